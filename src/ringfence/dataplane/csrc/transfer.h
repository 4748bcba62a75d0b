#ifndef RINGFENCE_TRANSFER_H
#define RINGFENCE_TRANSFER_H

/* The functions send(endpoint), receive(endpoint) and serve(engine, ready): send.c, receive.c and serve.c. */

#include "execution.h"

PyObject *core_send(PyObject *module, PyObject *object);
PyObject *core_receive(PyObject *module, PyObject *object);
PyObject *core_serve(PyObject *module, PyObject *args);
PyObject *core_release_gil(PyObject *module, PyObject *on);

/* What the two do, without a check of their argument. -1: an exception is set. `receive_some` returns 1 if a frame is
 * complete that was not expected. */
int send_some(Endpoint *link);
int receive_some(Endpoint *link);

#endif
