#include "frame_layout.h"
#include "program.h"

/* -- programs ------------------------------------------------------------------------------------------------------- */

static void program_dealloc(Program *self) {
    for (int i = 0; self->steps != NULL && i < self->count; i++) {
        PyMem_Free(self->steps[i].need);
        PyMem_Free(self->steps[i].wake);
        PyMem_Free(self->steps[i].sharer);
    }
    PyMem_Free(self->steps);
    free_object(self);
}

int is_tuple(PyObject *object) {
    if (PyTuple_Check(object))
        return 1;
    PyErr_SetString(PyExc_TypeError, "programs and queues are made of tuples");
    return 0;
}

/* The step numbers in a tuple, each checked to be one. */
static int read_numbers(PyObject *tuple, int limit, int *count, int **numbers) {
    if (!is_tuple(tuple))
        return -1;
    if (PyTuple_Size(tuple) > MOST_STEPS) {
        PyErr_SetString(PyExc_ValueError, "a program names more steps than it can have");
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
            PyErr_SetString(PyExc_ValueError, "a program names a step that it does not have");
            return -1;
        }
        (*numbers)[i] = (int)number;
    }
    return 0;
}

static int read_needs(PyObject *tuple, int limit, Step *step) {
    if (!is_tuple(tuple))
        return -1;
    if (PyTuple_Size(tuple) > MOST_STEPS) {
        PyErr_SetString(PyExc_ValueError, "a program names more steps than it can have");
        return -1;
    }
    step->needs = (int)PyTuple_Size(tuple);
    step->need = PyMem_New(Need, step->needs + 1);
    if (step->need == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < step->needs; i++) {
        Need *need = &step->need[i];
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (!is_tuple(item) || !PyArg_ParseTuple(item, "ip", &need->step, &need->by_segment))
            return -1;
        if (need->step < 0 || need->step >= limit) {
            PyErr_SetString(PyExc_ValueError, "a program names a step that it does not have");
            return -1;
        }
    }
    return 0;
}

static int writes_same(Program *self, Step *step, int other, int sealed_once) {
    Step *writer = &self->steps[other];
    if (writer->action != SEND || writer->chunk != step->chunk)
        return 0;
    return sealed_once ? writer->origin >= 0 && writer->origin == step->origin && writer->label == step->label : writer->origin < 0;
}

/* compile(steps, dependencies, wakes, ordinals, shared_by, heirs, chunks) -> Program */
PyObject *core_compile(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    PyObject *steps, *needs, *wakes, *ordinals, *sharers, *heirs;
    int chunks;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!i", &PyTuple_Type, &steps, &PyTuple_Type, &needs, &PyTuple_Type, &wakes, &PyTuple_Type,
                          &ordinals, &PyTuple_Type, &sharers, &PyTuple_Type, &heirs, &chunks))
        return NULL;
    Py_ssize_t count = PyTuple_Size(steps);
    if (PyTuple_Size(needs) != count || PyTuple_Size(wakes) != count || PyTuple_Size(ordinals) != count ||
        PyTuple_Size(sharers) != count || PyTuple_Size(heirs) != count || count > MOST_STEPS || chunks < 0) {
        PyErr_SetString(PyExc_ValueError, "the parts of a program differ in length, or there are too many or too few of them");
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
        if (!is_tuple(item) ||
            !PyArg_ParseTuple(item, "iiiiILp", &step->action, &step->chunk, &step->peer, &step->other,
                              &step->label, &step->origin, &step->received_first))
            goto fail;
        if (step->origin < -1 || step->origin >= NO_ORIGIN) {
            PyErr_SetString(PyExc_ValueError, "a step names an origin that no rank has");
            goto fail;
        }
        int computes = step->action == REDUCE || step->action == COPY;
        if (step->action < SEND || step->action > SCALE || step->chunk < 0 || step->chunk >= chunks || step->other >= chunks ||
            (computes && step->other < 0)) {
            PyErr_SetString(PyExc_ValueError, "a step names a chunk that the schedule does not have");
            goto fail;
        }
        unsigned long ordinal = PyLong_AsUnsignedLong(PyTuple_GetItem(ordinals, i));
        if (ordinal == (unsigned long)-1 && PyErr_Occurred())
            goto fail;
        if (ordinal > UINT32_MAX) {
            PyErr_SetString(PyExc_ValueError, "a step has a number that no header holds");
            goto fail;
        }
        step->ordinal = (uint32_t)ordinal;
        if (read_needs(PyTuple_GetItem(needs, i), self->count, step) ||
            read_numbers(PyTuple_GetItem(wakes, i), self->count, &step->wakes, &step->wake) ||
            read_numbers(PyTuple_GetItem(sharers, i), self->count, &step->sharers, &step->sharer))
            goto fail;
        long heir = PyLong_AsLong(PyTuple_GetItem(heirs, i));
        if (heir == -1 && PyErr_Occurred())
            goto fail;
        if (heir < -1 || heir >= self->count) {
            PyErr_SetString(PyExc_ValueError, "a program names a step that it does not have");
            goto fail;
        }
        step->heir = (int)heir;
    }
    for (int i = 0; i < self->count; i++) { /* whoever inherits or shares writes what this step has, and nothing else */
        Step *step = &self->steps[i];
        int same = step->heir < 0 || (step->action == REDUCE && writes_same(self, step, step->heir, 0));
        for (int k = 0; same && k < step->sharers; k++)
            same = step->action != REDUCE && writes_same(self, step, step->sharer[k], 1);
        if (!same) {
            PyErr_SetString(PyExc_ValueError, "a program passes a chunk on as another");
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
    {Py_tp_doc, "The steps of a schedule as numbers."},
    {0, NULL},
};
PyType_Spec program_spec = {"ringfence.dataplane._core.Program", sizeof(Program), 0, MADE_HERE, program_slots};
