#ifndef RINGFENCE_CORE_H
#define RINGFENCE_CORE_H

/* Common to all units: the state of the module and helpers for its types. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

/* State of the module: interned names, the Python objects it calls, its types. All members are objects: core_traverse
 * iterates over them.
 *
 * Segments and pools have a pointer to it. They are not tracked by the garbage collector, so their reference to the
 * type keeps the module and this state alive. Endpoints and executions reach the state through their pool. */
typedef struct {
    PyObject *s_add, *s_address, *s_append, *s_check, *s_counter, *s_current, *s_data_ptr, *s_failure, *s_fileno,
        *s_inbox, *s_lease,
        *s_length_of_other, *s_memory_changed, *s_nbytes, *s_obj, *s_open_into, *s_origin, *s_outbox, *s_popleft,
        *s_recv_into, *s_reject, *s_release, *s_seal_into, *s_send, *s_storage, *s_tag, *s_take, *s_ended;
    PyObject *deque_type, *socket_type, *protocol_error, *segment_bytes_of, *combine_bytes, *divide_bytes;
    PyObject *segment_type, *slice_type, *pool_type, *program_type, *endpoint_type, *execution_type, *region_type;
} ModuleState;

/* Py_XSETREF, which the limited API lacks. */
#define SET_REF(place, value)                                                                                          \
    do {                                                                                                               \
        PyObject *replaced = (PyObject *)(place);                                                                      \
        (place) = (value);                                                                                             \
        Py_XDECREF(replaced);                                                                                          \
    } while (0)

#define TYPE_FLAGS (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE)
#define INTERNAL_TYPE_FLAGS (TYPE_FLAGS | Py_TPFLAGS_DISALLOW_INSTANTIATION) /* not constructible from Python */

extern struct PyModuleDef core_module;

/* Deallocate an object of a heap type without garbage collection. */
void free_untracked(void *self);
/* The state of the module that defines Endpoint, given that type or a subclass. NULL: an exception is set. */
ModuleState *state_of_type(PyTypeObject *type);

#endif
