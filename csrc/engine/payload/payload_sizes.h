/* payload_sizes.h: bytes for payloads of codecs whose size depends on the values (gck_counted).
 *
 * On the CPU the values are counted first.  A device is not waited for, so its payloads get room for as
 * large a part of all values as the latest steps needed, and a margin: at first for all.  What a device
 * says late (gck_overflow_part()) is learned by codec, dtype and number of values: after an overflow
 * there is more room at once, and after steps that needed less there is less, little by little. */
#ifndef GRADCKPT_PAYLOAD_ROOM_H
#define GRADCKPT_PAYLOAD_ROOM_H

#include "engine/payload/payload_bytes.h"

/* 1 when the room of p is learned from what a device says late. */
int gck_is_sized_late(const gck_payload *p);

/* Set p->nbytes for the values of x, the original.  0 when that is no less than what the original
 * takes; 1 otherwise, and for other codecs (lossless may be larger than a tiny tensor).  for_user: the
 * payload holds any values, so it has the largest size on a device. */
int gck_payload_room(gck_payload *p, const gck_tensor *x, int for_user);

/* Learn from the answer of a device: the part of all values that p needs. */
void gck_payload_room_learn(const gck_payload *p, uint32_t part);

#endif
