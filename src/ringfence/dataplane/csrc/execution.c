#include <string.h>

#include "chunks.h"
#include "execution.h"
#include "reductions.h"

/* -- runs ------------------------------------------------------------------------------------------------------------ */

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

/* Whether the step's next segment may be done. */
int is_ready(Run *self, int index) {
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

int advance(Run *self, int index) {
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
PyType_Spec run_spec = {"ringfence.dataplane._core.Run", sizeof(Run), 0, FIXED | Py_TPFLAGS_HAVE_GC, run_slots};

Segment *take_kept(Run *self, int index, Py_ssize_t position) {
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
int keep(Run *self, int index, Py_ssize_t position, Segment *segment) {
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
int share(Run *self, Step *step, Py_ssize_t position, Segment *segment) {
    for (int i = 0; i < step->sharers; i++)
        if (self->progress[step->sharer[i]].done <= position &&
            keep(self, step->sharer[i], position, (Segment *)Py_NewRef((PyObject *)segment)))
            return -1;
    return 0;
}

/* The head of the queue. 1: there is one (`run` is a new reference); 0: none; -1: an error is set. */
int head_of_queue(End *link, int sends, Run **run, int *index) {
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

int leave_queue(End *link) {
    PyObject *gone = PyObject_CallMethodObjArgs(link->queue, link->pool->state->s_popleft, NULL);
    Py_XDECREF(gone);
    return gone == NULL ? -1 : 0;
}

/* Have the engine come back if there is more to do. */
int wake_if_queued(End *link) {
    Py_ssize_t length = PyObject_Size(link->queue);
    return length < 0 || (length && wake(link)) ? -1 : 0;
}
