#include "endpoint.h"

#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/socket.h>

/* Endpoint: writes and reads the bytes of one link. */

static int endpoint_traverse(Endpoint *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->ready);
    Py_VISIT(self->blocked);
    Py_VISIT(self->queue);
    Py_VISIT(self->stream);
    Py_VISIT(self->sealer);
    Py_VISIT(self->opener);
    Py_VISIT(self->pool);
    return 0; /* `unsent_view` is not visited: tp_clear of a memoryview with exports fails */
}

static void drop_unsent(Endpoint *self) {
    self->unsent_count = 0;
    if (self->unsent_view.obj != NULL)
        PyBuffer_Release(&self->unsent_view);
}

static int endpoint_clear(Endpoint *self) {
    drop_unsent(self);
    Py_CLEAR(self->ready);
    Py_CLEAR(self->blocked);
    Py_CLEAR(self->queue);
    Py_CLEAR(self->stream);
    Py_CLEAR(self->sealer);
    Py_CLEAR(self->opener);
    Py_CLEAR(self->sending);
    Py_CLEAR(self->receiving);
    Py_CLEAR(self->pool);
    return 0;
}

static void endpoint_dealloc(Endpoint *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    endpoint_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyObject *endpoint_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)args;
    (void)keywords;
    ModuleState *state = state_of_type(type);
    Endpoint *self = state == NULL ? NULL : (Endpoint *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->queue = PyObject_CallNoArgs(state->deque_type);
    self->stream = Py_NewRef(Py_None);
    self->sealer = Py_NewRef(Py_None);
    self->opener = Py_NewRef(Py_None);
    if (self->queue == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int endpoint_init(Endpoint *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"ready", "blocked", "pool", NULL};
    PyObject *ready, *blocked, *pool;
    ModuleState *state = state_of_type(Py_TYPE((PyObject *)self));
    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, keywords, "OO!O!", names, &ready, &PySet_Type, &blocked,
                                                      (PyTypeObject *)state->pool_type, &pool))
        return -1;
    if (self->pool != NULL || self->queue == NULL) { /* transfers in progress rely on these */
        PyErr_SetString(PyExc_RuntimeError, "the endpoint is already initialized");
        return -1;
    }
    self->ready = Py_NewRef(ready);
    self->blocked = Py_NewRef(blocked);
    self->pool = (Pool *)Py_NewRef(pool);
    return 0;
}

int is_endpoint(ModuleState *state, PyObject *object) {
    if (PyObject_TypeCheck(object, (PyTypeObject *)state->endpoint_type) && ((Endpoint *)object)->pool != NULL)
        return 1;
    PyErr_SetString(PyExc_TypeError, "not an initialized Endpoint of this module");
    return 0;
}

/* Whether __init__ ran. 0: an exception is set. */
static int is_initialized(Endpoint *self) {
    if (self->pool == NULL)
        PyErr_SetString(PyExc_TypeError, "not an initialized Endpoint of this module");
    return self->pool != NULL;
}

static PyObject *endpoint_get_stream(Endpoint *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->stream == NULL ? Py_None : self->stream);
}

static int endpoint_set_stream(Endpoint *self, PyObject *stream, void *unused) {
    (void)unused;
    SET_REF(self->stream, Py_NewRef(stream == NULL ? Py_None : stream));
    return 0;
}

/* Append the endpoint to `ready`, so that the engine calls its `work` method. */
int endpoint_wake(Endpoint *self) {
    if (self->queued)
        return 0;
    self->queued = 1;
    PyObject *done = PyObject_CallMethodObjArgs(self->ready, self->pool->state->s_append, (PyObject *)self, NULL);
    Py_XDECREF(done);
    if (done == NULL)
        self->queued = 0;
    return done == NULL ? -1 : 0;
}

/* 0: `busy` is set; the caller clears it after the transfer. -1: a transfer is in progress, and an exception is set. */
int begin_transfer(Endpoint *self) {
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "reentrant use of a link: a callback used it while it moved bytes");
        return -1;
    }
    self->busy = 1;
    return 0;
}

static PyObject *endpoint_wake_method(Endpoint *self, PyObject *unused) {
    (void)unused;
    if (!is_initialized(self) || endpoint_wake(self))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *endpoint_notify(Endpoint *self, PyObject *const *args, Py_ssize_t count) {
    if (!is_initialized(self))
        return NULL;
    if (count < 2 || count > 3) {
        PyErr_SetString(PyExc_TypeError, "notify(readable, writable, ended=False)");
        return NULL;
    }
    int truths[3] = {0, 0, 0};
    for (Py_ssize_t i = 0; i < count; i++)
        if ((truths[i] = PyObject_IsTrue(args[i])) < 0)
            return NULL;
    self->readable |= (char)truths[0];
    self->writable |= (char)truths[1];
    self->ended |= (char)truths[2];
    if (endpoint_wake(self))
        return NULL;
    Py_RETURN_NONE;
}

/* put(frame, segment=None): set the frame to write next; `segment` returns to the pool afterwards. */
static PyObject *endpoint_put(Endpoint *self, PyObject *const *args, Py_ssize_t count) {
    if (!is_initialized(self))
        return NULL;
    PyTypeObject *segment_type = (PyTypeObject *)self->pool->state->segment_type;
    if (count < 1 || count > 2 || (count == 2 && args[1] != Py_None && !Py_IS_TYPE(args[1], segment_type))) {
        PyErr_SetString(PyExc_TypeError, "put(frame, segment=None)");
        return NULL;
    }
    if (!self->unsent_count && !self->busy)
        drop_unsent(self);
    Py_buffer frame;
    if (PyObject_GetBuffer(args[0], &frame, PyBUF_SIMPLE))
        return NULL;
    if (self->unsent_count || self->busy) { /* checked last: the exporter may be Python code that calls put */
        PyBuffer_Release(&frame);
        PyErr_SetString(PyExc_RuntimeError, "a frame is still being written");
        return NULL;
    }
    self->unsent_view = frame;
    self->unsent[0] = (struct iovec){frame.buf, (size_t)frame.len};
    self->unsent_count = 1;
    SET_REF(self->sending, count == 2 && args[1] != Py_None ? (Segment *)Py_NewRef(args[1]) : NULL);
    Py_RETURN_NONE;
}

/* Call send or recv_into of a stream that is not a socket. Steals the view. Returns the byte count; -1: an exception is
 * set; -2: would block. */
static Py_ssize_t call_stream(Endpoint *self, PyObject *method, PyObject *view) {
    if (view == NULL)
        return -1;
    ModuleState *state = self->pool->state;
    PyObject *stream = Py_NewRef(self->stream); /* the call may close the link and drop the stream */
    PyObject *number = PyObject_CallMethodObjArgs(stream, method, view, NULL);
    Py_DECREF(stream);
    if (PyMemoryView_Check(view))
        release_view(state, view);
    else
        Py_DECREF(view);
    if (number == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_BlockingIOError))
            return -1;
        PyErr_Clear();
        return -2;
    }
    Py_ssize_t moved = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (moved < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "send() or recv_into() of a stream returned a negative number");
    return moved < 0 ? -1 : moved;
}

static int is_socket(Endpoint *self) {
    return Py_IS_TYPE(self->stream, (PyTypeObject *)self->pool->state->socket_type);
}

/* The socket's file descriptor. Not cached: other code may close the socket and the number may be reused. -1: an
 * exception is set. */
static int descriptor_of(Endpoint *self) {
    PyObject *stream = Py_NewRef(self->stream);
    PyObject *number = PyObject_CallMethodObjArgs(stream, self->pool->state->s_fileno, NULL);
    Py_DECREF(stream);
    if (number == NULL)
        return -1;
    long descriptor = PyLong_AsLong(number);
    Py_DECREF(number);
    if (descriptor == -1 && PyErr_Occurred())
        return -1;
    if (descriptor < 0 || descriptor > INT_MAX) {
        errno = EBADF;
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    return (int)descriptor;
}

/* After a failed system call. 0: retry; -1: an exception is set; -2: would block. A signal handler may have closed the
 * link; then there is no socket to retry with. */
static int handle_errno(Endpoint *self) {
    if (errno == EAGAIN || errno == EWOULDBLOCK)
        return -2;
    if (errno != EINTR) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    if (PyErr_CheckSignals())
        return -1;
    if (!is_socket(self)) {
        PyErr_SetString(PyExc_RuntimeError, "the endpoint is closed");
        return -1;
    }
    return 0;
}

/* Write unsent bytes. Returns the byte count; -1: an exception is set; -2: would block. */
static Py_ssize_t endpoint_write(Endpoint *self) {
    while (is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        struct msghdr message = {.msg_iov = self->unsent, .msg_iovlen = (size_t)self->unsent_count};
        ssize_t sent = sendmsg(descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0)
            return sent;
        int state = handle_errno(self);
        if (state < 0)
            return state;
    }
    char *first = self->unsent[0].iov_base;
    Py_ssize_t length = (Py_ssize_t)self->unsent[0].iov_len;
    Segment *segment = self->sending;
    if (segment != NULL && first >= segment->at && first + length <= segment->at + FRAME_BYTES)
        return call_stream(self, self->pool->state->s_send,
                           view_span(segment_span(segment, first - segment->at, length)));
    return call_stream(self, self->pool->state->s_send, copy_bytes(first, length));
}

/* Read to `offset` of the segment. Returns the byte count; -1: an exception is set; -2: would block. */
Py_ssize_t endpoint_read(Endpoint *self, Segment *segment, Py_ssize_t offset, Py_ssize_t room) {
    while (is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        ssize_t got = recv(descriptor, segment->at + offset, (size_t)room, MSG_DONTWAIT);
        if (got >= 0)
            return got;
        int state = handle_errno(self);
        if (state < 0)
            return state;
    }
    Py_ssize_t got = call_stream(self, self->pool->state->s_recv_into, view_span(segment_span(segment, offset, room)));
    if (got > room) {
        PyErr_SetString(PyExc_ValueError, "recv_into() of a stream returned more than the buffer holds");
        return -1;
    }
    return got;
}

/* Drop the bytes that were written. -1: more than there were, and an exception is set. */
static int drop_written(Endpoint *self, size_t sent) {
    int first = 0;
    while (first < self->unsent_count && sent >= self->unsent[first].iov_len) /* drops empty buffers too */
        sent -= self->unsent[first++].iov_len;
    self->unsent_count -= first;
    memmove(self->unsent, self->unsent + first, (size_t)self->unsent_count * sizeof(struct iovec));
    if (self->unsent_count) {
        self->unsent[0].iov_base = (char *)self->unsent[0].iov_base + sent;
        self->unsent[0].iov_len -= sent;
    } else if (sent) {
        PyErr_SetString(PyExc_ValueError, "send() of a stream returned more than it was given");
        return -1;
    }
    return 0;
}

/* Write the rest of a frame. 1: nothing is left; 0: would block; -1: an exception is set. */
int endpoint_flush(Endpoint *self) {
    if (!self->unsent_count)
        return 1;
    while (self->unsent_count && self->writable) {
        if (self->stream == Py_None) {
            PyErr_SetString(PyExc_RuntimeError, "the endpoint is closed");
            return -1;
        }
        size_t offered = self->unsent[0].iov_len; /* a stream that is not a socket takes one buffer at a time */
        for (int i = 1; is_socket(self) && i < self->unsent_count; i++)
            offered += self->unsent[i].iov_len;
        ClockStart start = start_clock();
        Py_ssize_t sent = endpoint_write(self);
        stop_clock(STAGE_SEND, start, self->spent, self->worker);
        if (sent > 0)
            self->wire_sent += (unsigned long long)sent;
        if (sent == -1 || (sent >= 0 && drop_written(self, (size_t)sent)))
            return -1;
        if (sent < 0 || (size_t)sent < offered)
            self->writable = 0; /* the buffer is full; epoll is edge-triggered and reports when it is writable */
    }
    if (self->unsent_count) {
        PyObject *done = PyObject_CallMethodObjArgs(self->blocked, self->pool->state->s_add, (PyObject *)self, NULL);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    drop_unsent(self);
    if (self->sending != NULL) {
        pool_give(self->pool, self->sending);
        self->sending = NULL;
    }
    if (PySet_Size(self->blocked) && PySet_Discard(self->blocked, (PyObject *)self) < 0)
        return -1;
    return 1;
}

static PyObject *endpoint_flush_method(Endpoint *self, PyObject *unused) {
    (void)unused;
    if (!is_initialized(self) || begin_transfer(self))
        return NULL;
    int flushed = endpoint_flush(self);
    self->busy = 0;
    return flushed < 0 ? NULL : PyBool_FromLong(flushed);
}

static PyObject *endpoint_pending(Endpoint *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(self->unsent_count > 0);
}

static PyMethodDef endpoint_methods[] = {
    {"wake", (PyCFunction)endpoint_wake_method, METH_NOARGS,
     "Append the endpoint to `ready`, so that the engine calls its `work` method."},
    {"notify", (PyCFunction)(void (*)(void))endpoint_notify, METH_FASTCALL,
     "Record that the stream became readable, became writable or ended, and wake the endpoint."},
    {"put", (PyCFunction)(void (*)(void))endpoint_put, METH_FASTCALL,
     "Set the frame to write next; the segment returns to the pool afterwards."},
    {"flush", (PyCFunction)endpoint_flush_method, METH_NOARGS,
     "Write the rest of a frame; return True when nothing is left."},
    {NULL},
};
static PyMemberDef endpoint_members[] = {
    {"readable", T_BOOL, offsetof(Endpoint, readable), 0, NULL},
    {"writable", T_BOOL, offsetof(Endpoint, writable), 0, NULL},
    {"ended", T_BOOL, offsetof(Endpoint, ended), 0, NULL},
    {"open", T_BOOL, offsetof(Endpoint, open), 0, NULL},
    {"queued", T_BOOL, offsetof(Endpoint, queued), 0, NULL},
    {"queue", T_OBJECT_EX, offsetof(Endpoint, queue), READONLY, NULL},
    {"sealer", T_OBJECT_EX, offsetof(Endpoint, sealer), 0, NULL},
    {"opener", T_OBJECT_EX, offsetof(Endpoint, opener), 0, NULL},
    {"far_end", T_INT, offsetof(Endpoint, worker), 0, "Global rank of the peer, for timing events."},
    {"wire_sent", T_ULONGLONG, offsetof(Endpoint, wire_sent), 0, NULL},
    {"wire_received", T_ULONGLONG, offsetof(Endpoint, wire_received), 0, NULL},
    {"payload_sent", T_ULONGLONG, offsetof(Endpoint, payload_sent), 0, NULL},
    {"payload_received", T_ULONGLONG, offsetof(Endpoint, payload_received), 0, NULL},
    {"waits", T_ULONGLONG, offsetof(Endpoint, waits), 0, NULL},
    {"waited", T_ULONGLONG, offsetof(Endpoint, waited), 0, NULL},
    {NULL},
};

static PyObject *endpoint_spent(Endpoint *self, void *unused) {
    (void)unused;
    PyObject *result = PyTuple_New(STAGE_COUNT);
    for (int i = 0; result != NULL && i < STAGE_COUNT; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(self->spent[i]);
        if (number == NULL)
            Py_CLEAR(result);
        else
            PyTuple_SetItem(result, i, number); /* steals the reference */
    }
    return result;
}

static PyGetSetDef endpoint_getset[] = {
    {"stream", (getter)endpoint_get_stream, (setter)endpoint_set_stream,
     "A socket, or an object with send and recv_into.", NULL},
    {"pending", (getter)endpoint_pending, NULL, "Whether a frame is partly written.", NULL},
    {"spent", (getter)endpoint_spent, NULL, "Nanoseconds by stage while timing was on.", NULL},
    {NULL},
};

static PyType_Slot endpoint_slots[] = {
    {Py_tp_dealloc, endpoint_dealloc},
    {Py_tp_traverse, endpoint_traverse},
    {Py_tp_clear, endpoint_clear},
    {Py_tp_methods, endpoint_methods},
    {Py_tp_members, endpoint_members},
    {Py_tp_getset, endpoint_getset},
    {Py_tp_init, endpoint_init},
    {Py_tp_new, endpoint_new},
    {Py_tp_doc, "Writes and reads the bytes of one link."},
    {0, NULL},
};
PyType_Spec endpoint_spec = {"ringfence.dataplane._core.Endpoint", sizeof(Endpoint), 0,
                             TYPE_FLAGS | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, endpoint_slots};
