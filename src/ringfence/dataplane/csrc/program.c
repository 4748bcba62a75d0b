#include "program.h"
#include "frame_layout.h"

/* Program: the steps of a schedule with their dependencies, checked once so that executions need no checks. */

static void program_dealloc(Program *self) {
    for (int i = 0; self->steps != NULL && i < self->count; i++) {
        PyMem_Free(self->steps[i].dependency);
        PyMem_Free(self->steps[i].dependent);
        PyMem_Free(self->steps[i].sharer);
    }
    PyMem_Free(self->steps);
    free_untracked(self);
}

int is_tuple(PyObject *object) {
    if (PyTuple_Check(object))
        return 1;
    PyErr_SetString(PyExc_TypeError, "programs and queue entries must be tuples");
    return 0;
}

/* Read a tuple of step indices and check their range. */
static int read_numbers(PyObject *tuple, int limit, int *count, int **numbers) {
    if (!is_tuple(tuple))
        return -1;
    if (PyTuple_Size(tuple) > MAX_STEPS) {
        PyErr_SetString(PyExc_ValueError, "a program has too many steps");
        return -1;
    }
    *count = (int)PyTuple_Size(tuple);
    *numbers = PyMem_New(int, *count + 1);
    if (*numbers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < *count; i++) {
        long number = PyLong_AsLong(PyTuple_GetItem(tuple, i));
        if (number == -1 && PyErr_Occurred())
            return -1;
        if (number < 0 || number >= limit) {
            PyErr_SetString(PyExc_ValueError, "a step index is out of range");
            return -1;
        }
        (*numbers)[i] = (int)number;
    }
    return 0;
}

static int read_dependencies(PyObject *tuple, int limit, Step *step) {
    if (!is_tuple(tuple))
        return -1;
    if (PyTuple_Size(tuple) > MAX_STEPS) {
        PyErr_SetString(PyExc_ValueError, "a program has too many steps");
        return -1;
    }
    step->dependencies = (int)PyTuple_Size(tuple);
    step->dependency = PyMem_New(Dependency, step->dependencies + 1);
    if (step->dependency == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < step->dependencies; i++) {
        Dependency *dependency = &step->dependency[i];
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (!is_tuple(item) || !PyArg_ParseTuple(item, "ip", &dependency->step, &dependency->by_segment))
            return -1;
        if (dependency->step < 0 || dependency->step >= limit) {
            PyErr_SetString(PyExc_ValueError, "a step index is out of range");
            return -1;
        }
    }
    return 0;
}

static int sends_same_bytes(Program *self, Step *step, int other, int sealed_once) {
    Step *writer = &self->steps[other];
    if (writer->action != SEND || writer->chunk != step->chunk)
        return 0;
    return sealed_once ? writer->origin == step->origin && writer->label == step->label : writer->origin < 0;
}

/* compile(steps, dependencies, dependents, ordinals, sharers, fused_sends, chunks) -> Program */
PyObject *core_compile(PyObject *module, PyObject *args) {
    ModuleState *state = PyModule_GetState(module);
    PyObject *steps, *dependencies, *dependents, *ordinals, *sharers, *fused_sends;
    int chunks;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!i", &PyTuple_Type, &steps, &PyTuple_Type, &dependencies, &PyTuple_Type,
                          &dependents, &PyTuple_Type, &ordinals, &PyTuple_Type, &sharers, &PyTuple_Type, &fused_sends,
                          &chunks))
        return NULL;
    Py_ssize_t count = PyTuple_Size(steps);
    if (PyTuple_Size(dependencies) != count || PyTuple_Size(dependents) != count || PyTuple_Size(ordinals) != count ||
        PyTuple_Size(sharers) != count || PyTuple_Size(fused_sends) != count || count > MAX_STEPS || chunks < 0) {
        PyErr_SetString(PyExc_ValueError,
                        "the arguments of a program differ in length, or their number is out of range");
        return NULL;
    }
    Program *self = PyObject_New(Program, (PyTypeObject *)state->program_type);
    if (self == NULL)
        return NULL;
    self->count = (int)count;
    self->chunks = chunks;
    self->steps = PyMem_Calloc((size_t)count + 1, sizeof(Step));
    if (self->steps == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (int i = 0; i < self->count; i++) {
        Step *step = &self->steps[i];
        PyObject *item = PyTuple_GetItem(steps, i);
        if (!is_tuple(item) || !PyArg_ParseTuple(item, "iiiiILp", &step->action, &step->chunk, &step->peer,
                                                 &step->other, &step->label, &step->origin, &step->received_first))
            goto fail;
        if (step->origin < -1 || step->origin >= NO_ORIGIN) {
            PyErr_SetString(PyExc_ValueError, "the origin of a step is not a rank");
            goto fail;
        }
        int computes = step->action == REDUCE || step->action == COPY;
        if (step->action < SEND || step->action > SCALE || step->chunk < 0 || step->chunk >= chunks ||
            step->other >= chunks || (computes && step->other < 0)) {
            PyErr_SetString(PyExc_ValueError, "a chunk index is out of range");
            goto fail;
        }
        unsigned long ordinal = PyLong_AsUnsignedLong(PyTuple_GetItem(ordinals, i));
        if (ordinal == (unsigned long)-1 && PyErr_Occurred())
            goto fail;
        if (ordinal > UINT32_MAX) {
            PyErr_SetString(PyExc_ValueError, "the ordinal of a step does not fit in a header");
            goto fail;
        }
        step->ordinal = (uint32_t)ordinal;
        if (read_dependencies(PyTuple_GetItem(dependencies, i), self->count, step) ||
            read_numbers(PyTuple_GetItem(dependents, i), self->count, &step->dependents, &step->dependent) ||
            read_numbers(PyTuple_GetItem(sharers, i), self->count, &step->sharers, &step->sharer))
            goto fail;
        long fused_send = PyLong_AsLong(PyTuple_GetItem(fused_sends, i));
        if (fused_send == -1 && PyErr_Occurred())
            goto fail;
        if (fused_send < -1 || fused_send >= self->count) {
            PyErr_SetString(PyExc_ValueError, "a step index is out of range");
            goto fail;
        }
        step->fused_send = (int)fused_send;
    }
    for (int i = 0; i < self->count; i++) { /* a fused or sharing SEND must send exactly the bytes of this step */
        Step *step = &self->steps[i];
        int same =
            step->fused_send < 0 || (step->action == REDUCE && sends_same_bytes(self, step, step->fused_send, 0));
        for (int k = 0; same && k < step->sharers; k++)
            same = step->action != REDUCE && sends_same_bytes(self, step, step->sharer[k], 1);
        if (!same) {
            PyErr_SetString(PyExc_ValueError, "a program forwards a chunk as another chunk");
            goto fail;
        }
    }
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

static PyType_Slot program_slots[] = {
    {Py_tp_dealloc, program_dealloc},
    {Py_tp_doc, "The steps of a schedule in C form."},
    {0, NULL},
};
PyType_Spec program_spec = {"ringfence.dataplane._core.Program", sizeof(Program), 0, INTERNAL_TYPE_FLAGS,
                            program_slots};
