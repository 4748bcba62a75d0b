#ifndef RINGFENCE_CORE_H
#define RINGFENCE_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

/* What the module holds: names, what it calls, its own types. Objects only, which core_traverse relies on.
 *
 * Segments and pools point to it. The garbage collector does not follow them, so they keep their type, the module and the state
 * alive; ends and runs have the state through their pool. */
typedef struct {
    PyObject *s_add, *s_address, *s_append, *s_check, *s_counter, *s_data_ptr, *s_fileno, *s_inbox, *s_lease,
        *s_length_of_other, *s_memory_changed, *s_nbytes, *s_obj, *s_open_into, *s_origin, *s_outbox, *s_popleft, *s_recv_into,
        *s_release, *s_seal_into, *s_send, *s_storage, *s_tag, *s_take, *s_ended;
    PyObject *deque_type, *socket_type, *segment_bytes_of, *combine_bytes, *divide_bytes;
    PyObject *segment_type, *piece_type, *pool_type, *program_type, *end_type, *run_type;
} State;

/* What Py_XSETREF does, which the limited API lacks. */
#define REPLACE(place, value)                                                                                                   \
    do {                                                                                                                        \
        PyObject *replaced = (PyObject *)(place);                                                                               \
        (place) = (value);                                                                                                      \
        Py_XDECREF(replaced);                                                                                                   \
    } while (0)

#define FIXED (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE)
#define MADE_HERE (FIXED | Py_TPFLAGS_DISALLOW_INSTANTIATION) /* Python code makes none of them */

extern struct PyModuleDef core_module;

void free_object(void *self);
State *state_of(PyTypeObject *type);

#endif
