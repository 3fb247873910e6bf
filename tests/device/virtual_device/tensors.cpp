/* tensors.cpp: from device tensors to CPU tensors at the addresses of kernels, and back. */
#include "torch_parts.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

namespace virtual_device {

namespace {

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

/* The current device of this thread, for a while. */
struct OnDevice {
    const int before = this_thread().device;
    explicit OnDevice(int device) { this_thread().device = device; }
    ~OnDevice() { this_thread().device = before; }
};

}  /* namespace */

Operation again(const Operation &op)
{
    return {op.stream, op.stream->clock.tick(op.stream->number), op.name, op.place};
}

CpuOnly::CpuOnly() : before(c10::impl::tls_local_dispatch_key_set())
{
    const c10::DispatchKeySet included(c10::DispatchKey::BackendSelect);
    const c10::DispatchKeySet excluded =
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;

    c10::impl::PODLocalDispatchKeySet keys = {};
    keys.set_included(included);
    keys.set_excluded(excluded);
    c10::impl::_force_tls_local_dispatch_key_set(keys);
}

CpuOnly::~CpuOnly() { c10::impl::_force_tls_local_dispatch_key_set(before); }

at::Tensor new_tensor(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype)
{
    OnDevice guard(device);
    return at::Tensor(at::detail::empty_strided_generic(sizes, strides, device_allocator(), KEYS, dtype));
}

at::Tensor view_of(const c10::Storage &storage, const caffe2::TypeMeta &dtype, at::IntArrayRef sizes,
                   at::IntArrayRef strides, int64_t offset)
{
    const bool ours = storage.device_type() == DEVICE;
    const c10::DispatchKeySet keys = ours ? KEYS : c10::DispatchKeySet(c10::DispatchKey::CPU);
    at::Tensor t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, dtype);

    t.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
    return t;
}

at::Tensor with_bits_of(const at::Tensor &other, const at::Tensor &t)
{
    t._set_conj(other.is_conj());
    t._set_neg(other.is_neg());
    return t;
}

at::Tensor view_like(const c10::Storage &storage, const at::Tensor &t)
{
    return with_bits_of(t, view_of(storage, t.dtype(), t.sizes(), t.strides(), t.storage_offset()));
}

at::Tensor Aliases::of(const at::Tensor &t)
{
    const c10::Storage &storage = t.storage();
    const c10::Storage *cpu = nullptr;

    for (const Pair &p : tensors) {
        if (p.device.is_same(t)) {
            return p.cpu;
        }
    }
    for (const Storages &s : storages) {
        if (s.device.is_alias_of(storage)) {
            cpu = &s.cpu;
        }
    }
    if (cpu == nullptr) {
        void *data = writable(storage.data());
        storages.push_back({storage, c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                                                  c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)),
                                                  c10::GetCPUAllocator(), true),
                            data, storage.nbytes()});
        cpu = &storages.back().cpu;
    }
    at::Tensor alias = view_like(*cpu, t);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
        alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    tensors.push_back({t, alias});
    return alias;
}

at::Tensor Aliases::original(const at::Tensor &cpu) const
{
    for (const Pair &p : tensors) {
        if (p.cpu.is_same(cpu)) {
            return p.device;
        }
    }
    return {};
}

const c10::Storage *Aliases::storage(const at::Tensor &cpu) const
{
    for (const Storages &s : storages) {
        if (cpu.has_storage() && s.cpu.is_alias_of(cpu.storage())) {
            return &s.device;
        }
    }
    return nullptr;
}

void Aliases::put_back_sizes(const Operation &op)
{
    for (const Storages &s : storages) {
        if (s.cpu.data() != s.data || s.cpu.nbytes() != s.nbytes) {
            resize_storage(s.device, s.cpu.nbytes());
            drain(op.stream);                            /* what fills new memory */
            if (s.cpu.nbytes() > 0) {
                use_memory(again(op), s.device.data(), s.cpu.nbytes(), true);
                memcpy(writable(s.device.data()), s.cpu.data(), s.cpu.nbytes());
            }
        }
    }
    for (const Pair &p : tensors) {
        if (p.device.sizes() != p.cpu.sizes() || p.device.strides() != p.cpu.strides()) {
            p.device.unsafeGetTensorImpl()->set_sizes_and_strides(p.cpu.sizes(), p.cpu.strides(),
                                                                  p.cpu.storage_offset());
        }
    }
}

void resize_storage(const c10::Storage &storage, size_t nbytes)
{
    OnDevice guard(storage.device().index());
    c10::StorageImpl *impl = storage.unsafeGetStorageImpl();
    c10::DataPtr data = device_allocator()->allocate(nbytes);
    const size_t both = nbytes < impl->nbytes() ? nbytes : impl->nbytes();

    if (both > 0) {
        Lock lock;
        Stream *s = current_stream(storage.device().index());
        const Operation op = begin_operation(s, "resize");
        use_memory(op, impl->data(), both, false);
        use_memory(op, data.get(), both, true);
        drain(s);
        memcpy(writable(data.get()), writable(impl->data()), both);
    }
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(nbytes);
}

namespace {

enum { MOST_RANGES = 64 };

void use_range(const Operation &op, const char *first, size_t nbytes, bool writes, std::vector<Range> *ranges)
{
    use_memory(op, first, nbytes, writes);
    if (ranges != nullptr) {
        ranges->push_back({first, nbytes, writes});
    }
}

}  /* namespace */

void use_values(const Operation &op, const Values &v, bool writes, std::vector<Range> *ranges)
{
    int64_t nbytes = v.item, nranges = 1;
    std::vector<std::pair<int64_t, int64_t>> dims;       /* stride in bytes, size */

    for (int d = 0; d < v.ndim; d++) {
        if (v.sizes[d] == 0) {
            return;
        }
        if (v.sizes[d] > 1 && v.strides[d] > 0) {
            dims.push_back({v.strides[d] * v.item, v.sizes[d]});
        }
    }
    std::sort(dims.begin(), dims.end());
    size_t d = 0;
    for (; d < dims.size() && dims[d].first <= nbytes; d++) {            /* no hole up to here */
        nbytes = dims[d].first * (dims[d].second - 1) + nbytes;
    }
    for (size_t e = d; e < dims.size(); e++) {
        nranges *= dims[e].second;
    }
    if (nranges > MOST_RANGES) {
        for (; d < dims.size(); d++) {
            nbytes += dims[d].first * (dims[d].second - 1);
        }
        nranges = 1;
    }
    for (int64_t i = 0; i < nranges; i++) {
        int64_t at = 0, rest = i;
        for (size_t e = d; e < dims.size(); e++) {
            at += rest % dims[e].second * dims[e].first;
            rest /= dims[e].second;
        }
        use_range(op, (const char *)v.data + at, (size_t)nbytes, writes, ranges);
    }
}

void use_tensor(const Operation &op, const at::Tensor &t, bool writes, std::vector<Range> *ranges)
{
    const void *data = t.unsafeGetTensorImpl()->data();

    if (t.is_contiguous()) {
        use_range(op, (const char *)data, t.nbytes(), writes, ranges);
    } else {
        const Values values = {data, (int64_t)t.itemsize(), (int)t.dim(), t.sizes().data(), t.strides().data()};
        use_values(op, values, writes, ranges);
    }
}

}  /* namespace virtual_device */
