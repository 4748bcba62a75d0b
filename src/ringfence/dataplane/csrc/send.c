#include "chunks.h"
#include "frames.h"
#include "transfer.h"

/* Write a frame's header and seal its payload, for this hop or as its origin. `inherited`: the segment holds it already. */
static int seal(Run *self, int index, End *link, uint64_t counter, Segment *segment, int inherited) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Place payload = in_chunk(self, step->chunk, position);
    unsigned char *frame = (unsigned char *)segment->at;
    if (inherited)
        payload = in_segment(segment, HEADER_BYTES, payload.length); /* sealed where it lies */
    else if (check_memory(self, step->chunk))
        return -1;
    int failed;
    State *state = self->pool->state;
    if (step->origin < 0) {
        write_header(self, index, position, HOP, counter, payload.length, NO_ORIGIN, 0, frame);
        failed = with_views(state, link->sealer, state->s_seal_into, NULL, 0, frame, HEADER_BYTES, payload,
                            in_segment(segment, HEADER_BYTES, payload.length + TAG_BYTES));
    } else
        failed = seal_as_origin(self, index, position, counter, segment, payload);
    if (failed || (!inherited && check_address(self, step->chunk)))
        return -1;
    return step->origin < 0 ? 0 : share(self, step, position, segment);
}

/* The next frame of a SEND, sealed and ready to be written. */
static int seal_next(Run *self, int index, End *link) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Py_ssize_t end = HEADER_BYTES + in_chunk(self, step->chunk, position).length + TAG_BYTES;
    uint64_t counter;
    if (read_counter(link->pool->state, link->sealer, &counter))
        return -1;
    Segment *segment = take_kept(self, index, position); /* ciphertext to pass on, or a sum to seal */
    int failed = 0, inherited = segment != NULL;
    Start start = start_clock();
    if (segment == NULL && (segment = pool_take(self->pool)) == NULL)
        return -1;
    if (step->origin < 0 || !inherited)
        failed = seal(self, index, link, counter, segment, inherited);
    if (!failed && step->origin >= 0)
        failed = frame_for_hop(link, step, counter, segment, end);
    stop_clock(IN_SEAL, start, link->spent, link->worker);
    if (failed) {
        Py_DECREF(segment);
        return -1;
    }
    link->payload_sent += (unsigned long long)(end - HEADER_BYTES - TAG_BYTES);
    if (step->origin < 0) {
        link->unsent[0] = (struct iovec){segment->at, (size_t)end};
        link->pieces = 1;
    }
    REPLACE(link->sending, segment);
    return 0;
}

/* Write on; when nothing is left, seal and write the next segment that may leave. */
static int send_on(End *link) {
    int state = flush(link);
    if (state <= 0)
        return state;
    Run *run;
    int index;
    state = head_of_queue(link, 1, &run, &index);
    if (state <= 0)
        return state;
    if (!is_ready(run, index)) {
        Py_DECREF(run);
        return 0;
    }
    int failed = seal_next(run, index, link);
    if (!failed && run->progress[index].done + 1 == run->progress[index].segments)
        failed = leave_queue(link);
    if (!failed)
        failed = advance(run, index);
    run->broken |= failed != 0;
    Py_DECREF(run);
    if (failed)
        return -1;
    state = flush(link);
    return state > 0 ? wake_if_queued(link) : state;
}

PyObject *core_send(PyObject *module, PyObject *object) {
    if (!is_end(PyModule_GetState(module), object) || begin_to_move((End *)object))
        return NULL;
    int failed = send_on((End *)object) < 0;
    ((End *)object)->busy = 0;
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}
