#include "shared.h"
#include "chunks.h"
#include "frames.h"
#include "reductions.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define STREAMED_FROM_BYTES (2 << 20) /* chunk from which results bypass the caches: nothing reads them soon */

/* Whether the next segment of a step passes through shared memory. Both ends of a link decide alike. */
int is_shared(Execution *self, int index, Endpoint *link) {
    Step *step = &self->program->steps[index];
    return link->shared != NULL && step->origin < 0 &&
           chunk_span(self, step->chunk, self->progress[index].done).length >= SHARED_FROM_BYTES;
}

/* memcpy that does not first read the lines that it overwrites. */
static void copy_streamed(char *to, const char *from, size_t length) {
#ifdef __SSE2__
    size_t before = -(uintptr_t)to & 15;
    if (length < 256) {
        memcpy(to, from, length);
        return;
    }
    memcpy(to, from, before);
    to += before, from += before, length -= before;
    for (; length >= 64; to += 64, from += 64, length -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32)), d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    _mm_sfence();
#endif
    memcpy(to, from, length);
}

/* Let the other SENDs of the same bytes that have not come so far, and have no slot yet, use the same slot. */
static int lend_to_sharers(Execution *self, Step *step, Py_ssize_t position, Endpoint *link, int slot) {
    Region *region = link->shared;
    for (int i = 0; i < step->sharers && region->waiting < region->ahead; i++) {
        Progress *other = &self->progress[step->sharer[i]];
        if (other->done > position || other->link == NULL || other->link->shared != region ||
            is_held(self, step->sharer[i], position))
            continue;
        if (hold_slot(self, step->sharer[i], position, slot, 0))
            return -1;
        region->users[slot]++;
        region->waiting++;
    }
    return 0;
}

/* Copy the next segment of a SEND to shared memory, unless it is there; its frame has only the header,
 * which is written after those in `unsent`. 1: done; 0: no slot is free, and the peer's return wakes this link; -1: an
 * exception is set. */
int share_segment(Execution *self, int index, Endpoint *link) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Span payload = chunk_span(self, step->chunk, position);
    uint64_t counter;
    HeldSegment held = take_held(self, index, position);
    int slot = held.slot, has_quota = link->lent_count + link->reserved < link->shared->quota;
    if (held.reserved)
        link->reserved--;
    else if (has_quota && slot >= 0)
        link->shared->waiting--;
    else if (!has_quota || (slot = region_take(link->shared)) < 0)
        return hold_again(self, held);
    link->lent[(link->lent_first + link->lent_count++) % MAX_SLOTS] = slot;
    region_lend(link->shared, slot);
    ClockStart start = start_clock();
    if (read_counter(link->pool->state, link->sealer, &counter) ||
        (held.slot < 0 && held.segment == NULL && check_memory(self, step->chunk))) {
        Py_XDECREF((PyObject *)held.segment);
        return -1;
    }
    if (held.slot < 0) {
        memcpy(region_span(link->shared, slot, payload.length).at,
               held.segment == NULL ? payload.at : held.segment->at + HEADER_BYTES, (size_t)payload.length);
        if (lend_to_sharers(self, step, position, link, slot)) {
            Py_XDECREF((PyObject *)held.segment);
            return -1;
        }
    }
    if (held.segment != NULL)
        pool_give(self->pool, held.segment);
    stop_clock(STAGE_SEND, start, link->spent, link->worker);
    size_t before = link->unsent_count ? link->unsent[0].iov_len : 0; /* headers that are written together with this one */
    write_header(self, index, position, SHARED, counter, payload.length, NO_ORIGIN, (uint64_t)slot,
                 link->shared_headers + before);
    link->payload_sent += (unsigned long long)payload.length;
    link->unsent[0] = (struct iovec){link->shared_headers, before + HEADER_BYTES};
    link->unsent_count = 1;
    SET_REF(link->sending, NULL);
    return 1;
}

/* Reserve a slot of the link on which a sum is sent next, or return -1. Half of them stay free for what is sent before. */
static int reserve_slot(Endpoint *link) {
    if (link->shared == NULL || link->shared->free == NULL || link->reserved >= link->shared->quota / 2 ||
        link->lent_count + link->reserved >= link->shared->quota)
        return -1;
    int slot = region_take(link->shared);
    if (slot >= 0)
        link->reserved++;
    return slot;
}

/* Copy a segment from the peer's shared memory, or add it. Steals the reference to the segment that its header was read
 * to. */
int open_shared(Execution *self, int index, Endpoint *link, Segment *segment) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Span target = chunk_span(self, step->chunk, position);
    uint64_t slot;
    memcpy(&slot, segment->at + COUNTER_AT, 8);
    slot = be64toh(slot);
    if (link->shared == NULL || slot >= (uint64_t)link->shared->count) {
        Py_DECREF(segment);
        PyErr_SetString(self->pool->state->protocol_error, "a peer named a part of its shared memory that does not exist");
        return -1;
    }
    Span received = region_span(link->shared, (int)slot, target.length);
    ClockStart start = start_clock();
    int failed, held = 0, own_slot = -1;
    if (step->action == REDUCE) {
        held = step->fused_send >= 0 && self->held_count < MAX_HELD_SUMS;
        Endpoint *next = held ? self->progress[step->fused_send].link : NULL;
        Span copy = segment_span(segment, HEADER_BYTES, target.length), sum = held ? copy : target;
        if (!is_summed_here(self, sum, chunk_span(self, step->other, position), received)) {
            memcpy(copy.at, received.at, (size_t)target.length);
            received = copy;
        } else if (next != NULL && (own_slot = reserve_slot(next)) >= 0)
            sum = region_span(next->shared, own_slot, target.length);
        failed = reduce_to(self, step, position, received, sum, held);
        stop_clock(STAGE_REDUCE, start, link->spent, link->worker);
    } else {
        failed = check_memory(self, step->chunk);
        if (!failed && self->chunks[step->chunk].length >= STREAMED_FROM_BYTES)
            copy_streamed(target.at, received.at, (size_t)target.length);
        else if (!failed)
            memcpy(target.at, received.at, (size_t)target.length);
        stop_clock(STAGE_RECEIVE, start, link->spent, link->worker);
    }
    link->used++;
    if (failed) {
        Py_DECREF(segment);
        return -1;
    }
    link->payload_received += (unsigned long long)target.length;
    if (held && own_slot < 0)
        failed = hold_segment(self, step->fused_send, position, segment);
    else {
        pool_give(self->pool, segment);
        failed = own_slot >= 0 && hold_slot(self, step->fused_send, position, own_slot, 1);
    }
    return failed ? -1 : execution_advance(self, index);
}
