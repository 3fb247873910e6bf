/* ranges.h: a space of which parts are given back while queued work still uses them.
 *
 * Who takes such a part comes after that work: a stream waits for it, the host finds it only when it is done.  What was
 * given first is taken first. */
#ifndef GRADCKPT_RANGES_H
#define GRADCKPT_RANGES_H

#include "offload/event.h"
#include "offload/space.h"

/* Given back, but in use until `last`. */
typedef struct {
    int64_t    offset, nbytes;
    gck_event *last;             /* owned                                                     */
    int        in_space;         /* it may be taken, by who waits for `last`                  */
} gck_range_given;

/* One that is all zero has no room. */
typedef struct {
    gck_space  space;
    gck_range_given *given;            /* in the order in which they were                           */
    int64_t    n, room;
    int        edge;             /* the number of the order that a taker gets (event.h)       */
} gck_ranges;

/* Take a part, for work on *stream; NULL: for the host.  Its offset; -1: none is free, or there is no memory; -2: who
 * takes it cannot wait, and *status says why. */
int64_t gck_ranges_take(gck_ranges *ranges, int64_t nbytes, void *const *stream, int *status);

/* Give a part back, of which `last` (owned; NULL: none) is the last use.  Never fails; one whose last use is lost is
 * never used again. */
void gck_ranges_give(gck_ranges *ranges, int64_t offset, int64_t nbytes, gck_event *last);

/* What was given and is not used any more is free. */
void gck_ranges_poll(gck_ranges *ranges);

/* Make it larger: bytes from `offset` on, which touch none.  0, or -1: no memory. */
int gck_ranges_add(gck_ranges *ranges, int64_t offset, int64_t nbytes, gck_event *last);

/* 1 when some part was given and may be taken by no one yet. */
int gck_ranges_wait(const gck_ranges *ranges);

/* The oldest use that is not done, taken out: the caller waits for it and gives the part back.  offset -1: none. */
gck_range_given gck_ranges_oldest(gck_ranges *ranges);

/* Wait for all uses that are not done. */
void gck_ranges_finish(gck_ranges *ranges);

/* After gck_ranges_finish(). */
void gck_ranges_clear(gck_ranges *ranges);

#endif
