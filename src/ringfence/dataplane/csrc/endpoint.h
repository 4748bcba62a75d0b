#ifndef RINGFENCE_ENDPOINT_H
#define RINGFENCE_ENDPOINT_H

/* Endpoint: the state of one link, and the system calls that move its bytes. */

#include "buffers.h"
#include "clock.h"
#include "frame_layout.h"
#include "region.h"

#include <sys/uio.h>

typedef struct {
    PyObject_HEAD
    PyObject *ready;   /* the engine's deque of endpoints with work to do */
    PyObject *blocked; /* the engine's set of endpoints with unsent bytes */
    PyObject *queue;   /* a deque of (execution, step) */
    PyObject *stream, *sealer, *opener;
    Pool *pool;
    char readable, writable, ended, open, queued;
    char role; /* what `work` does beside rare events: SENDS, RECEIVES; 0: something else */
    char lingering, bye_received; /* rare events of a link, which its `work` in Python handles */
    char busy; /* a transfer is in progress; reentrant transfers are refused */
    /* writing: the rest of one frame, in up to three buffers; the body of a forwarded frame may be shared with other
     * links */
    struct iovec unsent[3];
    int unsent_count;
    unsigned char hop[HOP_BYTES], tag[TAG_BYTES];
    Py_buffer unsent_view; /* holds a frame that is not in `sending` */
    Segment *sending;
    /* reading: the next frame of the schedule */
    char expecting, unexpected;
    unsigned char expected[HEADER_BYTES];
    Py_ssize_t received_bytes, frame_bytes;
    Segment *receiving;
    /* shared memory: this worker's, if it sends on this link, or the peer's, if it receives; NULL: there is none */
    Region *shared;
    unsigned char shared_headers[SEGMENTS_AT_ONCE * HEADER_BYTES]; /* of frames that are written together, in `unsent` */
    unsigned char ahead[SEGMENTS_AT_ONCE * HEADER_BYTES];          /* what was read beyond the frame that is due */
    Py_ssize_t ahead_first, ahead_count;
    int lent[MAX_SLOTS];                       /* slots that the peer has not returned, a ring from `lent_first` on */
    int lent_first, lent_count;
    int reserved; /* slots that hold sums until they are lent */
    uint64_t used, returned; /* frames that were read from the peer's slots; of these, reported to the peer */
    unsigned char control[HEADER_BYTES + TAG_BYTES]; /* the frame that is being read on a sending endpoint */
    int control_bytes;
    char goodbye; /* a BYE was read on a sending endpoint */
    /* counters: bytes of frames, bytes of tensors in them, number and duration of waits for a frame that was due */
    int worker;
    unsigned long long wire_sent, wire_received, payload_sent, payload_received, waits, waited;
    uint64_t waiting_since;
    uint64_t spent[STAGE_COUNT]; /* while timing is on */
} Endpoint;

enum { SENDS = 1, RECEIVES = 2 };

extern PyType_Spec endpoint_spec;

int is_endpoint(ModuleState *state, PyObject *object);
int endpoint_wake(Endpoint *self);
int begin_transfer(Endpoint *self);
int endpoint_flush(Endpoint *self);
int endpoint_read_returns(Endpoint *self);
int endpoint_return_slots(Endpoint *self);
/* Whether something may be left to read. */
int endpoint_is_readable(Endpoint *self);
Py_ssize_t endpoint_read(Endpoint *self, Segment *segment, Py_ssize_t offset, Py_ssize_t room);

#endif
