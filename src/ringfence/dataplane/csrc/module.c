/* ringfence.dataplane._core: execution.py and endpoint.py in C, at a tenth of the CPU time per segment.
 *
 * The module schedules segments, writes headers, moves bytes and computes sums. It holds no keys, chooses no nonces and
 * verifies no tags: it calls the same Python objects (link/seal.py) as the Python data plane to seal and open, and they
 * raise on failure. All code runs with the GIL; the ciphers release it while they work, and so do system
 * calls on large pieces if the process has several channels. The engine learns of progress
 * through Python objects: the `on_finished` callback, the `ready` deque and the `blocked` set.
 *
 * spec/link.md defines the wire format. choice.py compares LAYOUT with link/frames.py on import.
 */

#include "clock.h"
#include "execution.h"
#include "program.h"
#include "transfer.h"

#define INTERFACE_VERSION 7 /* of the functions and types that choice.py uses; increment both together */

void free_untracked(void *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

ModuleState *state_of_type(PyTypeObject *type) {
    for (; type != NULL; type = PyType_GetSlot(type, Py_tp_base)) {
        PyObject *module = PyType_GetModule(type);
        if (module != NULL && PyModule_GetDef(module) == &core_module)
            return PyModule_GetState(module);
        PyErr_Clear();
    }
    PyErr_SetString(PyExc_TypeError, "not an initialized Endpoint of this module");
    return NULL;
}

static PyMethodDef core_methods[] = {
    {"compile", core_compile, METH_VARARGS, "Convert a program to its C form."},
    {"send", core_send, METH_O, "Write the rest of a frame, then seal and write the next segment that is ready."},
    {"receive", core_receive, METH_O, "Read; open a segment that is complete."},
    {"serve", core_serve, METH_VARARGS, "Send and receive for the endpoints that are first in `ready`."},
    {"release_gil", core_release_gil, METH_O, "Whether to release the GIL around system calls on large pieces."},
    {"events", core_events, METH_O, "Return the events since the last call; turn their recording on or off."},
    {"stages", core_stages, METH_O, "Return nanoseconds by stage since the last call; turn timing on or off."},
    {NULL},
};

static PyObject *import_attribute(const char *module, const char *name) {
    PyObject *from = PyImport_ImportModule(module);
    PyObject *found = from == NULL ? NULL : PyObject_GetAttrString(from, name);
    Py_XDECREF(from);
    return found;
}

static int intern_names(ModuleState *state) {
    struct {
        PyObject **where;
        const char *text;
    } names[] = {
        {&state->s_add, "add"},
        {&state->s_append, "append"},
        {&state->s_check, "check"},
        {&state->s_counter, "counter"},
        {&state->s_current, "current"},
        {&state->s_failure, "failure"},
        {&state->s_fileno, "fileno"},
        {&state->s_inbox, "inbox"},
        {&state->s_open_into, "open_into"},
        {&state->s_origin, "origin"},
        {&state->s_outbox, "outbox"},
        {&state->s_popleft, "popleft"},
        {&state->s_recv_into, "recv_into"},
        {&state->s_reject, "reject"},
        {&state->s_seal_into, "seal_into"},
        {&state->s_send, "send"},
        {&state->s_tag, "tag"},
        {&state->s_take, "take"},
        {&state->s_ended, "stream_ended"},
        {&state->s_release, "release"},
        {&state->s_storage, "storage"},
        {&state->s_address, "address"},
        {&state->s_nbytes, "nbytes"},
        {&state->s_data_ptr, "data_ptr"},
        {&state->s_memory_changed, "memory_changed"},
        {&state->s_obj, "obj"},
        {&state->s_length_of_other, "length_of_other"},
        {&state->s_lease, "lease"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].where = PyUnicode_InternFromString(names[i].text)) == NULL)
            return -1;
    return 0;
}

static int import_attributes(ModuleState *state) {
    struct {
        PyObject **where;
        const char *module, *name;
    } used[] = {
        {&state->deque_type, "collections", "deque"},
        {&state->socket_type, "socket", "socket"},
        {&state->protocol_error, "ringfence.errors", "ProtocolError"},
        {&state->segment_bytes_of, "ringfence.link.segments", "segment_bytes"},
        {&state->combine_bytes, "ringfence.dataplane.buffers", "combine_bytes"},
        {&state->divide_bytes, "ringfence.dataplane.buffers", "divide_bytes"},
    };
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if ((*used[i].where = import_attribute(used[i].module, used[i].name)) == NULL)
            return -1;
    if (PyType_Check(state->socket_type))
        return 0;
    PyErr_SetString(PyExc_TypeError, "socket.socket is not a type");
    return -1;
}

static int make_types(PyObject *module, ModuleState *state) {
    struct {
        PyObject **where;
        PyType_Spec *spec;
    } types[] = {
        {&state->segment_type, &segment_spec},   {&state->slice_type, &slice_spec},
        {&state->pool_type, &pool_spec},         {&state->program_type, &program_spec},
        {&state->endpoint_type, &endpoint_spec}, {&state->execution_type, &execution_spec},
        {&state->region_type, &region_spec},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        *types[i].where = PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        if (*types[i].where == NULL || PyModule_AddType(module, (PyTypeObject *)*types[i].where) < 0)
            return -1;
    }
    return 0;
}

static int core_exec(PyObject *module) {
    ModuleState *state = PyModule_GetState(module);
    if (intern_names(state) || import_attributes(state) || make_types(module, state))
        return -1;
    PyObject *layout = Py_BuildValue("iiiiiiii", INTERFACE_VERSION, HEADER_BYTES, HOP_BYTES, TAG_BYTES, COUNTER_AT,
                                     KEY_PHASE_SHIFT, FRAME_BYTES, SHARED_FROM_BYTES);
    if (layout == NULL || PyModule_AddObject(module, "LAYOUT", layout) < 0) {
        Py_XDECREF(layout);
        return -1;
    }
    return 0;
}

/* The three functions below may be called before core_exec, or after it failed. */
static int core_traverse(PyObject *module, visitproc visit, void *arg) {
    PyObject **held = PyModule_GetState(module);
    for (size_t i = 0; held != NULL && i < sizeof(ModuleState) / sizeof *held; i++)
        Py_VISIT(held[i]);
    return 0;
}

static int core_clear(PyObject *module) {
    PyObject **held = PyModule_GetState(module);
    for (size_t i = 0; held != NULL && i < sizeof(ModuleState) / sizeof *held; i++)
        Py_CLEAR(held[i]);
    return 0;
}

static void core_free(void *module) { core_clear(module); }

static PyModuleDef_Slot core_slots[] = {{Py_mod_exec, core_exec}, {0, NULL}};

struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ringfence.dataplane._core",
    .m_doc = "The data plane in C.",
    .m_size = sizeof(ModuleState),
    .m_methods = core_methods,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&core_module); }
