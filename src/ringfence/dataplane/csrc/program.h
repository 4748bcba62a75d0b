#ifndef RINGFENCE_PROGRAM_H
#define RINGFENCE_PROGRAM_H

#include "core.h"

#define MOST_STEPS (1 << 24)

enum { SEND, RECV, REDUCE, COPY, SCALE };

typedef struct {
    int step;
    int by_segment;
} Need;

typedef struct {
    int action, chunk, peer, other, received_first;
    uint32_t label, ordinal;
    int64_t origin;
    int needs, wakes, sharers;
    Need *need;
    int *wake, *sharer; /* sharers: the SENDs that write the same ciphertext, as received or as sealed by another of them */
    int heir;           /* a REDUCE's sum goes nowhere but into this SEND; -1: it belongs in the chunk */
} Step;

typedef struct {
    PyObject_HEAD
    int count, chunks;
    Step *steps;
} Program;

extern PyType_Spec program_spec;

int is_tuple(PyObject *object);
PyObject *core_compile(PyObject *module, PyObject *args);

#endif
