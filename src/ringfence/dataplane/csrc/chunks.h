#ifndef RINGFENCE_CHUNKS_H
#define RINGFENCE_CHUNKS_H

#include "execution.h"

int bind_chunks(Run *self);
Place in_chunk(Run *self, int chunk, Py_ssize_t position);
int check_memory(Run *self, int chunk);
int check_address(Run *self, int chunk);

#endif
