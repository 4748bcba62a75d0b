#ifndef RINGFENCE_CLOCK_H
#define RINGFENCE_CLOCK_H

#include <time.h>

#include "core.h"

enum { IN_SEAL, IN_OPEN, IN_REDUCE, IN_SEND, IN_RECEIVE, FOR_LOCK, STAGES };

enum { TOTALS = 1, EVENTS = 2 };

extern int timing; /* which of the two are kept */

typedef struct {
    uint64_t wall, cpu;
} Start;

uint64_t clock_ns(clockid_t which);
void spend(int stage, uint64_t start, uint64_t length, uint64_t *link_spent, int worker);

static inline Start start_clock(void) {
    Start start = {0, 0};
    if (timing) {
        start.wall = clock_ns(CLOCK_MONOTONIC);
        start.cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    }
    return start;
}

/* A cipher gives up the interpreter's lock: what its call took beyond its CPU time went to getting that, or a core, back. */
static inline void stop_clock(int stage, Start start, uint64_t *link_spent, int worker) {
    if (!timing || !start.wall)
        return;
    uint64_t wall = clock_ns(CLOCK_MONOTONIC) - start.wall;
    if (stage == IN_SEAL || stage == IN_OPEN) {
        uint64_t cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID) - start.cpu;
        cpu = cpu < wall ? cpu : wall;
        spend(FOR_LOCK, start.wall + cpu, wall - cpu, link_spent, worker);
        wall = cpu;
    }
    spend(stage, start.wall, wall, link_spent, worker);
}

PyObject *core_stages(PyObject *module, PyObject *on);
PyObject *core_events(PyObject *module, PyObject *on);

#endif
