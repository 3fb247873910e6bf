/* autocast.cpp: torch.autocast("virtual"): boxed kernels for the operators that it casts. */
#include "torch_parts.h"

#include <torch/library.h>

namespace at::autocast {
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor &arg, c10::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace virtual_device {

namespace {

bool can_cast(const at::Tensor &t) { return is_ours(t) && t.is_floating_point() && t.scalar_type() != at::kDouble; }

at::Tensor cast(const at::Tensor &t, at::ScalarType dtype)
{
    return can_cast(t) ? at::autocast::cached_cast(dtype, t, DEVICE) : t;
}

template <typename F> void for_arguments(const c10::OperatorHandle &op, c10::Stack *stack, F f)
{
    const size_t n = op.schema().arguments().size();

    for (size_t i = stack->size() - n; i < stack->size(); i++) {
        c10::IValue &v = (*stack)[i];
        if (v.isTensor()) {
            v = f(v.toTensor());
        } else if (v.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor &t : v.toTensorVector()) {
                list.push_back(f(t));
            }
            v = list;
        }
    }
}

void call_with(const c10::OperatorHandle &op, c10::Stack *stack, at::ScalarType dtype)
{
    c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));

    for_arguments(op, stack, [dtype](const at::Tensor &t) { return cast(t, dtype); });
    op.callBoxed(stack);
}

void in_lower_precision(const c10::OperatorHandle &op, c10::Stack *stack)
{
    call_with(op, stack, at::autocast::get_autocast_dtype(DEVICE));
}

void in_float32(const c10::OperatorHandle &op, c10::Stack *stack) { call_with(op, stack, at::kFloat); }

/* The widest dtype of the arguments. */
void promoted(const c10::OperatorHandle &op, c10::Stack *stack)
{
    at::ScalarType widest = at::autocast::get_autocast_dtype(DEVICE);

    for_arguments(op, stack, [&widest](const at::Tensor &t) {
        if (can_cast(t)) {
            widest = t.scalar_type() == at::kFloat ? at::kFloat : widest;
        }
        return t;
    });
    call_with(op, stack, widest);
}

/* Those that the tests meet. */
const char *const LOWER[] = {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear", "conv1d", "conv2d", "convolution",
                             "scaled_dot_product_attention"};
const char *const FLOAT32[] = {"exp", "log", "pow.Tensor_Scalar", "layer_norm", "native_layer_norm", "group_norm",
                               "nll_loss", "mse_loss", "softmax.int", "log_softmax.int", "cumsum", "sum",
                               "sum.dim_IntList", "prod"};
const char *const WIDEST[] = {"addcdiv", "addcmul", "dot", "scatter_add", "cat", "stack"};

}  /* namespace */

}  /* namespace virtual_device */

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m)
{
    using namespace virtual_device;
    using torch::CppFunction;

    for (const char *name : LOWER) {
        m.impl(name, CppFunction::makeFromBoxedFunction<&in_lower_precision>());
    }
    for (const char *name : FLOAT32) {
        m.impl(name, CppFunction::makeFromBoxedFunction<&in_float32>());
    }
    for (const char *name : WIDEST) {
        m.impl(name, CppFunction::makeFromBoxedFunction<&promoted>());
    }
}
