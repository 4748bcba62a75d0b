#ifndef RINGFENCE_REGION_H
#define RINGFENCE_REGION_H

/* Region: memory that a worker shares with others of its machine, in slots of one segment each. */

#include "buffers.h"
#include "frame_layout.h"

typedef struct {
    PyObject_HEAD
    PyObject *view;   /* a memoryview of the mapping */
    Py_buffer buffer; /* of that view */
    int count;        /* slots */
    int quota;        /* of these, for each link, so that no link waits for the peer of another one */
    int ahead;        /* the others: slots that wait for further links that send the same bytes, counted for each */
    int waiting;      /* of these, in use */
    int most_used;    /* slots from here on were never used */
    int free_count;
    int *free; /* slots that may be written, the last one first; NULL: another worker's memory, which is only read */
    int users[MAX_SLOTS]; /* of each slot: links that it is or will be lent to */
    int lent[MAX_SLOTS];  /* of these, links that it is lent to: their peers may read it */
} Region;

extern PyType_Spec region_spec;

int is_region(ModuleState *state, PyObject *object);
/* A slot to write, or -1: none is free. */
int region_take(Region *self);
/* A peer may read a slot from now on. */
void region_lend(Region *self, int slot);
/* A peer has returned a slot. */
void region_give(Region *self, int slot);
Span region_span(Region *self, int slot, Py_ssize_t length);

#endif
