#include "clock.h"

#include <stdlib.h>
#include <string.h>

/* Time spent in each stage. Off unless a benchmark, a profiler or a setting turns it on. */

static const char *const stage_names[STAGE_COUNT] = {"seal", "open", "reduce", "send", "receive", "lock"};

int timing;
static uint64_t spent[STAGE_COUNT];

/* Events for a profiler's trace. Further events are dropped when the limit is reached. */
#define MAX_EVENTS (1 << 20)
typedef struct {
    uint64_t start, end;
    int stage, worker;
} Event;
static struct {
    Event *at;
    size_t count, room;
} events;

static void record_event(int stage, uint64_t start, uint64_t end, int worker) {
    if (events.count == events.room) {
        size_t room = events.room ? 2 * events.room : 4096;
        Event *at = room > MAX_EVENTS ? NULL : realloc(events.at, room * sizeof(Event));
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

void record_stage(int stage, uint64_t start, uint64_t length, uint64_t *link_spent, int worker) {
    spent[stage] += length;
    if (link_spent != NULL)
        link_spent[stage] += length;
    if (timing & TIME_EVENTS && length)
        record_event(stage, start, start + length, worker);
}

/* stages(on) -> dict of nanoseconds by stage since the last call */
PyObject *core_stages(PyObject *module, PyObject *on) {
    (void)module;
    int wanted = PyObject_IsTrue(on);
    PyObject *result = wanted < 0 ? NULL : PyDict_New();
    for (int i = 0; result != NULL && i < STAGE_COUNT; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(spent[i]);
        if (number == NULL || PyDict_SetItemString(result, stage_names[i], number))
            Py_CLEAR(result);
        Py_XDECREF(number);
        spent[i] = 0;
    }
    if (result != NULL)
        timing = wanted ? timing | TIME_TOTALS : timing & ~TIME_TOTALS;
    return result;
}

/* events(on) -> list of (stage, start, end, worker) since the last call; times in nanoseconds of the monotonic clock */
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
    timing = wanted ? timing | TIME_EVENTS : timing & ~TIME_EVENTS;
    return result;
}
