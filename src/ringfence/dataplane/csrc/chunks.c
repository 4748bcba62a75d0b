#include "chunks.h"

static Py_ssize_t segment_length(ModuleState *state, Py_ssize_t length) {
    PyObject *number = PyObject_CallFunction(state->segment_bytes_of, "n", length);
    if (number == NULL)
        return -1;
    Py_ssize_t each = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (each <= 0 || each > SEGMENT_BYTES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "the segment length does not fit in a frame");
        return -1;
    }
    return each;
}

/* Record the storage of the chunk's tensor, its address and its size. Chunks of the same tensor share the previous
 * chunk's record. */
static int read_lease(ModuleState *state, Chunk *chunk, const Chunk *before) {
    PyObject *exporter = PyObject_GetAttr(chunk->buffer.obj, state->s_obj);
    if (exporter == NULL)
        return -1;
    chunk->exporter = exporter;
    Py_DECREF(exporter); /* the view holds a reference */
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

int bind_chunks(Execution *self) {
    Py_ssize_t known = -1, each = 0;
    for (int i = 0; i < self->program->chunks; i++) {
        Chunk *chunk = &self->chunks[i];
        PyObject *view = PyTuple_GetItem(self->views, i);
        int is_view = PyMemoryView_Check(view);
        if (is_view && PyObject_GetBuffer(view, &chunk->buffer, PyBUF_WRITABLE))
            return -1;
        if (!is_view ||
            chunk->buffer.itemsize != 1) { /* a memoryview reports its itemsize whatever the request flags */
            PyErr_SetString(PyExc_TypeError, "an execution takes memoryviews of bytes");
            return -1;
        }
        if (read_lease(self->pool->state, chunk, i ? chunk - 1 : NULL))
            return -1;
        chunk->at = chunk->buffer.buf;
        chunk->length = chunk->buffer.len;
        if (chunk->length != known) {
            known = chunk->length;
            each = segment_length(self->pool->state, known);
            if (each < 0)
                return -1;
        }
        chunk->segment_bytes = each;
    }
    for (int i = 0; i < self->program->count; i++) {
        Step *step = &self->program->steps[i];
        Chunk *chunk = &self->chunks[step->chunk];
        Py_ssize_t segments = (chunk->length + chunk->segment_bytes - 1) / chunk->segment_bytes;
        self->progress[i].segments = segments ? segments : 1;
        if (step->other >= 0 && self->chunks[step->other].length != chunk->length) {
            PyErr_SetString(PyExc_ValueError, "the two operands of a step differ in length");
            return -1;
        }
    }
    return 0;
}

Span chunk_span(Execution *self, int chunk, Py_ssize_t position) {
    Chunk *c = &self->chunks[chunk];
    Py_ssize_t offset = position * c->segment_bytes;
    Py_ssize_t left = c->length - offset;
    Py_ssize_t length = left < c->segment_bytes ? (left > 0 ? left : 0) : c->segment_bytes;
    return (Span){c->buffer.obj, offset, length, c->at + offset};
}

/* Compare what the storage's method returns now with `then`. 1: equal; 0: different; -1: an exception is set. */
static int is_unchanged(PyObject *storage, PyObject *method, PyObject *then) {
    PyObject *now = PyObject_CallMethodObjArgs(storage, method, NULL);
    int same = now == NULL ? -1 : PyObject_RichCompareBool(now, then, Py_EQ);
    Py_XDECREF(now);
    return same;
}

static int memory_changed(Execution *self, PyObject *lease) {
    PyObject *method = self->pool->state->s_memory_changed, *request = Py_XNewRef(self->request);
    PyObject *done = request == NULL ? NULL : PyObject_CallMethodObjArgs(request, method, lease, NULL);
    Py_XDECREF(request);
    Py_XDECREF(done);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "the memory of a tensor changed while a collective used it");
    return -1;
}

/* Check that the tensor's storage still has the address and size it had at the call. Resizing the storage, or moving it
 * to shared memory, frees the old memory even while references to the storage exist. Call this before each use of a
 * chunk's memory and do not release the GIL in between. 0: unchanged; -1: an exception is set. */
int check_memory(Execution *self, int chunk) {
    Chunk *c = &self->chunks[chunk];
    if (c->storage == NULL)
        return 0;
    ModuleState *state = self->pool->state;
    int same = is_unchanged(c->storage, state->s_data_ptr, c->address);
    if (same == 1)
        same = is_unchanged(c->storage, state->s_nbytes, c->nbytes); /* new memory may have the old address */
    return same == 0 ? memory_changed(self, c->lease) : same == 1 ? 0 : -1;
}

/* Check the address again after a use that released the GIL. A write to memory that was freed meanwhile cannot be
 * undone, but the error prevents a frame or result made from it. */
int check_address(Execution *self, int chunk) {
    Chunk *c = &self->chunks[chunk];
    int same = c->storage == NULL ? 1 : is_unchanged(c->storage, self->pool->state->s_data_ptr, c->address);
    return same == 0 ? memory_changed(self, c->lease) : same == 1 ? 0 : -1;
}
