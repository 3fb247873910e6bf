/* guards.cpp: devices, streams, events, generators and what else torch asks an accelerator. */
#include "torch_parts.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace virtual_device {

namespace {

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = DEVICE;

    c10::DeviceType type() const override { return DEVICE; }
    c10::Device getDevice() const override { return {DEVICE, (c10::DeviceIndex)this_thread().device}; }
    void setDevice(c10::Device d) const override
    {
        TORCH_CHECK(d.type() == DEVICE && d.index() >= 0 && d.index() < DEVICES, "invalid device ", d);
        this_thread().device = d.index();
    }
    void uncheckedSetDevice(c10::Device d) const noexcept override { this_thread().device = d.index(); }
    c10::Device exchangeDevice(c10::Device d) const override
    {
        const c10::Device before = getDevice();
        setDevice(d);
        return before;
    }
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

    static int index_of(c10::Device d) { return d.has_index() ? d.index() : this_thread().device; }

    c10::Stream getStream(c10::Device d) const override
    {
        Lock lock;
        return stream_of(current_stream(index_of(d)));
    }
    c10::Stream getDefaultStream(c10::Device d) const override
    {
        Lock lock;
        return stream_of(stream_at(index_of(d), 0));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getNewStream(d, 0); }
    c10::Stream getNewStream(c10::Device d, int) const override
    {
        Lock lock;
        return stream_of(new_stream(index_of(d)));
    }
    c10::Stream exchangeStream(c10::Stream s) const override
    {
        Lock lock;
        Stream *before = current_stream(s.device_index());
        this_thread().current[s.device_index()] = stream_from(s);
        return stream_of(before);
    }
    void *getStreamNativeHandle(const c10::Stream s) const override
    {
        Lock lock;
        return stream_from(s);
    }
    bool queryStream(const c10::Stream &s) const override
    {
        Lock lock;
        return query(stream_from(s));
    }
    void synchronizeStream(const c10::Stream &s) const override
    {
        Lock lock;
        synchronise(stream_from(s));
    }
    void synchronizeDevice(const c10::DeviceIndex d) const override
    {
        Lock lock;
        synchronise_device(d);
    }
    bool isStreamCapturing(const c10::Stream &s) const        /* overrides from torch 2.12 on */
    {
        Lock lock;
        return stream_from(s)->capture != nullptr;
    }

    void record(void **event, const c10::Stream &s, const c10::DeviceIndex, const c10::EventFlag) const override
    {
        Lock lock;
        if (*event == nullptr) {
            *event = new Event;
        }
        virtual_device::record((Event *)*event, stream_from(s));
    }
    void block(void *event, const c10::Stream &s) const override
    {
        Lock lock;
        if (event != nullptr) {
            wait(stream_from(s), *(Event *)event);
        }
    }
    bool queryEvent(void *event) const override
    {
        Lock lock;
        return event == nullptr || query((Event *)event);
    }
    void synchronizeEvent(void *event) const override
    {
        Lock lock;
        if (event != nullptr) {
            synchronise(*(Event *)event);
        }
    }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override { delete (Event *)event; }
    double elapsedTime(void *first, void *second, const c10::DeviceIndex) const override
    {
        Lock lock;
        TORCH_CHECK(first != nullptr && second != nullptr,
                    "Both events must be recorded before calculating elapsed time.");
        return ((Event *)second)->time - ((Event *)first)->time;
    }
    void recordDataPtrOnStream(const c10::DataPtr &p, const c10::Stream &s) const override
    {
        Lock lock;
        use_on_stream(p.get_context(), stream_from(s));
    }
};

struct Generator final : c10::GeneratorImpl {
    at::Generator cpu;

    Generator(int device, at::Generator inner)
        : GeneratorImpl(c10::Device(DEVICE, (c10::DeviceIndex)device),
                        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          cpu(std::move(inner))
    {
    }
    void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
    void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
    uint64_t get_offset() const override { return cpu.get_offset(); }
    uint64_t current_seed() const override { return cpu.current_seed(); }
    uint64_t seed() override { return cpu.seed(); }
    void set_state(const c10::TensorImpl &state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }

private:
    Generator *clone_impl() const override { return new Generator(device_.index(), cpu.clone()); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    const at::Generator &getDefaultGenerator(c10::DeviceIndex d) const override
    {
        return default_generator(d < 0 ? this_thread().device : d);
    }
    at::Generator getNewGenerator(c10::DeviceIndex d) const override
    {
        return new_generator(d < 0 ? this_thread().device : d);
    }
    c10::Device getDeviceFromPtr(void *p) const override
    {
        TORCH_CHECK(is_device_memory(p), "The specified pointer is not of this device.");
        return {DEVICE, (c10::DeviceIndex)device_of(p)};
    }
    bool isPinnedPtr(const void *p) const override { return is_pinned(p); }
    c10::Allocator *getPinnedMemoryAllocator() const override { return pinned_allocator(); }
    void init() const override {}
    void resizePrivateUse1Bytes(const c10::Storage &storage, size_t n) const override { resize_storage(storage, n); }
    c10::DeviceIndex deviceCount() const override { return DEVICES; }
    void setCurrentDevice(c10::DeviceIndex d) const override { GuardImpl().setDevice({DEVICE, d}); }
    c10::DeviceIndex getCurrentDevice() const override { return (c10::DeviceIndex)this_thread().device; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override
    {
        return GuardImpl().exchangeDevice({DEVICE, d}).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override
    {
        return d < 0 ? getCurrentDevice() : exchangeDevice(d);
    }
};

}  /* namespace */

c10::Stream stream_of(Stream *s)
{
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE, (c10::DeviceIndex)s->device), s->id);
}

Stream *stream_from(const c10::Stream &s)
{
    TORCH_CHECK(s.device_type() == DEVICE, "a stream of another kind of device: ", s);
    return stream_at(s.device_index(), s.id());
}

at::Generator new_generator(int device)
{
    return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}

const at::Generator &default_generator(int device)
{
    static std::vector<at::Generator> *all = new std::vector<at::Generator>{new_generator(0), new_generator(1)};
    TORCH_CHECK(device >= 0 && device < DEVICES, "invalid device ", device);
    return (*all)[(size_t)device];
}

at::Generator cpu_generator_in(const at::Generator &generator)
{
    TORCH_CHECK(generator.device().type() == DEVICE, "Expected a '", c10::Device(DEVICE),
                "' device type for generator but found '",
                generator.device(), "'");
    return static_cast<Generator *>(generator.unsafeGetGeneratorImpl())->cpu;
}

/* What torch looks up: before the first backward, which starts a thread for each device that it knows. */
void register_with_torch()
{
    static GuardImpl guard;
    static Hooks hooks;

    c10::impl::device_guard_impl_registry[(size_t)DEVICE].store(&guard);
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::SetAllocator(DEVICE, device_allocator());
}

}  /* namespace virtual_device */
