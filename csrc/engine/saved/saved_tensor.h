/* saved_tensor.h: one tensor that compress_saved() keeps between forward and backward. */
#ifndef GRADCKPT_SAVED_TENSOR_H
#define GRADCKPT_SAVED_TENSOR_H

#include "engine/state.h"
#include "engine/payload/packed.h"

extern PyType_Spec gck_saved_tensor_spec;

/* What is kept of a tensor x. */
typedef struct {
    gck_packed  entry;    /* a payload, the tensor itself, or (OBJECT) a function that makes it */
    PyObject  *dtype;     /* of x, when the payload holds something computed from it; else NULL */
    PyObject  *rows;      /* restored values have the sum 1 along this dimension; else NULL */
    PyObject  *view;      /* x is this as_strided() of the restored payload; else NULL */
    const void *storage;  /* of x: compared while x is alive, never followed; NULL: never compared */
} gck_saved_form;

typedef struct {
    PyObject_HEAD
    gck_state *state;
    gck_saved_form   form;
    /* See saved_waiting.h. */
    PyObject  *waiting;      /* the list that knows it; else NULL                        */
    PyObject  *hooks;        /* while it waits: the hooks that packed it                 */
    int64_t    number;       /* of the node that saves it                                */
    int64_t    waits, epoch; /* bytes, while it waits, and the epoch in which they were counted */
    int        device;       /* while it waits: where it lies, and the stream on which it was saved, borrowed */
    void      *stream;
    int        captured;     /* a graph was being captured there                         */
    int        unknown;      /* the node that saves it was never seen                    */
    int        decided;      /* a search will settle it                                  */
    int        late;         /* it was packed while searches were put off                */
    /* It is kept exactly unless a Function in Python saves it: it has no history that a search could follow. */
    PyObject  *packer;       /* the hooks that packed it, until such a node is found; else NULL */
    int        reason;       /* for which it was counted then                            */
    int        result;       /* it is a result of the node that saves it                 */
} gck_saved_tensor;

/* The limits of the search: at most so many tensors wait, and so many nodes are searched.  One more
 * tensor, and the oldest stays uncompressed. */
enum { GCK_WAITING_TENSORS = 64, GCK_WAITING_NODES = 1024 };

/* The saved tensors that a block knows: those that wait, and the latest of those that no longer
 * wait. */
typedef struct {
    /* borrowed, oldest first: a dying entry removes itself */
    gck_saved_tensor *known[2 * GCK_WAITING_TENSORS];
    int        n, waits;                 /* how many are known, and how many of them wait   */
    int        on_device;                /* the latest that waited                          */
    int64_t    coded;                    /* the latest node whose saved tensors may have become payloads */
    int64_t    undecided;                /* the latest node that saved what a Function may have saved */
    /* At the remainder of their numbers: numbers of nodes that were visited, plus 1, and the use of their results,
     * see node_use.h. */
    int64_t    seen[GCK_WAITING_NODES];
    unsigned char seen_use[GCK_WAITING_NODES];
    /* The same of nodes the use of which was open, and the node that was being made then. */
    int64_t    open[GCK_WAITING_NODES], open_for[GCK_WAITING_NODES];
    /* The same of products, and whether something steep made a factor. */
    int64_t    asked[GCK_WAITING_NODES];
    unsigned char steep[GCK_WAITING_NODES];
} gck_saved_list;

/* New reference: a list's capsule, of its own or shared by the blocks of this thread. */
PyObject *gck_saved_list_new(void);
PyObject *gck_saved_list_of_thread(void);

/* Borrowed: the list in a capsule. */
gck_saved_list *gck_saved_list_of(PyObject *waiting);

/* Borrowed: the one with this index, oldest first; NULL behind the last, before 2 *
 * GCK_WAITING_TENSORS. */
gck_saved_tensor *gck_saved_list_known(PyObject *waiting, int index);

/* Remove a dying one. */
void gck_saved_list_forget(gck_saved_tensor *saved);

/* New reference: empty. */
gck_saved_tensor *gck_saved_tensor_new(gck_state *state);

void gck_saved_form_clear(gck_saved_form *form);

/* The codec of its payload; NULL: it has none. */
const gck_codec *gck_saved_form_codec(const gck_saved_form *form);

/* Keep of a tensor only the function that makes it. */
void gck_saved_form_make_again(gck_saved_form *form, PyObject *function);

/* New reference: x as the view of `whole`, the restored payload. */
PyObject *gck_saved_form_view(const gck_saved_form *form, PyObject *whole);

/* New reference: the tensor without history, which autograd holds itself. */
PyObject *gck_saved_tensor_restore(const gck_saved_tensor *self);

#endif
