#ifndef RINGFENCE_EXECUTION_H
#define RINGFENCE_EXECUTION_H

#include "endpoint.h"
#include "program.h"

typedef struct {
    Py_buffer held; /* for as long as the run: nobody releases or resizes what is under it, but torch (see check_memory) */
    char *at;
    Py_ssize_t length, each;
    PyObject *exporter; /* of the view that `held` is of; borrowed from it */
    PyObject *lease, *storage, *address, *nbytes; /* of the tensor that the memory is (memory.py); NULL if it is none */
} Chunk;

typedef struct {
    Py_ssize_t done, segments;
    End *link;
} Progress;

typedef struct {
    int step;
    Py_ssize_t position;
    Segment *segment;
} Kept;

#define MOST_KEPT 8 /* sums that wait to be sealed; further ones are written to the chunk, where there is room for them */

enum { ADD_NOT, ADD_F32, ADD_F64, ADD_I32, ADD_I64, ADD_BF16 };

typedef struct {
    PyObject_HEAD
    Program *program;
    PyObject *group, *operation, *finished, *views, *keeper, *dtype, *combine, *divisor; /* views: a tuple */
    Pool *pool;
    Chunk *chunks;
    Progress *progress;
    Kept *kept; /* ciphertext to pass on, sums to seal */
    int keeping, room;
    int left, add;
    char started;
    char broken; /* something failed half-way: no further segment of it may be sealed or opened, whoever asks */
    uint32_t base;
    unsigned char header[HEADER_BYTES]; /* what all frames of the run share */
} Run;

extern PyType_Spec run_spec;

int is_ready(Run *self, int index);
int advance(Run *self, int index);
Segment *take_kept(Run *self, int index, Py_ssize_t position);
int keep(Run *self, int index, Py_ssize_t position, Segment *segment);
int share(Run *self, Step *step, Py_ssize_t position, Segment *segment);
int head_of_queue(End *link, int sends, Run **run, int *index);
int leave_queue(End *link);
int wake_if_queued(End *link);

#endif
