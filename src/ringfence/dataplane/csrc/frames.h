#ifndef RINGFENCE_FRAMES_H
#define RINGFENCE_FRAMES_H

#include "execution.h"

PyObject *half_of(PyObject *half);
int read_counter(State *state, PyObject *half, uint64_t *counter);
int with_views(State *state, PyObject *half, PyObject *method, PyObject *const *numbers, int count, const void *header,
               Py_ssize_t header_length, Place data, Place target);
void write_header(Run *self, int index, Py_ssize_t position, int type, uint64_t counter, Py_ssize_t length, uint32_t origin,
                  uint64_t origin_counter, unsigned char *at);
int frame_for_hop(End *link, Step *step, uint64_t counter, Segment *segment, Py_ssize_t end);
int seal_as_origin(Run *self, int index, Py_ssize_t position, uint64_t counter, Segment *segment, Place payload);
int open_forwarded(Run *self, Step *step, End *link, Segment *segment, Py_ssize_t total, Place target);
int as_expected(End *link);

#endif
