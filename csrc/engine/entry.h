/* entry.h: one argument of a region, as it is kept between forward and recompute. */
#ifndef GRADCKPT_ENTRY_H
#define GRADCKPT_ENTRY_H

#include "aliases.h"
#include "payload.h"

typedef enum {
    GCK_KEPT,                /* value: the object itself, as the caller passed it          */
    GCK_VERSIONED,           /* value: the tensor, checked against its version             */
    GCK_SAVED,               /* value: torch's SavedTensor: outer saved-tensor hooks see it */
    GCK_PAYLOAD,             /* value: a Payload                                           */
    GCK_OF_NODE,             /* value: None; the tensor is the next of ctx.saved_tensors   */
    GCK_TREE,                /* value: pytree spec; leaves: entries, some of them payloads */
} gck_entry_kind;

typedef struct gck_entry {
    gck_entry_kind    kind;
    PyObject         *value;     /* owned; see above                                       */
    int64_t           version;   /* GCK_VERSIONED only                                     */
    int               leaf;      /* likewise                                               */
    struct gck_entry *leaves;    /* owned; GCK_TREE only                                   */
    Py_ssize_t        nleaves;
} gck_entry;

/* How one call keeps its arguments. */
typedef struct {
    gck_state *state;
    gck_plan   plan;
    int        outer;        /* outer saved-tensor hooks are active: payloads go through them */
    int        payloads;     /* out: how many entries became payloads                         */
    gck_batch *batch;        /* where encoding may wait                                       */
    gck_aliases aliases;     /* out, with a codec: the tensors; to be cleared                 */
    PyObject  *inputs;       /* list, out: tensors, which become inputs of a node and are checked
                                against their versions; NULL: the region is no node           */
    int        nested;       /* those in containers, too                                      */
    int        of_node;      /* tensors are kept by the node that is being made, all of them  */
} gck_packing;

/* Keep x in *entry.  positional: torch version-checks such tensors.  *forward takes a new
 * reference to what the forward call should get: x itself, or in replay mode what a
 * payload gives back.  0, or -1 with an exception and *entry empty. */
int gck_entry_pack(gck_packing *packing, PyObject *x, int positional, gck_entry *entry, PyObject **forward);

/* A node keeps what its function has left in its inputs, as autograd's: the versions of now.  0 or -1. */
int gck_entry_touch(gck_state *state, gck_entry *entry);

/* Keep in->x itself, as autograd keeps a saved tensor: through the outer hooks, or with its
 * version.  0 or -1. */
int gck_entry_keep(const gck_packing *packing, gck_input *in, gck_entry *entry);

/* Not 0 while a region hands what it keeps to outer hooks: no autograd node saves that. */
extern _Thread_local int gck_entry_of_region;

/* Add the bytes of x; of a subclass that refuses to tell none.  0 or -1. */
int gck_count_bytes(const gck_py *py, PyObject *x, int64_t *counter);

/* In stats(): x stays for this reason.  0 or -1. */
int gck_count_kept(gck_state *state, PyObject *x, int verdict);

/* New reference: the argument for the recompute; its values may wait in `batch`.  inputs: NULL,
 * or a list that gets its tensors, which then have no history. */
PyObject *gck_entry_restore(gck_state *state, const gck_entry *entry, gck_batch *batch, PyObject *inputs);

int  gck_entry_traverse(gck_entry *entry, visitproc visit, void *arg);
void gck_entry_clear(gck_entry *entry);

#endif
