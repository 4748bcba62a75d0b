#include "chunks.h"
#include "frames.h"
#include "shared.h"
#include "transfer.h"

/* The way of a segment from a tensor to the socket. All of it runs in the thread that drives the engine, which holds the
 * interpreter's lock, except around the system calls on large pieces (release_gil); nothing here takes another lock.
 *
 *   1. serve.c          takes a link that is ready, and calls `send_some`
 *   2. put_next         the step at the head of the link's queue, if the steps that it waits for are done
 *   3. seal_frame       reads the link's counter, writes the header, and lets link/seal.py seal the payload into a segment of
 *                       the pool; ciphertext that is only forwarded keeps its origin's seal and gets a new header
 *      share_segment    inside one machine: copies the payload to a slot of shared memory, and sends a header only
 *   4. endpoint_flush   writes to the socket. If it takes less, the link waits in Engine.blocked
 *   5. execution_advance   with its last segment the step is done: steps that wait for it become ready, and their links
 *
 * receive.c is the way back. */

/* Write a frame's header and seal its payload, for this hop or as the origin. `in_place`: the segment already holds the
 * payload. */
static int seal_payload(Execution *self, int index, Endpoint *link, uint64_t counter, Segment *segment, int in_place) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Span payload = chunk_span(self, step->chunk, position);
    unsigned char *frame = (unsigned char *)segment->at;
    if (in_place)
        payload = segment_span(segment, HEADER_BYTES, payload.length); /* sealed in place */
    else if (check_memory(self, step->chunk))
        return -1;
    int failed;
    ModuleState *state = self->pool->state;
    if (step->origin < 0) {
        write_header(self, index, position, HOP, counter, payload.length, NO_ORIGIN, 0, frame);
        failed = call_cipher(state, link->sealer, state->s_seal_into, NULL, 0, frame, HEADER_BYTES, payload,
                             segment_span(segment, HEADER_BYTES, payload.length + TAG_BYTES));
    } else
        failed = seal_as_origin(self, index, position, counter, segment, payload);
    if (failed || (!in_place && check_address(self, step->chunk)))
        return -1;
    return step->origin < 0 ? 0 : share_ciphertext(self, step, position, segment);
}

/* Seal the next frame of a SEND. */
static int seal_frame(Execution *self, int index, Endpoint *link) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Py_ssize_t end = HEADER_BYTES + chunk_span(self, step->chunk, position).length + TAG_BYTES;
    uint64_t counter;
    if (read_counter(link->pool->state, link->sealer, &counter))
        return -1;
    Segment *segment = take_held(self, index, position).segment; /* ciphertext to forward, or a sum to seal */
    int failed = 0, in_place = segment != NULL;
    ClockStart start = start_clock();
    if (segment == NULL && (segment = pool_take(self->pool)) == NULL)
        return -1;
    if (step->origin < 0 || !in_place)
        failed = seal_payload(self, index, link, counter, segment, in_place);
    if (!failed && step->origin >= 0)
        failed = tag_for_hop(link, step, counter, segment, end);
    stop_clock(STAGE_SEAL, start, link->spent, link->worker);
    if (failed) {
        Py_DECREF(segment);
        return -1;
    }
    link->payload_sent += (unsigned long long)(end - HEADER_BYTES - TAG_BYTES);
    if (step->origin < 0) {
        link->unsent[0] = (struct iovec){segment->at, (size_t)end};
        link->unsent_count = 1;
    }
    SET_REF(link->sending, segment);
    return 0;
}

/* Put the next frame in `unsent` if its segment is ready. `shared`: whether headers of segments in shared memory are
 * there already; then only another one may follow. 1: done; 0: there is none; -1: an exception is set. */
static int put_next(Endpoint *link, int *shared) {
    Execution *execution;
    int index;
    int state = queue_head(link, 1, &execution, &index);
    if (state <= 0)
        return state;
    int with_others = *shared, failed = 0;
    *shared = is_shared(execution, index, link);
    state = step_is_ready(execution, index) && (*shared || !with_others);
    if (state && *shared)
        state = share_segment(execution, index, link);
    else if (state)
        state = seal_frame(execution, index, link) ? -1 : 1;
    if (state > 0 && execution->progress[index].done + 1 == execution->progress[index].segments)
        failed = queue_pop(link);
    if (state > 0 && !failed)
        failed = execution_advance(execution, index);
    failed |= state < 0;
    execution->failed |= failed != 0;
    Py_DECREF(execution);
    return failed ? -1 : state;
}

/* Write the rest of a frame; then seal and write the next segment that is ready, or share several of them. */
int send_some(Endpoint *link) {
    if (link->shared != NULL && endpoint_read_returns(link))
        return -1;
    int state = endpoint_flush(link);
    if (state <= 0)
        return state;
    int shared = 0, count = 0;
    do
        state = put_next(link, &shared);
    while (state > 0 && shared && ++count < SEGMENTS_AT_ONCE);
    if (state < 0)
        return -1;
    int more = state > 0 || count; /* after a header of a shared segment comes, perhaps, a frame of another kind */
    state = endpoint_flush(link);
    return state > 0 && more ? wake_if_queued(link) : state;
}

PyObject *core_send(PyObject *module, PyObject *object) {
    if (!is_endpoint(PyModule_GetState(module), object) || begin_transfer((Endpoint *)object))
        return NULL;
    int failed = send_some((Endpoint *)object) < 0;
    ((Endpoint *)object)->busy = 0;
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}
