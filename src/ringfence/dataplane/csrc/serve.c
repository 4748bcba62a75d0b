#include "transfer.h"

#define SERVED_AT_ONCE 16 /* endpoints, before signals are handled */

/* Whether an endpoint has nothing to do but to send or to receive. */
static int is_routine(Endpoint *link) {
    if (link->role == SENDS)
        return link->open && !link->ended && !link->lingering && !link->bye_received;
    return link->role == RECEIVES;
}

/* Send or receive. An unexpected frame is passed to the endpoint's method `reject`, which raises. */
static int transfer(Endpoint *link) {
    if (begin_transfer(link))
        return -1;
    int state = link->role == SENDS ? send_some(link) : receive_some(link);
    link->busy = 0;
    if (state <= 0 || link->role == SENDS)
        return state < 0 ? -1 : 0;
    PyObject *frame = PyBytes_FromStringAndSize(link->receiving->at, link->frame_bytes);
    PyObject *method = link->pool->state->s_reject;
    PyObject *done = frame == NULL ? NULL : PyObject_CallMethodObjArgs((PyObject *)link, method, frame, NULL);
    Py_XDECREF(frame);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Whether the engine has not failed meanwhile; -1: an exception is set. */
static int is_going_on(ModuleState *state, PyObject *engine) {
    PyObject *failure = PyObject_GetAttr(engine, state->s_failure);
    int none = failure == Py_None;
    Py_XDECREF(failure);
    return failure == NULL ? -1 : none;
}

/* serve(engine, ready): send and receive for the endpoints that are first in `ready`, as their `work` would. It returns
 * when none is left, or when the first one needs its `work`. `engine.current` is the endpoint during its transfer, and
 * after an exception. */
PyObject *core_serve(PyObject *module, PyObject *args) {
    ModuleState *state = PyModule_GetState(module);
    PyObject *engine, *ready;
    if (!PyArg_ParseTuple(args, "OO", &engine, &ready))
        return NULL;
    for (int i = 0; i < SERVED_AT_ONCE; i++) {
        if (i) { /* other threads take the GIL here, and not between the check of a tensor's memory and its use */
            Py_BEGIN_ALLOW_THREADS;
            Py_END_ALLOW_THREADS;
        }
        Py_ssize_t count = PyObject_Size(ready);
        int going_on = count > 0 ? is_going_on(state, engine) : 0;
        if (count < 0 || going_on < 0)
            return NULL;
        PyObject *first = going_on ? PySequence_GetItem(ready, 0) : NULL;
        if (going_on && first == NULL)
            return NULL;
        if (first == NULL || !PyObject_TypeCheck(first, (PyTypeObject *)state->endpoint_type) ||
            ((Endpoint *)first)->pool == NULL || !is_routine((Endpoint *)first)) {
            Py_XDECREF(first);
            break;
        }
        PyObject *taken = PyObject_CallMethodObjArgs(ready, state->s_popleft, NULL);
        int failed = taken != first || PyObject_SetAttr(engine, state->s_current, first);
        Py_XDECREF(taken);
        if (!failed) {
            ((Endpoint *)first)->queued = 0;
            failed = transfer((Endpoint *)first) || PyObject_SetAttr(engine, state->s_current, Py_None);
        }
        Py_DECREF(first);
        if (failed) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_RuntimeError, "another thread serves the same endpoints");
            return NULL;
        }
    }
    Py_RETURN_NONE;
}
