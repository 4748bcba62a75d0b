#ifndef RINGFENCE_BUFFERS_H
#define RINGFENCE_BUFFERS_H

/* Segments (memory for one frame each), their pool, and views of them for Python code. */

#include "core.h"

/* Bytes that Python code reads or writes: `owner` exports them, `at` points to the first. */
typedef struct {
    PyObject *owner; /* a segment, or a memoryview of bytes; borrowed */
    Py_ssize_t offset, length;
    char *at;
} Span;

typedef struct {
    PyObject_HEAD
    ModuleState *state;
    char *memory;
    char *at;  /* the frame, placed so that its payload is aligned to a cache line */
    char idle; /* in a pool */
} Segment;

#define MAX_IDLE 64

typedef struct {
    PyObject_HEAD
    ModuleState *state;
    Segment *idle[MAX_IDLE];
    int count, most;
    Py_ssize_t made;
} Pool;

extern PyType_Spec segment_spec, slice_spec, pool_spec;

Span segment_span(Segment *segment, Py_ssize_t offset, Py_ssize_t length);
PyObject *view_span(Span span);
void release_view(ModuleState *state, PyObject *view);
PyObject *copy_bytes(const void *at, Py_ssize_t length);
Segment *pool_take(Pool *self);
void pool_give(Pool *self, Segment *segment);

#endif
