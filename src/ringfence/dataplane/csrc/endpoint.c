#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/socket.h>

#include "endpoint.h"

/* -- one end of a link: the part that moves bytes -------------------------------------------------------------------- */

static int end_traverse(End *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->ready);
    Py_VISIT(self->blocked);
    Py_VISIT(self->queue);
    Py_VISIT(self->stream);
    Py_VISIT(self->sealer);
    Py_VISIT(self->opener);
    Py_VISIT(self->pool);
    return 0; /* not what `unsent_view` holds: the collector would clear a memoryview in use, which it survives badly */
}

static void end_forget_unsent(End *self) {
    self->pieces = 0;
    if (self->unsent_view.obj != NULL)
        PyBuffer_Release(&self->unsent_view);
}

static int end_clear(End *self) {
    end_forget_unsent(self);
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

static void end_dealloc(End *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    end_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyObject *end_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)args;
    (void)keywords;
    State *state = state_of(type);
    End *self = state == NULL ? NULL : (End *)PyType_GenericAlloc(type, 0);
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

static int end_init(End *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"ready", "blocked", "pool", NULL};
    PyObject *ready, *blocked, *pool;
    State *state = state_of(Py_TYPE((PyObject *)self));
    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, keywords, "OO!O!", names, &ready, &PySet_Type, &blocked,
                                                      (PyTypeObject *)state->pool_type, &pool))
        return -1;
    if (self->pool != NULL || self->queue == NULL) { /* what is at work relies on these to stay */
        PyErr_SetString(PyExc_RuntimeError, "the end of a link is made once");
        return -1;
    }
    self->ready = Py_NewRef(ready);
    self->blocked = Py_NewRef(blocked);
    self->pool = (Pool *)Py_NewRef(pool);
    return 0;
}

int is_end(State *state, PyObject *object) {
    if (PyObject_TypeCheck(object, (PyTypeObject *)state->end_type) && ((End *)object)->pool != NULL)
        return 1;
    PyErr_SetString(PyExc_TypeError, "this is not the end of a link");
    return 0;
}

/* Of an End: whether it was made as one is made. */
static int is_whole(End *self) {
    if (self->pool == NULL)
        PyErr_SetString(PyExc_TypeError, "this is not the end of a link");
    return self->pool != NULL;
}

static PyObject *end_get_stream(End *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->stream == NULL ? Py_None : self->stream);
}

static int end_set_stream(End *self, PyObject *stream, void *unused) {
    (void)unused;
    REPLACE(self->stream, Py_NewRef(stream == NULL ? Py_None : stream));
    return 0;
}

/* Have the engine call `work` soon. */
int wake(End *self) {
    if (self->queued)
        return 0;
    self->queued = 1;
    PyObject *done = PyObject_CallMethodObjArgs(self->ready, self->pool->state->s_append, (PyObject *)self, NULL);
    Py_XDECREF(done);
    if (done == NULL)
        self->queued = 0;
    return done == NULL ? -1 : 0;
}

/* 0: bytes may be moved, and `busy` is set until the caller takes it back; -1: somebody does already. */
int begin_to_move(End *self) {
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "a link was used by something that was called while it moved bytes");
        return -1;
    }
    self->busy = 1;
    return 0;
}

static PyObject *end_wake(End *self, PyObject *unused) {
    (void)unused;
    if (!is_whole(self) || wake(self))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *end_notify(End *self, PyObject *const *args, Py_ssize_t count) {
    if (!is_whole(self))
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
    if (wake(self))
        return NULL;
    Py_RETURN_NONE;
}

/* put(frame, segment=None): what to write next; `segment` goes back to the pool afterwards. */
static PyObject *end_put(End *self, PyObject *const *args, Py_ssize_t count) {
    if (!is_whole(self))
        return NULL;
    PyTypeObject *segment_type = (PyTypeObject *)self->pool->state->segment_type;
    if (count < 1 || count > 2 || (count == 2 && args[1] != Py_None && !Py_IS_TYPE(args[1], segment_type))) {
        PyErr_SetString(PyExc_TypeError, "put(frame, segment=None)");
        return NULL;
    }
    if (!self->pieces && !self->busy)
        end_forget_unsent(self);
    Py_buffer frame;
    if (PyObject_GetBuffer(args[0], &frame, PyBUF_SIMPLE))
        return NULL;
    if (self->pieces || self->busy) { /* asked last: an exporter may be Python code, which may have put something */
        PyBuffer_Release(&frame);
        PyErr_SetString(PyExc_RuntimeError, "a frame is still being written");
        return NULL;
    }
    self->unsent_view = frame;
    self->unsent[0] = (struct iovec){frame.buf, (size_t)frame.len};
    self->pieces = 1;
    REPLACE(self->sending, count == 2 && args[1] != Py_None ? (Segment *)Py_NewRef(args[1]) : NULL);
    Py_RETURN_NONE;
}

/* A stream that is no socket, asked through its method; takes over the view. -1: an error is set; -2: none now. */
static Py_ssize_t ask_stream(End *self, PyObject *method, PyObject *view) {
    if (view == NULL)
        return -1;
    State *state = self->pool->state;
    PyObject *stream = Py_NewRef(self->stream); /* it may close the link, and so be forgotten, while it is asked */
    PyObject *number = PyObject_CallMethodObjArgs(stream, method, view, NULL);
    Py_DECREF(stream);
    if (PyMemoryView_Check(view))
        end_view(state, view);
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
        PyErr_SetString(PyExc_ValueError, "a stream moved a negative number of bytes");
    return moved < 0 ? -1 : moved;
}

static int is_socket(End *self) { return Py_IS_TYPE(self->stream, (PyTypeObject *)self->pool->state->socket_type); }

/* Asked each time: somebody else may close the socket, and its number may be another one's at once. -1: an error is set. */
static int descriptor_of(End *self) {
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

/* After a system call that failed. 0: call again; -1: an error is set; -2: nothing moves now. A signal's handler may have
 * closed the link: then there is no socket to call again. */
static int after_errno(End *self) {
    if (errno == EAGAIN || errno == EWOULDBLOCK)
        return -2;
    if (errno != EINTR) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    if (PyErr_CheckSignals())
        return -1;
    if (!is_socket(self)) {
        PyErr_SetString(PyExc_RuntimeError, "this end of a link is closed");
        return -1;
    }
    return 0;
}

/* Bytes that the kernel took; -1: an error is set; -2: none now. */
static Py_ssize_t write_some(End *self) {
    while (is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        struct msghdr message = {.msg_iov = self->unsent, .msg_iovlen = (size_t)self->pieces};
        ssize_t sent = sendmsg(descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0)
            return sent;
        int state = after_errno(self);
        if (state < 0)
            return state;
    }
    char *first = self->unsent[0].iov_base;
    Py_ssize_t length = (Py_ssize_t)self->unsent[0].iov_len;
    Segment *segment = self->sending;
    if (segment != NULL && first >= segment->at && first + length <= segment->at + FRAME_BYTES)
        return ask_stream(self, self->pool->state->s_send, view_of(in_segment(segment, first - segment->at, length)));
    return ask_stream(self, self->pool->state->s_send, copy_of(first, length));
}

/* Bytes that were read to `offset` of the segment; -1 and -2 as above. */
Py_ssize_t read_some(End *self, Segment *segment, Py_ssize_t offset, Py_ssize_t room) {
    while (is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        ssize_t got = recv(descriptor, segment->at + offset, (size_t)room, MSG_DONTWAIT);
        if (got >= 0)
            return got;
        int state = after_errno(self);
        if (state < 0)
            return state;
    }
    Py_ssize_t got = ask_stream(self, self->pool->state->s_recv_into, view_of(in_segment(segment, offset, room)));
    if (got > room) {
        PyErr_SetString(PyExc_ValueError, "a stream read more than there was room for");
        return -1;
    }
    return got;
}

/* Strike what the kernel took. -1: it took more than there was. */
static int strike(End *self, size_t sent) {
    int first = 0;
    while (first < self->pieces && sent >= self->unsent[first].iov_len) /* an empty piece goes too */
        sent -= self->unsent[first++].iov_len;
    self->pieces -= first;
    memmove(self->unsent, self->unsent + first, (size_t)self->pieces * sizeof(struct iovec));
    if (self->pieces) {
        self->unsent[0].iov_base = (char *)self->unsent[0].iov_base + sent;
        self->unsent[0].iov_len -= sent;
    } else if (sent) {
        PyErr_SetString(PyExc_ValueError, "a stream took more than it was given");
        return -1;
    }
    return 0;
}

/* Write what is left of a frame. 1: nothing is left; 0: the kernel takes no more now; -1: an error is set. */
int flush(End *self) {
    if (!self->pieces)
        return 1;
    while (self->pieces && self->writable) {
        if (self->stream == Py_None) {
            PyErr_SetString(PyExc_RuntimeError, "this end of a link is closed");
            return -1;
        }
        size_t offered = self->unsent[0].iov_len; /* a stream that is no socket takes one piece at a time */
        for (int i = 1; is_socket(self) && i < self->pieces; i++)
            offered += self->unsent[i].iov_len;
        Start start = start_clock();
        Py_ssize_t sent = write_some(self);
        stop_clock(IN_SEND, start, self->spent, self->worker);
        if (sent > 0)
            self->wire_sent += (unsigned long long)sent;
        if (sent == -1 || (sent >= 0 && strike(self, (size_t)sent)))
            return -1;
        if (sent < 0 || (size_t)sent < offered)
            self->writable = 0; /* the buffer is full: the next edge says when to go on */
    }
    if (self->pieces) {
        PyObject *done = PyObject_CallMethodObjArgs(self->blocked, self->pool->state->s_add, (PyObject *)self, NULL);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    end_forget_unsent(self);
    if (self->sending != NULL) {
        pool_give(self->pool, self->sending);
        self->sending = NULL;
    }
    if (PySet_Size(self->blocked) && PySet_Discard(self->blocked, (PyObject *)self) < 0)
        return -1;
    return 1;
}

static PyObject *end_flush(End *self, PyObject *unused) {
    (void)unused;
    if (!is_whole(self) || begin_to_move(self))
        return NULL;
    int flushed = flush(self);
    self->busy = 0;
    return flushed < 0 ? NULL : PyBool_FromLong(flushed);
}

static PyObject *end_pending(End *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(self->pieces > 0);
}

static PyMethodDef end_methods[] = {
    {"wake", (PyCFunction)end_wake, METH_NOARGS, "Have the engine call `work` soon."},
    {"notify", (PyCFunction)(void (*)(void))end_notify, METH_FASTCALL, "The stream's state changed."},
    {"put", (PyCFunction)(void (*)(void))end_put, METH_FASTCALL, "Write this next."},
    {"flush", (PyCFunction)end_flush, METH_NOARGS, "Write what is left; True when nothing is."},
    {NULL},
};
static PyMemberDef end_members[] = {
    {"readable", T_BOOL, offsetof(End, readable), 0, NULL},
    {"writable", T_BOOL, offsetof(End, writable), 0, NULL},
    {"ended", T_BOOL, offsetof(End, ended), 0, NULL},
    {"open", T_BOOL, offsetof(End, open), 0, NULL},
    {"queued", T_BOOL, offsetof(End, queued), 0, NULL},
    {"queue", T_OBJECT_EX, offsetof(End, queue), READONLY, NULL},
    {"sealer", T_OBJECT_EX, offsetof(End, sealer), 0, NULL},
    {"opener", T_OBJECT_EX, offsetof(End, opener), 0, NULL},
    {"far_end", T_INT, offsetof(End, worker), 0, "The worker there, for the events of the clock."},
    {"wire_sent", T_ULONGLONG, offsetof(End, wire_sent), 0, NULL},
    {"wire_received", T_ULONGLONG, offsetof(End, wire_received), 0, NULL},
    {"payload_sent", T_ULONGLONG, offsetof(End, payload_sent), 0, NULL},
    {"payload_received", T_ULONGLONG, offsetof(End, payload_received), 0, NULL},
    {"waits", T_ULONGLONG, offsetof(End, waits), 0, NULL},
    {"waited", T_ULONGLONG, offsetof(End, waited), 0, NULL},
    {NULL},
};

static PyObject *end_spent(End *self, void *unused) {
    (void)unused;
    PyObject *result = PyTuple_New(STAGES);
    for (int i = 0; result != NULL && i < STAGES; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(self->spent[i]);
        if (number == NULL)
            Py_CLEAR(result);
        else
            PyTuple_SetItem(result, i, number); /* takes the reference */
    }
    return result;
}

static PyGetSetDef end_getset[] = {
    {"stream", (getter)end_get_stream, (setter)end_set_stream, "A socket, or anything with send and recv_into.", NULL},
    {"pending", (getter)end_pending, NULL, "Whether a frame is half written.", NULL},
    {"spent", (getter)end_spent, NULL, "Nanoseconds by stage while the clock was on.", NULL},
    {NULL},
};

static PyType_Slot end_slots[] = {
    {Py_tp_dealloc, end_dealloc},
    {Py_tp_traverse, end_traverse},
    {Py_tp_clear, end_clear},
    {Py_tp_methods, end_methods},
    {Py_tp_members, end_members},
    {Py_tp_getset, end_getset},
    {Py_tp_init, end_init},
    {Py_tp_new, end_new},
    {Py_tp_doc, "One end of a link: the part that moves bytes."},
    {0, NULL},
};
PyType_Spec end_spec = {"ringfence.dataplane._core.End", sizeof(End), 0, FIXED | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                               end_slots};
