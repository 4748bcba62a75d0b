#ifndef RINGFENCE_CHUNKS_H
#define RINGFENCE_CHUNKS_H

/* The memory of an execution, and the checks that torch has not freed it. */

#include "execution.h"

int bind_chunks(Execution *self);
Span chunk_span(Execution *self, int chunk, Py_ssize_t position);
int check_memory(Execution *self, int chunk);
int check_address(Execution *self, int chunk);

#endif
