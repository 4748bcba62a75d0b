#ifndef RINGFENCE_TRANSFER_H
#define RINGFENCE_TRANSFER_H

/* The functions send(endpoint) and receive(endpoint): send.c and receive.c. */

#include "execution.h"

PyObject *core_send(PyObject *module, PyObject *object);
PyObject *core_receive(PyObject *module, PyObject *object);

#endif
