/* place_devices.h: what devices, and graphs that are captured there, have at a place: an offloader and its ring. */
#ifndef GRADCKPT_PLACE_DEVICES_H
#define GRADCKPT_PLACE_DEVICES_H

#include "engine/place_parts.h"
#include "engine/state.h"

enum { GCK_PLACE_AUTO = -1 };

/* *found, borrowed: what this device has, or the graph that this stream is captured into.  1; 0: it cannot have
 * anything, see *why; -1. */
int gck_place_device_have(gck_place_object *place, int device, void *stream, gck_place_device **found,
                          const char **why);

/* Make the ring as large as it should be.  0 or -1. */
int gck_place_device_have_ring(gck_state *state, const gck_place_object *place, gck_place_device *of, int64_t nbytes,
                               void *stream);

/* Borrowed: what has this offloader; NULL: nothing here. */
const gck_place_device *gck_place_device_with(const gck_place_object *place, const gck_offloader *offloader);

/* What a status says; borrowed.  of NULL: of no device. */
const char *gck_place_device_text(const gck_place_device *of, int status);

/* Free all, when the place ends. */
void gck_place_devices_free(gck_place_object *place);

/* Free what graphs had that are gone.  1, or 0: there was nothing.  Other threads may run meanwhile. */
int gck_place_free_ended(void);

/* The same, soon: for where no Python may run. */
void gck_place_graph_ended(void);

#endif
