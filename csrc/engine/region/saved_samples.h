/* saved_samples.h: samples of what a region saves, from the forward and from its recompute.
 *
 * They are taken in the first region of each kind: of a function, or of a class of modules, and a codec.
 * Python compares them (gradckpt/_engine/ill_conditioned.py) and warns of an operator that amplifies the
 * error of restored values.  Regions of a kind that was judged only look it up. */
#ifndef GRADCKPT_SAVED_SAMPLES_H
#define GRADCKPT_SAVED_SAMPLES_H

#include "engine/state.h"

typedef struct {
    gck_state *state;                  /* borrowed                                           */
    PyObject  *taken;                  /* owned, of Python; NULL: none are taken here        */
    int        kind;                   /* of the region, among those of the state            */
} gck_samples;

/* Take samples in a region that begins, if its kind was not judged.  codec: whose error the recompute
 * meets, that of its arguments or of what its policy keeps, and of_policy: of which, or of both.  0 or -1. */
enum { GCK_OF_INPUTS = 0, GCK_OF_POLICY = 1, GCK_OF_BOTH = 2 };
int gck_samples_begin(gck_samples *s, PyObject *function, const gck_codec *codec, int of_policy);

/* The tensor of a slot, for the method of what Python has taken.  0 or -1. */
int gck_samples_note(gck_samples *s, const char *method, Py_ssize_t slot, PyObject *x);

/* The forward of the frame has returned; then its graph tells which operator saved what.  nodes: as many may be
 * looked at.  0 or -1. */
int gck_samples_returned(gck_samples *s, PyObject *frame, PyObject *result, int64_t nodes);

/* The recompute is complete: judge the kind.  0 or -1. */
int gck_samples_decide(gck_samples *s);

/* The region dies: if it was not judged, another one of its kind will be. */
void gck_samples_clear(gck_samples *s);

/* gradckpt._C.sample_anew(on): inside, all kinds count as new, and those of before return afterwards. */
PyObject *gck_sample_anew(PyObject *module, PyObject *on);

#endif
