#include "chunks.h"
#include "reductions.h"
#include "frames.h"
#include "transfer.h"

/* After a failure: the opener has wiped what it wrote, unless an interrupt kept it from doing so. */
static void wipe_target(Run *self, Step *step, Place target) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (check_memory(self, step->chunk))
        PyErr_Clear(); /* it is no longer there: what failed is said already */
    else
        memset(target.at, 0, (size_t)target.length);
    PyErr_Restore(type, value, trace);
}

/* Open the frame of a RECV or REDUCE into place. Takes over the reference to the segment. */
static int open_next(Run *self, int index, End *link, Segment *segment, Py_ssize_t total) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Place target = in_chunk(self, step->chunk, position);
    Place sealed = in_segment(segment, HEADER_BYTES, target.length + TAG_BYTES);
    Place received = in_segment(segment, HEADER_BYTES, target.length);
    int failed, inherits = 0;
    State *state = self->pool->state;
    Start start = start_clock();
    if (step->action == REDUCE) { /* opened where it lies, then added to the local operand */
        failed = with_views(state, link->opener, state->s_open_into, NULL, 0, link->expected, HEADER_BYTES, sealed, received);
        stop_clock(IN_OPEN, start, link->spent, link->worker);
        if (!failed) {
            start = start_clock();
            inherits = step->heir >= 0 && self->keeping < MOST_KEPT; /* what is only passed on stays where the cipher wants it */
            failed = reduce(self, step, position, received, inherits);
            stop_clock(IN_REDUCE, start, link->spent, link->worker);
        }
    } else {
        if (step->origin < 0)
            failed = check_memory(self, step->chunk) ||
                     with_views(state, link->opener, state->s_open_into, NULL, 0, link->expected, HEADER_BYTES, sealed, target);
        else
            failed = open_forwarded(self, step, link, segment, total, target);
        if (failed)
            wipe_target(self, step, target);
        else
            failed = check_address(self, step->chunk);
        stop_clock(IN_OPEN, start, link->spent, link->worker);
    }
    if (failed) {
        Py_DECREF(segment);
        return -1;
    }
    link->payload_received += (unsigned long long)target.length;
    if (inherits)
        failed = keep(self, step->heir, position, segment);
    else {
        failed = share(self, step, position, segment);
        pool_give(self->pool, segment);
    }
    return failed ? -1 : advance(self, index);
}

/* The header that the next frame must have (a forwarded one's counter aside). 0 when its place is not free yet. */
static int expect(Run *self, int index, End *link) {
    if (!is_ready(self, index))
        return 0;
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done, length = in_chunk(self, step->chunk, position).length;
    uint64_t counter;
    if (read_counter(link->pool->state, link->opener, &counter))
        return -1;
    Segment *segment = pool_take(self->pool);
    if (segment == NULL)
        return -1;
    REPLACE(link->receiving, segment);
    int forwarded = step->origin >= 0;
    write_header(self, index, position, forwarded ? FORWARD : HOP, counter, length, forwarded ? (uint32_t)step->origin : NO_ORIGIN, 0,
                 link->expected);
    link->total = HEADER_BYTES + length + (forwarded ? 2 : 1) * TAG_BYTES;
    link->have = 0;
    link->expecting = 1;
    link->surprising = 0;
    return 1;
}

/* The length of a frame that was not expected is its receiver's to say (links.py), or to refuse. */
static int length_of_other(End *link) {
    PyObject *header = copy_of(link->receiving->at, HEADER_BYTES), *method = link->pool->state->s_length_of_other;
    PyObject *number = header == NULL ? NULL : PyObject_CallMethodObjArgs((PyObject *)link, method, header, NULL);
    Py_XDECREF(header);
    if (number == NULL)
        return -1;
    Py_ssize_t total = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (total < HEADER_BYTES || total > FRAME_BYTES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a frame of a length that no frame has");
        return -1;
    }
    link->total = total;
    return 0;
}

static void begin_to_wait(End *link) {
    if (!link->waiting_since)
        link->waiting_since = clock_ns(CLOCK_MONOTONIC);
}

static void end_wait(End *link) {
    if (!link->waiting_since)
        return;
    link->waited += clock_ns(CLOCK_MONOTONIC) - link->waiting_since;
    link->waits++;
    link->waiting_since = 0;
}

/* 1: the frame is complete; 0: not yet; -1: an error is set. */
static int read_on(End *link) {
    Py_ssize_t before = link->have, wanted = link->total - before;
    if (wanted <= 0) {
        PyErr_SetString(PyExc_RuntimeError, "a frame that was not expected is waiting to be refused");
        return -1;
    }
    if (link->stream == Py_None) {
        PyErr_SetString(PyExc_RuntimeError, "this end of a link is closed");
        return -1;
    }
    Start start = start_clock();
    Py_ssize_t got = read_some(link, link->receiving, before, wanted);
    stop_clock(IN_RECEIVE, start, link->spent, link->worker);
    if (got == -1)
        return -1;
    if (got == -2) {
        link->readable = 0;
        begin_to_wait(link);
        return 0;
    }
    if (got > 0) {
        link->wire_received += (unsigned long long)got;
        end_wait(link);
    }
    if (got == 0) {
        PyObject *done = PyObject_CallMethodObjArgs((PyObject *)link, link->pool->state->s_ended, NULL);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    link->have += got;
    if (before < HEADER_BYTES && link->have >= HEADER_BYTES) {
        link->surprising = !as_expected(link);
        if (link->surprising && length_of_other(link))
            return -1;
    }
    if (link->have >= link->total)
        return 1;
    if (got < wanted && !link->ended) {
        link->readable = 0; /* drained: the next edge says when to go on */
        begin_to_wait(link);
    } else if (wake(link))
        return -1;
    return 0;
}

/* Nothing can be read now. If a frame is due, this worker waits for its peer. */
static int note_wait(End *link) {
    Run *run;
    int index;
    int state = link->waiting_since ? 0 : head_of_queue(link, 0, &run, &index);
    if (state <= 0)
        return state;
    if (link->expecting || is_ready(run, index))
        begin_to_wait(link);
    Py_DECREF(run);
    return 0;
}

/* Read on; open a segment that is complete. 1: a frame is complete that is not the expected one; 0: none; -1: an error. */
static int receive_on(End *link) {
    if (!link->open || !link->readable)
        return note_wait(link);
    Run *run;
    int index;
    int state = head_of_queue(link, 0, &run, &index);
    if (state <= 0)
        return state;
    if (run->broken)
        state = 0;
    else if (!link->expecting)
        state = expect(run, index, link);
    if (state > 0)
        state = read_on(link);
    if (state <= 0 || link->surprising) {
        Py_DECREF(run);
        return state;
    }
    Segment *segment = link->receiving;
    link->receiving = NULL;
    link->expecting = 0;
    int failed = 0;
    if (run->progress[index].done + 1 == run->progress[index].segments)
        failed = leave_queue(link);
    if (failed)
        Py_DECREF(segment);
    else
        failed = open_next(run, index, link, segment, link->total);
    run->broken |= failed != 0;
    Py_DECREF(run);
    return failed ? -1 : wake_if_queued(link);
}

/* receive(link): returns None, or a frame that is complete and not the expected one. */
PyObject *core_receive(PyObject *module, PyObject *object) {
    if (!is_end(PyModule_GetState(module), object) || begin_to_move((End *)object))
        return NULL;
    End *link = (End *)object;
    int state = receive_on(link);
    link->busy = 0;
    if (state < 0)
        return NULL;
    if (state > 0)
        return PyBytes_FromStringAndSize(link->receiving->at, link->total);
    Py_RETURN_NONE;
}
