#include "buffers.h"
#include "frame_layout.h"

#include <stdlib.h>

/* Segments, the pool that recycles them, and the memoryviews of them that Python code receives. */

/* Release a view after the call that it was made for: code that kept it, such as a profiler, cannot read the memory any
 * more. Steals the reference, which may be NULL. Preserves the error indicator. */
void release_view(ModuleState *state, PyObject *view) {
    if (view == NULL || Py_REFCNT(view) == 1) { /* the call kept no reference */
        Py_XDECREF(view);
        return;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallMethodObjArgs(view, state->s_release, NULL);
    if (done == NULL && PyErr_ExceptionMatches(PyExc_BufferError))
        PyErr_Clear(); /* a buffer of the view is in use; that buffer keeps the memory alive */
    else if (done == NULL)
        PyErr_WriteUnraisable(view);
    Py_XDECREF(done);
    Py_DECREF(view);
    PyErr_Restore(type, value, trace);
}

PyObject *copy_bytes(const void *at, Py_ssize_t length) { return PyBytes_FromStringAndSize(at, length); }

static Segment *new_segment(ModuleState *state) {
    Segment *self = PyObject_New(Segment, (PyTypeObject *)state->segment_type);
    if (self == NULL)
        return NULL;
    self->state = state;
    self->idle = 0;
    if (posix_memalign((void **)&self->memory, 64, 128 + FRAME_BYTES)) {
        self->memory = NULL;
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    self->at = self->memory + 128 - HEADER_BYTES;
    return self;
}

static void segment_dealloc(Segment *self) {
    free(self->memory);
    free_untracked(self);
}

static int segment_buffer(Segment *self, Py_buffer *buffer, int flags) {
    return PyBuffer_FillInfo(buffer, (PyObject *)self, self->at, FRAME_BYTES, 0, flags);
}

Span segment_span(Segment *segment, Py_ssize_t offset, Py_ssize_t length) {
    return (Span){(PyObject *)segment, offset, length, segment->at + offset};
}

static PyObject *segment_view(Segment *self, void *unused) {
    (void)unused;
    return PyMemoryView_FromObject((PyObject *)self);
}

static PyGetSetDef segment_getset[] = {{"view", (getter)segment_view, NULL, "The bytes of the frame.", NULL}, {NULL}};

static PyType_Slot segment_slots[] = {
    {Py_tp_dealloc, segment_dealloc},
    {Py_bf_getbuffer, segment_buffer},
    {Py_tp_getset, segment_getset},
    {Py_tp_doc, "Memory for one frame."},
    {0, NULL},
};
PyType_Spec segment_spec = {"ringfence.dataplane._core.Segment", sizeof(Segment), 0, INTERNAL_TYPE_FLAGS,
                            segment_slots};

/* Exports part of a segment through the buffer protocol and keeps the segment alive. */
typedef struct {
    PyObject_HEAD
    Segment *segment;
    Py_ssize_t offset, length;
} SegmentSlice;

static void slice_dealloc(SegmentSlice *self) {
    Py_DECREF(self->segment);
    free_untracked(self);
}

static int slice_buffer(SegmentSlice *self, Py_buffer *buffer, int flags) {
    return PyBuffer_FillInfo(buffer, (PyObject *)self, self->segment->at + self->offset, self->length, 0, flags);
}

static PyType_Slot slice_slots[] = {
    {Py_tp_dealloc, slice_dealloc},
    {Py_bf_getbuffer, slice_buffer},
    {Py_tp_doc, "Part of a segment."},
    {0, NULL},
};
PyType_Spec slice_spec = {"ringfence.dataplane._core.SegmentSlice", sizeof(SegmentSlice), 0, INTERNAL_TYPE_FLAGS,
                          slice_slots};

/* A memoryview of the span. The view, and every view made from it, keeps the owner alive. */
PyObject *view_span(Span span) {
    if (PyMemoryView_Check(span.owner))
        return PySequence_GetSlice(span.owner, span.offset, span.offset + span.length);
    Segment *segment = (Segment *)span.owner;
    SegmentSlice *slice = PyObject_New(SegmentSlice, (PyTypeObject *)segment->state->slice_type);
    if (slice == NULL)
        return NULL;
    slice->segment = (Segment *)Py_NewRef(span.owner);
    slice->offset = span.offset;
    slice->length = span.length;
    PyObject *view = PyMemoryView_FromObject((PyObject *)slice);
    Py_DECREF(slice);
    return view;
}

Segment *pool_take(Pool *self) {
    if (self->count) {
        self->idle[--self->count]->idle = 0;
        return self->idle[self->count];
    }
    Segment *segment = new_segment(self->state);
    if (segment != NULL)
        self->made++;
    return segment;
}

/* Return a segment to the pool. Steals the reference. A segment with other references (another link sends it, or a view
 * exists) is not recycled. */
void pool_give(Pool *self, Segment *segment) {
    if (Py_REFCNT((PyObject *)segment) == 1 && self->count < self->most) {
        segment->idle = 1;
        self->idle[self->count++] = segment;
    } else
        Py_DECREF(segment);
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    Pool *self = (Pool *)PyType_GenericNew(type, args, keywords);
    if (self != NULL)
        self->state = PyType_GetModuleState(type); /* valid because the type has no subclasses */
    return (PyObject *)self;
}

static int pool_init(Pool *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"most", NULL};
    int most = 32;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|i", names, &most))
        return -1;
    if (most < 0 || most > MAX_IDLE) {
        PyErr_SetString(PyExc_ValueError, "a pool keeps at most 64 idle segments");
        return -1;
    }
    self->most = most;
    return 0;
}

static void pool_dealloc(Pool *self) {
    while (self->count)
        Py_DECREF(self->idle[--self->count]);
    free_untracked(self);
}

static PyObject *pool_take_method(Pool *self, PyObject *unused) {
    (void)unused;
    return (PyObject *)pool_take(self);
}

static PyObject *pool_give_method(Pool *self, PyObject *segment) {
    if (!Py_IS_TYPE(segment, (PyTypeObject *)self->state->segment_type)) {
        PyErr_SetString(PyExc_TypeError, "give() takes a Segment of this module");
        return NULL;
    }
    if (((Segment *)segment)->idle) {
        PyErr_SetString(PyExc_ValueError, "the segment is already in a pool");
        return NULL;
    }
    if (self->count < self->most) {
        ((Segment *)segment)->idle = 1;
        self->idle[self->count++] = (Segment *)Py_NewRef(segment);
    }
    Py_RETURN_NONE;
}

static PyMethodDef pool_methods[] = {
    {"take", (PyCFunction)pool_take_method, METH_NOARGS, "Return a segment, recycled or new."},
    {"give", (PyCFunction)pool_give_method, METH_O, "Return a segment to the pool."},
    {NULL},
};
static PyMemberDef pool_members[] = {
    {"made", T_PYSSIZET, offsetof(Pool, made), READONLY, "Number of segments allocated so far."}, {NULL}};

static PyType_Slot pool_slots[] = {
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_members, pool_members},
    {Py_tp_init, pool_init},
    {Py_tp_new, pool_new},
    {Py_tp_doc, "Recycles segments; keeps at most `most` idle ones."},
    {0, NULL},
};
PyType_Spec pool_spec = {"ringfence.dataplane._core.Pool", sizeof(Pool), 0, TYPE_FLAGS, pool_slots};
