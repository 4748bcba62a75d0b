#ifndef RINGFENCE_REDUCTIONS_H
#define RINGFENCE_REDUCTIONS_H

#include "execution.h"

int divide(Run *self, Place place);
int reduce(Run *self, Step *step, Py_ssize_t position, Place received, int inherits);

#endif
