/* input.h: a tensor that gradckpt was given, and what is known of it.
 *
 * Every question about a tensor may run Python: under a torch-function mode, of which
 * torch.set_default_device() is one, each read of an attribute calls it.  That code may drop
 * the last reference to anything, switch threads, or raise.  So each fact is asked once, the
 * answers are handed on in this struct, and no borrowed pointer survives a question.
 *
 * Only `view` may become wrong: whoever runs Python may resize the tensor.  It tells what
 * the tensor was; memory is read or written through gck_view_again() alone, which is called
 * when nothing runs Python any more before the work. */
#ifndef GRADCKPT_INPUT_H
#define GRADCKPT_INPUT_H

#include "tensor.h"

enum { GCK_FACT_GRAD = 1, GCK_FACT_LEAF = 2, GCK_FACT_VERSION = 4, GCK_FACT_VIEW = 8 };

typedef struct {
    PyObject   *x;                 /* owned                                                */
    int         known;             /* which of the facts below were asked for              */
    int         requires_grad, leaf;
    int64_t     version;           /* -1: an inference tensor, or a subclass that does not tell */
    gck_verdict verdict;           /* GCK_COMPRESS: it has a view; else why not            */
    gck_tensor  view;
} gck_input;

/* x, of which nothing is known yet; to be cleared. */
gck_input gck_input_of(PyObject *x);
void      gck_input_clear(gck_input *in);

/* Ask for those of these facts that are not known.  0 or -1. */
int gck_input_read(gck_py *py, gck_input *in, int facts);

/* Its version and view, and may the codec take it?  GCK_COMPRESS, or the reason why not; -1 with
 * an exception. */
int gck_input_judge(gck_py *py, gck_input *in, const gck_codec *codec, int64_t min_numel);

/* How DLPack shows a plain Tensor or Parameter: 1; 0: meta, sparse and others, which it cannot; -1. */
int gck_read_dlpack(const gck_py *py, PyObject *x, gck_dl_tensor *dl);

/* x's memory without a question: GCK_COMPRESS and *view, or the reason why not; -1. */
int gck_view_of(gck_py *py, PyObject *x, gck_tensor *view);

/* x's memory as it is now, and valid until something runs Python.  0; -1 with an exception,
 * also when its dtype, device or number of values is not what `was` tells. */
int gck_view_again(gck_py *py, PyObject *x, const gck_tensor *was, gck_tensor *view);

/* Version of x into *version, -1 where x has none.  0 or -1. */
int gck_version_of(const gck_py *py, PyObject *x, int64_t *version);

#endif
