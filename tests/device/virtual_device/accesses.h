/* accesses.h: which operation read and wrote which bytes, and the pairs of them without an order. */
#ifndef VIRTUAL_DEVICE_ACCESSES_H
#define VIRTUAL_DEVICE_ACCESSES_H

#include "streams.h"

namespace virtual_device {

/* The operation reads, or writes, bytes [first, first + nbytes), at the addresses that torch sees. */
void note_access(const Operation &op, uintptr_t first, size_t nbytes, bool writes);
/* Nothing is known of these bytes any longer. */
void forget_accesses(uintptr_t first, size_t nbytes);
/* Of the operations of a capture, when it ends. */
void forget_capture(Graph *graph);
/* Bytes that do not belong to an allocated block. */
void report_outside(const Operation &op, uintptr_t first, size_t nbytes, const char *why);

/* A list in JSON, and none is left. */
std::string take_reports();

/* Where a host thread is: asked of `callback` before each operation, when there is one. */
typedef void place_callback(char *text, size_t size);
void set_place_callback(place_callback *callback);
void find_place();

}  /* namespace virtual_device */

#endif
