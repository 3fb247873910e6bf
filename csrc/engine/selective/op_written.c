/* op_written.c: writes into kept outputs that their versions do not show. */
#include "engine/selective/op_written.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/input.h"
#include "torch/tensor.h"
#include "engine/selective/active_storage.h"
#include "engine/selective/op_hiding.h"
#include "engine/selective/op_outputs.h"

gck_op_effect gck_op_effect_of(const gck_py *py, PyObject *op)
{
    for (Py_ssize_t i = 0; i < PyTuple_Size(py->unseen_views); i++) {
        if (PyTuple_GetItem(py->unseen_views, i) == op) {
            return GCK_VIEWS_UNSEEN;
        }
    }
    GCK_SCOPED PyObject *schema = PyObject_GetAttrString(op, "_schema");
    const int writes = schema != NULL ? gck_is_true(PyObject_GetAttrString(schema, "is_mutable")) : 0;
    gck_error_report();                          /* a higher order operator has no schema */
    return writes > 0 ? GCK_WRITES : GCK_READS;
}

/* Borrowed: the output in that entry whose memory is touched; NULL: none.  Addresses are compared
 * while the output holds its memory. */
static gck_op_output *touched(const gck_state *state, PyObject *entry, const char *data, int64_t nbytes)
{
    const Py_ssize_t n = gck_items(entry);
    gck_op_output *found = NULL;

    if (Py_TYPE(entry) == state->OpOutput) {
        gck_op_output *kept = (gck_op_output *)entry;
        return kept->nbytes > 0 && data < kept->data + kept->nbytes && kept->data < data + nbytes ? kept : NULL;
    }
    for (Py_ssize_t i = 0; found == NULL && i < n; i++) {
        found = touched(state, gck_item(entry, i), data, nbytes);
    }
    return found;
}

/* New reference: the latest touched output of an active store of this thread; NULL: none.  *after: the
 * search goes on behind these, which start at 0. */
typedef struct { Py_ssize_t stores, calls; } place;
static gck_op_output *next_touched(const gck_state *state, const char *data, int64_t nbytes, place *after)
{
    const gck_active *a = nbytes > 0 ? gck_active_of_thread(state->active) : NULL;

    for (Py_ssize_t number = 0; a != NULL; a = gck_active_of_thread(a->outer), number++) {
        const Py_ssize_t from = number < after->stores ? a->store->ncalls : number == after->stores ? after->calls : 0;
        for (Py_ssize_t back = from; back < a->store->ncalls; back++) {
            gck_op_output *kept = touched(state, a->store->calls[a->store->ncalls - 1 - back].entry, data, nbytes);
            if (kept != NULL) {
                *after = (place){number, back + 1};
                return (gck_op_output *)Py_NewRef((PyObject *)kept);
            }
        }
    }
    return NULL;
}

/* 1 when an active store of this thread waits for names of outputs. */
static int has_candidates(const gck_state *state)
{
    int found = 0;

    for (const gck_active *a = gck_active_of_thread(state->active); a != NULL; a = gck_active_of_thread(a->outer)) {
        found |= a->store->candidates != NULL;
    }
    return found;
}

static int is_kept(void *with, PyObject *x)
{
    const gck_state *state = with;
    const char *data;
    int64_t nbytes;
    place after = {0, 0};

    if (gck_memory_of(&state->py, x, &data, &nbytes) < 0) {
        return -1;
    }
    GCK_SCOPED gck_op_output *kept = next_touched(state, data, nbytes, &after);
    return kept != NULL || has_candidates(state);
}

int gck_is_kept_memory(gck_state *state, PyObject *x) { return gck_each_item(x, is_kept, state); }

/* visit(py, kept, with) for each kept output of this thread's stores in the memory of x.  0 or -1. */
typedef int touched_visitor(const gck_py *py, gck_op_output *kept, PyObject *with);
static int each_touched(gck_state *state, PyObject *x, touched_visitor *visit, PyObject *with)
{
    const char *data;
    int64_t nbytes;
    place after = {0, 0};
    gck_op_output *kept;
    int status = gck_memory_of(&state->py, x, &data, &nbytes);

    while (status == 0 && (kept = next_touched(state, data, nbytes, &after)) != NULL) {
        status = visit(&state->py, kept, with);
        Py_DECREF((PyObject *)kept);
    }
    return status;
}

/* Copy a kept output before it is written into.  0 or -1. */
static int copy(const gck_py *py, gck_op_output *kept, PyObject *Py_UNUSED(unused))
{
    const int same = kept->copy == NULL ? gck_op_output_unwritten(py, kept) : 1;

    kept->written |= same == 0;
    if (same < 0 || kept->copy != NULL || kept->written) {
        return same < 0 ? -1 : 0;
    }
    PyObject *made = PyObject_CallMethod(kept->val, "clone", NULL);
    GCK_SCOPED PyObject *old = kept->copy;
    kept->copy = made;
    return made != NULL ? 0 : -1;
}

/* Copy the outputs of this thread's stores that may still get a name.  0 or -1. */
static int copy_candidates(gck_state *state, PyObject *x)
{
    gck_active *a = gck_active_of_thread(state->active);
    int status = 0;

    for (; status == 0 && a != NULL; a = gck_active_of_thread(a->outer)) {
        if (a->store->candidates != NULL) {
            GCK_SCOPED PyObject *candidates = Py_NewRef(a->store->candidates);
            status = gck_done(PyObject_CallFunction(state->py.call.copy_candidates, "OO", candidates, x));
        }
    }
    return status;
}

static int prepare(void *with, PyObject *x)
{
    return each_touched(with, x, copy, NULL) < 0 ? -1 : copy_candidates(with, x);
}

int gck_effect_begin(gck_state *state, gck_op_effect effect, PyObject *x)
{
    PyObject *modes;
    int status = gck_is_kept_memory(state, x);

    if (status > 0 && effect == GCK_WRITES && (status = gck_hide_begin(state, &modes)) == 0) {
        status = gck_each_item(x, prepare, state);
        status = gck_hide_end(state, modes) < 0 || status < 0 ? -1 : 1;
    }
    return status;
}

/* Remember a view of a kept output.  0 or -1. */
typedef struct { const gck_py *py; gck_op_output *kept; } viewed;
static int note_one(void *with, PyObject *view)
{
    const viewed *of = with;
    const int tensor = gck_is_tensor(of->py, view);
    GCK_SCOPED PyObject *alias = tensor > 0 ? gck_op_output_alias(of->py, view) : NULL;
    return tensor <= 0 ? tensor : alias != NULL ? gck_op_output_note(of->py, of->kept, alias) : -1;
}

static int note_views(const gck_py *py, gck_op_output *kept, PyObject *views)
{
    return gck_each_item(views, note_one, &(viewed){py, kept});
}

int gck_effect_end(gck_state *state, PyObject *x, PyObject *out)
{
    PyObject *modes;
    int status = gck_hide_begin(state, &modes);

    if (status == 0) {
        status = each_touched(state, x, note_views, out);
        status = gck_hide_end(state, modes) < 0 ? -1 : status;
    }
    return status;
}

int gck_settle_outputs(gck_op_storage *store)
{
    int changed = 0;

    for (Py_ssize_t i = 0; changed >= 0 && i < store->ncalls; i++) {
        GCK_SCOPED PyObject *entry = Py_NewRef(store->calls[i].entry);
        changed = gck_op_output_settle(store, entry);
        if (changed > 0) {                       /* it runs again */
            gck_op_storage_keep(store, i, Py_NewRef(store->state->py.recompute_mark));
        }
    }
    return changed < 0 ? -1 : 0;
}
