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
} gck_packing;

/* Keep x in *entry.  positional: torch version-checks such tensors.  *forward takes a new
 * reference to what the forward call should get: x itself, or in replay mode what a
 * payload gives back.  0, or -1 with an exception and *entry empty. */
int gck_entry_pack(gck_packing *packing, PyObject *x, int positional, gck_entry *entry, PyObject **forward);

/* *entry becomes a payload: 1; or x may not, and *entry is left alone: 0; or -1. */
int gck_entry_encode(gck_packing *packing, PyObject *x, gck_entry *entry);
/* Keep x itself, as autograd keeps a saved tensor: through the outer hooks, or with its
 * version.  0 or -1. */
int gck_entry_keep(const gck_packing *packing, PyObject *x, gck_entry *entry);

/* Not 0 while a region hands what it keeps to outer hooks: no autograd node saves that. */
extern _Thread_local int gck_entry_of_region;

/* A GCK_VERSIONED tensor has not been written to since: 1, 0, -1. */
int gck_entry_is_unchanged(gck_state *state, const gck_entry *entry);

/* In stats(): x stays for this reason.  Returns 0. */
int gck_count_kept(gck_state *state, PyObject *x, int verdict);

/* The noise of the next tensor in *dither; NULL: to nearest. */
const gck_dither *gck_next_dither(gck_state *state, const gck_plan *plan, gck_dither *dither);

/* New reference: the argument for the recompute; its values may wait in `batch`. */
PyObject *gck_entry_restore(gck_state *state, const gck_entry *entry, gck_batch *batch);

int  gck_entry_traverse(gck_entry *entry, visitproc visit, void *arg);
void gck_entry_clear(gck_entry *entry);

#endif
