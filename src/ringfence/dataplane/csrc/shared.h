#ifndef RINGFENCE_SHARED_H
#define RINGFENCE_SHARED_H

/* Segments that pass through the shared memory of a machine instead of through a socket. */

#include "execution.h"

int is_shared(Execution *self, int index, Endpoint *link);
int share_segment(Execution *self, int index, Endpoint *link);
int open_shared(Execution *self, int index, Endpoint *link, Segment *segment);

#endif
