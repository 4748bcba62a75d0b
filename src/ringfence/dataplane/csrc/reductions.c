#include "reductions.h"
#include "chunks.h"

/* Sums and averages. Common types are added here, all others by torch (buffers.py). */

/* Unlike other views, those passed to torch are not released after the call: torch makes tensors of them, and these
 * keep the memory alive. */
int divide_span(Execution *self, Span span) {
    PyObject *view = view_span(span);
    if (view == NULL)
        return -1;
    PyObject *done =
        PyObject_CallFunctionObjArgs(self->pool->state->divide_bytes, self->dtype, view, self->divisor, NULL);
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

/* Rounds to nearest, ties to even, like torch. */
static inline uint16_t to_bf16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, sizeof wide);
    uint32_t rounded = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16;
    return (uint16_t)(value != value ? 0x7FC0 : rounded);
}

#define ADD(one, other) ((one) + (other))
#define ADD_BF16(one, other) to_bf16(from_bf16(one) + from_bf16(other))

#define DEFINE_SUM(name, type, SUM)                                                                                    \
    WIDEST static void name(type *restrict out, const type *left, const type *restrict right, Py_ssize_t count) {      \
        for (Py_ssize_t i = 0; i < count; i++)                                                                         \
            out[i] = SUM(left[i], right[i]);                                                                           \
    }                                                                                                                  \
    WIDEST static void name##_to(type *restrict out, const type *restrict right, Py_ssize_t count) {                   \
        for (Py_ssize_t i = 0; i < count; i++)                                                                         \
            out[i] = SUM(out[i], right[i]);                                                                            \
    }                                                                                                                  \
    static void name##_bytes(char *out, const char *left, const char *right, Py_ssize_t length) {                      \
        Py_ssize_t count = length / (Py_ssize_t)sizeof(type);                                                          \
        if (out == left)                                                                                               \
            name##_to((type *)out, (const type *)right, count);                                                        \
        else if (out == right)                                                                                         \
            name##_to((type *)out, (const type *)left, count);                                                         \
        else                                                                                                           \
            name((type *)out, (const type *)left, (const type *)right, count);                                         \
    }

DEFINE_SUM(add_f32, float, ADD)
DEFINE_SUM(add_f64, double, ADD)
DEFINE_SUM(add_i32, uint32_t, ADD) /* unsigned: integers wrap on overflow in torch */
DEFINE_SUM(add_i64, uint64_t, ADD)
DEFINE_SUM(add_bf16, uint16_t, ADD_BF16)

static int check_operand_memory(Execution *self, Step *step, int stays_in_segment) {
    if (check_memory(self, step->other))
        return -1;
    return !stays_in_segment && step->chunk != step->other ? check_memory(self, step->chunk) : 0;
}

static int combine_by_torch(Execution *self, Step *step, Span target, Span operand, Span received) {
    PyObject *out = view_span(target), *mine = view_span(operand), *theirs = view_span(received);
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
    return failed ? failed : check_operand_memory(self, step, 0); /* torch releases the GIL */
}

/* Whether these bytes are added here and not by torch, which wants memory that it may write. */
int is_summed_here(Execution *self, Span target, Span operand, Span received) {
    static const unsigned char sizes[] = {1, 4, 8, 4, 8, 2};
    uintptr_t all = (uintptr_t)target.at | (uintptr_t)operand.at | (uintptr_t)received.at;
    return self->sum_type != SUM_BY_TORCH && !(all & (uintptr_t)(sizes[self->sum_type] - 1));
}

static int combine(Execution *self, Step *step, Span to, Span mine, Span theirs) {
    char *target = to.at, *operand = mine.at, *received = theirs.at;
    Py_ssize_t length = theirs.length;
    switch (is_summed_here(self, to, mine, theirs) ? self->sum_type : SUM_BY_TORCH) {
    case SUM_F32: add_f32_bytes(target, operand, received, length); return 0;
    case SUM_F64: add_f64_bytes(target, operand, received, length); return 0;
    case SUM_I32: add_i32_bytes(target, operand, received, length); return 0;
    case SUM_I64: add_i64_bytes(target, operand, received, length); return 0;
    case SUM_BF16: add_bf16_bytes(target, operand, received, length); return 0;
    default: return combine_by_torch(self, step, to, mine, theirs);
    }
}

/* Add received bytes to the local operand. `stays_in_segment`: the target is not the chunk. */
int reduce_to(Execution *self, Step *step, Py_ssize_t position, Span received, Span target, int stays_in_segment) {
    if (check_operand_memory(self, step, stays_in_segment))
        return -1;
    return combine(self, step, target, chunk_span(self, step->other, position), received);
}

/* Add the opened payload of a REDUCE to the local operand. The sum replaces the payload if `stays_in_segment`, else the
 * chunk. */
int reduce_segment(Execution *self, Step *step, Py_ssize_t position, Span received, int stays_in_segment) {
    Span target = stays_in_segment ? received : chunk_span(self, step->chunk, position);
    return reduce_to(self, step, position, received, target, stays_in_segment);
}
