#ifndef RINGFENCE_CLOCK_H
#define RINGFENCE_CLOCK_H

/* Time spent in the stages of the data plane, in total, by endpoint and as events. */

#include "core.h"

#include <time.h>

enum { STAGE_SEAL, STAGE_OPEN, STAGE_REDUCE, STAGE_SEND, STAGE_RECEIVE, STAGE_LOCK, STAGE_COUNT };

enum { TIME_TOTALS = 1, TIME_EVENTS = 2 };

extern int timing; /* bits of the two above */

typedef struct {
    uint64_t wall, cpu;
} ClockStart;

uint64_t clock_ns(clockid_t which);
void record_stage(int stage, uint64_t start, uint64_t length, uint64_t *link_spent, int worker);

static inline ClockStart start_clock(void) {
    ClockStart start = {0, 0};
    if (timing) {
        start.wall = clock_ns(CLOCK_MONOTONIC);
        start.cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    }
    return start;
}

/* Ciphers release the GIL. Wall time beyond the thread's CPU time was spent waiting for the GIL or a core, and counts
 * as "lock". */
static inline void stop_clock(int stage, ClockStart start, uint64_t *link_spent, int worker) {
    if (!timing || !start.wall)
        return;
    uint64_t wall = clock_ns(CLOCK_MONOTONIC) - start.wall;
    if (stage == STAGE_SEAL || stage == STAGE_OPEN) {
        uint64_t cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID) - start.cpu;
        cpu = cpu < wall ? cpu : wall;
        record_stage(STAGE_LOCK, start.wall + cpu, wall - cpu, link_spent, worker);
        wall = cpu;
    }
    record_stage(stage, start.wall, wall, link_spent, worker);
}

PyObject *core_stages(PyObject *module, PyObject *on);
PyObject *core_events(PyObject *module, PyObject *on);

#endif
