#include "chunks.h"
#include "reductions.h"

/* These views are not ended after the call: torch makes tensors of them, and who keeps one of those keeps the memory. */
int divide(Run *self, Place place) {
    PyObject *view = view_of(place);
    if (view == NULL)
        return -1;
    PyObject *done = PyObject_CallFunctionObjArgs(self->pool->state->divide_bytes, self->dtype, view, self->divisor, NULL);
    Py_DECREF(view);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

static inline float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* To the nearest, ties to even, as torch rounds. */
static inline uint16_t to_bf16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    uint32_t rounded = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;
    return (uint16_t)(value != value ? 0x7FC0 : rounded);
}

#define PLAIN(one, other) ((one) + (other))
#define BF16(one, other) to_bf16(from_bf16(one) + from_bf16(other))

#define ADDER(name, type, SUM)                                                                                                  \
    WIDEST static void name(type *restrict out, const type *left, const type *restrict right, Py_ssize_t count) {               \
        for (Py_ssize_t i = 0; i < count; i++)                                                                                  \
            out[i] = SUM(left[i], right[i]);                                                                                    \
    }                                                                                                                           \
    WIDEST static void name##_to(type *restrict out, const type *restrict right, Py_ssize_t count) {                            \
        for (Py_ssize_t i = 0; i < count; i++)                                                                                  \
            out[i] = SUM(out[i], right[i]);                                                                                     \
    }                                                                                                                           \
    static void name##_bytes(char *out, const char *left, const char *right, Py_ssize_t length) {                               \
        Py_ssize_t count = length / (Py_ssize_t)sizeof(type);                                                                   \
        if (out == left)                                                                                                        \
            name##_to((type *)out, (const type *)right, count);                                                                 \
        else if (out == right)                                                                                                  \
            name##_to((type *)out, (const type *)left, count);                                                                  \
        else                                                                                                                    \
            name((type *)out, (const type *)left, (const type *)right, count);                                                  \
    }

ADDER(add_f32, float, PLAIN)
ADDER(add_f64, double, PLAIN)
ADDER(add_i32, uint32_t, PLAIN) /* unsigned: signed overflow wraps in torch and is undefined in C */
ADDER(add_i64, uint64_t, PLAIN)
ADDER(add_bf16, uint16_t, BF16)

static int check_operands(Run *self, Step *step, int inherits) {
    return check_memory(self, step->other) || (!inherits && step->chunk != step->other && check_memory(self, step->chunk)) ? -1 : 0;
}

static int combine_in_python(Run *self, Step *step, Place target, Place operand, Place received) {
    PyObject *out = view_of(target), *mine = view_of(operand), *theirs = view_of(received);
    int failed = -1;
    if (out != NULL && mine != NULL && theirs != NULL) {
        PyObject *first = step->received_first ? theirs : mine, *second = step->received_first ? mine : theirs;
        PyObject *function = self->pool->state->combine_bytes;
        PyObject *done = PyObject_CallFunctionObjArgs(function, self->combine, self->dtype, first, second, out, NULL);
        failed = done == NULL ? -1 : 0;
        Py_XDECREF(done);
    }
    Py_XDECREF(out);
    Py_XDECREF(mine);
    Py_XDECREF(theirs);
    return failed ? failed : check_operands(self, step, 0); /* torch gives up the lock, as our own sums do not */
}

static int combine(Run *self, Step *step, Place to, Place mine, Place theirs) {
    char *target = to.at, *operand = mine.at, *received = theirs.at;
    Py_ssize_t length = theirs.length;
    static const unsigned char sizes[] = {1, 4, 8, 4, 8, 2};
    uintptr_t size = sizes[self->add];
    int aligned = !(((uintptr_t)target | (uintptr_t)operand | (uintptr_t)received) & (size - 1));
    switch (aligned ? self->add : ADD_NOT) {
    case ADD_F32: add_f32_bytes(target, operand, received, length); return 0;
    case ADD_F64: add_f64_bytes(target, operand, received, length); return 0;
    case ADD_I32: add_i32_bytes(target, operand, received, length); return 0;
    case ADD_I64: add_i64_bytes(target, operand, received, length); return 0;
    case ADD_BF16: add_bf16_bytes(target, operand, received, length); return 0;
    default: return combine_in_python(self, step, to, mine, theirs);
    }
}

/* Add what a REDUCE received, which lies opened in the segment, to the local operand. `inherits`: the sum stays there. */
int reduce(Run *self, Step *step, Py_ssize_t position, Place received, int inherits) {
    Place target = inherits ? received : in_chunk(self, step->chunk, position);
    if (check_operands(self, step, inherits))
        return -1;
    return combine(self, step, target, in_chunk(self, step->other, position), received);
}
