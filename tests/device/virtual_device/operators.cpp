/* operators.cpp: what needs a kernel of its own: new tensors, views, storages, and operators that torch lets
 * a device replace. */
#include "fallback.h"

#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

namespace virtual_device {

namespace {

using Sizes = at::IntArrayRef;
template <typename T> using Maybe = std::optional<T>;

int index_of(Maybe<c10::Device> d) { return d.has_value() && d->has_index() ? d->index() : this_thread().device; }

at::ScalarType dtype_of(Maybe<at::ScalarType> dtype) { return dtype.value_or(c10::get_default_dtype_as_scalartype()); }

at::Tensor empty(Sizes sizes, Maybe<at::ScalarType> dtype, Maybe<c10::Layout>, Maybe<c10::Device> device, Maybe<bool>,
                 Maybe<c10::MemoryFormat> format)
{
    find_place();
    c10::DeviceGuard guard(c10::Device(DEVICE, (c10::DeviceIndex)index_of(device)));
    const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::Tensor(at::detail::empty_generic(sizes, device_allocator(), keys, dtype_of(dtype), format));
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, Maybe<at::ScalarType> dtype, Maybe<c10::Layout>,
                         Maybe<c10::Device> device, Maybe<bool>)
{
    find_place();
    return new_tensor(index_of(device), sizes, strides, dtype_of(dtype));
}

/* No memory: torch's zeros that stand for a gradient. */
struct NoMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t) override
    {
        return {nullptr, c10::Device(DEVICE, (c10::DeviceIndex)this_thread().device)};
    }
    void copy_data(void *, const void *, size_t) const override {}
};

at::Tensor zeros_without_memory(Sizes sizes, Maybe<at::ScalarType> dtype, Maybe<c10::Layout>, Maybe<c10::Device> device,
                                Maybe<bool>)
{
    static NoMemory *allocator = new NoMemory;
    const c10::DispatchKeySet keys({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor});

    c10::DeviceGuard guard(c10::Device(DEVICE, (c10::DeviceIndex)index_of(device)));
    return at::Tensor(at::detail::empty_generic(sizes, allocator, keys, dtype_of(dtype), std::nullopt));
}

at::Tensor as_strided(const at::Tensor &self, Sizes sizes, Sizes strides, Maybe<int64_t> offset)
{
    return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor view(const at::Tensor &self, Sizes sizes) { return at::native::view(self, sizes); }

at::Tensor reshape_alias(const at::Tensor &self, Sizes sizes, Sizes strides)
{
    return at::native::_reshape_alias(self, sizes, strides);
}

std::vector<int64_t> contiguous(Sizes sizes)
{
    std::vector<int64_t> strides(sizes.size());
    int64_t next = 1;

    for (size_t d = sizes.size(); d-- > 0;) {
        strides[d] = next;
        next *= sizes[d] > 1 ? sizes[d] : 1;
    }
    return strides;
}

void give_sizes(const at::Tensor &self, Sizes sizes, Sizes strides, int64_t offset)
{
    const size_t nbytes = at::detail::computeStorageNbytes(sizes, strides, self.itemsize(), (size_t)offset);

    if (nbytes > self.storage().nbytes()) {
        resize_storage(self.storage(), nbytes);
    }
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
}

const at::Tensor &resize(const at::Tensor &self, Sizes sizes, Maybe<c10::MemoryFormat> format)
{
    if (self.sizes() == sizes && !format.has_value()) {
        return self;
    }
    give_sizes(self, sizes, contiguous(sizes), self.storage_offset());
    if (format.has_value()) {
        self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
    }
    return self;
}

at::Tensor &set_storage(at::Tensor &self, c10::Storage storage, int64_t offset, Sizes sizes, Sizes strides)
{
    const std::vector<int64_t> dense = contiguous(sizes);

    self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    give_sizes(self, sizes, strides.size() == sizes.size() ? strides : Sizes(dense), offset);
    return self;
}

at::Tensor &set_whole_storage(at::Tensor &self, c10::Storage storage)
{
    const int64_t n = (int64_t)(storage.nbytes() / self.itemsize());
    return set_storage(self, std::move(storage), 0, {n}, {1});
}

at::Tensor &set_tensor(at::Tensor &self, const at::Tensor &other)
{
    return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

at::Tensor &set_nothing(at::Tensor &self)
{
    const c10::Device d = self.device();
    c10::Storage none(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, d), device_allocator(), true);
    return set_storage(self, std::move(none), 0, {0}, {1});
}

void record_stream(at::Tensor &self, c10::Stream s)
{
    Lock lock;
    use_on_stream(self.storage().data_ptr().get_context(), stream_from(s));
}

/* torch's choice among attentions: plain operators. */
int64_t attention_choice(const at::Tensor &, const at::Tensor &, const at::Tensor &, const Maybe<at::Tensor> &, double,
                         bool, Maybe<double>, bool)
{
    return 0;
}

c10::OperatorHandle operator_named(const char *name)
{
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle &, c10::Stack *stack)
{
    static const c10::OperatorHandle op = operator_named("aten::convolution");
    run_on_cpu(op, stack);
}

/* After grad, input and weight the other operator takes the sizes of the bias. */
void convolution_backward(const c10::OperatorHandle &, c10::Stack *stack)
{
    static const c10::OperatorHandle op = operator_named("aten::convolution_backward");
    const size_t first = stack->size() - 10;
    const bool transposed = (*stack)[first + 6].toBool();
    const at::Tensor weight = (*stack)[first + 2].toTensor();
    const int64_t groups = (*stack)[first + 8].toInt();
    const std::vector<int64_t> sizes = {transposed ? weight.size(1) * groups : weight.size(0)};

    stack->insert(stack->begin() + (ptrdiff_t)first + 3, c10::IValue(sizes));
    run_on_cpu(op, stack);
}

}  /* namespace */

}  /* namespace virtual_device */

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    using namespace virtual_device;
    using torch::CppFunction;

    m.impl("empty.memory_format", &virtual_device::empty);
    m.impl("empty_strided", &virtual_device::empty_strided);
    m.impl("_efficientzerotensor", &zeros_without_memory);
    m.impl("as_strided", &virtual_device::as_strided);
    m.impl("view", &virtual_device::view);
    m.impl("_reshape_alias", &reshape_alias);
    m.impl("resize_", &virtual_device::resize);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("set_.source_Storage", &set_whole_storage);
    m.impl("set_.source_Tensor", &set_tensor);
    m.impl("set_", &set_nothing);
    m.impl("record_stream", &virtual_device::record_stream);
    m.impl("_fused_sdp_choice", &attention_choice);
    m.impl("convolution_overrideable", CppFunction::makeFromBoxedFunction<&virtual_device::convolution>());
    m.impl("convolution_backward_overrideable",
           CppFunction::makeFromBoxedFunction<&virtual_device::convolution_backward>());
    for (const char *name : {"native_layer_norm", "native_group_norm", "native_dropout"}) {
        m.impl(name, CppFunction::makeFromBoxedFunction<&run_on_cpu>());     /* torch has another for devices */
    }
}
