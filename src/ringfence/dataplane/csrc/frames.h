#ifndef RINGFENCE_FRAMES_H
#define RINGFENCE_FRAMES_H

/* Headers of frames, and the calls of Python's sealers and openers. */

#include "execution.h"

PyObject *hold_cipher(PyObject *cipher);
int read_counter(ModuleState *state, PyObject *cipher, uint64_t *counter);
int call_cipher(ModuleState *state, PyObject *cipher, PyObject *method, PyObject *const *numbers, int count,
                const void *header, Py_ssize_t header_length, Span data, Span target);
void write_header(Execution *self, int index, Py_ssize_t position, int type, uint64_t counter, Py_ssize_t length,
                  uint32_t origin, uint64_t origin_counter, unsigned char *at);
int tag_for_hop(Endpoint *link, Step *step, uint64_t counter, Segment *segment, Py_ssize_t end);
int seal_as_origin(Execution *self, int index, Py_ssize_t position, uint64_t counter, Segment *segment, Span payload);
int open_forwarded(Execution *self, Step *step, Endpoint *link, Segment *segment, Py_ssize_t frame_bytes, Span target);
int header_matches(Endpoint *link);

#endif
