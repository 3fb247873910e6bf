/* store_status.h: what a store answers, beside 0. */
#ifndef GRADCKPT_STORE_STATUS_H
#define GRADCKPT_STORE_STATUS_H

/* Results below 0, beside those of file.h; above, a result is the errno of a call. */
enum {
    GCK_STORE_LARGE = -11,       /* larger than the memory of the store */
    GCK_STORE_FULL = -12,        /* the file takes nothing any more, and the memory is full                         */
    GCK_STORE_NO_MEMORY = -13,
    GCK_STORE_BUSY = -14,        /* its bytes are not in memory yet     */
    GCK_STORE_FORKED = -15,      /* a child of the process that made it: its threads are not here                   */
    GCK_STORE_DEVICE = -16,      /* gck_offloader_status() says         */
    GCK_STORE_RING = -17,        /* the ring has no room                */
    GCK_STORE_PAGEABLE = -18,    /* a graph needs memory that is pinned */
};

/* A sentence's part on what went wrong. */
const char *gck_byte_store_text(int status);

#endif
