/* store_figures.c: words for what a store answers. */
#include "offload/store_figures.h"

#include "offload/file.h"

#include <string.h>

const char *gck_byte_store_text(int status)
{
    switch (status) {
    case GCK_FILE_IN_MEMORY: return "the directory is in memory (tmpfs)";
    case GCK_FILE_MISALIGNED: return "a misaligned request";
    case GCK_FILE_SHORT: return "the file ended too early";
    case GCK_STORE_LARGE: return "larger than host_budget";
    case GCK_STORE_FULL: return "no room is left";
    case GCK_STORE_NO_MEMORY: return "out of memory";
    case GCK_FILE_CHANGED: return "the file gave other bytes than were written";
    case GCK_STORE_FORKED: return "this process was forked from the one that made the store";
    case GCK_STORE_BUSY: return "it is being read";
    case GCK_STORE_RING: return "the ring has no room";
    case GCK_STORE_PAGEABLE: return "the system refuses to pin host memory, which a captured graph needs";
    case GCK_STORE_DEVICE: return "the device refused";
    default: return status > 0 ? strerror(status) : "an unknown error";
    }
}
