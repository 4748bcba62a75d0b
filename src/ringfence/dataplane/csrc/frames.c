#include "chunks.h"
#include "frames.h"

/* -- sealing ---------------------------------------------------------------------------------------------------------- */

/* A new reference to the half of a link that seals or opens: it may be replaced while it is called. NULL: there is none. */
PyObject *half_of(PyObject *half) {
    if (half == NULL)
        PyErr_SetString(PyExc_RuntimeError, "this end of a link has no keys");
    return Py_XNewRef(half);
}

int read_counter(State *state, PyObject *half, uint64_t *counter) {
    PyObject *owner = half_of(half);
    PyObject *number = owner == NULL ? NULL : PyObject_GetAttr(owner, state->s_counter);
    Py_XDECREF(owner);
    if (number == NULL)
        return -1;
    *counter = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *counter == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* half.method([numbers,] header, data, target): the header as a copy, the others as views that end with the call. */
int with_views(State *state, PyObject *half, PyObject *method, PyObject *const *numbers, int count, const void *header,
                      Py_ssize_t header_length, Place data, Place target) {
    PyObject *args[6] = {half_of(half), NULL, NULL, NULL, NULL, NULL};
    if (args[0] == NULL)
        return -1;
    for (int i = 0; i < count; i++)
        args[1 + i] = numbers[i];
    PyObject **views = args + 1 + count;
    PyObject *done = NULL;
    views[0] = copy_of(header, header_length);
    views[1] = view_of(data);
    views[2] = view_of(target);
    if (views[0] != NULL && views[1] != NULL && views[2] != NULL)
        done = PyObject_CallMethodObjArgs(args[0], method, args[1], args[2], args[3], args[4], args[5], NULL);
    Py_XDECREF(done);
    Py_XDECREF(views[0]);
    end_view(state, views[1]);
    end_view(state, views[2]);
    Py_DECREF(args[0]);
    return done == NULL ? -1 : 0;
}

void write_header(Run *self, int index, Py_ssize_t position, int type, uint64_t counter, Py_ssize_t length, uint32_t origin,
                         uint64_t origin_counter, unsigned char *at) {
    Step *step = &self->program->steps[index];
    memcpy(at, self->header, HEADER_BYTES);
    at[0] = (unsigned char)type;
    put32(at + 4, (uint32_t)(counter >> KEY_PHASE_SHIFT));
    put32(at + 8, step->ordinal);
    put32(at + 16, (uint32_t)length);
    put32(at + 20, step->label);
    put32(at + 24, self->base + (uint32_t)position);
    put32(at + 28, origin);
    put64(at + COUNTER_AT, origin_counter);
}

/* A forwarded frame on this link: its own hop part and its own tag, over the header and the origin's tag, around a body
 * that stays as it is. `end` is where the body, which begins after the hop part, ends. */
int frame_for_hop(End *link, Step *step, uint64_t counter, Segment *segment, Py_ssize_t end) {
    unsigned char covered[HEADER_BYTES + TAG_BYTES];
    memset(link->hop, 0, HOP_BYTES);
    link->hop[0] = FORWARD;
    put32(link->hop + 4, (uint32_t)(counter >> KEY_PHASE_SHIFT));
    put32(link->hop + 8, step->ordinal);
    memcpy(covered, link->hop, HOP_BYTES);
    memcpy(covered + HOP_BYTES, segment->at + HOP_BYTES, HEADER_BYTES - HOP_BYTES);
    memcpy(covered + HEADER_BYTES, segment->at + end - TAG_BYTES, TAG_BYTES);
    PyObject *sealer = half_of(link->sealer);
    PyObject *copy = sealer == NULL ? NULL : copy_of(covered, sizeof covered);
    PyObject *tag = copy == NULL ? NULL : PyObject_CallMethodObjArgs(sealer, link->pool->state->s_tag, copy, NULL);
    Py_XDECREF(copy);
    Py_XDECREF(sealer);
    if (tag == NULL)
        return -1;
    if (!PyBytes_Check(tag) || PyBytes_Size(tag) != TAG_BYTES) {
        Py_DECREF(tag);
        PyErr_SetString(PyExc_TypeError, "a tag has 16 bytes");
        return -1;
    }
    memcpy(link->tag, PyBytes_AsString(tag), TAG_BYTES);
    Py_DECREF(tag);
    link->unsent[0] = (struct iovec){link->hop, HOP_BYTES};
    link->unsent[1] = (struct iovec){segment->at + HOP_BYTES, (size_t)(end - HOP_BYTES)};
    link->unsent[2] = (struct iovec){link->tag, TAG_BYTES};
    link->pieces = 3;
    return 0;
}

int seal_as_origin(Run *self, int index, Py_ssize_t position, uint64_t counter, Segment *segment, Place payload) {
    int result = -1;
    State *state = self->pool->state;
    PyObject *origin = PyObject_GetAttr(self->group, state->s_origin);
    PyObject *own = origin == NULL ? NULL : PyObject_CallMethodObjArgs(origin, state->s_take, NULL);
    if (own != NULL) {
        uint64_t number = PyLong_AsUnsignedLongLong(own);
        if (number != (uint64_t)-1 || !PyErr_Occurred()) {
            uint32_t rank = (uint32_t)self->program->steps[index].origin;
            write_header(self, index, position, FORWARD, counter, payload.length, rank, number, (unsigned char *)segment->at);
            result = with_views(state, origin, state->s_seal_into, &own, 1, segment->at + HOP_BYTES, HEADER_BYTES - HOP_BYTES,
                                payload, in_segment(segment, HEADER_BYTES, payload.length + TAG_BYTES));
        }
    }
    Py_XDECREF(own);
    Py_XDECREF(origin);
    return result;
}

int open_forwarded(Run *self, Step *step, End *link, Segment *segment, Py_ssize_t total, Place target) {
    unsigned char *frame = (unsigned char *)segment->at;
    Py_ssize_t end = total - TAG_BYTES;
    unsigned char covered[HEADER_BYTES + TAG_BYTES];
    memcpy(covered, frame, HEADER_BYTES);
    memcpy(covered + HEADER_BYTES, frame + end - TAG_BYTES, TAG_BYTES);
    State *state = self->pool->state;
    PyObject *opener = half_of(link->opener);
    PyObject *copies[2] = {copy_of(covered, sizeof covered), copy_of(frame + end, TAG_BYTES)};
    PyObject *done = NULL;
    if (opener != NULL && copies[0] != NULL && copies[1] != NULL)
        done = PyObject_CallMethodObjArgs(opener, state->s_check, copies[0], copies[1], NULL);
    Py_XDECREF(opener);
    Py_XDECREF(copies[0]);
    Py_XDECREF(copies[1]);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    uint64_t counter;
    memcpy(&counter, frame + COUNTER_AT, 8);
    PyObject *numbers[2] = {PyLong_FromLongLong(step->origin), PyLong_FromUnsignedLongLong(be64toh(counter))};
    PyObject *origin = PyObject_GetAttr(self->group, state->s_origin);
    int failed = -1;
    if (numbers[0] != NULL && numbers[1] != NULL && origin != NULL && !check_memory(self, step->chunk))
        failed = with_views(state, origin, state->s_open_into, numbers, 2, frame + HOP_BYTES, HEADER_BYTES - HOP_BYTES,
                            in_segment(segment, HEADER_BYTES, target.length + TAG_BYTES), target);
    Py_XDECREF(numbers[0]);
    Py_XDECREF(numbers[1]);
    Py_XDECREF(origin);
    return failed;
}

/* Whether the header is the expected one; a forwarded frame brings its own counter. Headers are no secrets. */
int as_expected(End *link) {
    const unsigned char *got = (const unsigned char *)link->receiving->at, *expected = link->expected;
    if (expected[0] != FORWARD)
        return !memcmp(got, expected, HEADER_BYTES);
    return !memcmp(got, expected, COUNTER_AT) && !memcmp(got + COUNTER_END, expected + COUNTER_END, HEADER_BYTES - COUNTER_END);
}
