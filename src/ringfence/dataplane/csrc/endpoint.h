#ifndef RINGFENCE_ENDPOINT_H
#define RINGFENCE_ENDPOINT_H

#include <sys/uio.h>

#include "buffers.h"
#include "clock.h"
#include "frame_layout.h"

typedef struct {
    PyObject_HEAD
    PyObject *ready;   /* the engine's deque of what has work to do */
    PyObject *blocked; /* the engine's set of links with bytes that the kernel has not taken */
    PyObject *queue;   /* a deque of (run, step) */
    PyObject *stream, *sealer, *opener;
    Pool *pool;
    char readable, writable, ended, open, queued;
    char busy; /* bytes are being moved: whoever is called meanwhile and wants to move some, too, is refused */
    /* writing: what is left of one frame, in up to three pieces: a forwarded one's body may be shared with other links */
    struct iovec unsent[3];
    int pieces;
    unsigned char hop[HOP_BYTES], tag[TAG_BYTES];
    Py_buffer unsent_view; /* where the frame is not in `sending` */
    Segment *sending;
    /* reading: the frame that the schedule expects next */
    char expecting, surprising;
    unsigned char expected[HEADER_BYTES];
    Py_ssize_t have, total;
    Segment *receiving;
    /* what Python asks to be counted: bytes of frames, bytes of tensors in them, and how often and how long a frame was due
     * from the peer and nothing of it was there */
    int worker;
    unsigned long long wire_sent, wire_received, payload_sent, payload_received, waits, waited;
    uint64_t waiting_since;
    uint64_t spent[STAGES]; /* while the clock is on */
} End;

extern PyType_Spec end_spec;

int is_end(State *state, PyObject *object);
int wake(End *self);
int begin_to_move(End *self);
int flush(End *self);
Py_ssize_t read_some(End *self, Segment *segment, Py_ssize_t offset, Py_ssize_t room);

#endif
