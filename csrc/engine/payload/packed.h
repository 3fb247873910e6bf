/* packed.h: one argument of a region, kept between forward and recompute. */
#ifndef GRADCKPT_PACKED_H
#define GRADCKPT_PACKED_H

#include "torch/input.h"
#include "torch/objects.h"
#include "engine/state.h"
#include "engine/payload/batch.h"
#include "engine/payload/input_aliasing.h"
#include "engine/payload/slices.h"

typedef enum {
    GCK_PACKED_OBJECT,   /* value: the object itself, as the caller passed it          */
    GCK_PACKED_TENSOR,   /* value: the tensor, checked against its version             */
    GCK_PACKED_SAVED,    /* value: torch's SavedTensor: outer saved-tensor hooks see it */
    GCK_PACKED_PAYLOAD,  /* value: a Payload                                           */
    GCK_PACKED_BY_NODE,  /* value: None; the tensor is the next of ctx.saved_tensors   */
    GCK_PACKED_TREE,     /* value: pytree spec; leaves: entries, some of them payloads */
} gck_packed_kind;

/* One that is all zero is empty. */
typedef struct gck_packed {
    gck_packed_kind    kind;
    PyObject         *value;    /* owned; see above                                       */
    int64_t           version;  /* of a tensor, also behind SAVED                         */
    int               leaf;     /* likewise                                               */
    struct gck_packed *leaves;  /* owned; GCK_PACKED_TREE only                            */
    Py_ssize_t        nleaves;
    PyObject         *state;    /* owned: attributes (dict) of a payload's tensor; what a tree's containers have
                                   outside their leaves (argument_state.py); NULL: none   */
    gck_slice         slice;    /* GCK_PACKED_PAYLOAD only: where its tensor is restored  */
} gck_packed;

/* How one call keeps its arguments. */
typedef struct {
    gck_state *state;
    gck_plan   plan;
    int        outer;            /* outer saved-tensor hooks are active, and payloads go through them */
    int        payloads;         /* out: the number of entries that became payloads               */
    gck_batch *batch;            /* where encoding may be deferred                                */
    PyObject  *aliases;          /* out, with a codec: the rows of input_aliasing.h; see gck_packing_end() */
    PyObject  *inputs;           /* list, out: tensors, which become inputs of a node and are checked
                                    against their versions; NULL: the region is no node           */
    int        nested;           /* the same for tensors in containers                            */
    int        of_node;          /* the node that is being made keeps all tensors                 */
    int        exactly;          /* in a container of which no copy can be made                   */
} gck_packing;

/* The call is over: its rows go. */
static inline void gck_packing_end(gck_packing *packing) { Py_CLEAR(packing->aliases); }

/* Keep x in *entry.  positional: torch checks the versions of such tensors.  *forward takes a new
 * reference to what the forward call gets: x itself, or with fake_quantize what a payload restores.
 * 0, or -1 with an exception and *entry empty. */
int gck_pack(gck_packing *packing, PyObject *x, int positional, gck_packed *entry, PyObject **forward);

/* All n arguments are packed: find those that are slices of one memory.  0 or -1. */
int gck_pack_slices(gck_packing *packing, gck_packed *entries, Py_ssize_t n);

/* Take the present version: like autograd's, a node keeps its inputs as its function has left them.
 * 0 or -1. */
int gck_packed_touch(gck_state *state, gck_packed *entry);

/* Keep in->x itself, as autograd keeps a saved tensor: through the outer hooks, or with its
 * version.  0 or -1. */
int gck_pack_exactly(const gck_packing *packing, gck_input *in, gck_packed *entry);

/* Not 0 while a region passes what it keeps to outer hooks; no autograd node saves that. */
extern _Thread_local int gck_packing_for_region;

/* Add the bytes of x, or none for a subclass that does not answer.  0 or -1. */
int gck_count_bytes(const gck_py *py, PyObject *x, int64_t *counter);

/* Count in stats() that x stays uncompressed for this reason.  0 or -1. */
int gck_count_uncompressed(gck_state *state, PyObject *x, int reason);

/* The same for a tensor of known size (by 1); take that back (-1). */
void gck_count_uncompressed_bytes(gck_state *state, int64_t nbytes, int reason, int by);

int  gck_packed_traverse(gck_packed *entry, visitproc visit, void *arg);
void gck_packed_clear(gck_packed *entry);

#endif
