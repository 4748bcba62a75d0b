#include "frames.h"
#include "chunks.h"

/* Headers of frames, and the calls of link/seal.py that seal and open them. */

/* A new reference to the sealer or opener: a callback may replace it during the call. NULL: there is none, and an
 * exception is set. */
PyObject *hold_cipher(PyObject *cipher) {
    if (cipher == NULL)
        PyErr_SetString(PyExc_RuntimeError, "the endpoint has no keys");
    return Py_XNewRef(cipher);
}

int read_counter(ModuleState *state, PyObject *cipher, uint64_t *counter) {
    PyObject *owner = hold_cipher(cipher);
    PyObject *number = owner == NULL ? NULL : PyObject_GetAttr(owner, state->s_counter);
    Py_XDECREF(owner);
    if (number == NULL)
        return -1;
    *counter = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *counter == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Call cipher.method([numbers,] header, data, target). The header is copied; data and target are views, released after
 * the call. */
int call_cipher(ModuleState *state, PyObject *cipher, PyObject *method, PyObject *const *numbers, int count,
                const void *header, Py_ssize_t header_length, Span data, Span target) {
    PyObject *args[6] = {hold_cipher(cipher), NULL, NULL, NULL, NULL, NULL};
    if (args[0] == NULL)
        return -1;
    for (int i = 0; i < count; i++)
        args[1 + i] = numbers[i];
    PyObject **views = args + 1 + count;
    PyObject *done = NULL;
    views[0] = copy_bytes(header, header_length);
    views[1] = view_span(data);
    views[2] = view_span(target);
    if (views[0] != NULL && views[1] != NULL && views[2] != NULL)
        done = PyObject_CallMethodObjArgs(args[0], method, args[1], args[2], args[3], args[4], args[5], NULL);
    Py_XDECREF(done);
    Py_XDECREF(views[0]);
    release_view(state, views[1]);
    release_view(state, views[2]);
    Py_DECREF(args[0]);
    return done == NULL ? -1 : 0;
}

void write_header(Execution *self, int index, Py_ssize_t position, int type, uint64_t counter, Py_ssize_t length,
                  uint32_t origin, uint64_t origin_counter, unsigned char *at) {
    Step *step = &self->program->steps[index];
    memcpy(at, self->header, HEADER_BYTES);
    at[0] = (unsigned char)type;
    put32(at + 4, (uint32_t)(counter >> KEY_PHASE_SHIFT));
    put32(at + 8, step->ordinal);
    put32(at + 16, (uint32_t)length);
    put32(at + 20, step->label);
    put32(at + 24, self->first_segment + (uint32_t)position);
    put32(at + 28, origin);
    put64(at + COUNTER_AT, origin_counter);
}

/* Prepare a forwarded frame for this link: a hop part and a tag of the link around the origin's body (spec/link.md).
 * `end` is the offset of the end of the body, which follows the hop part. Other links may be sending the body, but the
 * segment's own hop part is not sent: it is there for the tag. */
int tag_for_hop(Endpoint *link, Step *step, uint64_t counter, Segment *segment, Py_ssize_t end) {
    ModuleState *state = link->pool->state;
    memset(link->hop, 0, HOP_BYTES);
    link->hop[0] = FORWARD;
    put32(link->hop + 4, (uint32_t)(counter >> KEY_PHASE_SHIFT));
    put32(link->hop + 8, step->ordinal);
    memcpy(segment->at, link->hop, HOP_BYTES);
    PyObject *sealer = hold_cipher(link->sealer);
    PyObject *frame = sealer == NULL ? NULL : view_span(segment_span(segment, 0, end));
    PyObject *tag = frame == NULL ? NULL : PyObject_CallMethodObjArgs(sealer, state->s_tag, frame, NULL);
    release_view(state, frame);
    Py_XDECREF(sealer);
    if (tag == NULL)
        return -1;
    if (!PyBytes_Check(tag) || PyBytes_Size(tag) != TAG_BYTES) {
        Py_DECREF(tag);
        PyErr_SetString(PyExc_TypeError, "tag() must return 16 bytes");
        return -1;
    }
    memcpy(link->tag, PyBytes_AsString(tag), TAG_BYTES);
    Py_DECREF(tag);
    link->unsent[0] = (struct iovec){link->hop, HOP_BYTES};
    link->unsent[1] = (struct iovec){segment->at + HOP_BYTES, (size_t)(end - HOP_BYTES)};
    link->unsent[2] = (struct iovec){link->tag, TAG_BYTES};
    link->unsent_count = 3;
    return 0;
}

int seal_as_origin(Execution *self, int index, Py_ssize_t position, uint64_t counter, Segment *segment, Span payload) {
    int result = -1;
    ModuleState *state = self->pool->state;
    PyObject *origin = PyObject_GetAttr(self->communicator, state->s_origin);
    PyObject *own = origin == NULL ? NULL : PyObject_CallMethodObjArgs(origin, state->s_take, NULL);
    if (own != NULL) {
        uint64_t number = PyLong_AsUnsignedLongLong(own);
        if (number != (uint64_t)-1 || !PyErr_Occurred()) {
            uint32_t rank = (uint32_t)self->program->steps[index].origin;
            write_header(self, index, position, FORWARD, counter, payload.length, rank, number,
                         (unsigned char *)segment->at);
            result = call_cipher(state, origin, state->s_seal_into, &own, 1, segment->at + HOP_BYTES,
                                 HEADER_BYTES - HOP_BYTES, payload,
                                 segment_span(segment, HEADER_BYTES, payload.length + TAG_BYTES));
        }
    }
    Py_XDECREF(own);
    Py_XDECREF(origin);
    return result;
}

int open_forwarded(Execution *self, Step *step, Endpoint *link, Segment *segment, Py_ssize_t frame_bytes, Span target) {
    unsigned char *frame = (unsigned char *)segment->at;
    Py_ssize_t end = frame_bytes - TAG_BYTES;
    ModuleState *state = self->pool->state;
    PyObject *opener = hold_cipher(link->opener);
    PyObject *view = view_span(segment_span(segment, 0, end)), *tag = copy_bytes(frame + end, TAG_BYTES);
    PyObject *done = NULL;
    if (opener != NULL && view != NULL && tag != NULL)
        done = PyObject_CallMethodObjArgs(opener, state->s_check, view, tag, NULL);
    Py_XDECREF(opener);
    release_view(state, view);
    Py_XDECREF(tag);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    uint64_t counter;
    memcpy(&counter, frame + COUNTER_AT, 8);
    PyObject *numbers[2] = {PyLong_FromLongLong(step->origin), PyLong_FromUnsignedLongLong(be64toh(counter))};
    PyObject *origin = PyObject_GetAttr(self->communicator, state->s_origin);
    int failed = -1;
    if (numbers[0] != NULL && numbers[1] != NULL && origin != NULL && !check_memory(self, step->chunk))
        failed = call_cipher(state, origin, state->s_open_into, numbers, 2, frame + HOP_BYTES, HEADER_BYTES - HOP_BYTES,
                             segment_span(segment, HEADER_BYTES, target.length + TAG_BYTES), target);
    Py_XDECREF(numbers[0]);
    Py_XDECREF(numbers[1]);
    Py_XDECREF(origin);
    return failed;
}

/* Whether the header is the expected one. The counter of a forwarded frame is the origin's choice. Headers are public,
 * so memcmp is safe. */
int header_matches(Endpoint *link) {
    const unsigned char *got = (const unsigned char *)link->receiving->at, *expected = link->expected;
    if (expected[0] != FORWARD && expected[0] != SHARED) /* the counter of a shared frame names the slot */
        return !memcmp(got, expected, HEADER_BYTES);
    return !memcmp(got, expected, COUNTER_AT) &&
           !memcmp(got + COUNTER_END, expected + COUNTER_END, HEADER_BYTES - COUNTER_END);
}
