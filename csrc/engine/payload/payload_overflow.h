/* payload_overflow.h: payloads of which a device has yet to report: did values overflow, is it another's twin?
 *
 * A kernel learns that some value overflows when it runs, and no thread waits for it.  So the
 * payload also holds the original until the device has written its overflow flag, which is read
 * whenever another payload is made, at a restore, and by stats().  No overflow releases the
 * original; an overflow keeps it, and restores use it.
 *
 * Sharing is proved as late: the second use of a tensor is encoded, and a kernel compares its bytes with those of
 * the first.  If they are equal, the second payload drops its own and uses the first's.
 *
 * The CPU may be far ahead of the device.  To hold only a few originals, it then waits for the
 * oldest flag, without the GIL and with a timeout: the device's work may itself wait for something
 * that this thread has yet to do (a receive, for example). */
#ifndef GRADCKPT_PAYLOAD_OVERFLOW_H
#define GRADCKPT_PAYLOAD_OVERFLOW_H

#include "engine/state.h"
#include "engine/payload/payload_bytes.h"

/* Before an encode: p gets a word if a device does the work and the codec may overflow.  0, or -1
 * when no word is left (no exception). */
int gck_payload_overflow_begin(gck_payload *p);

/* After it: status as gck_run_encode() returned it. p holds x while its flag is pending. */
void gck_payload_overflow_encoded(gck_payload *p, PyObject *x, int status);

/* p, just encoded, is the newest.  Wait while too many originals of its device are held.  0, or -1
 * with an exception.  Other threads run meanwhile. */
int gck_payload_overflow_bound(gck_payload *newest);

/* self, encoded on a device, may have the bytes of `first`: ask, if the device can be asked.  0 or -1. */
int gck_payload_overflow_ask(gck_payload *self, gck_payload *first);

/* Act on every flag that was written. */
void gck_payload_overflow_poll(gck_state *state);

/* p dies: call this before anything runs Python. */
void gck_payload_overflow_forget(gck_payload *p);

/* *original: new reference to the tensor that a restore must use, or NULL when the payload
 * suffices.  A pending flag is waited for if the original has changed since.  0, or -1 with
 * torch's exception when the payload cannot hold what the original was then. */
int gck_payload_overflow_original(gck_payload *p, PyObject **original);

/* For tests: late_overflow(seconds) makes CPU codecs report overflow as a device does, in words
 * that settle_overflow() writes, and sets how long gck_payload_overflow_bound() waits; 0 ends
 * it. */
PyObject *gck_late_overflow(PyObject *module, PyObject *seconds);
PyObject *gck_settle_overflow(PyObject *module, PyObject *unused);

#endif
