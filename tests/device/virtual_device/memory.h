/* memory.h: device memory: two mappings, and blocks as torch's caching allocator has them. */
#ifndef VIRTUAL_DEVICE_MEMORY_H
#define VIRTUAL_DEVICE_MEMORY_H

#include "streams.h"

namespace virtual_device {

/* Reserves addresses for the memory of all devices, of which torch sees a half without access; kernels use
 * the other half, a fixed distance further. */
void reserve_memory(size_t nbytes_per_device);
uintptr_t memory_of(int device);
bool is_device_memory(const void *p);
int  device_of(const void *p);
/* Where kernels find what torch sees at p; other addresses stay as they are. */
void *writable(const void *p);
/* Says on stderr whose memory a fault was in; then faulthandler, if it is enabled before, shows the stacks. */
void watch_faults();

/* Blocks.  They belong to the stream that they were allocated on. */
void *allocate(int device, size_t nbytes);
void  deallocate(void *p);
void  use_on_stream(void *p, Stream *s);
void  empty_cache();

/* The bytes lie in one allocated block; otherwise a reason. */
const char *why_outside(uintptr_t first, size_t nbytes);

/* One operation's access: notes it, and reports what does not lie in an allocated block. */
void use_memory(const Operation &op, const void *first, size_t nbytes, bool writes);

/* What is allocated meanwhile on any stream by this thread belongs to the graph. */
void release_pool_of(Graph *graph);

enum Statistic { ALLOCATED, RESERVED, REQUESTED, ACTIVE, STATISTICS };
struct Count {
    int64_t current = 0, peak = 0, total = 0, freed = 0;
    void add(int64_t n);
};
struct Statistics {
    Count bytes[STATISTICS], blocks[STATISTICS];
    int64_t retries = 0, failures = 0;
};
Statistics &statistics_of(int device);
size_t capacity();

/* Pinned memory of the host. */
void *allocate_pinned(size_t nbytes);
void  deallocate_pinned(void *p);
bool  is_pinned(const void *p);
/* Memory that another owns, as cudaHostRegister(). */
void  remember_pinned(void *p, size_t nbytes);
void  forget_pinned(void *p);

}  /* namespace virtual_device */

#endif
