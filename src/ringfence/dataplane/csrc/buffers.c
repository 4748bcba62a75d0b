#include <stdlib.h>

#include "buffers.h"
#include "frame_layout.h"

/* -- views: whoever has one keeps its memory alive ------------------------------------------------------------------- */

/* The call that a view was made for is over: whoever kept it, such as a profiler, has a view of nothing. Takes over the
 * reference, which may be NULL; keeps the error that is set, if one is. */
void end_view(State *state, PyObject *view) {
    if (view == NULL || Py_REFCNT(view) == 1) { /* nobody kept it */
        Py_XDECREF(view);
        return;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallMethodObjArgs(view, state->s_release, NULL);
    if (done == NULL && PyErr_ExceptionMatches(PyExc_BufferError))
        PyErr_Clear(); /* somebody has taken a buffer of it, and keeps the memory alive with that */
    else if (done == NULL)
        PyErr_WriteUnraisable(view);
    Py_XDECREF(done);
    Py_DECREF(view);
    PyErr_Restore(type, value, trace);
}

/* Short pieces are handed over as copies. */
PyObject *copy_of(const void *at, Py_ssize_t length) { return PyBytes_FromStringAndSize(at, length); }

/* -- segments and their pool ---------------------------------------------------------------------------------------- */

static Segment *new_segment(State *state) {
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
    free_object(self);
}

static int segment_buffer(Segment *self, Py_buffer *buffer, int flags) {
    return PyBuffer_FillInfo(buffer, (PyObject *)self, self->at, FRAME_BYTES, 0, flags);
}

Place in_segment(Segment *segment, Py_ssize_t offset, Py_ssize_t length) {
    return (Place){(PyObject *)segment, offset, length, segment->at + offset};
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
    {Py_tp_doc, "Room for one frame."},
    {0, NULL},
};
PyType_Spec segment_spec = {"ringfence.dataplane._core.Segment", sizeof(Segment), 0, MADE_HERE, segment_slots};

/* A piece of a segment: what it exports is that piece, and it keeps the segment. */
typedef struct {
    PyObject_HEAD
    Segment *segment;
    Py_ssize_t offset, length;
} Piece;

static void piece_dealloc(Piece *self) {
    Py_DECREF(self->segment);
    free_object(self);
}

static int piece_buffer(Piece *self, Py_buffer *buffer, int flags) {
    return PyBuffer_FillInfo(buffer, (PyObject *)self, self->segment->at + self->offset, self->length, 0, flags);
}

static PyType_Slot piece_slots[] = {
    {Py_tp_dealloc, piece_dealloc},
    {Py_bf_getbuffer, piece_buffer},
    {Py_tp_doc, "A piece of a segment."},
    {0, NULL},
};
PyType_Spec piece_spec = {"ringfence.dataplane._core.Piece", sizeof(Piece), 0, MADE_HERE, piece_slots};

/* A view of the place. It keeps the owner alive, and so does every view that somebody makes of it. */
PyObject *view_of(Place place) {
    if (PyMemoryView_Check(place.owner))
        return PySequence_GetSlice(place.owner, place.offset, place.offset + place.length);
    Segment *segment = (Segment *)place.owner;
    Piece *piece = PyObject_New(Piece, (PyTypeObject *)segment->state->piece_type);
    if (piece == NULL)
        return NULL;
    piece->segment = (Segment *)Py_NewRef(place.owner);
    piece->offset = place.offset;
    piece->length = place.length;
    PyObject *view = PyMemoryView_FromObject((PyObject *)piece);
    Py_DECREF(piece);
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

/* Takes over the caller's reference. A segment that others still send, or have a view of, stays with them. */
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
        self->state = PyType_GetModuleState(type); /* nothing can be derived from the type, so that it is ours */
    return (PyObject *)self;
}

static int pool_init(Pool *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"most", NULL};
    int most = 32;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|i", names, &most))
        return -1;
    if (most < 0 || most > MOST_IDLE) {
        PyErr_SetString(PyExc_ValueError, "a pool keeps at most 64 idle segments");
        return -1;
    }
    self->most = most;
    return 0;
}

static void pool_dealloc(Pool *self) {
    while (self->count)
        Py_DECREF(self->idle[--self->count]);
    free_object(self);
}

static PyObject *pool_take_method(Pool *self, PyObject *unused) {
    (void)unused;
    return (PyObject *)pool_take(self);
}

static PyObject *pool_give_method(Pool *self, PyObject *segment) {
    if (!Py_IS_TYPE(segment, (PyTypeObject *)self->state->segment_type)) {
        PyErr_SetString(PyExc_TypeError, "a pool takes segments");
        return NULL;
    }
    if (((Segment *)segment)->idle) {
        PyErr_SetString(PyExc_ValueError, "a segment is given back once");
        return NULL;
    }
    if (self->count < self->most) {
        ((Segment *)segment)->idle = 1;
        self->idle[self->count++] = (Segment *)Py_NewRef(segment);
    }
    Py_RETURN_NONE;
}

static PyMethodDef pool_methods[] = {
    {"take", (PyCFunction)pool_take_method, METH_NOARGS, "A segment, used before or new."},
    {"give", (PyCFunction)pool_give_method, METH_O, "Take a segment back."},
    {NULL},
};
static PyMemberDef pool_members[] = {
    {"made", T_PYSSIZET, offsetof(Pool, made), READONLY, "How many segments were ever made."}, {NULL}};

static PyType_Slot pool_slots[] = {
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_members, pool_members},
    {Py_tp_init, pool_init},
    {Py_tp_new, pool_new},
    {Py_tp_doc, "Segments that are used again; it keeps at most `most` idle ones."},
    {0, NULL},
};
PyType_Spec pool_spec = {"ringfence.dataplane._core.Pool", sizeof(Pool), 0, FIXED, pool_slots};
