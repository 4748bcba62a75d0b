#ifndef RINGFENCE_REDUCTIONS_H
#define RINGFENCE_REDUCTIONS_H

/* Sums and averages of received segments. */

#include "execution.h"

int divide_span(Execution *self, Span span);
int reduce_segment(Execution *self, Step *step, Py_ssize_t position, Span received, int stays_in_segment);

#endif
