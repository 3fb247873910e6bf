/* space.h: which parts of a memory or a file are free. */
#ifndef GRADCKPT_SPACE_H
#define GRADCKPT_SPACE_H

#include <stdint.h>

typedef struct {
    int64_t offset, size;
} gck_range;

/* One that is all zero has no room. */
typedef struct {
    gck_range *free;         /* by offset; no two of them touch                                */
    int64_t    n, room;      /* ranges, and for how many there is memory                       */
    int64_t    added, taken; /* how often it grew, and parts that are taken: more ranges than both there never are */
    int64_t    size, used;   /* bytes                                                          */
} gck_space;

/* Make it larger: bytes from here on, which it does not have yet.  0, or -1: no memory. */
int gck_space_add(gck_space *space, int64_t offset, int64_t nbytes);

/* Take a part: its offset, in the smallest range that holds it; -1: none does, or there is no memory. */
int64_t gck_space_take(gck_space *space, int64_t nbytes);

/* The same, and it grows by `more` bytes, or as many as it takes, where none does. */
int64_t gck_space_take_more(gck_space *space, int64_t nbytes, int64_t more);

/* Give a part back.  Never fails. */
void gck_space_give(gck_space *space, int64_t offset, int64_t nbytes);

void gck_space_clear(gck_space *space);

#endif
