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
    Py_VISIT(self->shared);
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
    Py_CLEAR(self->shared);
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

static PyObject *endpoint_get_shared(Endpoint *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->shared == NULL ? Py_None : (PyObject *)self->shared);
}

/* Slots that the peer has not returned are not taken back when the link ends: it may be reading them. */
static int endpoint_set_shared(Endpoint *self, PyObject *region, void *unused) {
    (void)unused;
    if (!is_initialized(self))
        return -1;
    if (region == Py_None)
        region = NULL;
    if (region != NULL && !is_region(self->pool->state, region)) {
        PyErr_SetString(PyExc_TypeError, "not a Region of this module");
        return -1;
    }
    SET_REF(self->shared, (Region *)Py_XNewRef(region));
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

/* Whether to release the GIL around system calls on large pieces. It costs some time and gains nothing unless another
 * thread has segments to move. Only the driving thread of a link uses or closes it, so nobody does meanwhile. */
static int releases_gil;
#define LARGE_PIECE 65536

PyObject *core_release_gil(PyObject *module, PyObject *on) {
    (void)module;
    int truth = PyObject_IsTrue(on);
    if (truth < 0)
        return NULL;
    releases_gil = truth;
    Py_RETURN_NONE;
}

static ssize_t write_to(int descriptor, struct msghdr *message) {
    const int flags = MSG_NOSIGNAL | MSG_DONTWAIT;
    size_t largest = message->msg_iov[0].iov_len; /* the payload is the first buffer, or the second */
    if (message->msg_iovlen > 1 && message->msg_iov[1].iov_len > largest)
        largest = message->msg_iov[1].iov_len;
    if (!releases_gil || largest < LARGE_PIECE)
        return sendmsg(descriptor, message, flags);
    ssize_t sent;
    Py_BEGIN_ALLOW_THREADS;
    sent = sendmsg(descriptor, message, flags);
    Py_END_ALLOW_THREADS;
    return sent;
}

static ssize_t read_from(int descriptor, char *target, size_t room) {
    if (!releases_gil || room < LARGE_PIECE)
        return recv(descriptor, target, room, MSG_DONTWAIT);
    ssize_t got;
    Py_BEGIN_ALLOW_THREADS;
    got = recv(descriptor, target, room, MSG_DONTWAIT);
    Py_END_ALLOW_THREADS;
    return got;
}

/* Write unsent bytes. Returns the byte count; -1: an exception is set; -2: would block. */
static Py_ssize_t endpoint_write(Endpoint *self) {
    while (is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        struct msghdr message = {.msg_iov = self->unsent, .msg_iovlen = (size_t)self->unsent_count};
        ssize_t sent = write_to(descriptor, &message);
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

/* Read from the socket. Returns the byte count; -1: an exception is set; -2: would block; -3: it is not a socket. */
static Py_ssize_t read_socket(Endpoint *self, void *at, Py_ssize_t room) {
    while (is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        ssize_t got = read_from(descriptor, at, (size_t)room);
        if (got >= 0)
            return got;
        int state = handle_errno(self);
        if (state < 0)
            return state;
    }
    return -3;
}

/* Take up to `room` bytes of what was read ahead. */
static Py_ssize_t take_ahead(Endpoint *self, char *at, Py_ssize_t room) {
    Py_ssize_t count = self->ahead_count < room ? self->ahead_count : room;
    memcpy(at, self->ahead + self->ahead_first, (size_t)count);
    self->ahead_first += count;
    self->ahead_count -= count;
    return count;
}

int endpoint_is_readable(Endpoint *self) { return self->readable || self->ahead_count; }

/* Read the headers of several segments at once, and the first `room` bytes to `at`. */
static Py_ssize_t read_ahead(Endpoint *self, char *at, Py_ssize_t room) {
    Py_ssize_t taken = take_ahead(self, at, room);
    if (taken == room || !self->readable)
        return taken ? taken : -2;
    int is_long = room - taken >= (Py_ssize_t)sizeof self->ahead; /* read to where it belongs */
    Py_ssize_t got = is_long ? read_socket(self, at + taken, room - taken)
                             : read_socket(self, self->ahead, sizeof self->ahead);
    if (got < 0)
        return taken && got == -2 ? taken : got;
    if (is_long)
        return taken + got;
    if (got > 0 && got < (Py_ssize_t)sizeof self->ahead && !self->ended)
        self->readable = 0; /* drained; epoll is edge-triggered and reports when it is readable */
    self->ahead_first = 0;
    self->ahead_count = got;
    return taken + take_ahead(self, at + taken, room - taken);
}

/* Read to `offset` of the segment. Returns the byte count; -1: an exception is set; -2: would block. */
Py_ssize_t endpoint_read(Endpoint *self, Segment *segment, Py_ssize_t offset, Py_ssize_t room) {
    Py_ssize_t found = self->shared != NULL ? read_ahead(self, segment->at + offset, room)
                                            : read_socket(self, segment->at + offset, room);
    if (found != -3)
        return found;
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

/* Take back what one complete control frame returns. -1: an exception is set. */
static int handle_control(Endpoint *self) {
    uint64_t total;
    switch (self->control[0]) {
    case NOP: return 0;
    case BYE: self->goodbye = 1; return 0;
    case RETURN:
        memcpy(&total, self->control + COUNTER_AT, 8);
        total = be64toh(total);
        if (total >= self->returned && total - self->returned <= (uint64_t)self->lent_count) {
            for (; self->returned < total; self->returned++) {
                region_give(self->shared, self->lent[self->lent_first]);
                self->lent_first = (self->lent_first + 1) % MAX_SLOTS;
                self->lent_count--;
            }
            return 0;
        }
    }
    PyErr_SetString(self->pool->state->protocol_error, "a peer returned shared memory that it was not lent");
    return -1;
}

/* On the sending endpoint of a link with shared memory: read which slots the peer has returned. 0: all is read; -1: an
 * exception is set. */
int endpoint_read_returns(Endpoint *self) {
    while (self->readable && !self->goodbye && is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        size_t room = sizeof self->control - (size_t)self->control_bytes;
        ssize_t got = recv(descriptor, self->control + self->control_bytes, room, MSG_DONTWAIT);
        if (got < 0) {
            int state = handle_errno(self);
            if (state == -1)
                return -1;
            if (state == -2)
                self->readable = 0;
            continue;
        }
        if (got == 0) { /* the end is reported by epoll, and handled in Python */
            self->readable = 0;
            return 0;
        }
        self->control_bytes += (int)got;
        if (self->control_bytes == (int)sizeof self->control) {
            self->control_bytes = 0;
            if (handle_control(self))
                return -1;
        }
    }
    return 0;
}

/* On the receiving endpoint: tell the peer which slots it may use again, once they are half of the quota. The peer waits
 * for a slot only if it has lent more than that. A peer that has closed the link needs none. -1: an exception is set. */
int endpoint_return_slots(Endpoint *self) {
    uint64_t half = (uint64_t)self->shared->quota / 2;
    if (self->used - self->returned < (half ? half : 1))
        return 0;
    unsigned char frame[HEADER_BYTES + TAG_BYTES] = {RETURN};
    put32(frame + 28, NO_ORIGIN);
    put64(frame + COUNTER_AT, self->used);
    while (is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        ssize_t sent = send(descriptor, frame, sizeof frame, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent == (ssize_t)sizeof frame) {
            self->returned = self->used;
            return 0;
        }
        if (sent < 0 && (errno == EPIPE || errno == ECONNRESET))
            return 0;
        if (sent >= 0)
            errno = ENOBUFS; /* the peer has not read for hundreds of frames, although it may have only so many slots */
        int state = handle_errno(self);
        if (state == -2) {
            errno = ENOBUFS;
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
        if (state < 0)
            return -1;
    }
    return 0; /* closed: what was received ended the session, or the group */
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
    {"role", T_BYTE, offsetof(Endpoint, role), 0, "What serve() does in place of `work`: 1: send; 2: receive; 0: nothing."},
    {"lingering", T_BOOL, offsetof(Endpoint, lingering), 0, NULL},
    {"bye_received", T_BOOL, offsetof(Endpoint, bye_received), 0, NULL},
    {"queue", T_OBJECT_EX, offsetof(Endpoint, queue), READONLY, NULL},
    {"sealer", T_OBJECT_EX, offsetof(Endpoint, sealer), 0, NULL},
    {"opener", T_OBJECT_EX, offsetof(Endpoint, opener), 0, NULL},
    {"far_end", T_INT, offsetof(Endpoint, worker), 0, "Global rank of the peer, for timing events."},
    {"wire_sent", T_ULONGLONG, offsetof(Endpoint, wire_sent), 0, NULL},
    {"wire_received", T_ULONGLONG, offsetof(Endpoint, wire_received), 0, NULL},
    {"payload_sent", T_ULONGLONG, offsetof(Endpoint, payload_sent), 0, NULL},
    {"payload_received", T_ULONGLONG, offsetof(Endpoint, payload_received), 0, NULL},
    {"goodbye", T_BOOL, offsetof(Endpoint, goodbye), READONLY, "Whether a BYE was read on a sending endpoint."},
    {"lent", T_INT, offsetof(Endpoint, lent_count), READONLY, "Number of slots that the peer has not returned."},
    {"reserved", T_INT, offsetof(Endpoint, reserved), READONLY, "Number of slots that hold sums until they are lent."},
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
    {"shared", (getter)endpoint_get_shared, (setter)endpoint_set_shared,
     "The Region that this endpoint writes or reads; None: frames carry all payloads.", NULL},
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
