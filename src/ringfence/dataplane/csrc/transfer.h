#ifndef RINGFENCE_TRANSFER_H
#define RINGFENCE_TRANSFER_H

#include "execution.h"

PyObject *core_send(PyObject *module, PyObject *object);
PyObject *core_receive(PyObject *module, PyObject *object);

#endif
