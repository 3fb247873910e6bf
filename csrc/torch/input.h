/* input.h: a tensor that gradckpt was given, and what is known about it.
 *
 * Every question about a tensor may run Python: under a torch-function mode, of which
 * torch.set_default_device() is one, each read of an attribute calls it.  That code may drop the
 * last reference to anything, switch threads, or raise.  So each fact is read once and passed on in
 * this struct, and no borrowed pointer survives a question.
 *
 * Only `view` may become wrong: any Python code may resize the tensor.  It says what the tensor
 * was.  Memory is read or written through gck_view_again() alone, which is called when no Python
 * runs any longer before the work. */
#ifndef GRADCKPT_INPUT_H
#define GRADCKPT_INPUT_H

#include "gradckpt.h"
#include "torch/abi.h"
#include "torch/objects.h"
#include "torch/tensor.h"

/* GCK_FACT_SHAPE: `reason` and `view` as far as they follow without asking whether the memory holds
 * the values as they are; who reads values asks for GCK_FACT_VIEW. */
enum { GCK_FACT_GRAD = 1, GCK_FACT_LEAF = 2, GCK_FACT_VERSION = 4, GCK_FACT_SHAPE = 8, GCK_FACT_VIEW = 16 };

typedef struct {
    PyObject   *x;                 /* owned                                                */
    int         known;             /* which of the facts below were read                   */
    int         requires_grad, leaf;
    int64_t     version;           /* -1: an inference tensor, or a subclass without one */
    gck_skip_reason reason;        /* GCK_COMPRESS: it has a view; else the reason why not */
    gck_tensor  view;
} gck_input;

/* An input for x, of which nothing is known yet.  The caller clears it. */
gck_input gck_input_of(PyObject *x);
void      gck_input_clear(gck_input *in);

/* Read those of these facts that are not known yet.  0 or -1. */
int gck_input_read(gck_py *py, gck_input *in, int facts);

/* Read its version and view, and check whether the codec takes it.  GCK_COMPRESS, or the reason why
 * not; -1 with an exception. */
int gck_input_skip_reason(gck_py *py, gck_input *in, const gck_codec *codec, int64_t min_numel);

/* The same by its shape alone, for a tensor that is judged again before it is encoded. */
int gck_input_skip_reason_of_shape(gck_py *py, gck_input *in, const gck_codec *codec, int64_t min_numel);

/* Read a plain Tensor or Parameter through DLPack: 1; 0 for meta, sparse and others, which DLPack
 * cannot show; -1. */
int gck_read_dlpack(const gck_py *py, PyObject *x, gck_dl_tensor *dl);

/* Read x's memory without a question: GCK_COMPRESS and *view, or the reason why not; -1. */
int gck_view_of(gck_py *py, PyObject *x, gck_tensor *view);

/* x's memory as it is now, valid until Python runs.  0; -1 with an exception, also when its dtype,
 * device or number of values differs from `was`. */
int gck_view_again(gck_py *py, PyObject *x, const gck_tensor *was, gck_tensor *view);

/* -1, with the exception for a tensor that changed meanwhile. */
int gck_view_changed(void);

/* The address of x's storage, NULL when it has none.  0 or -1. */
int gck_storage_of(const gck_py *py, PyObject *x, const void **address);

/* The same, faster where the view is known; then of the storage that it had at that time. */
int gck_input_storage(const gck_py *py, const gck_input *in, const void **address);

/* Version of x into *version, -1 where x has none.  0 or -1. */
int gck_version_of(const gck_py *py, PyObject *x, int64_t *version);

/* The memory of a tensor, from its first value to its last; *nbytes 0: it cannot be read.  Runs no
 * Python.  0 or -1. */
int gck_memory_of(const gck_py *py, PyObject *x, const char **data, int64_t *nbytes);

#endif
