#ifndef RINGFENCE_EXECUTION_H
#define RINGFENCE_EXECUTION_H

/* Execution: one pass of a program over its memory, and the progress of each step. */

#include "endpoint.h"
#include "program.h"

/* The memory of one chunk. */
typedef struct {
    Py_buffer buffer; /* held during the execution; only torch can still free the memory (see check_memory) */
    char *at;
    Py_ssize_t length, segment_bytes;
    PyObject *exporter;                           /* of the memoryview; borrowed from it */
    PyObject *lease, *storage, *address, *nbytes; /* of the tensor (buffers.py); NULL for other memory */
} Chunk;

/* Progress of one step. */
typedef struct {
    Py_ssize_t done, segments;
    Endpoint *link;
} Progress;

/* A segment that waits for its SEND: in memory of its own, or already in the slot of shared memory from which the peer
 * reads it. */
typedef struct {
    int step;
    Py_ssize_t position;
    Segment *segment; /* NULL: in `slot` */
    int slot;
    int reserved; /* whether the slot is one of the link's own */
} HeldSegment;

#define MAX_HELD_SUMS 8 /* further sums are written to the chunk instead */

enum { SUM_BY_TORCH, SUM_F32, SUM_F64, SUM_I32, SUM_I64, SUM_BF16 };

typedef struct {
    PyObject_HEAD
    Program *program;
    PyObject *communicator, *request, *on_finished;
    PyObject *views; /* a tuple of memoryviews, one for each chunk */
    PyObject *memory_owner, *dtype, *combine, *divisor;
    Pool *pool;
    Chunk *chunks;
    Progress *progress;
    HeldSegment *held; /* ciphertext to forward, sums to seal */
    int held_count, held_capacity;
    int steps_left, sum_type;
    char started;
    char failed; /* a segment failed: no further segment is sealed or opened */
    uint32_t first_segment;
    unsigned char header[HEADER_BYTES]; /* the header fields that all frames share */
} Execution;

extern PyType_Spec execution_spec;

int step_is_ready(Execution *self, int index);
int execution_advance(Execution *self, int index);
HeldSegment take_held(Execution *self, int index, Py_ssize_t position);
int is_held(Execution *self, int index, Py_ssize_t position);
int hold_again(Execution *self, HeldSegment held);
int hold_segment(Execution *self, int index, Py_ssize_t position, Segment *segment);
int hold_slot(Execution *self, int index, Py_ssize_t position, int slot, int reserved);
int share_ciphertext(Execution *self, Step *step, Py_ssize_t position, Segment *segment);
int queue_head(Endpoint *link, int sends, Execution **execution, int *index);
int queue_pop(Endpoint *link);
int wake_if_queued(Endpoint *link);

#endif
