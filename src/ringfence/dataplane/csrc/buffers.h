#ifndef RINGFENCE_BUFFERS_H
#define RINGFENCE_BUFFERS_H

#include "core.h"

/* Bytes that Python code is to read or write: `owner` exports them, `at` is the first of them. */
typedef struct {
    PyObject *owner; /* a segment, or a memoryview of bytes; borrowed */
    Py_ssize_t offset, length;
    char *at;
} Place;

typedef struct {
    PyObject_HEAD
    State *state;
    char *memory;
    char *at; /* the frame; its payload is aligned to a cache line */
    char idle; /* in a pool */
} Segment;

#define MOST_IDLE 64

typedef struct {
    PyObject_HEAD
    State *state;
    Segment *idle[MOST_IDLE];
    int count, most;
    Py_ssize_t made;
} Pool;

extern PyType_Spec segment_spec, piece_spec, pool_spec;

Place in_segment(Segment *segment, Py_ssize_t offset, Py_ssize_t length);
PyObject *view_of(Place place);
void end_view(State *state, PyObject *view);
PyObject *copy_of(const void *at, Py_ssize_t length);
Segment *pool_take(Pool *self);
void pool_give(Pool *self, Segment *segment);

#endif
