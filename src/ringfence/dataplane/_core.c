/* The data plane in C: what run.py and ends.py do, segment by segment, at a tenth of their price.
 *
 * It schedules, frames, moves and adds. It holds no key, takes no nonce and checks no tag: sealing and opening are calls
 * to the same Python objects (link/seal.py) that the Python data plane calls, and every failure is theirs to raise.
 * Everything runs under the interpreter's lock; the ciphers give it up while they work, and so does a wait in epoll.
 * What is told to others is told through Python too: `finished`, the engine's `ready`, the set of `blocked` links.
 *
 * The wire format is spec/link.md's. core.py compares the sizes below with link/frames.py's when it is imported.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <endian.h>
#include <errno.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define INTERFACE 3 /* core.py's calls of this module; a change of either changes both */
#define HEADER_BYTES 88
#define HOP_BYTES 16
#define TAG_BYTES 16
#define COUNTER_AT 40
#define COUNTER_END 48
#define INSTANCE_AT 48
#define INSTANCE_BYTES 16
#define CALL_AT 64
#define CALL_BYTES 24
#define KEY_PHASE_SHIFT 20
#define SEGMENT_BYTES (256 * 1024)
#define FRAME_BYTES (HEADER_BYTES + SEGMENT_BYTES + 2 * TAG_BYTES)
#define NO_ORIGIN 0xFFFFFFFFu
#define MOST_STEPS (1 << 24)

enum { HOP = 1, FORWARD = 2 };
enum { SEND, RECV, REDUCE, COPY, SCALE };

/* -- the clock: off unless a benchmark, a profiler or a setting asks ----------------------------------------------------------------------- */

enum { IN_SEAL, IN_OPEN, IN_REDUCE, IN_SEND, IN_RECEIVE, FOR_LOCK, STAGES };
static const char *const stage_names[STAGES] = {"seal", "open", "reduce", "send", "receive", "lock"};
enum { TOTALS = 1, EVENTS = 2 };
static int timing; /* which of the two are kept */
static uint64_t spent[STAGES];

/* What was done when, for a profiler's trace. What does not fit any more is not kept. */
#define MOST_EVENTS (1 << 20)
typedef struct {
    uint64_t start, end;
    int stage, worker;
} Event;
static struct {
    Event *at;
    size_t count, room;
} events;

static void keep_event(int stage, uint64_t start, uint64_t end, int worker) {
    if (events.count == events.room) {
        size_t room = events.room ? 2 * events.room : 4096;
        Event *at = room > MOST_EVENTS ? NULL : realloc(events.at, room * sizeof(Event));
        if (at == NULL)
            return;
        events.at = at;
        events.room = room;
    }
    events.at[events.count++] = (Event){start, end, stage, worker};
}

static uint64_t clock_ns(clockid_t which) {
    struct timespec now;
    clock_gettime(which, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

typedef struct {
    uint64_t wall, cpu;
} Start;

static inline Start start_clock(void) {
    Start start = {0, 0};
    if (timing) {
        start.wall = clock_ns(CLOCK_MONOTONIC);
        start.cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    }
    return start;
}

static void spend(int stage, uint64_t start, uint64_t length, uint64_t *link_spent, int worker) {
    spent[stage] += length;
    if (link_spent != NULL)
        link_spent[stage] += length;
    if (timing & EVENTS && length)
        keep_event(stage, start, start + length, worker);
}

/* A cipher gives up the interpreter's lock: what its call took beyond its CPU time went to getting that, or a core, back. */
static inline void stop_clock(int stage, Start start, uint64_t *link_spent, int worker) {
    if (!timing || !start.wall)
        return;
    uint64_t wall = clock_ns(CLOCK_MONOTONIC) - start.wall;
    if (stage == IN_SEAL || stage == IN_OPEN) {
        uint64_t cpu = clock_ns(CLOCK_THREAD_CPUTIME_ID) - start.cpu;
        cpu = cpu < wall ? cpu : wall;
        spend(FOR_LOCK, start.wall + cpu, wall - cpu, link_spent, worker);
        wall = cpu;
    }
    spend(stage, start.wall, wall, link_spent, worker);
}

/* -- the module's state ---------------------------------------------------------------------------------------------- */

/* What the module holds: names, what it calls, its own types. Objects only, which core_traverse relies on.
 *
 * Segments and pools point to it. The garbage collector does not follow them, so they keep their type, the module and the state
 * alive; ends and runs have the state through their pool. */
typedef struct {
    PyObject *s_add, *s_address, *s_append, *s_check, *s_counter, *s_data_ptr, *s_fileno, *s_inbox, *s_lease,
        *s_length_of_other, *s_memory_changed, *s_nbytes, *s_obj, *s_open_into, *s_origin, *s_outbox, *s_popleft, *s_recv_into,
        *s_release, *s_seal_into, *s_send, *s_storage, *s_tag, *s_take, *s_ended;
    PyObject *deque_type, *socket_type, *segment_bytes_of, *combine_bytes, *divide_bytes;
    PyObject *segment_type, *piece_type, *pool_type, *program_type, *end_type, *run_type;
} State;

/* What Py_XSETREF does, which the limited API lacks. */
#define REPLACE(place, value)                                                                                                   \
    do {                                                                                                                        \
        PyObject *replaced = (PyObject *)(place);                                                                               \
        (place) = (value);                                                                                                      \
        Py_XDECREF(replaced);                                                                                                   \
    } while (0)

#define FIXED (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE)
#define MADE_HERE (FIXED | Py_TPFLAGS_DISALLOW_INSTANTIATION) /* Python code makes none of them */

/* For a type without cycles: its memory and its reference to the type. */
static void free_object(void *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* -- views: whoever has one keeps its memory alive ------------------------------------------------------------------- */

/* Bytes that Python code is to read or write: `owner` exports them, `at` is the first of them. */
typedef struct {
    PyObject *owner; /* a segment, or a memoryview of bytes; borrowed */
    Py_ssize_t offset, length;
    char *at;
} Place;

/* The call that a view was made for is over: whoever kept it, such as a profiler, has a view of nothing. Takes over the
 * reference, which may be NULL; keeps the error that is set, if one is. */
static void end_view(State *state, PyObject *view) {
    if (view == NULL || Py_REFCNT(view) == 1) { /* nobody kept it */
        Py_XDECREF(view);
        return;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *done = PyObject_CallMethodObjArgs(view, state->s_release, NULL);
    if (done == NULL && PyErr_ExceptionMatches(PyExc_BufferError))
        PyErr_Clear(); /* somebody has taken a buffer of it, and keeps the memory alive with that */
    else if (done == NULL)
        PyErr_WriteUnraisable(view);
    Py_XDECREF(done);
    Py_DECREF(view);
    PyErr_Restore(type, value, trace);
}

/* Short pieces are handed over as copies. */
static PyObject *copy_of(const void *at, Py_ssize_t length) { return PyBytes_FromStringAndSize(at, length); }

/* -- segments and their pool ---------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    State *state;
    char *memory;
    char *at; /* the frame; its payload is aligned to a cache line */
    char idle; /* in a pool */
} Segment;

static Segment *new_segment(State *state) {
    Segment *self = PyObject_New(Segment, (PyTypeObject *)state->segment_type);
    if (self == NULL)
        return NULL;
    self->state = state;
    self->idle = 0;
    if (posix_memalign((void **)&self->memory, 64, 128 + FRAME_BYTES)) {
        self->memory = NULL;
        Py_DECREF(self);
        PyErr_NoMemory();
        return NULL;
    }
    self->at = self->memory + 128 - HEADER_BYTES;
    return self;
}

static void segment_dealloc(Segment *self) {
    free(self->memory);
    free_object(self);
}

static int segment_buffer(Segment *self, Py_buffer *buffer, int flags) {
    return PyBuffer_FillInfo(buffer, (PyObject *)self, self->at, FRAME_BYTES, 0, flags);
}

static Place in_segment(Segment *segment, Py_ssize_t offset, Py_ssize_t length) {
    return (Place){(PyObject *)segment, offset, length, segment->at + offset};
}

static PyObject *segment_view(Segment *self, void *unused) {
    (void)unused;
    return PyMemoryView_FromObject((PyObject *)self);
}

static PyGetSetDef segment_getset[] = {{"view", (getter)segment_view, NULL, "The bytes of the frame.", NULL}, {NULL}};

static PyType_Slot segment_slots[] = {
    {Py_tp_dealloc, segment_dealloc},
    {Py_bf_getbuffer, segment_buffer},
    {Py_tp_getset, segment_getset},
    {Py_tp_doc, "Room for one frame."},
    {0, NULL},
};
static PyType_Spec segment_spec = {"ringfence.dataplane._core.Segment", sizeof(Segment), 0, MADE_HERE, segment_slots};

/* A piece of a segment: what it exports is that piece, and it keeps the segment. */
typedef struct {
    PyObject_HEAD
    Segment *segment;
    Py_ssize_t offset, length;
} Piece;

static void piece_dealloc(Piece *self) {
    Py_DECREF(self->segment);
    free_object(self);
}

static int piece_buffer(Piece *self, Py_buffer *buffer, int flags) {
    return PyBuffer_FillInfo(buffer, (PyObject *)self, self->segment->at + self->offset, self->length, 0, flags);
}

static PyType_Slot piece_slots[] = {
    {Py_tp_dealloc, piece_dealloc},
    {Py_bf_getbuffer, piece_buffer},
    {Py_tp_doc, "A piece of a segment."},
    {0, NULL},
};
static PyType_Spec piece_spec = {"ringfence.dataplane._core.Piece", sizeof(Piece), 0, MADE_HERE, piece_slots};

/* A view of the place. It keeps the owner alive, and so does every view that somebody makes of it. */
static PyObject *view_of(Place place) {
    if (PyMemoryView_Check(place.owner))
        return PySequence_GetSlice(place.owner, place.offset, place.offset + place.length);
    Segment *segment = (Segment *)place.owner;
    Piece *piece = PyObject_New(Piece, (PyTypeObject *)segment->state->piece_type);
    if (piece == NULL)
        return NULL;
    piece->segment = (Segment *)Py_NewRef(place.owner);
    piece->offset = place.offset;
    piece->length = place.length;
    PyObject *view = PyMemoryView_FromObject((PyObject *)piece);
    Py_DECREF(piece);
    return view;
}

#define MOST_IDLE 64

typedef struct {
    PyObject_HEAD
    State *state;
    Segment *idle[MOST_IDLE];
    int count, most;
    Py_ssize_t made;
} Pool;

static Segment *pool_take(Pool *self) {
    if (self->count) {
        self->idle[--self->count]->idle = 0;
        return self->idle[self->count];
    }
    Segment *segment = new_segment(self->state);
    if (segment != NULL)
        self->made++;
    return segment;
}

/* Takes over the caller's reference. A segment that others still send, or have a view of, stays with them. */
static void pool_give(Pool *self, Segment *segment) {
    if (Py_REFCNT((PyObject *)segment) == 1 && self->count < self->most) {
        segment->idle = 1;
        self->idle[self->count++] = segment;
    } else
        Py_DECREF(segment);
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    Pool *self = (Pool *)PyType_GenericNew(type, args, keywords);
    if (self != NULL)
        self->state = PyType_GetModuleState(type); /* nothing can be derived from the type, so that it is ours */
    return (PyObject *)self;
}

static int pool_init(Pool *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"most", NULL};
    int most = 32;
    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|i", names, &most))
        return -1;
    if (most < 0 || most > MOST_IDLE) {
        PyErr_SetString(PyExc_ValueError, "a pool keeps at most 64 idle segments");
        return -1;
    }
    self->most = most;
    return 0;
}

static void pool_dealloc(Pool *self) {
    while (self->count)
        Py_DECREF(self->idle[--self->count]);
    free_object(self);
}

static PyObject *pool_take_method(Pool *self, PyObject *unused) {
    (void)unused;
    return (PyObject *)pool_take(self);
}

static PyObject *pool_give_method(Pool *self, PyObject *segment) {
    if (!Py_IS_TYPE(segment, (PyTypeObject *)self->state->segment_type)) {
        PyErr_SetString(PyExc_TypeError, "a pool takes segments");
        return NULL;
    }
    if (((Segment *)segment)->idle) {
        PyErr_SetString(PyExc_ValueError, "a segment is given back once");
        return NULL;
    }
    if (self->count < self->most) {
        ((Segment *)segment)->idle = 1;
        self->idle[self->count++] = (Segment *)Py_NewRef(segment);
    }
    Py_RETURN_NONE;
}

static PyMethodDef pool_methods[] = {
    {"take", (PyCFunction)pool_take_method, METH_NOARGS, "A segment, used before or new."},
    {"give", (PyCFunction)pool_give_method, METH_O, "Take a segment back."},
    {NULL},
};
static PyMemberDef pool_members[] = {
    {"made", T_PYSSIZET, offsetof(Pool, made), READONLY, "How many segments were ever made."}, {NULL}};

static PyType_Slot pool_slots[] = {
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_members, pool_members},
    {Py_tp_init, pool_init},
    {Py_tp_new, pool_new},
    {Py_tp_doc, "Segments that are used again; it keeps at most `most` idle ones."},
    {0, NULL},
};
static PyType_Spec pool_spec = {"ringfence.dataplane._core.Pool", sizeof(Pool), 0, FIXED, pool_slots};

/* -- programs ------------------------------------------------------------------------------------------------------- */

typedef struct {
    int step;
    int by_segment;
} Need;

typedef struct {
    int action, chunk, peer, other, received_first;
    uint32_t label, ordinal;
    int64_t origin;
    int needs, wakes, sharers;
    Need *need;
    int *wake, *sharer; /* sharers: the SENDs that write the same ciphertext, as received or as sealed by another of them */
    int heir;           /* a REDUCE's sum goes nowhere but into this SEND; -1: it belongs in the chunk */
} Step;

typedef struct {
    PyObject_HEAD
    int count, chunks;
    Step *steps;
} Program;

static void program_dealloc(Program *self) {
    for (int i = 0; self->steps != NULL && i < self->count; i++) {
        PyMem_Free(self->steps[i].need);
        PyMem_Free(self->steps[i].wake);
        PyMem_Free(self->steps[i].sharer);
    }
    PyMem_Free(self->steps);
    free_object(self);
}

static int is_tuple(PyObject *object) {
    if (PyTuple_Check(object))
        return 1;
    PyErr_SetString(PyExc_TypeError, "programs and queues are made of tuples");
    return 0;
}

/* The step numbers in a tuple, each checked to be one. */
static int read_numbers(PyObject *tuple, int limit, int *count, int **numbers) {
    if (!is_tuple(tuple))
        return -1;
    if (PyTuple_Size(tuple) > MOST_STEPS) {
        PyErr_SetString(PyExc_ValueError, "a program names more steps than it can have");
        return -1;
    }
    *count = (int)PyTuple_Size(tuple);
    *numbers = PyMem_New(int, *count + 1);
    if (*numbers == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < *count; i++) {
        long number = PyLong_AsLong(PyTuple_GetItem(tuple, i));
        if (number == -1 && PyErr_Occurred())
            return -1;
        if (number < 0 || number >= limit) {
            PyErr_SetString(PyExc_ValueError, "a program names a step that it does not have");
            return -1;
        }
        (*numbers)[i] = (int)number;
    }
    return 0;
}

static int read_needs(PyObject *tuple, int limit, Step *step) {
    if (!is_tuple(tuple))
        return -1;
    if (PyTuple_Size(tuple) > MOST_STEPS) {
        PyErr_SetString(PyExc_ValueError, "a program names more steps than it can have");
        return -1;
    }
    step->needs = (int)PyTuple_Size(tuple);
    step->need = PyMem_New(Need, step->needs + 1);
    if (step->need == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < step->needs; i++) {
        Need *need = &step->need[i];
        PyObject *item = PyTuple_GetItem(tuple, i);
        if (!is_tuple(item) || !PyArg_ParseTuple(item, "ip", &need->step, &need->by_segment))
            return -1;
        if (need->step < 0 || need->step >= limit) {
            PyErr_SetString(PyExc_ValueError, "a program names a step that it does not have");
            return -1;
        }
    }
    return 0;
}

static int writes_same(Program *self, Step *step, int other, int sealed_once) {
    Step *writer = &self->steps[other];
    if (writer->action != SEND || writer->chunk != step->chunk)
        return 0;
    return sealed_once ? writer->origin >= 0 && writer->origin == step->origin && writer->label == step->label : writer->origin < 0;
}

/* compile(steps, dependencies, wakes, ordinals, shared_by, heirs, chunks) -> Program */
static PyObject *core_compile(PyObject *module, PyObject *args) {
    State *state = PyModule_GetState(module);
    PyObject *steps, *needs, *wakes, *ordinals, *sharers, *heirs;
    int chunks;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!i", &PyTuple_Type, &steps, &PyTuple_Type, &needs, &PyTuple_Type, &wakes, &PyTuple_Type,
                          &ordinals, &PyTuple_Type, &sharers, &PyTuple_Type, &heirs, &chunks))
        return NULL;
    Py_ssize_t count = PyTuple_Size(steps);
    if (PyTuple_Size(needs) != count || PyTuple_Size(wakes) != count || PyTuple_Size(ordinals) != count ||
        PyTuple_Size(sharers) != count || PyTuple_Size(heirs) != count || count > MOST_STEPS || chunks < 0) {
        PyErr_SetString(PyExc_ValueError, "the parts of a program differ in length, or there are too many or too few of them");
        return NULL;
    }
    Program *self = PyObject_New(Program, (PyTypeObject *)state->program_type);
    if (self == NULL)
        return NULL;
    self->count = (int)count;
    self->chunks = chunks;
    self->steps = PyMem_Calloc((size_t)count + 1, sizeof(Step));
    if (self->steps == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (int i = 0; i < self->count; i++) {
        Step *step = &self->steps[i];
        PyObject *item = PyTuple_GetItem(steps, i);
        if (!is_tuple(item) ||
            !PyArg_ParseTuple(item, "iiiiILp", &step->action, &step->chunk, &step->peer, &step->other,
                              &step->label, &step->origin, &step->received_first))
            goto fail;
        if (step->origin < -1 || step->origin >= NO_ORIGIN) {
            PyErr_SetString(PyExc_ValueError, "a step names an origin that no rank has");
            goto fail;
        }
        int computes = step->action == REDUCE || step->action == COPY;
        if (step->action < SEND || step->action > SCALE || step->chunk < 0 || step->chunk >= chunks || step->other >= chunks ||
            (computes && step->other < 0)) {
            PyErr_SetString(PyExc_ValueError, "a step names a chunk that the schedule does not have");
            goto fail;
        }
        unsigned long ordinal = PyLong_AsUnsignedLong(PyTuple_GetItem(ordinals, i));
        if (ordinal == (unsigned long)-1 && PyErr_Occurred())
            goto fail;
        if (ordinal > UINT32_MAX) {
            PyErr_SetString(PyExc_ValueError, "a step has a number that no header holds");
            goto fail;
        }
        step->ordinal = (uint32_t)ordinal;
        if (read_needs(PyTuple_GetItem(needs, i), self->count, step) ||
            read_numbers(PyTuple_GetItem(wakes, i), self->count, &step->wakes, &step->wake) ||
            read_numbers(PyTuple_GetItem(sharers, i), self->count, &step->sharers, &step->sharer))
            goto fail;
        long heir = PyLong_AsLong(PyTuple_GetItem(heirs, i));
        if (heir == -1 && PyErr_Occurred())
            goto fail;
        if (heir < -1 || heir >= self->count) {
            PyErr_SetString(PyExc_ValueError, "a program names a step that it does not have");
            goto fail;
        }
        step->heir = (int)heir;
    }
    for (int i = 0; i < self->count; i++) { /* whoever inherits or shares writes what this step has, and nothing else */
        Step *step = &self->steps[i];
        int same = step->heir < 0 || (step->action == REDUCE && writes_same(self, step, step->heir, 0));
        for (int k = 0; same && k < step->sharers; k++)
            same = step->action != REDUCE && writes_same(self, step, step->sharer[k], 1);
        if (!same) {
            PyErr_SetString(PyExc_ValueError, "a program passes a chunk on as another");
            goto fail;
        }
    }
    return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

static PyType_Slot program_slots[] = {
    {Py_tp_dealloc, program_dealloc},
    {Py_tp_doc, "The steps of a schedule as numbers."},
    {0, NULL},
};
static PyType_Spec program_spec = {"ringfence.dataplane._core.Program", sizeof(Program), 0, MADE_HERE, program_slots};

/* -- one end of a link: the part that moves bytes -------------------------------------------------------------------- */

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

static int end_traverse(End *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->ready);
    Py_VISIT(self->blocked);
    Py_VISIT(self->queue);
    Py_VISIT(self->stream);
    Py_VISIT(self->sealer);
    Py_VISIT(self->opener);
    Py_VISIT(self->pool);
    return 0; /* not what `unsent_view` holds: the collector would clear a memoryview in use, which it survives badly */
}

static void end_forget_unsent(End *self) {
    self->pieces = 0;
    if (self->unsent_view.obj != NULL)
        PyBuffer_Release(&self->unsent_view);
}

static int end_clear(End *self) {
    end_forget_unsent(self);
    Py_CLEAR(self->ready);
    Py_CLEAR(self->blocked);
    Py_CLEAR(self->queue);
    Py_CLEAR(self->stream);
    Py_CLEAR(self->sealer);
    Py_CLEAR(self->opener);
    Py_CLEAR(self->sending);
    Py_CLEAR(self->receiving);
    Py_CLEAR(self->pool);
    return 0;
}

static void end_dealloc(End *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    end_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static struct PyModuleDef core_module;

/* The state of the module whose End a type is, or is derived from. NULL: an error is set. */
static State *state_of(PyTypeObject *type) {
    for (; type != NULL; type = PyType_GetSlot(type, Py_tp_base)) {
        PyObject *module = PyType_GetModule(type);
        if (module != NULL && PyModule_GetDef(module) == &core_module)
            return PyModule_GetState(module);
        PyErr_Clear();
    }
    PyErr_SetString(PyExc_TypeError, "this is not the end of a link");
    return NULL;
}

static PyObject *end_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)args;
    (void)keywords;
    State *state = state_of(type);
    End *self = state == NULL ? NULL : (End *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    self->queue = PyObject_CallNoArgs(state->deque_type);
    self->stream = Py_NewRef(Py_None);
    self->sealer = Py_NewRef(Py_None);
    self->opener = Py_NewRef(Py_None);
    if (self->queue == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int end_init(End *self, PyObject *args, PyObject *keywords) {
    static char *names[] = {"ready", "blocked", "pool", NULL};
    PyObject *ready, *blocked, *pool;
    State *state = state_of(Py_TYPE((PyObject *)self));
    if (state == NULL || !PyArg_ParseTupleAndKeywords(args, keywords, "OO!O!", names, &ready, &PySet_Type, &blocked,
                                                      (PyTypeObject *)state->pool_type, &pool))
        return -1;
    if (self->pool != NULL || self->queue == NULL) { /* what is at work relies on these to stay */
        PyErr_SetString(PyExc_RuntimeError, "the end of a link is made once");
        return -1;
    }
    self->ready = Py_NewRef(ready);
    self->blocked = Py_NewRef(blocked);
    self->pool = (Pool *)Py_NewRef(pool);
    return 0;
}

static int is_end(State *state, PyObject *object) {
    if (PyObject_TypeCheck(object, (PyTypeObject *)state->end_type) && ((End *)object)->pool != NULL)
        return 1;
    PyErr_SetString(PyExc_TypeError, "this is not the end of a link");
    return 0;
}

/* Of an End: whether it was made as one is made. */
static int is_whole(End *self) {
    if (self->pool == NULL)
        PyErr_SetString(PyExc_TypeError, "this is not the end of a link");
    return self->pool != NULL;
}

static PyObject *end_get_stream(End *self, void *unused) {
    (void)unused;
    return Py_NewRef(self->stream == NULL ? Py_None : self->stream);
}

static int end_set_stream(End *self, PyObject *stream, void *unused) {
    (void)unused;
    REPLACE(self->stream, Py_NewRef(stream == NULL ? Py_None : stream));
    return 0;
}

/* Have the engine call `work` soon. */
static int wake(End *self) {
    if (self->queued)
        return 0;
    self->queued = 1;
    PyObject *done = PyObject_CallMethodObjArgs(self->ready, self->pool->state->s_append, (PyObject *)self, NULL);
    Py_XDECREF(done);
    if (done == NULL)
        self->queued = 0;
    return done == NULL ? -1 : 0;
}

/* 0: bytes may be moved, and `busy` is set until the caller takes it back; -1: somebody does already. */
static int begin_to_move(End *self) {
    if (self->busy) {
        PyErr_SetString(PyExc_RuntimeError, "a link was used by something that was called while it moved bytes");
        return -1;
    }
    self->busy = 1;
    return 0;
}

static PyObject *end_wake(End *self, PyObject *unused) {
    (void)unused;
    if (!is_whole(self) || wake(self))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *end_notify(End *self, PyObject *const *args, Py_ssize_t count) {
    if (!is_whole(self))
        return NULL;
    if (count < 2 || count > 3) {
        PyErr_SetString(PyExc_TypeError, "notify(readable, writable, ended=False)");
        return NULL;
    }
    int truths[3] = {0, 0, 0};
    for (Py_ssize_t i = 0; i < count; i++)
        if ((truths[i] = PyObject_IsTrue(args[i])) < 0)
            return NULL;
    self->readable |= (char)truths[0];
    self->writable |= (char)truths[1];
    self->ended |= (char)truths[2];
    if (wake(self))
        return NULL;
    Py_RETURN_NONE;
}

/* put(frame, segment=None): what to write next; `segment` goes back to the pool afterwards. */
static PyObject *end_put(End *self, PyObject *const *args, Py_ssize_t count) {
    if (!is_whole(self))
        return NULL;
    PyTypeObject *segment_type = (PyTypeObject *)self->pool->state->segment_type;
    if (count < 1 || count > 2 || (count == 2 && args[1] != Py_None && !Py_IS_TYPE(args[1], segment_type))) {
        PyErr_SetString(PyExc_TypeError, "put(frame, segment=None)");
        return NULL;
    }
    if (!self->pieces && !self->busy)
        end_forget_unsent(self);
    Py_buffer frame;
    if (PyObject_GetBuffer(args[0], &frame, PyBUF_SIMPLE))
        return NULL;
    if (self->pieces || self->busy) { /* asked last: an exporter may be Python code, which may have put something */
        PyBuffer_Release(&frame);
        PyErr_SetString(PyExc_RuntimeError, "a frame is still being written");
        return NULL;
    }
    self->unsent_view = frame;
    self->unsent[0] = (struct iovec){frame.buf, (size_t)frame.len};
    self->pieces = 1;
    REPLACE(self->sending, count == 2 && args[1] != Py_None ? (Segment *)Py_NewRef(args[1]) : NULL);
    Py_RETURN_NONE;
}

/* A stream that is no socket, asked through its method; takes over the view. -1: an error is set; -2: none now. */
static Py_ssize_t ask_stream(End *self, PyObject *method, PyObject *view) {
    if (view == NULL)
        return -1;
    State *state = self->pool->state;
    PyObject *stream = Py_NewRef(self->stream); /* it may close the link, and so be forgotten, while it is asked */
    PyObject *number = PyObject_CallMethodObjArgs(stream, method, view, NULL);
    Py_DECREF(stream);
    if (PyMemoryView_Check(view))
        end_view(state, view);
    else
        Py_DECREF(view);
    if (number == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_BlockingIOError))
            return -1;
        PyErr_Clear();
        return -2;
    }
    Py_ssize_t moved = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (moved < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a stream moved a negative number of bytes");
    return moved < 0 ? -1 : moved;
}

static int is_socket(End *self) { return Py_IS_TYPE(self->stream, (PyTypeObject *)self->pool->state->socket_type); }

/* Asked each time: somebody else may close the socket, and its number may be another one's at once. -1: an error is set. */
static int descriptor_of(End *self) {
    PyObject *stream = Py_NewRef(self->stream);
    PyObject *number = PyObject_CallMethodObjArgs(stream, self->pool->state->s_fileno, NULL);
    Py_DECREF(stream);
    if (number == NULL)
        return -1;
    long descriptor = PyLong_AsLong(number);
    Py_DECREF(number);
    if (descriptor == -1 && PyErr_Occurred())
        return -1;
    if (descriptor < 0 || descriptor > INT_MAX) {
        errno = EBADF;
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    return (int)descriptor;
}

/* After a system call that failed. 0: call again; -1: an error is set; -2: nothing moves now. A signal's handler may have
 * closed the link: then there is no socket to call again. */
static int after_errno(End *self) {
    if (errno == EAGAIN || errno == EWOULDBLOCK)
        return -2;
    if (errno != EINTR) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    if (PyErr_CheckSignals())
        return -1;
    if (!is_socket(self)) {
        PyErr_SetString(PyExc_RuntimeError, "this end of a link is closed");
        return -1;
    }
    return 0;
}

/* Bytes that the kernel took; -1: an error is set; -2: none now. */
static Py_ssize_t write_some(End *self) {
    while (is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        struct msghdr message = {.msg_iov = self->unsent, .msg_iovlen = (size_t)self->pieces};
        ssize_t sent = sendmsg(descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0)
            return sent;
        int state = after_errno(self);
        if (state < 0)
            return state;
    }
    char *first = self->unsent[0].iov_base;
    Py_ssize_t length = (Py_ssize_t)self->unsent[0].iov_len;
    Segment *segment = self->sending;
    if (segment != NULL && first >= segment->at && first + length <= segment->at + FRAME_BYTES)
        return ask_stream(self, self->pool->state->s_send, view_of(in_segment(segment, first - segment->at, length)));
    return ask_stream(self, self->pool->state->s_send, copy_of(first, length));
}

/* Bytes that were read to `offset` of the segment; -1 and -2 as above. */
static Py_ssize_t read_some(End *self, Segment *segment, Py_ssize_t offset, Py_ssize_t room) {
    while (is_socket(self)) {
        int descriptor = descriptor_of(self);
        if (descriptor < 0)
            return -1;
        ssize_t got = recv(descriptor, segment->at + offset, (size_t)room, MSG_DONTWAIT);
        if (got >= 0)
            return got;
        int state = after_errno(self);
        if (state < 0)
            return state;
    }
    Py_ssize_t got = ask_stream(self, self->pool->state->s_recv_into, view_of(in_segment(segment, offset, room)));
    if (got > room) {
        PyErr_SetString(PyExc_ValueError, "a stream read more than there was room for");
        return -1;
    }
    return got;
}

/* Strike what the kernel took. -1: it took more than there was. */
static int strike(End *self, size_t sent) {
    int first = 0;
    while (first < self->pieces && sent >= self->unsent[first].iov_len) /* an empty piece goes too */
        sent -= self->unsent[first++].iov_len;
    self->pieces -= first;
    memmove(self->unsent, self->unsent + first, (size_t)self->pieces * sizeof(struct iovec));
    if (self->pieces) {
        self->unsent[0].iov_base = (char *)self->unsent[0].iov_base + sent;
        self->unsent[0].iov_len -= sent;
    } else if (sent) {
        PyErr_SetString(PyExc_ValueError, "a stream took more than it was given");
        return -1;
    }
    return 0;
}

/* Write what is left of a frame. 1: nothing is left; 0: the kernel takes no more now; -1: an error is set. */
static int flush(End *self) {
    if (!self->pieces)
        return 1;
    while (self->pieces && self->writable) {
        if (self->stream == Py_None) {
            PyErr_SetString(PyExc_RuntimeError, "this end of a link is closed");
            return -1;
        }
        size_t offered = self->unsent[0].iov_len; /* a stream that is no socket takes one piece at a time */
        for (int i = 1; is_socket(self) && i < self->pieces; i++)
            offered += self->unsent[i].iov_len;
        Start start = start_clock();
        Py_ssize_t sent = write_some(self);
        stop_clock(IN_SEND, start, self->spent, self->worker);
        if (sent > 0)
            self->wire_sent += (unsigned long long)sent;
        if (sent == -1 || (sent >= 0 && strike(self, (size_t)sent)))
            return -1;
        if (sent < 0 || (size_t)sent < offered)
            self->writable = 0; /* the buffer is full: the next edge says when to go on */
    }
    if (self->pieces) {
        PyObject *done = PyObject_CallMethodObjArgs(self->blocked, self->pool->state->s_add, (PyObject *)self, NULL);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    end_forget_unsent(self);
    if (self->sending != NULL) {
        pool_give(self->pool, self->sending);
        self->sending = NULL;
    }
    if (PySet_Size(self->blocked) && PySet_Discard(self->blocked, (PyObject *)self) < 0)
        return -1;
    return 1;
}

static PyObject *end_flush(End *self, PyObject *unused) {
    (void)unused;
    if (!is_whole(self) || begin_to_move(self))
        return NULL;
    int flushed = flush(self);
    self->busy = 0;
    return flushed < 0 ? NULL : PyBool_FromLong(flushed);
}

static PyObject *end_pending(End *self, void *unused) {
    (void)unused;
    return PyBool_FromLong(self->pieces > 0);
}

static PyMethodDef end_methods[] = {
    {"wake", (PyCFunction)end_wake, METH_NOARGS, "Have the engine call `work` soon."},
    {"notify", (PyCFunction)(void (*)(void))end_notify, METH_FASTCALL, "The stream's state changed."},
    {"put", (PyCFunction)(void (*)(void))end_put, METH_FASTCALL, "Write this next."},
    {"flush", (PyCFunction)end_flush, METH_NOARGS, "Write what is left; True when nothing is."},
    {NULL},
};
static PyMemberDef end_members[] = {
    {"readable", T_BOOL, offsetof(End, readable), 0, NULL},
    {"writable", T_BOOL, offsetof(End, writable), 0, NULL},
    {"ended", T_BOOL, offsetof(End, ended), 0, NULL},
    {"open", T_BOOL, offsetof(End, open), 0, NULL},
    {"queued", T_BOOL, offsetof(End, queued), 0, NULL},
    {"queue", T_OBJECT_EX, offsetof(End, queue), READONLY, NULL},
    {"sealer", T_OBJECT_EX, offsetof(End, sealer), 0, NULL},
    {"opener", T_OBJECT_EX, offsetof(End, opener), 0, NULL},
    {"far_end", T_INT, offsetof(End, worker), 0, "The worker there, for the events of the clock."},
    {"wire_sent", T_ULONGLONG, offsetof(End, wire_sent), 0, NULL},
    {"wire_received", T_ULONGLONG, offsetof(End, wire_received), 0, NULL},
    {"payload_sent", T_ULONGLONG, offsetof(End, payload_sent), 0, NULL},
    {"payload_received", T_ULONGLONG, offsetof(End, payload_received), 0, NULL},
    {"waits", T_ULONGLONG, offsetof(End, waits), 0, NULL},
    {"waited", T_ULONGLONG, offsetof(End, waited), 0, NULL},
    {NULL},
};

static PyObject *end_spent(End *self, void *unused) {
    (void)unused;
    PyObject *result = PyTuple_New(STAGES);
    for (int i = 0; result != NULL && i < STAGES; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(self->spent[i]);
        if (number == NULL)
            Py_CLEAR(result);
        else
            PyTuple_SetItem(result, i, number); /* takes the reference */
    }
    return result;
}

static PyGetSetDef end_getset[] = {
    {"stream", (getter)end_get_stream, (setter)end_set_stream, "A socket, or anything with send and recv_into.", NULL},
    {"pending", (getter)end_pending, NULL, "Whether a frame is half written.", NULL},
    {"spent", (getter)end_spent, NULL, "Nanoseconds by stage while the clock was on.", NULL},
    {NULL},
};

static PyType_Slot end_slots[] = {
    {Py_tp_dealloc, end_dealloc},
    {Py_tp_traverse, end_traverse},
    {Py_tp_clear, end_clear},
    {Py_tp_methods, end_methods},
    {Py_tp_members, end_members},
    {Py_tp_getset, end_getset},
    {Py_tp_init, end_init},
    {Py_tp_new, end_new},
    {Py_tp_doc, "One end of a link: the part that moves bytes."},
    {0, NULL},
};
static PyType_Spec end_spec = {"ringfence.dataplane._core.End", sizeof(End), 0, FIXED | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                               end_slots};

/* -- runs ------------------------------------------------------------------------------------------------------------ */

typedef struct {
    Py_buffer held; /* for as long as the run: nobody releases or resizes what is under it, but torch (see check_memory) */
    char *at;
    Py_ssize_t length, each;
    PyObject *exporter; /* of the view that `held` is of; borrowed from it */
    PyObject *lease, *storage, *address, *nbytes; /* of the tensor that the memory is (memory.py); NULL if it is none */
} Chunk;

typedef struct {
    Py_ssize_t done, segments;
    End *link;
} Progress;

typedef struct {
    int step;
    Py_ssize_t position;
    Segment *segment;
} Kept;

#define MOST_KEPT 8 /* sums that wait to be sealed; further ones are written to the chunk, where there is room for them */

enum { ADD_NOT, ADD_F32, ADD_F64, ADD_I32, ADD_I64, ADD_BF16 };

typedef struct {
    PyObject_HEAD
    Program *program;
    PyObject *group, *operation, *finished, *views, *keeper, *dtype, *combine, *divisor; /* views: a tuple */
    Pool *pool;
    Chunk *chunks;
    Progress *progress;
    Kept *kept; /* ciphertext to pass on, sums to seal */
    int keeping, room;
    int left, add;
    char started;
    char broken; /* something failed half-way: no further segment of it may be sealed or opened, whoever asks */
    uint32_t base;
    unsigned char header[HEADER_BYTES]; /* what all frames of the run share */
} Run;

static int run_traverse(Run *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->group);
    Py_VISIT(self->operation);
    Py_VISIT(self->finished);
    Py_VISIT(self->views);
    Py_VISIT(self->keeper);
    Py_VISIT(self->combine);
    Py_VISIT(self->pool);
    for (int i = 0; self->progress != NULL && i < self->program->count; i++)
        Py_VISIT(self->progress[i].link);
    for (int i = 0; self->chunks != NULL && i < self->program->chunks; i++) {
        Py_VISIT(self->chunks[i].lease); /* not what `held` holds, as in end_traverse */
        Py_VISIT(self->chunks[i].storage);
    }
    return 0;
}

static int run_clear(Run *self) {
    Py_CLEAR(self->group);
    Py_CLEAR(self->operation);
    Py_CLEAR(self->finished);
    Py_CLEAR(self->combine);
    for (int i = 0; self->progress != NULL && i < self->program->count; i++)
        Py_CLEAR(self->progress[i].link);
    return 0;
}

static void run_dealloc(Run *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    run_clear(self);
    for (int i = 0; i < self->keeping; i++)
        Py_DECREF(self->kept[i].segment);
    PyMem_Free(self->kept);
    PyMem_Free(self->progress);
    for (int i = 0; self->chunks != NULL && i < self->program->chunks; i++) {
        Chunk *chunk = &self->chunks[i];
        PyBuffer_Release(&chunk->held);
        Py_XDECREF(chunk->lease);
        Py_XDECREF(chunk->storage);
        Py_XDECREF(chunk->address);
        Py_XDECREF(chunk->nbytes);
    }
    PyMem_Free(self->chunks);
    Py_CLEAR(self->program);
    Py_CLEAR(self->views);
    Py_CLEAR(self->keeper);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->divisor);
    Py_CLEAR(self->pool);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static void put32(unsigned char *at, uint32_t value) {
    value = htobe32(value);
    memcpy(at, &value, 4);
}

static void put64(unsigned char *at, uint64_t value) {
    value = htobe64(value);
    memcpy(at, &value, 8);
}

static Py_ssize_t segment_length(State *state, Py_ssize_t length) {
    PyObject *number = PyObject_CallFunction(state->segment_bytes_of, "n", length);
    if (number == NULL)
        return -1;
    Py_ssize_t each = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (each <= 0 || each > SEGMENT_BYTES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "segments of a length that no frame holds");
        return -1;
    }
    return each;
}

/* Note what the chunk's storage is and where its memory lies. A chunk of the same tensor as the one before is not asked. */
static int read_lease(State *state, Chunk *chunk, const Chunk *before) {
    PyObject *exporter = PyObject_GetAttr(chunk->held.obj, state->s_obj);
    if (exporter == NULL)
        return -1;
    chunk->exporter = exporter;
    Py_DECREF(exporter); /* the view keeps it */
    if (exporter == Py_None || PyByteArray_Check(exporter))
        return 0;
    if (before != NULL && before->lease != NULL && exporter == before->exporter) {
        chunk->lease = Py_NewRef(before->lease);
        chunk->storage = Py_NewRef(before->storage);
        chunk->address = Py_NewRef(before->address);
        chunk->nbytes = Py_NewRef(before->nbytes);
        return 0;
    }
    PyObject *lease = PyObject_GetAttr(exporter, state->s_lease);
    if (lease == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError))
        return -1;
    if (lease == NULL || lease == Py_None) {
        PyErr_Clear();
        Py_XDECREF(lease);
        return 0;
    }
    chunk->lease = lease;
    chunk->storage = PyObject_GetAttr(lease, state->s_storage);
    chunk->address = PyObject_GetAttr(lease, state->s_address);
    chunk->nbytes = PyObject_GetAttr(lease, state->s_nbytes);
    return chunk->storage == NULL || chunk->address == NULL || chunk->nbytes == NULL ? -1 : 0;
}

static int bind_chunks(Run *self) {
    Py_ssize_t known = -1, each = 0;
    for (int i = 0; i < self->program->chunks; i++) {
        Chunk *chunk = &self->chunks[i];
        PyObject *view = PyTuple_GetItem(self->views, i);
        int is_view = PyMemoryView_Check(view);
        if (is_view && PyObject_GetBuffer(view, &chunk->held, PyBUF_WRITABLE))
            return -1;
        if (!is_view || chunk->held.itemsize != 1) { /* a memoryview says what its items take, whatever it is asked for */
            PyErr_SetString(PyExc_TypeError, "a run is bound to views of bytes");
            return -1;
        }
        if (read_lease(self->pool->state, chunk, i ? chunk - 1 : NULL))
            return -1;
        chunk->at = chunk->held.buf;
        chunk->length = chunk->held.len;
        if (chunk->length != known) {
            known = chunk->length;
            each = segment_length(self->pool->state, known);
            if (each < 0)
                return -1;
        }
        chunk->each = each;
    }
    for (int i = 0; i < self->program->count; i++) {
        Step *step = &self->program->steps[i];
        Chunk *chunk = &self->chunks[step->chunk];
        Py_ssize_t segments = (chunk->length + chunk->each - 1) / chunk->each;
        self->progress[i].segments = segments ? segments : 1;
        if (step->other >= 0 && self->chunks[step->other].length != chunk->length) {
            PyErr_SetString(PyExc_ValueError, "the two operands of a step differ in length");
            return -1;
        }
    }
    return 0;
}

/* Run(group, program, sequence, call, views, keeper, dtype, combine, base, finished, native) */
static PyObject *run_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)keywords;
    PyObject *group, *program, *views, *keeper, *dtype, *combine, *finished;
    unsigned long long sequence;
    const char *call, *instance;
    Py_ssize_t call_length, instance_length;
    unsigned int base;
    int add;
    PyObject *pool, *divisor;
    State *state = PyType_GetModuleState(type); /* ours, as in pool_new */
    if (!PyArg_ParseTuple(args, "OO!Ky#O!OOOIOiy#O!O", &group, (PyTypeObject *)state->program_type, &program, &sequence, &call,
                          &call_length, &PyList_Type, &views, &keeper, &dtype, &combine, &base, &finished, &add, &instance,
                          &instance_length, (PyTypeObject *)state->pool_type, &pool, &divisor))
        return NULL;
    views = PyList_AsTuple(views); /* the list is somebody else's, to change */
    if (views == NULL)
        return NULL;
    if (call_length != CALL_BYTES || instance_length != INSTANCE_BYTES || PyTuple_Size(views) != ((Program *)program)->chunks ||
        add < ADD_NOT || add > ADD_BF16) {
        PyErr_SetString(PyExc_ValueError, "a run is bound to something else than its program");
        Py_DECREF(views);
        return NULL;
    }
    Run *self = (Run *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        Py_DECREF(views);
        return NULL;
    }
    self->program = (Program *)Py_NewRef(program);
    self->group = Py_NewRef(group);
    self->operation = Py_NewRef(Py_None);
    self->finished = Py_NewRef(finished);
    self->views = views;
    self->keeper = Py_NewRef(keeper);
    self->dtype = Py_NewRef(dtype);
    self->combine = Py_NewRef(combine);
    self->divisor = Py_NewRef(divisor);
    self->pool = (Pool *)Py_NewRef(pool);
    self->base = base;
    self->add = add;
    self->left = self->program->count;
    put32(self->header + 28, NO_ORIGIN);
    put64(self->header + 32, sequence);
    memcpy(self->header + INSTANCE_AT, instance, INSTANCE_BYTES);
    memcpy(self->header + CALL_AT, call, CALL_BYTES);
    self->chunks = PyMem_Calloc((size_t)self->program->chunks + 1, sizeof(Chunk));
    self->progress = PyMem_Calloc((size_t)self->program->count + 1, sizeof(Progress));
    if (self->chunks == NULL || self->progress == NULL)
        PyErr_NoMemory();
    if (self->chunks == NULL || self->progress == NULL || bind_chunks(self)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static Place in_chunk(Run *self, int chunk, Py_ssize_t position) {
    Chunk *c = &self->chunks[chunk];
    Py_ssize_t offset = position * c->each;
    Py_ssize_t left = c->length - offset;
    Py_ssize_t length = left < c->each ? (left > 0 ? left : 0) : c->each;
    return (Place){c->held.obj, offset, length, c->at + offset};
}

/* 1: the method returns what it did when the call was made; 0: something else; -1: an error is set. */
static int still(PyObject *storage, PyObject *method, PyObject *then) {
    PyObject *now = PyObject_CallMethodObjArgs(storage, method, NULL);
    int same = now == NULL ? -1 : PyObject_RichCompareBool(now, then, Py_EQ);
    Py_XDECREF(now);
    return same;
}

static int memory_changed(Run *self, PyObject *lease) {
    PyObject *method = self->pool->state->s_memory_changed, *operation = Py_XNewRef(self->operation);
    PyObject *done = operation == NULL ? NULL : PyObject_CallMethodObjArgs(operation, method, lease, NULL);
    Py_XDECREF(operation);
    Py_XDECREF(done);
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "the memory of a tensor changed while a collective used it");
    return -1;
}

/* The program may have resized the tensor's storage, or moved it to shared memory, while others had the interpreter's
 * lock: then its memory is freed, whoever refers to the storage. Asked before each use of a chunk's memory, with nothing in
 * between that gives up the lock. 0: the memory is there; -1: an error is set. */
static int check_memory(Run *self, int chunk) {
    Chunk *c = &self->chunks[chunk];
    if (c->storage == NULL)
        return 0;
    State *state = self->pool->state;
    int same = still(c->storage, state->s_data_ptr, c->address);
    if (same == 1)
        same = still(c->storage, state->s_nbytes, c->nbytes); /* another piece of memory may have come to lie at the old address */
    return same == 0 ? memory_changed(self, c->lease) : same == 1 ? 0 : -1;
}

/* Asked after each use that gave up the lock itself. What it did to memory that went meanwhile cannot be undone, but nothing
 * comes of it, neither a frame nor a result. */
static int check_address(Run *self, int chunk) {
    Chunk *c = &self->chunks[chunk];
    int same = c->storage == NULL ? 1 : still(c->storage, self->pool->state->s_data_ptr, c->address);
    return same == 0 ? memory_changed(self, c->lease) : same == 1 ? 0 : -1;
}

/* Whether the step's next segment may be done. */
static int is_ready(Run *self, int index) {
    if (self->broken)
        return 0;
    Step *step = &self->program->steps[index];
    Py_ssize_t segment = self->progress[index].done;
    for (int i = 0; i < step->needs; i++) {
        Progress *needed = &self->progress[step->need[i].step];
        if (needed->done < (step->need[i].by_segment ? segment + 1 : needed->segments))
            return 0;
    }
    return 1;
}

static int do_local(Run *self, int index);

static int end_of_run(Run *self) {
    PyObject *finished = self->finished; /* the callback holds this run: leave no cycle behind */
    self->finished = Py_NewRef(Py_None);
    PyObject *done = PyObject_CallNoArgs(finished);
    Py_DECREF(finished);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int advance(Run *self, int index) {
    Progress *mine = &self->progress[index];
    Step *step = &self->program->steps[index];
    mine->done++;
    if (mine->done == mine->segments)
        self->left--;
    for (int i = 0; i < step->wakes; i++) {
        int other = step->wake[i];
        if (self->progress[other].link != NULL) {
            if (wake(self->progress[other].link))
                return -1;
        } else if (self->program->steps[other].action >= COPY && do_local(self, other))
            return -1;
    }
    if (!self->left) {
        self->left = -1;
        return end_of_run(self);
    }
    return 0;
}

/* These views are not ended after the call: torch makes tensors of them, and who keeps one of those keeps the memory. */
static int divide(Run *self, Place place) {
    PyObject *view = view_of(place);
    if (view == NULL)
        return -1;
    PyObject *done = PyObject_CallFunctionObjArgs(self->pool->state->divide_bytes, self->dtype, view, self->divisor, NULL);
    Py_DECREF(view);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int do_local(Run *self, int index) {
    Step *step = &self->program->steps[index];
    Progress *progress = &self->progress[index];
    while (progress->done < progress->segments && is_ready(self, index)) {
        Place target = in_chunk(self, step->chunk, progress->done);
        int copies = step->action == COPY;
        Start start = start_clock();
        if ((copies && check_memory(self, step->other)) || check_memory(self, step->chunk))
            return -1;
        if (copies)
            memmove(target.at, in_chunk(self, step->other, progress->done).at, (size_t)target.length);
        else if (divide(self, target) || check_address(self, step->chunk))
            return -1;
        stop_clock(IN_REDUCE, start, NULL, -1);
        if (advance(self, index))
            return -1;
    }
    return 0;
}

/* Queue every message on its link, in program order, and do the local steps that can be done. */
static PyObject *run_start(Run *self, PyObject *unused) {
    (void)unused;
    if (self->started || self->group == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a run is started once, and not after the garbage collector had it");
        return NULL;
    }
    self->started = 1;
    if (!self->left) {
        if (end_of_run(self))
            return NULL;
        Py_RETURN_NONE;
    }
    State *state = self->pool->state;
    for (int i = 0; i < self->program->count; i++) {
        Step *step = &self->program->steps[i];
        if (step->action > REDUCE)
            continue;
        PyObject *peer = PyLong_FromLong(step->peer);
        if (peer == NULL)
            return NULL;
        PyObject *method = step->action == SEND ? state->s_outbox : state->s_inbox;
        PyObject *link = PyObject_CallMethodObjArgs(self->group, method, peer, NULL);
        Py_DECREF(peer);
        if (link == NULL || !is_end(state, link)) {
            Py_XDECREF(link);
            return NULL;
        }
        REPLACE(self->progress[i].link, (End *)link);
        PyObject *entry = Py_BuildValue("Oi", self, i);
        PyObject *done = entry == NULL ? NULL : PyObject_CallMethodObjArgs(((End *)link)->queue, state->s_append, entry, NULL);
        Py_XDECREF(entry);
        Py_XDECREF(done);
        if (done == NULL || wake((End *)link))
            return NULL;
    }
    for (int i = 0; i < self->program->count; i++)
        if (self->program->steps[i].action > REDUCE && do_local(self, i))
            return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef run_methods[] = {
    {"start", (PyCFunction)run_start, METH_NOARGS, "Queue every message on its link and do what can be done."}, {NULL}};
static PyMemberDef run_members[] = {{"operation", T_OBJECT_EX, offsetof(Run, operation), 0, NULL}, {NULL}};

static PyType_Slot run_slots[] = {
    {Py_tp_dealloc, run_dealloc},
    {Py_tp_traverse, run_traverse},
    {Py_tp_clear, run_clear},
    {Py_tp_methods, run_methods},
    {Py_tp_members, run_members},
    {Py_tp_new, run_new},
    {Py_tp_doc, "One pass: a program, the memory of each chunk, and how far each step has come."},
    {0, NULL},
};
static PyType_Spec run_spec = {"ringfence.dataplane._core.Run", sizeof(Run), 0, FIXED | Py_TPFLAGS_HAVE_GC, run_slots};

/* -- sealing ---------------------------------------------------------------------------------------------------------- */

/* A new reference to the half of a link that seals or opens: it may be replaced while it is called. NULL: there is none. */
static PyObject *half_of(PyObject *half) {
    if (half == NULL)
        PyErr_SetString(PyExc_RuntimeError, "this end of a link has no keys");
    return Py_XNewRef(half);
}

static int read_counter(State *state, PyObject *half, uint64_t *counter) {
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
static int with_views(State *state, PyObject *half, PyObject *method, PyObject *const *numbers, int count, const void *header,
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

static void write_header(Run *self, int index, Py_ssize_t position, int type, uint64_t counter, Py_ssize_t length, uint32_t origin,
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
static int frame_for_hop(End *link, Step *step, uint64_t counter, Segment *segment, Py_ssize_t end) {
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

static int seal_as_origin(Run *self, int index, Py_ssize_t position, uint64_t counter, Segment *segment, Place payload) {
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

static Segment *take_kept(Run *self, int index, Py_ssize_t position) {
    for (int i = 0; i < self->keeping; i++) {
        Kept *kept = &self->kept[i];
        if (kept->step == index && kept->position == position) {
            Segment *segment = kept->segment;
            *kept = self->kept[--self->keeping];
            return segment;
        }
    }
    return NULL;
}

/* Takes over the reference to the segment, also when it fails. */
static int keep(Run *self, int index, Py_ssize_t position, Segment *segment) {
    if (self->keeping == self->room) {
        int room = self->room ? 2 * self->room : 8;
        Kept *kept = PyMem_Realloc(self->kept, (size_t)room * sizeof(Kept));
        if (kept == NULL) {
            Py_DECREF(segment);
            PyErr_NoMemory();
            return -1;
        }
        self->kept = kept;
        self->room = room;
    }
    self->kept[self->keeping++] = (Kept){index, position, segment};
    return 0;
}

/* Give the ciphertext to those who write the same and have not come so far; each holds it until it has. */
static int share(Run *self, Step *step, Py_ssize_t position, Segment *segment) {
    for (int i = 0; i < step->sharers; i++)
        if (self->progress[step->sharer[i]].done <= position &&
            keep(self, step->sharer[i], position, (Segment *)Py_NewRef((PyObject *)segment)))
            return -1;
    return 0;
}

/* Write a frame's header and seal its payload, for this hop or as its origin. `inherited`: the segment holds it already. */
static int seal(Run *self, int index, End *link, uint64_t counter, Segment *segment, int inherited) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Place payload = in_chunk(self, step->chunk, position);
    unsigned char *frame = (unsigned char *)segment->at;
    if (inherited)
        payload = in_segment(segment, HEADER_BYTES, payload.length); /* sealed where it lies */
    else if (check_memory(self, step->chunk))
        return -1;
    int failed;
    State *state = self->pool->state;
    if (step->origin < 0) {
        write_header(self, index, position, HOP, counter, payload.length, NO_ORIGIN, 0, frame);
        failed = with_views(state, link->sealer, state->s_seal_into, NULL, 0, frame, HEADER_BYTES, payload,
                            in_segment(segment, HEADER_BYTES, payload.length + TAG_BYTES));
    } else
        failed = seal_as_origin(self, index, position, counter, segment, payload);
    if (failed || (!inherited && check_address(self, step->chunk)))
        return -1;
    return step->origin < 0 ? 0 : share(self, step, position, segment);
}

/* The next frame of a SEND, sealed and ready to be written. */
static int seal_next(Run *self, int index, End *link) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Py_ssize_t end = HEADER_BYTES + in_chunk(self, step->chunk, position).length + TAG_BYTES;
    uint64_t counter;
    if (read_counter(link->pool->state, link->sealer, &counter))
        return -1;
    Segment *segment = take_kept(self, index, position); /* ciphertext to pass on, or a sum to seal */
    int failed = 0, inherited = segment != NULL;
    Start start = start_clock();
    if (segment == NULL && (segment = pool_take(self->pool)) == NULL)
        return -1;
    if (step->origin < 0 || !inherited)
        failed = seal(self, index, link, counter, segment, inherited);
    if (!failed && step->origin >= 0)
        failed = frame_for_hop(link, step, counter, segment, end);
    stop_clock(IN_SEAL, start, link->spent, link->worker);
    if (failed) {
        Py_DECREF(segment);
        return -1;
    }
    link->payload_sent += (unsigned long long)(end - HEADER_BYTES - TAG_BYTES);
    if (step->origin < 0) {
        link->unsent[0] = (struct iovec){segment->at, (size_t)end};
        link->pieces = 1;
    }
    REPLACE(link->sending, segment);
    return 0;
}

/* The head of the queue. 1: there is one (`run` is a new reference); 0: none; -1: an error is set. */
static int head_of_queue(End *link, int sends, Run **run, int *index) {
    Py_ssize_t length = PyObject_Size(link->queue);
    if (length <= 0)
        return (int)length;
    PyObject *entry = PySequence_GetItem(link->queue, 0);
    if (entry == NULL)
        return -1;
    int understood = is_tuple(entry) && PyArg_ParseTuple(entry, "O!i", (PyTypeObject *)link->pool->state->run_type, run, index);
    if (understood) {
        int known = *index >= 0 && *index < (*run)->program->count && (*run)->program->steps[*index].action <= REDUCE;
        known = known && (*run)->progress[*index].done < (*run)->progress[*index].segments && (*run)->group != NULL;
        if (known && ((*run)->program->steps[*index].action == SEND) == sends)
            Py_INCREF((PyObject *)*run);
        else {
            PyErr_SetString(PyExc_ValueError, "a step stands in the queue of a link that it does not belong to, or is done");
            understood = 0;
        }
    }
    Py_DECREF(entry);
    return understood ? 1 : -1;
}

static int leave_queue(End *link) {
    PyObject *gone = PyObject_CallMethodObjArgs(link->queue, link->pool->state->s_popleft, NULL);
    Py_XDECREF(gone);
    return gone == NULL ? -1 : 0;
}

/* Have the engine come back if there is more to do. */
static int wake_if_queued(End *link) {
    Py_ssize_t length = PyObject_Size(link->queue);
    return length < 0 || (length && wake(link)) ? -1 : 0;
}

/* Write on; when nothing is left, seal and write the next segment that may leave. */
static int send_on(End *link) {
    int state = flush(link);
    if (state <= 0)
        return state;
    Run *run;
    int index;
    state = head_of_queue(link, 1, &run, &index);
    if (state <= 0)
        return state;
    if (!is_ready(run, index)) {
        Py_DECREF(run);
        return 0;
    }
    int failed = seal_next(run, index, link);
    if (!failed && run->progress[index].done + 1 == run->progress[index].segments)
        failed = leave_queue(link);
    if (!failed)
        failed = advance(run, index);
    run->broken |= failed != 0;
    Py_DECREF(run);
    if (failed)
        return -1;
    state = flush(link);
    return state > 0 ? wake_if_queued(link) : state;
}

static PyObject *core_send(PyObject *module, PyObject *object) {
    if (!is_end(PyModule_GetState(module), object) || begin_to_move((End *)object))
        return NULL;
    int failed = send_on((End *)object) < 0;
    ((End *)object)->busy = 0;
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* -- opening ---------------------------------------------------------------------------------------------------------- */

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
static int reduce(Run *self, Step *step, Py_ssize_t position, Place received, int inherits) {
    Place target = inherits ? received : in_chunk(self, step->chunk, position);
    if (check_operands(self, step, inherits))
        return -1;
    return combine(self, step, target, in_chunk(self, step->other, position), received);
}

static int open_forwarded(Run *self, Step *step, End *link, Segment *segment, Py_ssize_t total, Place target) {
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

/* After a failure: the opener has wiped what it wrote, unless an interrupt kept it from doing so. */
static void wipe_target(Run *self, Step *step, Place target) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (check_memory(self, step->chunk))
        PyErr_Clear(); /* it is no longer there: what failed is said already */
    else
        memset(target.at, 0, (size_t)target.length);
    PyErr_Restore(type, value, trace);
}

/* Open the frame of a RECV or REDUCE into place. Takes over the reference to the segment. */
static int open_next(Run *self, int index, End *link, Segment *segment, Py_ssize_t total) {
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done;
    Place target = in_chunk(self, step->chunk, position);
    Place sealed = in_segment(segment, HEADER_BYTES, target.length + TAG_BYTES);
    Place received = in_segment(segment, HEADER_BYTES, target.length);
    int failed, inherits = 0;
    State *state = self->pool->state;
    Start start = start_clock();
    if (step->action == REDUCE) { /* opened where it lies, then added to the local operand */
        failed = with_views(state, link->opener, state->s_open_into, NULL, 0, link->expected, HEADER_BYTES, sealed, received);
        stop_clock(IN_OPEN, start, link->spent, link->worker);
        if (!failed) {
            start = start_clock();
            inherits = step->heir >= 0 && self->keeping < MOST_KEPT; /* what is only passed on stays where the cipher wants it */
            failed = reduce(self, step, position, received, inherits);
            stop_clock(IN_REDUCE, start, link->spent, link->worker);
        }
    } else {
        if (step->origin < 0)
            failed = check_memory(self, step->chunk) ||
                     with_views(state, link->opener, state->s_open_into, NULL, 0, link->expected, HEADER_BYTES, sealed, target);
        else
            failed = open_forwarded(self, step, link, segment, total, target);
        if (failed)
            wipe_target(self, step, target);
        else
            failed = check_address(self, step->chunk);
        stop_clock(IN_OPEN, start, link->spent, link->worker);
    }
    if (failed) {
        Py_DECREF(segment);
        return -1;
    }
    link->payload_received += (unsigned long long)target.length;
    if (inherits)
        failed = keep(self, step->heir, position, segment);
    else {
        failed = share(self, step, position, segment);
        pool_give(self->pool, segment);
    }
    return failed ? -1 : advance(self, index);
}

/* The header that the next frame must have (a forwarded one's counter aside). 0 when its place is not free yet. */
static int expect(Run *self, int index, End *link) {
    if (!is_ready(self, index))
        return 0;
    Step *step = &self->program->steps[index];
    Py_ssize_t position = self->progress[index].done, length = in_chunk(self, step->chunk, position).length;
    uint64_t counter;
    if (read_counter(link->pool->state, link->opener, &counter))
        return -1;
    Segment *segment = pool_take(self->pool);
    if (segment == NULL)
        return -1;
    REPLACE(link->receiving, segment);
    int forwarded = step->origin >= 0;
    write_header(self, index, position, forwarded ? FORWARD : HOP, counter, length, forwarded ? (uint32_t)step->origin : NO_ORIGIN, 0,
                 link->expected);
    link->total = HEADER_BYTES + length + (forwarded ? 2 : 1) * TAG_BYTES;
    link->have = 0;
    link->expecting = 1;
    link->surprising = 0;
    return 1;
}

/* Whether the header is the expected one; a forwarded frame brings its own counter. Headers are no secrets. */
static int as_expected(End *link) {
    const unsigned char *got = (const unsigned char *)link->receiving->at, *expected = link->expected;
    if (expected[0] != FORWARD)
        return !memcmp(got, expected, HEADER_BYTES);
    return !memcmp(got, expected, COUNTER_AT) && !memcmp(got + COUNTER_END, expected + COUNTER_END, HEADER_BYTES - COUNTER_END);
}

/* The length of a frame that was not expected is its receiver's to say (links.py), or to refuse. */
static int length_of_other(End *link) {
    PyObject *header = copy_of(link->receiving->at, HEADER_BYTES), *method = link->pool->state->s_length_of_other;
    PyObject *number = header == NULL ? NULL : PyObject_CallMethodObjArgs((PyObject *)link, method, header, NULL);
    Py_XDECREF(header);
    if (number == NULL)
        return -1;
    Py_ssize_t total = PyLong_AsSsize_t(number);
    Py_DECREF(number);
    if (total < HEADER_BYTES || total > FRAME_BYTES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a frame of a length that no frame has");
        return -1;
    }
    link->total = total;
    return 0;
}

static void begin_to_wait(End *link) {
    if (!link->waiting_since)
        link->waiting_since = clock_ns(CLOCK_MONOTONIC);
}

static void end_wait(End *link) {
    if (!link->waiting_since)
        return;
    link->waited += clock_ns(CLOCK_MONOTONIC) - link->waiting_since;
    link->waits++;
    link->waiting_since = 0;
}

/* 1: the frame is complete; 0: not yet; -1: an error is set. */
static int read_on(End *link) {
    Py_ssize_t before = link->have, wanted = link->total - before;
    if (wanted <= 0) {
        PyErr_SetString(PyExc_RuntimeError, "a frame that was not expected is waiting to be refused");
        return -1;
    }
    if (link->stream == Py_None) {
        PyErr_SetString(PyExc_RuntimeError, "this end of a link is closed");
        return -1;
    }
    Start start = start_clock();
    Py_ssize_t got = read_some(link, link->receiving, before, wanted);
    stop_clock(IN_RECEIVE, start, link->spent, link->worker);
    if (got == -1)
        return -1;
    if (got == -2) {
        link->readable = 0;
        begin_to_wait(link);
        return 0;
    }
    if (got > 0) {
        link->wire_received += (unsigned long long)got;
        end_wait(link);
    }
    if (got == 0) {
        PyObject *done = PyObject_CallMethodObjArgs((PyObject *)link, link->pool->state->s_ended, NULL);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    link->have += got;
    if (before < HEADER_BYTES && link->have >= HEADER_BYTES) {
        link->surprising = !as_expected(link);
        if (link->surprising && length_of_other(link))
            return -1;
    }
    if (link->have >= link->total)
        return 1;
    if (got < wanted && !link->ended) {
        link->readable = 0; /* drained: the next edge says when to go on */
        begin_to_wait(link);
    } else if (wake(link))
        return -1;
    return 0;
}

/* Nothing can be read now. If a frame is due, this worker waits for its peer. */
static int note_wait(End *link) {
    Run *run;
    int index;
    int state = link->waiting_since ? 0 : head_of_queue(link, 0, &run, &index);
    if (state <= 0)
        return state;
    if (link->expecting || is_ready(run, index))
        begin_to_wait(link);
    Py_DECREF(run);
    return 0;
}

/* Read on; open a segment that is complete. 1: a frame is complete that is not the expected one; 0: none; -1: an error. */
static int receive_on(End *link) {
    if (!link->open || !link->readable)
        return note_wait(link);
    Run *run;
    int index;
    int state = head_of_queue(link, 0, &run, &index);
    if (state <= 0)
        return state;
    if (run->broken)
        state = 0;
    else if (!link->expecting)
        state = expect(run, index, link);
    if (state > 0)
        state = read_on(link);
    if (state <= 0 || link->surprising) {
        Py_DECREF(run);
        return state;
    }
    Segment *segment = link->receiving;
    link->receiving = NULL;
    link->expecting = 0;
    int failed = 0;
    if (run->progress[index].done + 1 == run->progress[index].segments)
        failed = leave_queue(link);
    if (failed)
        Py_DECREF(segment);
    else
        failed = open_next(run, index, link, segment, link->total);
    run->broken |= failed != 0;
    Py_DECREF(run);
    return failed ? -1 : wake_if_queued(link);
}

/* receive(link): returns None, or a frame that is complete and not the expected one. */
static PyObject *core_receive(PyObject *module, PyObject *object) {
    if (!is_end(PyModule_GetState(module), object) || begin_to_move((End *)object))
        return NULL;
    End *link = (End *)object;
    int state = receive_on(link);
    link->busy = 0;
    if (state < 0)
        return NULL;
    if (state > 0)
        return PyBytes_FromStringAndSize(link->receiving->at, link->total);
    Py_RETURN_NONE;
}

/* -- the module ------------------------------------------------------------------------------------------------------- */

/* stages(on) -> nanoseconds by stage since it was last asked */
static PyObject *core_stages(PyObject *module, PyObject *on) {
    (void)module;
    int wanted = PyObject_IsTrue(on);
    PyObject *result = wanted < 0 ? NULL : PyDict_New();
    for (int i = 0; result != NULL && i < STAGES; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(spent[i]);
        if (number == NULL || PyDict_SetItemString(result, stage_names[i], number))
            Py_CLEAR(result);
        Py_XDECREF(number);
        spent[i] = 0;
    }
    if (result != NULL)
        timing = wanted ? timing | TOTALS : timing & ~TOTALS;
    return result;
}

/* events(on) -> a list of (stage, start, end, worker) since it was last asked, on the monotonic clock in nanoseconds */
static PyObject *core_events(PyObject *module, PyObject *on) {
    (void)module;
    int wanted = PyObject_IsTrue(on);
    PyObject *result = wanted < 0 ? NULL : PyList_New(0);
    for (size_t i = 0; result != NULL && i < events.count; i++) {
        Event *event = &events.at[i];
        PyObject *entry = Py_BuildValue("sKKi", stage_names[event->stage], (unsigned long long)event->start,
                                        (unsigned long long)event->end, event->worker);
        if (entry == NULL || PyList_Append(result, entry))
            Py_CLEAR(result);
        Py_XDECREF(entry);
    }
    if (result == NULL)
        return NULL;
    free(events.at);
    memset(&events, 0, sizeof events);
    timing = wanted ? timing | EVENTS : timing & ~EVENTS;
    return result;
}

static PyMethodDef core_methods[] = {
    {"compile", core_compile, METH_VARARGS, "A program as numbers."},
    {"send", core_send, METH_O, "Write on; seal and write the next segment that may leave."},
    {"receive", core_receive, METH_O, "Read on; open a segment that is complete."},
    {"events", core_events, METH_O, "What was done when since it was last asked; keep such events from now on, or not."},
    {"stages", core_stages, METH_O, "Nanoseconds by stage since it was last asked; switch the clock on or off."},
    {NULL},
};

static PyObject *attribute(const char *module, const char *name) {
    PyObject *from = PyImport_ImportModule(module);
    PyObject *found = from == NULL ? NULL : PyObject_GetAttrString(from, name);
    Py_XDECREF(from);
    return found;
}

static int intern_names(State *state) {
    struct {
        PyObject **where;
        const char *text;
    } names[] = {
        {&state->s_add, "add"}, {&state->s_append, "append"}, {&state->s_check, "check"}, {&state->s_counter, "counter"},
        {&state->s_fileno, "fileno"}, {&state->s_inbox, "inbox"}, {&state->s_open_into, "open_into"},
        {&state->s_origin, "origin"}, {&state->s_outbox, "outbox"}, {&state->s_popleft, "popleft"},
        {&state->s_recv_into, "recv_into"}, {&state->s_seal_into, "seal_into"}, {&state->s_send, "send"},
        {&state->s_tag, "tag"}, {&state->s_take, "take"}, {&state->s_ended, "stream_ended"}, {&state->s_release, "release"},
        {&state->s_storage, "storage"}, {&state->s_address, "address"}, {&state->s_nbytes, "nbytes"},
        {&state->s_data_ptr, "data_ptr"}, {&state->s_memory_changed, "memory_changed"}, {&state->s_obj, "obj"},
        {&state->s_length_of_other, "length_of_other"}, {&state->s_lease, "lease"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if ((*names[i].where = PyUnicode_InternFromString(names[i].text)) == NULL)
            return -1;
    return 0;
}

static int import_used(State *state) {
    struct {
        PyObject **where;
        const char *module, *name;
    } used[] = {
        {&state->deque_type, "collections", "deque"},
        {&state->socket_type, "socket", "socket"},
        {&state->segment_bytes_of, "ringfence.link.segments", "segment_bytes"},
        {&state->combine_bytes, "ringfence.dataplane.buffers", "combine_bytes"},
        {&state->divide_bytes, "ringfence.dataplane.buffers", "divide_bytes"},
    };
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        if ((*used[i].where = attribute(used[i].module, used[i].name)) == NULL)
            return -1;
    if (PyType_Check(state->socket_type))
        return 0;
    PyErr_SetString(PyExc_TypeError, "socket.socket is not a type");
    return -1;
}

static int make_types(PyObject *module, State *state) {
    struct {
        PyObject **where;
        PyType_Spec *spec;
    } types[] = {
        {&state->segment_type, &segment_spec}, {&state->piece_type, &piece_spec}, {&state->pool_type, &pool_spec},
        {&state->program_type, &program_spec}, {&state->end_type, &end_spec},     {&state->run_type, &run_spec},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        *types[i].where = PyType_FromModuleAndSpec(module, types[i].spec, NULL);
        if (*types[i].where == NULL || PyModule_AddType(module, (PyTypeObject *)*types[i].where) < 0)
            return -1;
    }
    return 0;
}

static int core_exec(PyObject *module) {
    State *state = PyModule_GetState(module);
    if (intern_names(state) || import_used(state) || make_types(module, state))
        return -1;
    PyObject *layout = Py_BuildValue("iiiiiii", INTERFACE, HEADER_BYTES, HOP_BYTES, TAG_BYTES, COUNTER_AT, KEY_PHASE_SHIFT, FRAME_BYTES);
    if (layout == NULL || PyModule_AddObject(module, "LAYOUT", layout) < 0) {
        Py_XDECREF(layout);
        return -1;
    }
    return 0;
}

/* Each of these may be called before core_exec, or after it failed. */
static int core_traverse(PyObject *module, visitproc visit, void *arg) {
    PyObject **held = PyModule_GetState(module);
    for (size_t i = 0; held != NULL && i < sizeof(State) / sizeof *held; i++)
        Py_VISIT(held[i]);
    return 0;
}

static int core_clear(PyObject *module) {
    PyObject **held = PyModule_GetState(module);
    for (size_t i = 0; held != NULL && i < sizeof(State) / sizeof *held; i++)
        Py_CLEAR(held[i]);
    return 0;
}

static void core_free(void *module) { core_clear(module); }

static PyModuleDef_Slot core_slots[] = {{Py_mod_exec, core_exec}, {0, NULL}};

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ringfence.dataplane._core",
    .m_doc = "The data plane in C.",
    .m_size = sizeof(State),
    .m_methods = core_methods,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&core_module); }
