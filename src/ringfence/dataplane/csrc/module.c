/* The data plane in C: what run.py and ends.py do, segment by segment, at a tenth of their price.
 *
 * It schedules, frames, moves and adds. It holds no key, takes no nonce and checks no tag: sealing and opening are calls
 * to the same Python objects (link/seal.py) that the Python data plane calls, and every failure is theirs to raise.
 * Everything runs under the interpreter's lock; the ciphers give it up while they work, and so does a wait in epoll.
 * What is told to others is told through Python too: `finished`, the engine's `ready`, the set of `blocked` links.
 *
 * The wire format is spec/link.md's. core.py compares the sizes below with link/frames.py's when it is imported.
 */

#include "clock.h"
#include "execution.h"
#include "program.h"
#include "transfer.h"

#define INTERFACE 3 /* core.py's calls of this module; a change of either changes both */

/* For a type without cycles: its memory and its reference to the type. */
void free_object(void *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* The state of the module whose End a type is, or is derived from. NULL: an error is set. */
State *state_of(PyTypeObject *type) {
    for (; type != NULL; type = PyType_GetSlot(type, Py_tp_base)) {
        PyObject *module = PyType_GetModule(type);
        if (module != NULL && PyModule_GetDef(module) == &core_module)
            return PyModule_GetState(module);
        PyErr_Clear();
    }
    PyErr_SetString(PyExc_TypeError, "this is not the end of a link");
    return NULL;
}

/* -- the module ------------------------------------------------------------------------------------------------------- */

static PyMethodDef core_methods[] = {
    {"compile", core_compile, METH_VARARGS, "A program as numbers."},
    {"send", core_send, METH_O, "Write on; seal and write the next segment that may leave."},
    {"receive", core_receive, METH_O, "Read on; open a segment that is complete."},
    {"events", core_events, METH_O, "What was done when since it was last asked; keep such events from now on, or not."},
    {"stages", core_stages, METH_O, "Nanoseconds by stage since it was last asked; switch the clock on or off."},
    {NULL},
};

static PyObject *attribute(const char *module, const char *name) {
    PyObject *from = PyImport_ImportModule(module);
    PyObject *found = from == NULL ? NULL : PyObject_GetAttrString(from, name);
    Py_XDECREF(from);
    return found;
}

static int intern_names(State *state) {
    struct {
        PyObject **where;
        const char *text;
    } names[] = {
        {&state->s_add, "add"}, {&state->s_append, "append"}, {&state->s_check, "check"}, {&state->s_counter, "counter"},
        {&state->s_fileno, "fileno"}, {&state->s_inbox, "inbox"}, {&state->s_open_into, "open_into"},
        {&state->s_origin, "origin"}, {&state->s_outbox, "outbox"}, {&state->s_popleft, "popleft"},
        {&state->s_recv_into, "recv_into"}, {&state->s_seal_into, "seal_into"}, {&state->s_send, "send"},
        {&state->s_tag, "tag"}, {&state->s_take, "take"}, {&state->s_ended, "stream_ended"}, {&state->s_release, "release"},
        {&state->s_storage, "storage"}, {&state->s_address, "address"}, {&state->s_nbytes, "nbytes"},
        {&state->s_data_ptr, "data_ptr"}, {&state->s_memory_changed, "memory_changed"}, {&state->s_obj, "obj"},
        {&state->s_length_of_other, "length_of_other"}, {&state->s_lease, "lease"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].where = PyUnicode_InternFromString(names[i].text)) == NULL)
            return -1;
    return 0;
}

static int import_used(State *state) {
    struct {
        PyObject **where;
        const char *module, *name;
    } used[] = {
        {&state->deque_type, "collections", "deque"},
        {&state->socket_type, "socket", "socket"},
        {&state->segment_bytes_of, "ringfence.link.segments", "segment_bytes"},
        {&state->combine_bytes, "ringfence.dataplane.buffers", "combine_bytes"},
        {&state->divide_bytes, "ringfence.dataplane.buffers", "divide_bytes"},
    };
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if ((*used[i].where = attribute(used[i].module, used[i].name)) == NULL)
            return -1;
    if (PyType_Check(state->socket_type))
        return 0;
    PyErr_SetString(PyExc_TypeError, "socket.socket is not a type");
    return -1;
}

static int make_types(PyObject *module, State *state) {
    struct {
        PyObject **where;
        PyType_Spec *spec;
    } types[] = {
        {&state->segment_type, &segment_spec}, {&state->piece_type, &piece_spec}, {&state->pool_type, &pool_spec},
        {&state->program_type, &program_spec}, {&state->end_type, &end_spec},     {&state->run_type, &run_spec},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        *types[i].where = PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        if (*types[i].where == NULL || PyModule_AddType(module, (PyTypeObject *)*types[i].where) < 0)
            return -1;
    }
    return 0;
}

static int core_exec(PyObject *module) {
    State *state = PyModule_GetState(module);
    if (intern_names(state) || import_used(state) || make_types(module, state))
        return -1;
    PyObject *layout = Py_BuildValue("iiiiiii", INTERFACE, HEADER_BYTES, HOP_BYTES, TAG_BYTES, COUNTER_AT, KEY_PHASE_SHIFT, FRAME_BYTES);
    if (layout == NULL || PyModule_AddObject(module, "LAYOUT", layout) < 0) {
        Py_XDECREF(layout);
        return -1;
    }
    return 0;
}

/* Each of these may be called before core_exec, or after it failed. */
static int core_traverse(PyObject *module, visitproc visit, void *arg) {
    PyObject **held = PyModule_GetState(module);
    for (size_t i = 0; held != NULL && i < sizeof(State) / sizeof *held; i++)
        Py_VISIT(held[i]);
    return 0;
}

static int core_clear(PyObject *module) {
    PyObject **held = PyModule_GetState(module);
    for (size_t i = 0; held != NULL && i < sizeof(State) / sizeof *held; i++)
        Py_CLEAR(held[i]);
    return 0;
}

static void core_free(void *module) { core_clear(module); }

static PyModuleDef_Slot core_slots[] = {{Py_mod_exec, core_exec}, {0, NULL}};

struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ringfence.dataplane._core",
    .m_doc = "The data plane in C.",
    .m_size = sizeof(State),
    .m_methods = core_methods,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&core_module); }
