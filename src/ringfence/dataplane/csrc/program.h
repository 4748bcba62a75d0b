#ifndef RINGFENCE_PROGRAM_H
#define RINGFENCE_PROGRAM_H

/* Program: a schedule in C form, validated once. */

#include "core.h"

#define MAX_STEPS (1 << 24)

enum { SEND, RECV, REDUCE, COPY, SCALE };

typedef struct {
    int step;
    int by_segment;
} Dependency;

typedef struct {
    int action, chunk, peer, other, received_first;
    uint32_t label, ordinal;
    int64_t origin;
    int dependencies, dependents, sharers;
    Dependency *dependency;
    int *dependent, *sharer; /* sharers: the other SENDs of the same bytes */
    int fused_send;          /* the only SEND that reads the sum of a REDUCE; -1: the sum is written to the chunk */
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
