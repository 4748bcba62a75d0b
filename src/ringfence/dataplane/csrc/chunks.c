#include "chunks.h"

static Py_ssize_t segment_length(State *state, Py_ssize_t length) {
    PyObject *number = PyObject_CallFunction(state->segment_bytes_of, "n", length);
    if (number == NULL)
        return -1;
    Py_ssize_t each = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (each <= 0 || each > SEGMENT_BYTES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "segments of a length that no frame holds");
        return -1;
    }
    return each;
}

/* Note what the chunk's storage is and where its memory lies. A chunk of the same tensor as the one before is not asked. */
static int read_lease(State *state, Chunk *chunk, const Chunk *before) {
    PyObject *exporter = PyObject_GetAttr(chunk->held.obj, state->s_obj);
    if (exporter == NULL)
        return -1;
    chunk->exporter = exporter;
    Py_DECREF(exporter); /* the view keeps it */
    if (exporter == Py_None || PyByteArray_Check(exporter))
        return 0;
    if (before != NULL && before->lease != NULL && exporter == before->exporter) {
        chunk->lease = Py_NewRef(before->lease);
        chunk->storage = Py_NewRef(before->storage);
        chunk->address = Py_NewRef(before->address);
        chunk->nbytes = Py_NewRef(before->nbytes);
        return 0;
    }
    PyObject *lease = PyObject_GetAttr(exporter, state->s_lease);
    if (lease == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    if (lease == NULL || lease == Py_None) {
        PyErr_Clear();
        Py_XDECREF(lease);
        return 0;
    }
    chunk->lease = lease;
    chunk->storage = PyObject_GetAttr(lease, state->s_storage);
    chunk->address = PyObject_GetAttr(lease, state->s_address);
    chunk->nbytes = PyObject_GetAttr(lease, state->s_nbytes);
    return chunk->storage == NULL || chunk->address == NULL || chunk->nbytes == NULL ? -1 : 0;
}

int bind_chunks(Run *self) {
    Py_ssize_t known = -1, each = 0;
    for (int i = 0; i < self->program->chunks; i++) {
        Chunk *chunk = &self->chunks[i];
        PyObject *view = PyTuple_GetItem(self->views, i);
        int is_view = PyMemoryView_Check(view);
        if (is_view && PyObject_GetBuffer(view, &chunk->held, PyBUF_WRITABLE))
            return -1;
        if (!is_view || chunk->held.itemsize != 1) { /* a memoryview says what its items take, whatever it is asked for */
            PyErr_SetString(PyExc_TypeError, "a run is bound to views of bytes");
            return -1;
        }
        if (read_lease(self->pool->state, chunk, i ? chunk - 1 : NULL))
            return -1;
        chunk->at = chunk->held.buf;
        chunk->length = chunk->held.len;
        if (chunk->length != known) {
            known = chunk->length;
            each = segment_length(self->pool->state, known);
            if (each < 0)
                return -1;
        }
        chunk->each = each;
    }
    for (int i = 0; i < self->program->count; i++) {
        Step *step = &self->program->steps[i];
        Chunk *chunk = &self->chunks[step->chunk];
        Py_ssize_t segments = (chunk->length + chunk->each - 1) / chunk->each;
        self->progress[i].segments = segments ? segments : 1;
        if (step->other >= 0 && self->chunks[step->other].length != chunk->length) {
            PyErr_SetString(PyExc_ValueError, "the two operands of a step differ in length");
            return -1;
        }
    }
    return 0;
}

Place in_chunk(Run *self, int chunk, Py_ssize_t position) {
    Chunk *c = &self->chunks[chunk];
    Py_ssize_t offset = position * c->each;
    Py_ssize_t left = c->length - offset;
    Py_ssize_t length = left < c->each ? (left > 0 ? left : 0) : c->each;
    return (Place){c->held.obj, offset, length, c->at + offset};
}

/* 1: the method returns what it did when the call was made; 0: something else; -1: an error is set. */
static int still(PyObject *storage, PyObject *method, PyObject *then) {
    PyObject *now = PyObject_CallMethodObjArgs(storage, method, NULL);
    int same = now == NULL ? -1 : PyObject_RichCompareBool(now, then, Py_EQ);
    Py_XDECREF(now);
    return same;
}

static int memory_changed(Run *self, PyObject *lease) {
    PyObject *method = self->pool->state->s_memory_changed, *operation = Py_XNewRef(self->operation);
    PyObject *done = operation == NULL ? NULL : PyObject_CallMethodObjArgs(operation, method, lease, NULL);
    Py_XDECREF(operation);
    Py_XDECREF(done);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "the memory of a tensor changed while a collective used it");
    return -1;
}

/* The program may have resized the tensor's storage, or moved it to shared memory, while others had the interpreter's
 * lock: then its memory is freed, whoever refers to the storage. Asked before each use of a chunk's memory, with nothing in
 * between that gives up the lock. 0: the memory is there; -1: an error is set. */
int check_memory(Run *self, int chunk) {
    Chunk *c = &self->chunks[chunk];
    if (c->storage == NULL)
        return 0;
    State *state = self->pool->state;
    int same = still(c->storage, state->s_data_ptr, c->address);
    if (same == 1)
        same = still(c->storage, state->s_nbytes, c->nbytes); /* another piece of memory may have come to lie at the old address */
    return same == 0 ? memory_changed(self, c->lease) : same == 1 ? 0 : -1;
}

/* Asked after each use that gave up the lock itself. What it did to memory that went meanwhile cannot be undone, but nothing
 * comes of it, neither a frame nor a result. */
int check_address(Run *self, int chunk) {
    Chunk *c = &self->chunks[chunk];
    int same = c->storage == NULL ? 1 : still(c->storage, self->pool->state->s_data_ptr, c->address);
    return same == 0 ? memory_changed(self, c->lease) : same == 1 ? 0 : -1;
}
