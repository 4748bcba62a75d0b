#include "region.h"

static PyObject *region_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    static char *names[] = {"memory", "peers", "own", NULL};
    PyObject *memory;
    int peers, own;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "Oip", names, &memory, &peers, &own))
        return NULL;
    Region *self = (Region *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->view = PyMemoryView_FromObject(memory);
    if (self->view == NULL || PyObject_GetBuffer(self->view, &self->buffer, own ? PyBUF_WRITABLE : PyBUF_SIMPLE)) {
        Py_DECREF(self);
        return NULL;
    }
    Py_ssize_t count = self->buffer.len / SEGMENT_BYTES;
    if (count < 1 || count > MAX_SLOTS || self->buffer.len % SEGMENT_BYTES || peers < 1 ||
        peers > count / 2) {
        PyErr_SetString(PyExc_ValueError, "shared memory has up to 256 slots of one segment each, two for each peer");
        Py_DECREF(self);
        return NULL;
    }
    self->count = (int)count;
    self->quota = self->count / 2 / peers;
    self->ahead = self->count - self->quota * peers;
    if (!own)
        return (PyObject *)self;
    self->free = PyMem_Calloc((size_t)count, sizeof(int));
    if (self->free == NULL) {
        PyErr_NoMemory();
        Py_DECREF(self);
        return NULL;
    }
    while (self->free_count < self->count) { /* the first slot is taken first, so that few pages are used */
        self->free[self->free_count] = self->count - 1 - self->free_count;
        self->free_count++;
    }
    return (PyObject *)self;
}

static void region_dealloc(Region *self) {
    PyMem_Free(self->free);
    if (self->buffer.obj != NULL)
        PyBuffer_Release(&self->buffer);
    Py_XDECREF(self->view);
    free_untracked(self);
}

int is_region(ModuleState *state, PyObject *object) { return Py_IS_TYPE(object, (PyTypeObject *)state->region_type); }

int region_take(Region *self) {
    if (!self->free_count)
        return -1;
    int slot = self->free[--self->free_count];
    if (slot >= self->most_used)
        self->most_used = slot + 1;
    self->users[slot] = 1;
    return slot;
}

void region_lend(Region *self, int slot) { self->lent[slot]++; }

void region_give(Region *self, int slot) {
    self->lent[slot]--;
    if (--self->users[slot] == 0)
        self->free[self->free_count++] = slot;
}

Span region_span(Region *self, int slot, Py_ssize_t length) {
    Py_ssize_t offset = (Py_ssize_t)slot * SEGMENT_BYTES;
    return (Span){self->view, offset, length, (char *)self->buffer.buf + offset};
}

/* Zero the slots that no peer has. */
static PyObject *region_wipe(Region *self, PyObject *unused) {
    (void)unused;
    for (int slot = 0; slot < self->most_used; slot++)
        if (!self->lent[slot])
            memset((char *)self->buffer.buf + (Py_ssize_t)slot * SEGMENT_BYTES, 0, SEGMENT_BYTES);
    Py_RETURN_NONE;
}

static PyMethodDef region_methods[] = {
    {"wipe", (PyCFunction)region_wipe, METH_NOARGS, "Zero the slots that no peer has."},
    {NULL},
};
static PyMemberDef region_members[] = {
    {"free", T_INT, offsetof(Region, free_count), READONLY, "Number of slots that may be written."},
    {"count", T_INT, offsetof(Region, count), READONLY, "Number of slots."},
    {"quota", T_INT, offsetof(Region, quota), READONLY, "Number of slots for each link."},
    {"waiting", T_INT, offsetof(Region, waiting), READONLY, "How often slots wait for further links."},
    {NULL},
};

static PyType_Slot region_slots[] = {
    {Py_tp_dealloc, region_dealloc},
    {Py_tp_members, region_members},
    {Py_tp_methods, region_methods},
    {Py_tp_new, region_new},
    {Py_tp_doc, "Memory that is shared with other workers of this machine, in slots."},
    {0, NULL},
};
PyType_Spec region_spec = {"ringfence.dataplane._core.Region", sizeof(Region), 0, TYPE_FLAGS, region_slots};
