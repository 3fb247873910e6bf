/* pending.h: payloads of which a device has yet to say whether they hold their values.
 *
 * A kernel that cannot hold some value knows it when it runs, and nobody waits for it.  So
 * the payload keeps the original, too, until the device has written its verdict; the word
 * is looked at whenever another payload is made, at a restore, and by stats().  FITS lets
 * go of the original; REFUSED keeps it, and what is restored comes from it. */
#ifndef GRADCKPT_PENDING_H
#define GRADCKPT_PENDING_H

#include "payload.h"

/* Before an encode: p gets a word where the work is such.  0, or -1 when there is none left (no
 * exception). */
int gck_pending_begin(gck_payload *p);

/* After it: status as gck_run_encode() returned it.  p keeps x while its verdict is open. */
void gck_pending_encoded(gck_payload *p, PyObject *x, int status);

/* Acts on every verdict that has come. */
void gck_pending_poll(gck_state *state);

/* p dies: first of all, before anything runs Python. */
void gck_pending_forget(gck_payload *p);

/* *original: new reference to what a restore must be taken from, or NULL when the payload
 * serves.  0, or -1 with torch's exception when the original was changed since. */
int gck_pending_original(gck_payload *p, PyObject **original);

/* For tests: late_verdicts(on) makes CPU codecs answer as a device does, in words that
 * settle_verdicts() writes. */
PyObject *gck_late_verdicts(PyObject *module, PyObject *on);
PyObject *gck_settle_verdicts(PyObject *module, PyObject *unused);

#endif
