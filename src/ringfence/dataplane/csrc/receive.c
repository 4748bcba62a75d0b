#include "chunks.h"
#include "frames.h"
#include "shared.h"
#include "reductions.h"
#include "transfer.h"

/* Zero the target after a failure. The opener does so too, unless a signal handler's exception interrupted it. */
static void wipe_target(Execution *self, Step *step, Span target) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (check_memory(self, step->chunk))
        PyErr_Clear(); /* the memory is gone; the first exception is reported */
    else
        memset(target.at, 0, (size_t)target.length);
    PyErr_Restore(type, value, trace);
}

/* Open the frame of a RECV into its chunk, or add the frame of a REDUCE. Steals the reference to the segment. */
static int open_frame(Execution *self, int index, Endpoint *link, Segment *segment, Py_ssize_t frame_bytes) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Span target = chunk_span(self, step->chunk, position);
    Span sealed = segment_span(segment, HEADER_BYTES, target.length + TAG_BYTES);
    Span received = segment_span(segment, HEADER_BYTES, target.length);
    int failed, stays_in_segment = 0;
    ModuleState *state = self->pool->state;
    ClockStart start = start_clock();
    if (link->expected[0] == SHARED)
        return open_shared(self, index, link, segment);
    if (step->action == REDUCE) { /* opened in place, then added to the local operand */
        failed = call_cipher(state, link->opener, state->s_open_into, NULL, 0, link->expected, HEADER_BYTES, sealed,
                             received);
        stop_clock(STAGE_OPEN, start, link->spent, link->worker);
        if (!failed) {
            start = start_clock();
            stays_in_segment = step->fused_send >= 0 && self->held_count < MAX_HELD_SUMS;
            failed = reduce_segment(self, step, position, received, stays_in_segment);
            stop_clock(STAGE_REDUCE, start, link->spent, link->worker);
        }
    } else {
        if (step->origin < 0)
            failed = check_memory(self, step->chunk) || call_cipher(state, link->opener, state->s_open_into, NULL, 0,
                                                                    link->expected, HEADER_BYTES, sealed, target);
        else
            failed = open_forwarded(self, step, link, segment, frame_bytes, target);
        if (failed)
            wipe_target(self, step, target);
        else
            failed = check_address(self, step->chunk);
        stop_clock(STAGE_OPEN, start, link->spent, link->worker);
    }
    if (failed) {
        Py_DECREF(segment);
        return -1;
    }
    link->payload_received += (unsigned long long)target.length;
    if (stays_in_segment)
        failed = hold_segment(self, step->fused_send, position, segment);
    else {
        failed = share_ciphertext(self, step, position, segment);
        pool_give(self->pool, segment);
    }
    return failed ? -1 : execution_advance(self, index);
}

/* Set the header that the next frame must have (the counter of a forwarded frame aside). 1: set; 0: the step is not
 * ready; -1: an exception is set. */
static int expect_frame(Execution *self, int index, Endpoint *link) {
    if (!step_is_ready(self, index))
        return 0;
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done, length = chunk_span(self, step->chunk, position).length;
    uint64_t counter;
    if (read_counter(link->pool->state, link->opener, &counter))
        return -1;
    Segment *segment = pool_take(self->pool);
    if (segment == NULL)
        return -1;
    SET_REF(link->receiving, segment);
    int forwarded = step->origin >= 0, shared = is_shared(self, index, link);
    write_header(self, index, position, forwarded ? FORWARD : shared ? SHARED : HOP, counter, length,
                 forwarded ? (uint32_t)step->origin : NO_ORIGIN, 0, link->expected);
    link->frame_bytes = shared ? HEADER_BYTES : HEADER_BYTES + length + (forwarded ? 2 : 1) * TAG_BYTES;
    link->received_bytes = 0;
    link->expecting = 1;
    link->unexpected = 0;
    return 1;
}

/* Ask the Python endpoint (connection.py) for the length of an unexpected frame. It raises to refuse the frame. */
static int read_unexpected_length(Endpoint *link) {
    PyObject *header = copy_bytes(link->receiving->at, HEADER_BYTES), *method = link->pool->state->s_length_of_other;
    PyObject *number = header == NULL ? NULL : PyObject_CallMethodObjArgs((PyObject *)link, method, header, NULL);
    Py_XDECREF(header);
    if (number == NULL)
        return -1;
    Py_ssize_t frame_bytes = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (frame_bytes < HEADER_BYTES || frame_bytes > FRAME_BYTES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "the length of a frame is out of range");
        return -1;
    }
    link->frame_bytes = frame_bytes;
    return 0;
}

static void begin_wait(Endpoint *link) {
    if (!link->waiting_since)
        link->waiting_since = clock_ns(CLOCK_MONOTONIC);
}

static void end_wait(Endpoint *link) {
    if (!link->waiting_since)
        return;
    link->waited += clock_ns(CLOCK_MONOTONIC) - link->waiting_since;
    link->waits++;
    link->waiting_since = 0;
}

/* Read more of a frame. 1: the frame is complete; 0: not yet; -1: an exception is set. */
static int read_frame(Endpoint *link) {
    Py_ssize_t before = link->received_bytes, wanted = link->frame_bytes - before;
    if (wanted <= 0) {
        PyErr_SetString(PyExc_RuntimeError, "an unexpected frame has not been handled");
        return -1;
    }
    if (link->stream == Py_None) {
        PyErr_SetString(PyExc_RuntimeError, "the endpoint is closed");
        return -1;
    }
    ClockStart start = start_clock();
    Py_ssize_t got = endpoint_read(link, link->receiving, before, wanted);
    stop_clock(STAGE_RECEIVE, start, link->spent, link->worker);
    if (got == -1)
        return -1;
    if (got == -2) {
        link->readable = 0;
        begin_wait(link);
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
    link->received_bytes += got;
    if (before < HEADER_BYTES && link->received_bytes >= HEADER_BYTES) {
        link->unexpected = !header_matches(link);
        if (link->unexpected && read_unexpected_length(link))
            return -1;
    }
    if (link->received_bytes >= link->frame_bytes)
        return 1;
    if (got < wanted && !link->ended) {
        link->readable = 0; /* drained; epoll is edge-triggered and reports when it is readable */
        begin_wait(link);
    } else if (endpoint_wake(link))
        return -1;
    return 0;
}

/* Start counting a wait for the peer if a frame is due. */
static int note_wait(Endpoint *link) {
    Execution *execution;
    int index;
    int state = link->waiting_since ? 0 : queue_head(link, 0, &execution, &index);
    if (state <= 0)
        return state;
    if (link->expecting || step_is_ready(execution, index))
        begin_wait(link);
    Py_DECREF(execution);
    return 0;
}

/* Read; open a segment that is complete. 2: one was opened; 1: an unexpected frame is complete; 0: otherwise; -1: an
 * exception is set. */
static int receive_next(Endpoint *link) {
    if (!link->open || !endpoint_is_readable(link))
        return note_wait(link);
    Execution *execution;
    int index;
    int state = queue_head(link, 0, &execution, &index);
    if (state <= 0)
        return state;
    if (execution->failed)
        state = 0;
    else if (!link->expecting)
        state = expect_frame(execution, index, link);
    if (state > 0)
        state = read_frame(link);
    if (state <= 0 || link->unexpected) {
        Py_DECREF(execution);
        return state;
    }
    Segment *segment = link->receiving;
    link->receiving = NULL;
    link->expecting = 0;
    int failed = 0;
    if (execution->progress[index].done + 1 == execution->progress[index].segments)
        failed = queue_pop(link);
    if (failed)
        Py_DECREF(segment);
    else
        failed = open_frame(execution, index, link, segment, link->frame_bytes);
    execution->failed |= failed != 0;
    Py_DECREF(execution);
    return failed ? -1 : 2;
}

/* Receive what has arrived; from shared memory, several segments in one call, whose slots are returned together. */
int receive_some(Endpoint *link) {
    int state = receive_next(link);
    for (int more = link->shared == NULL ? 0 : SEGMENTS_AT_ONCE - 1; state == 2 && more; more--)
        state = receive_next(link);
    if (state >= 0 && link->shared != NULL && endpoint_return_slots(link))
        return -1;
    return state == 2 ? wake_if_queued(link) : state; /* 0, or 1 */
}

/* receive(endpoint) -> an unexpected frame that is complete, or None */
PyObject *core_receive(PyObject *module, PyObject *object) {
    if (!is_endpoint(PyModule_GetState(module), object) || begin_transfer((Endpoint *)object))
        return NULL;
    Endpoint *link = (Endpoint *)object;
    int state = receive_some(link);
    link->busy = 0;
    if (state < 0)
        return NULL;
    if (state > 0)
        return PyBytes_FromStringAndSize(link->receiving->at, link->frame_bytes);
    Py_RETURN_NONE;
}
