/* saved_samples.h: samples of what a region saves, from the forward and from its recompute.
 *
 * They are taken in the first region of each kind: of a function, or of a class of modules, and a codec.
 * Python compares them (gradckpt/_engine/ill_conditioned.py) and warns of an operator that amplifies the
 * error of restored inputs.  Regions of a kind that was judged only look it up. */
#ifndef GRADCKPT_SAVED_SAMPLES_H
#define GRADCKPT_SAVED_SAMPLES_H

#include "engine/region/frame.h"

/* Take samples in this region, whose arguments are kept, if its kind was not judged.  0 or -1. */
int gck_samples_begin(gck_frame *frame, const gck_plan *plan);

/* The tensor of a slot in the forward, and in the recompute.  0 or -1. */
int gck_samples_saved(gck_frame *frame, Py_ssize_t slot, PyObject *x);
int gck_samples_restored(gck_frame *frame, Py_ssize_t slot, PyObject *x);

/* The forward has returned; then its graph tells which operator saved what.  0 or -1. */
int gck_samples_returned(gck_frame *frame, PyObject *result);

/* The recompute is complete: judge the kind.  0 or -1. */
int gck_samples_judge(gck_frame *frame);

/* The frame dies: if it was not judged, another region of its kind will be. */
void gck_samples_clear(gck_frame *frame);

/* gradckpt._C.judge_anew(on): inside, all kinds count as new, and those of before return afterwards. */
PyObject *gck_judge_anew(PyObject *module, PyObject *on);

#endif
