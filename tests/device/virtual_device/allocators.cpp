/* allocators.cpp: memory.h as torch's allocators. */
#include "torch_parts.h"

#include <cstring>

namespace virtual_device {

namespace {

struct DeviceAllocator final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t n) override
    {
        const int device = this_thread().device;
        void *p = virtual_device::allocate(device, n);
        TORCH_CHECK_WITH(OutOfMemoryError, p != nullptr || n == 0, "virtual out of memory. Tried to allocate ", n,
                         " bytes. Device ", device, " has a total capacity of ", capacity(), " bytes, of which ",
                         statistics_of(device).bytes[ALLOCATED].current, " are allocated and ",
                         statistics_of(device).bytes[RESERVED].current, " reserved.");
        return {p, p, &deallocate, c10::Device(DEVICE, (c10::DeviceIndex)device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
    void copy_data(void *to, const void *from, size_t n) const override
    {
        Lock lock;
        Stream *s = current_stream(device_of(to));
        const Operation op = begin_operation(s, "copy_data");
        use_memory(op, from, n, false);
        use_memory(op, to, n, true);
        drain(s);
        memcpy(writable(to), writable(from), n);
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override { empty_cache(); }
    void recordStream(const c10::DataPtr &p, c10::Stream s) override { use_on_stream(p.get(), stream_from(s)); }
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override
    {
        Lock lock;
        const Statistics &all = statistics_of(device);
        c10::CachingDeviceAllocator::DeviceStats s;

        set(s.allocated_bytes, all.bytes[ALLOCATED]), set(s.allocation, all.blocks[ALLOCATED]);
        set(s.reserved_bytes, all.bytes[RESERVED]), set(s.segment, all.blocks[RESERVED]);
        set(s.active_bytes, all.bytes[ACTIVE]), set(s.active, all.blocks[ACTIVE]);
        set(s.requested_bytes, all.bytes[REQUESTED]);
        s.num_alloc_retries = all.retries;
        s.num_ooms = all.failures;
        return s;
    }
    void resetAccumulatedStats(c10::DeviceIndex device) override
    {
        Lock lock;
        Statistics &all = statistics_of(device);
        for (int i = 0; i < STATISTICS; i++) {
            all.bytes[i].total = all.bytes[i].freed = all.blocks[i].total = all.blocks[i].freed = 0;
        }
        all.retries = all.failures = 0;
    }
    void resetPeakStats(c10::DeviceIndex device) override
    {
        Lock lock;
        Statistics &all = statistics_of(device);
        for (int i = 0; i < STATISTICS; i++) {
            all.bytes[i].peak = all.bytes[i].current;
            all.blocks[i].peak = all.blocks[i].current;
        }
    }

private:
    static void set(c10::CachingAllocator::StatArray &to, const Count &from)
    {
        c10::CachingAllocator::Stat &s = to[(size_t)c10::CachingAllocator::StatType::AGGREGATE];
        s.current = from.current, s.peak = from.peak, s.allocated = from.total, s.freed = from.freed;
    }
};

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t n) override
    {
        void *p = allocate_pinned(n);
        return {p, p, &deallocate_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &deallocate_pinned; }
    void copy_data(void *to, const void *from, size_t n) const override { default_copy_data(to, from, n); }
};

}  /* namespace */

c10::DeviceAllocator *device_allocator()
{
    static DeviceAllocator *allocator = new DeviceAllocator;
    return allocator;
}

c10::Allocator *pinned_allocator()
{
    static PinnedAllocator *allocator = new PinnedAllocator;
    return allocator;
}

}  /* namespace virtual_device */
