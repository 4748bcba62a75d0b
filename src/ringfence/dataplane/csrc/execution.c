#include "execution.h"
#include "chunks.h"
#include "reductions.h"

#include <string.h>

/* Execution: tracks how many segments of each step are done and which steps are ready. */

static int execution_traverse(Execution *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->communicator);
    Py_VISIT(self->request);
    Py_VISIT(self->on_finished);
    Py_VISIT(self->views);
    Py_VISIT(self->memory_owner);
    Py_VISIT(self->combine);
    Py_VISIT(self->pool);
    for (int i = 0; self->progress != NULL && i < self->program->count; i++)
        Py_VISIT(self->progress[i].link);
    for (int i = 0; self->chunks != NULL && i < self->program->chunks; i++) {
        Py_VISIT(self->chunks[i].lease); /* `buffer` is not visited, as in endpoint_traverse */
        Py_VISIT(self->chunks[i].storage);
    }
    return 0;
}

static int execution_clear(Execution *self) {
    Py_CLEAR(self->communicator);
    Py_CLEAR(self->request);
    Py_CLEAR(self->on_finished);
    Py_CLEAR(self->combine);
    for (int i = 0; self->progress != NULL && i < self->program->count; i++)
        Py_CLEAR(self->progress[i].link);
    return 0;
}

static void execution_dealloc(Execution *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    execution_clear(self);
    for (int i = 0; i < self->held_count; i++)
        Py_XDECREF((PyObject *)self->held[i].segment);
    PyMem_Free(self->held);
    PyMem_Free(self->progress);
    for (int i = 0; self->chunks != NULL && i < self->program->chunks; i++) {
        Chunk *chunk = &self->chunks[i];
        PyBuffer_Release(&chunk->buffer);
        Py_XDECREF(chunk->lease);
        Py_XDECREF(chunk->storage);
        Py_XDECREF(chunk->address);
        Py_XDECREF(chunk->nbytes);
    }
    PyMem_Free(self->chunks);
    Py_CLEAR(self->program);
    Py_CLEAR(self->views);
    Py_CLEAR(self->memory_owner);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->divisor);
    Py_CLEAR(self->pool);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

/* Execution(communicator, program, sequence, call, views, memory_owner, dtype, combine, first_segment, on_finished,
 * sum_type, instance, pool, divisor) */
static PyObject *execution_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)keywords;
    PyObject *communicator, *program, *views, *memory_owner, *dtype, *combine, *on_finished;
    unsigned long long sequence;
    const char *call, *instance;
    Py_ssize_t call_length, instance_length;
    unsigned int first_segment;
    int add;
    PyObject *pool, *divisor;
    ModuleState *state = PyType_GetModuleState(type); /* valid because the type has no subclasses */
    if (!PyArg_ParseTuple(args, "OO!Ky#O!OOOIOiy#O!O", &communicator, (PyTypeObject *)state->program_type, &program,
                          &sequence, &call, &call_length, &PyList_Type, &views, &memory_owner, &dtype, &combine,
                          &first_segment, &on_finished, &add, &instance, &instance_length,
                          (PyTypeObject *)state->pool_type, &pool, &divisor))
        return NULL;
    views = PyList_AsTuple(views); /* the caller may change its list */
    if (views == NULL)
        return NULL;
    if (call_length != CALL_BYTES || instance_length != INSTANCE_BYTES ||
        PyTuple_Size(views) != ((Program *)program)->chunks || add < SUM_BY_TORCH || add > SUM_BF16) {
        PyErr_SetString(PyExc_ValueError, "the arguments of an execution do not match its program");
        Py_DECREF(views);
        return NULL;
    }
    Execution *self = (Execution *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        Py_DECREF(views);
        return NULL;
    }
    self->program = (Program *)Py_NewRef(program);
    self->communicator = Py_NewRef(communicator);
    self->request = Py_NewRef(Py_None);
    self->on_finished = Py_NewRef(on_finished);
    self->views = views;
    self->memory_owner = Py_NewRef(memory_owner);
    self->dtype = Py_NewRef(dtype);
    self->combine = Py_NewRef(combine);
    self->divisor = Py_NewRef(divisor);
    self->pool = (Pool *)Py_NewRef(pool);
    self->first_segment = first_segment;
    self->sum_type = add;
    self->steps_left = self->program->count;
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

/* Whether the dependencies of the step's next segment are done. */
int step_is_ready(Execution *self, int index) {
    if (self->failed)
        return 0;
    Step *step = &self->program->steps[index];
    Py_ssize_t segment = self->progress[index].done;
    for (int i = 0; i < step->dependencies; i++) {
        Progress *required = &self->progress[step->dependency[i].step];
        if (required->done < (step->dependency[i].by_segment ? segment + 1 : required->segments))
            return 0;
    }
    return 1;
}

static int execute_local_step(Execution *self, int index);

static int execution_finish(Execution *self) {
    PyObject *on_finished = self->on_finished; /* the callback refers to this execution: break the cycle */
    self->on_finished = Py_NewRef(Py_None);
    PyObject *done = PyObject_CallNoArgs(on_finished);
    Py_DECREF(on_finished);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

int execution_advance(Execution *self, int index) {
    Progress *mine = &self->progress[index];
    Step *step = &self->program->steps[index];
    mine->done++;
    if (mine->done == mine->segments)
        self->steps_left--;
    for (int i = 0; i < step->dependents; i++) {
        int other = step->dependent[i];
        if (self->progress[other].link != NULL) {
            if (endpoint_wake(self->progress[other].link))
                return -1;
        } else if (self->program->steps[other].action >= COPY && execute_local_step(self, other))
            return -1;
    }
    if (!self->steps_left) {
        self->steps_left = -1;
        return execution_finish(self);
    }
    return 0;
}

static int execute_local_step(Execution *self, int index) {
    Step *step = &self->program->steps[index];
    Progress *progress = &self->progress[index];
    while (progress->done < progress->segments && step_is_ready(self, index)) {
        Span target = chunk_span(self, step->chunk, progress->done);
        int copies = step->action == COPY;
        ClockStart start = start_clock();
        if ((copies && check_memory(self, step->other)) || check_memory(self, step->chunk))
            return -1;
        if (copies)
            memmove(target.at, chunk_span(self, step->other, progress->done).at, (size_t)target.length);
        else if (divide_span(self, target) || check_address(self, step->chunk))
            return -1;
        stop_clock(STAGE_REDUCE, start, NULL, -1);
        if (execution_advance(self, index))
            return -1;
    }
    return 0;
}

/* Queue every message on its link, in program order, and execute the local steps that are ready. */
static PyObject *execution_start(Execution *self, PyObject *unused) {
    (void)unused;
    if (self->started || self->communicator == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the execution was started before, or cleared by the garbage collector");
        return NULL;
    }
    self->started = 1;
    if (!self->steps_left) {
        if (execution_finish(self))
            return NULL;
        Py_RETURN_NONE;
    }
    ModuleState *state = self->pool->state;
    for (int i = 0; i < self->program->count; i++) {
        Step *step = &self->program->steps[i];
        if (step->action > REDUCE)
            continue;
        PyObject *peer = PyLong_FromLong(step->peer);
        if (peer == NULL)
            return NULL;
        PyObject *method = step->action == SEND ? state->s_outbox : state->s_inbox;
        PyObject *link = PyObject_CallMethodObjArgs(self->communicator, method, peer, NULL);
        Py_DECREF(peer);
        if (link == NULL || !is_endpoint(state, link)) {
            Py_XDECREF(link);
            return NULL;
        }
        SET_REF(self->progress[i].link, (Endpoint *)link);
        PyObject *entry = Py_BuildValue("Oi", self, i);
        PyObject *done =
            entry == NULL ? NULL : PyObject_CallMethodObjArgs(((Endpoint *)link)->queue, state->s_append, entry, NULL);
        Py_XDECREF(entry);
        Py_XDECREF(done);
        if (done == NULL || endpoint_wake((Endpoint *)link))
            return NULL;
    }
    for (int i = 0; i < self->program->count; i++)
        if (self->program->steps[i].action > REDUCE && execute_local_step(self, i))
            return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef execution_methods[] = {
    {"start", (PyCFunction)execution_start, METH_NOARGS,
     "Queue every message on its link and execute the local steps that are ready."},
    {NULL}};
static PyMemberDef execution_members[] = {{"operation", T_OBJECT_EX, offsetof(Execution, request), 0, NULL}, {NULL}};

static PyType_Slot execution_slots[] = {
    {Py_tp_dealloc, execution_dealloc},
    {Py_tp_traverse, execution_traverse},
    {Py_tp_clear, execution_clear},
    {Py_tp_methods, execution_methods},
    {Py_tp_members, execution_members},
    {Py_tp_new, execution_new},
    {Py_tp_doc, "One pass of a program over the memory of its chunks, with the progress of each step."},
    {0, NULL},
};
PyType_Spec execution_spec = {"ringfence.dataplane._core.Execution", sizeof(Execution), 0,
                              TYPE_FLAGS | Py_TPFLAGS_HAVE_GC, execution_slots};

/* What was held for a SEND; neither a segment nor a slot: nothing was. */
HeldSegment take_held(Execution *self, int index, Py_ssize_t position) {
    for (int i = 0; i < self->held_count; i++) {
        HeldSegment held = self->held[i];
        if (held.step == index && held.position == position) {
            self->held[i] = self->held[--self->held_count];
            return held;
        }
    }
    return (HeldSegment){index, position, NULL, -1, 0};
}

/* Whether something is held for a SEND. */
int is_held(Execution *self, int index, Py_ssize_t position) {
    for (int i = 0; i < self->held_count; i++)
        if (self->held[i].step == index && self->held[i].position == position)
            return 1;
    return 0;
}

static int hold(Execution *self, HeldSegment one) {
    if (self->held_count == self->held_capacity) {
        int room = self->held_capacity ? 2 * self->held_capacity : 8;
        HeldSegment *held = PyMem_Realloc(self->held, (size_t)room * sizeof(HeldSegment));
        if (held == NULL) {
            Py_XDECREF((PyObject *)one.segment);
            PyErr_NoMemory();
            return -1;
        }
        self->held = held;
        self->held_capacity = room;
    }
    self->held[self->held_count++] = one;
    return 0;
}

/* Hold what was taken, if it was anything. */
int hold_again(Execution *self, HeldSegment held) {
    return held.segment == NULL && held.slot < 0 ? 0 : hold(self, held);
}

/* Hold a segment for a later SEND. Steals the reference, also on failure. */
int hold_segment(Execution *self, int index, Py_ssize_t position, Segment *segment) {
    return hold(self, (HeldSegment){index, position, segment, -1, 0});
}

int hold_slot(Execution *self, int index, Py_ssize_t position, int slot, int reserved) {
    return hold(self, (HeldSegment){index, position, NULL, slot, reserved});
}

/* Hold the ciphertext for the other SENDs that write the same bytes and have not reached this position. */
int share_ciphertext(Execution *self, Step *step, Py_ssize_t position, Segment *segment) {
    for (int i = 0; i < step->sharers; i++)
        if (self->progress[step->sharer[i]].done <= position &&
            hold_segment(self, step->sharer[i], position, (Segment *)Py_NewRef((PyObject *)segment)))
            return -1;
    return 0;
}

/* The first entry of the queue. 1: found (`execution` is a new reference); 0: the queue is empty; -1: an exception is
 * set. */
int queue_head(Endpoint *link, int sends, Execution **execution, int *index) {
    Py_ssize_t length = PyObject_Size(link->queue);
    if (length <= 0)
        return (int)length;
    PyObject *entry = PySequence_GetItem(link->queue, 0);
    if (entry == NULL)
        return -1;
    int understood =
        is_tuple(entry) &&
        PyArg_ParseTuple(entry, "O!i", (PyTypeObject *)link->pool->state->execution_type, execution, index);
    if (understood) {
        int known = *index >= 0 && *index < (*execution)->program->count &&
                    (*execution)->program->steps[*index].action <= REDUCE;
        known = known && (*execution)->progress[*index].done < (*execution)->progress[*index].segments &&
                (*execution)->communicator != NULL;
        if (known && ((*execution)->program->steps[*index].action == SEND) == sends)
            Py_INCREF((PyObject *)*execution);
        else {
            PyErr_SetString(PyExc_ValueError, "a queue entry is done, or belongs to another link");
            understood = 0;
        }
    }
    Py_DECREF(entry);
    return understood ? 1 : -1;
}

int queue_pop(Endpoint *link) {
    PyObject *gone = PyObject_CallMethodObjArgs(link->queue, link->pool->state->s_popleft, NULL);
    Py_XDECREF(gone);
    return gone == NULL ? -1 : 0;
}

/* Wake the endpoint if its queue is not empty. */
int wake_if_queued(Endpoint *link) {
    Py_ssize_t length = PyObject_Size(link->queue);
    return length < 0 || (length && endpoint_wake(link)) ? -1 : 0;
}
