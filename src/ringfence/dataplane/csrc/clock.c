#include <stdlib.h>
#include <string.h>

#include "clock.h"

/* -- the clock: off unless a benchmark, a profiler or a setting asks ----------------------------------------------------------------------- */

static const char *const stage_names[STAGES] = {"seal", "open", "reduce", "send", "receive", "lock"};

int timing; /* which of the two are kept */
static uint64_t spent[STAGES];

/* What was done when, for a profiler's trace. What does not fit any more is not kept. */
#define MOST_EVENTS (1 << 20)
typedef struct {
    uint64_t start, end;
    int stage, worker;
} Event;
static struct {
    Event *at;
    size_t count, room;
} events;

static void keep_event(int stage, uint64_t start, uint64_t end, int worker) {
    if (events.count == events.room) {
        size_t room = events.room ? 2 * events.room : 4096;
        Event *at = room > MOST_EVENTS ? NULL : realloc(events.at, room * sizeof(Event));
        if (at == NULL)
            return;
        events.at = at;
        events.room = room;
    }
    events.at[events.count++] = (Event){start, end, stage, worker};
}

uint64_t clock_ns(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void spend(int stage, uint64_t start, uint64_t length, uint64_t *link_spent, int worker) {
    spent[stage] += length;
    if (link_spent != NULL)
        link_spent[stage] += length;
    if (timing & EVENTS && length)
        keep_event(stage, start, start + length, worker);
}

/* stages(on) -> nanoseconds by stage since it was last asked */
PyObject *core_stages(PyObject *module, PyObject *on) {
    (void)module;
    int wanted = PyObject_IsTrue(on);
    PyObject *result = wanted < 0 ? NULL : PyDict_New();
    for (int i = 0; result != NULL && i < STAGES; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(spent[i]);
        if (number == NULL || PyDict_SetItemString(result, stage_names[i], number))
            Py_CLEAR(result);
        Py_XDECREF(number);
        spent[i] = 0;
    }
    if (result != NULL)
        timing = wanted ? timing | TOTALS : timing & ~TOTALS;
    return result;
}

/* events(on) -> a list of (stage, start, end, worker) since it was last asked, on the monotonic clock in nanoseconds */
PyObject *core_events(PyObject *module, PyObject *on) {
    (void)module;
    int wanted = PyObject_IsTrue(on);
    PyObject *result = wanted < 0 ? NULL : PyList_New(0);
    for (size_t i = 0; result != NULL && i < events.count; i++) {
        Event *event = &events.at[i];
        PyObject *entry = Py_BuildValue("sKKi", stage_names[event->stage], (unsigned long long)event->start,
                                        (unsigned long long)event->end, event->worker);
        if (entry == NULL || PyList_Append(result, entry))
            Py_CLEAR(result);
        Py_XDECREF(entry);
    }
    if (result == NULL)
        return NULL;
    free(events.at);
    memset(&events, 0, sizeof events);
    timing = wanted ? timing | EVENTS : timing & ~EVENTS;
    return result;
}
