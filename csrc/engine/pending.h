/* pending.h: payloads of which a device has yet to say whether they hold their values.
 *
 * A kernel that cannot hold some value knows it when it runs, and nobody waits for it.  So
 * the payload keeps the original, too, until the device has written its verdict; the words
 * are looked at whenever another payload is made, at a restore, and by stats().  FITS lets
 * go of the original; REFUSED keeps it, and what is restored comes from it.
 *
 * The CPU may be far ahead of the device.  So that no more than a few originals are kept, it
 * then waits for the oldest verdict, without the GIL and not for ever: what the device works
 * at may itself wait for something that this thread has yet to do (a receive, for one). */
#ifndef GRADCKPT_PENDING_H
#define GRADCKPT_PENDING_H

#include "payload.h"

/* Before an encode: p gets a word where the work is such.  0, or -1 when there is none left (no
 * exception). */
int gck_pending_begin(gck_payload *p);

/* After it: status as gck_run_encode() returned it.  p keeps x while its verdict is open. */
void gck_pending_encoded(gck_payload *p, PyObject *x, int status);

/* p, which was encoded, is the newest.  Waits while too many originals of its device are kept.  0, or -1 with an
 * exception.  Other threads run meanwhile. */
int gck_pending_bound(gck_payload *newest);

/* Acts on every verdict that has come. */
void gck_pending_poll(gck_state *state);

/* p dies: first of all, before anything runs Python. */
void gck_pending_forget(gck_payload *p);

/* *original: new reference to what a restore must be taken from, or NULL when the payload
 * serves.  0, or -1 with torch's exception when the original was changed since and the payload
 * cannot hold what it was, for which an open verdict is waited for. */
int gck_pending_original(gck_payload *p, PyObject **original);

/* For tests: late_verdicts(seconds) makes CPU codecs answer as a device does, in words that
 * settle_verdicts() writes, and gck_pending_bound() wait so long; 0: no more. */
PyObject *gck_late_verdicts(PyObject *module, PyObject *seconds);
PyObject *gck_settle_verdicts(PyObject *module, PyObject *unused);

#endif
