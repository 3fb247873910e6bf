/* op_outputs.h: what is kept of one call of an operator, and how it is returned. */
#ifndef GRADCKPT_OP_OUTPUTS_H
#define GRADCKPT_OP_OUTPUTS_H

#include "torch/generators.h"
#include "engine/state.h"
#include "engine/selective/op_storage.h"

/* Type gradckpt._C.OpOutput: a value, and the version it had. */
typedef struct {
    PyObject_HEAD
    PyObject *val;           /* a detached alias, a Payload, or not a tensor; torch's modes have this attribute too */
    int64_t   version;       /* -1: not compared                                             */
    PyObject *unpack;        /* of the user's hooks that have packed val; owned, NULL        */
    PyObject *form;          /* the form whose state val is, of a discrete operator; owned, NULL */
    /* The memory of an alias, and what may have changed unseen by its version: */
    const char *data;
    int64_t   nbytes;        /* 0: not an alias                                              */
    gck_state *counted_in;   /* borrowed, as in its storage: counts these bytes of a discrete output; or NULL */
    int64_t   counted;
    PyObject *others;        /* list of (tensor of this memory with its own version counter, version); or NULL */
    PyObject *copy;          /* made before a write that the version may not show; or NULL   */
    int       written;       /* such a write came before the copy                            */
} gck_op_output;

extern PyType_Spec gck_op_output_spec;

/* Find out whether the outputs of an entry were written into unseen: copies made in time take their
 * place.  0: they are what the operator returned, or their versions show what happened; 1: they
 * have changed; -1. */
int gck_op_output_settle(gck_op_storage *store, PyObject *entry);

/* 1 when the version of an output of an entry shows that it was written into; 0; -1. */
int gck_op_output_written(const gck_op_storage *store, PyObject *entry);

/* Remember a tensor of the output's memory with a version counter of its own.  0 or -1. */
int gck_op_output_note(const gck_py *py, gck_op_output *kept, PyObject *alias);

/* 1 while none of those was written into; 0; -1. */
int gck_op_output_unwritten(const gck_py *py, const gck_op_output *kept);

/* New reference: an alias without history that shares x's version counter. */
PyObject *gck_op_output_alias(const gck_py *py, PyObject *x);

/* New reference: what is kept of the outputs of a call: a tensor as a detached alias or a payload (of
 * several return values only the first), anything else by reference. */
PyObject *gck_op_output_keep(gck_op_storage *store, PyObject *out, const gck_plan *plan);
/* The same of a discrete output, in its form, or as copies; bool as bits. */
PyObject *gck_op_output_keep_discrete(gck_op_storage *store, const gck_call *call, PyObject *form, PyObject *out);

/* Keep what the call drew from a generator, so that its replay leaves the generator where the call
 * did.  0 or -1. */
int gck_op_output_note_draw(gck_op_storage *store, Py_ssize_t index, gck_draw *draw);

/* New reference: the outputs of a call, from its entry; its generator is set to its state after
 * what it drew, or NULL. */
PyObject *gck_op_output_give(gck_op_storage *store, const gck_call *call, PyObject *entry, PyObject *drawn);

#endif
