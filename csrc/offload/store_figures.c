/* store_figures.c: words for what a store answers. */
#include "offload/store_figures.h"

#include "offload/file.h"

#include <string.h>

const char *gck_byte_store_text(int status)
{
    static const char *const texts[] = {
        [-GCK_FILE_IN_MEMORY] = "the directory is in memory (tmpfs)",
        [-GCK_FILE_MISALIGNED] = "a misaligned request",
        [-GCK_FILE_SHORT] = "the file ended too early",
        [-GCK_FILE_CHANGED] = "the file gave other bytes than were written",
        [-GCK_STORE_LARGE] = "larger than host_budget",
        [-GCK_STORE_FULL] = "no room is left",
        [-GCK_STORE_NO_MEMORY] = "out of memory",
        [-GCK_STORE_BUSY] = "it is being read",
        [-GCK_STORE_FORKED] = "this process was forked from the one that made the store",
        [-GCK_STORE_DEVICE] = "the device refused",
        [-GCK_STORE_RING] = "the ring has no room",
        [-GCK_STORE_PAGEABLE] = "the system refuses to pin host memory, which a captured graph needs",
    };
    const char *text = status <= 0 && status > -(int)(sizeof texts / sizeof texts[0]) ? texts[-status] : NULL;

    return text != NULL ? text : status > 0 ? strerror(status) : "an unknown error";
}
