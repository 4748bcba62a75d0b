#ifndef RINGFENCE_REDUCTIONS_H
#define RINGFENCE_REDUCTIONS_H

/* Sums and averages of received segments. */

#include "execution.h"

int divide_span(Execution *self, Span span);
int is_summed_here(Execution *self, Span target, Span operand, Span received);
int reduce_to(Execution *self, Step *step, Py_ssize_t position, Span received, Span target, int stays_in_segment);
int reduce_segment(Execution *self, Step *step, Py_ssize_t position, Span received, int stays_in_segment);

#endif
