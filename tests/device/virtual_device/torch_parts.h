/* torch_parts.h: what the files that know torch share. */
#ifndef VIRTUAL_DEVICE_TORCH_PARTS_H
#define VIRTUAL_DEVICE_TORCH_PARTS_H

#include "accesses.h"
#include "graphs.h"
#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace virtual_device {

constexpr c10::DeviceType DEVICE = c10::DeviceType::PrivateUse1;

inline bool is_ours(const at::Tensor &t) { return t.defined() && t.device().type() == DEVICE; }

c10::DeviceAllocator *device_allocator();
c10::Allocator *pinned_allocator();

/* torch's name of a stream, and back. */
c10::Stream stream_of(Stream *s);
Stream *stream_from(const c10::Stream &s);

/* Default generators wrap one of the CPU each. */
const at::Generator &default_generator(int device);
at::Generator new_generator(int device);
at::Generator cpu_generator_in(const at::Generator &generator);

/* The CPU's kernels alone: no autograd, no autocast, no mode of Python's. */
class CpuOnly {
public:
    CpuOnly();
    ~CpuOnly();
    CpuOnly(const CpuOnly &) = delete;
    CpuOnly &operator=(const CpuOnly &) = delete;

private:
    c10::impl::LocalDispatchKeySet before;
};

/* New device memory; the current stream is that of `device`. */
at::Tensor new_tensor(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

/* A view of a device tensor's storage. */
at::Tensor view_of(const c10::Storage &storage, const caffe2::TypeMeta &dtype, at::IntArrayRef sizes,
                   at::IntArrayRef strides, int64_t offset);

/* `t` is conjugated and negated where the other is, and is returned. */
at::Tensor with_bits_of(const at::Tensor &other, const at::Tensor &t);
/* The same view of another storage. */
at::Tensor view_like(const c10::Storage &storage, const at::Tensor &t);

/* The operation goes on after the memory of its results was filled. */
Operation again(const Operation &op);

/* CPU tensors at the addresses of kernels: those of one storage share one, as the tensors do. */
class Aliases {
public:
    at::Tensor of(const at::Tensor &t);
    /* The tensor whose alias this is; undefined: it is not an alias. */
    at::Tensor original(const at::Tensor &cpu) const;
    /* The device storage that the CPU storage stands for; NULL: it is new. */
    const c10::Storage *storage(const at::Tensor &cpu) const;
    /* What a kernel resized is resized. */
    void put_back_sizes(const Operation &op);

private:
    struct Pair {
        at::Tensor device, cpu;
    };
    struct Storages {
        c10::Storage device, cpu;
        void  *data;
        size_t nbytes;
    };
    std::vector<Pair> tensors;
    std::vector<Storages> storages;
};

/* A strided array, as tensors and gck_tensor have it; strides in values. */
struct Values {
    const void    *data;
    int64_t        item;
    int            ndim;
    const int64_t *sizes, *strides;
};

/* The operation reads or writes the values of a tensor: a range of bytes for each part without holes, or one
 * for all where there are many.  ranges: they are added there, too; or NULL. */
void use_values(const Operation &op, const Values &values, bool writes, std::vector<Range> *ranges);
void use_tensor(const Operation &op, const at::Tensor &t, bool writes, std::vector<Range> *ranges);

/* Give a device storage another size. */
void resize_storage(const c10::Storage &storage, size_t nbytes);

void register_with_torch();

}  /* namespace virtual_device */

#endif
