"""What kernels save, cast and allocate, for a simulated step, in which every tensor is on the CPU.

:func:`cuda_kernels`: attention, dropout and RMS norm save other tensors on CUDA. Convolutions,
layer, group and batch norms, losses and activations save the same. Not counted: workspaces of
cuBLAS and cuDNN, cuDNN's attention, which Hopper and Blackwell choose first and which saves what
flash attention saves, cuDNN's recurrent layers and its batch norm's reserve.

:func:`cuda_autocast`: both devices cast matrix products to 16 bits. Of the operators that CUDA's
autocast computes in float32, the CPU's leaves norms, softmax, powers and others in 16 bits: a small
GPT-2 would save 15 % less.

:func:`scratch_of`, :func:`gloo_bytes`: oneDNN copies operands into its own layouts and results out
of them; gloo gathers into a flat tensor and reduces a copy. The order and the sizes are those that
torch 2.13's CPU allocator reports. :func:`cuda_scratch_of`: flash attention's backward sums the
query's gradient in float32, with one number for each row of the scores, and where heads share keys
and values it has their gradients of each head. Sizes and order are those of torch 2.13's
flash_api.cpp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from gradckpt._engine import saved_roles
from gradckpt._engine import torch_private as private

aten = torch.ops.aten
_HALVES = (torch.bfloat16, torch.float16)

#: Values of the last dimension that flash attention reads at once; rows of a mask begin at
#: multiples of it.
_ALIGNMENT = 8


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Let simulated operators save what CUDA's save, also where a recompute runs them in backward.

    The kernels lie below autocast, and C++ functions that call these operators get them, too.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
    library.impl("dropout", _dropout, "AutogradCPU")
    library.impl("_fused_rms_norm", _refuse, "CPU")  # with a kernel it is one operator to autograd
    saved_roles.are_rows_read = False
    try:
        yield
    finally:
        saved_roles.are_rows_read = True
        del library  # which takes its kernels back


def _refuse(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("gradckpt: CUDA's kernels have no values; run them in a SimulationMode")


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not train or p == 0:
        return x
    output: torch.Tensor = aten.native_dropout(x, p, True)[0]
    return output


# ---- attention ----


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run the operators that scaled_dot_product_attention chooses on CUDA since sm_80."""
    output: torch.Tensor
    if attn_mask is None and _takes_flash(query, key, value, is_causal, enable_gqa):
        size = query.shape[-1]
        padded = [pad(x, (0, -size % _ALIGNMENT)) if size % _ALIGNMENT else x for x in (query, key, value)]
        scale = size**-0.5 if scale is None else scale
        output = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return output[..., :size] if size % _ALIGNMENT else output
    efficient = _takes_efficient(query, key, value, attn_mask)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype))
    if efficient:
        bias = None if attn_mask is None else _bias(attn_mask, (*query.shape[:3], key.shape[2]))
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        output = aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, differentiable, dropout_p, is_causal, scale=scale
        )[0]
    else:
        output = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return output


# Conditions of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13.


def _takes_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, grouped: bool) -> bool:
    return (
        _is_fusible(query, key, value)
        and query.dtype in _HALVES
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and (not is_causal or query.shape[2] == key.shape[2])
        and key.shape[1] == value.shape[1]
        and (query.shape[1] % key.shape[1] == 0 if grouped else query.shape[1] == key.shape[1])
    )


def _takes_efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    alignment = 8 if query.dtype in _HALVES else 4
    return (
        _is_fusible(query, key, value)
        and query.dtype in (*_HALVES, torch.float32)
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == value.shape[-1] % alignment == 0
        and query.shape[1] == key.shape[1] == value.shape[1]
        and (mask is None or mask.stride(-1) == 1)
    )


def _is_fusible(*operands: torch.Tensor) -> bool:
    """Return whether the operands have 4 dimensions, one dtype, one batch size and dense rows."""
    first = operands[0]
    return all(
        x.dim() == 4 and x.dtype is first.dtype and len(x) == len(first) and x.numel() and x.stride(-1) == 1
        for x in operands
    )


def _bias(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the mask in the shape of the scores, with rows at multiples of 8 values."""
    if mask.stride(-1) != 1 or any(stride % _ALIGNMENT for stride in mask.stride()[:-1]):
        length = mask.shape[-1]
        mask = pad(mask, (0, _ALIGNMENT - length % _ALIGNMENT))[..., :length]
    return mask.expand(shape)


#: Channels that fill a block of a layout. With fewer, oneDNN reads the operand where it lies.
_BLOCK = 8

#: Its scratchpad for operands in channels_last; about that of a strided backward, beside one
#: sample's gradient.
_PAD, _STRIDED_PAD = 12336, 53272


class Scratch(NamedTuple):
    """``results``: what the operator returns, as meta tensors. ``sizes``: bytes allocated, or
    released if negative, in order; ``None`` where the next result is allocated.
    """

    results: Any
    sizes: list[int | None]


def scratch_of(func: Any, args: Any, results: Any) -> Scratch | None:
    """Return what an operator allocates and releases, None if it allocates its results alone."""
    found: Callable[..., Scratch | None] | None = _SCRATCH.get(func)
    return found(results, *args) if found is not None else None


def gloo_bytes(func: Any, args: Any) -> int:
    """Return the bytes that a collective allocates and releases while it runs."""
    if func == torch.ops.c10d._allgather_base_.default:
        return int(2 * args[0].nbytes)  # its caller's, and its thread's
    return int(args[1].nbytes) if func == torch.ops.c10d._reduce_scatter_base_.default else 0


def _convolution_scratch(result: Any, x: Any, w: Any, bias: Any, *how: Any) -> Scratch | None:
    if not _is_onednn(x, w, *how):
        return None
    if _is_channels_last(x):
        return Scratch(_in_channels_last(result), [w.nbytes, None, _PAD, w.nbytes, -w.nbytes, -_PAD, -w.nbytes])
    operand = _operand(x)
    return Scratch(result, [operand, w.nbytes, result.nbytes, -w.nbytes, -operand, None, -result.nbytes])


def _convolution_backward_scratch(results: Any, gradient: Any, x: Any, w: Any, bias: Any, *rest: Any) -> Scratch | None:
    *how, (for_x, for_w, for_bias) = rest
    if not _is_onednn(x, w, *how):
        return None
    side = w.shape[0] * w.element_size() if for_bias else 0
    sizes: list[int | None] = []
    if _is_channels_last(x):
        copy = 0 if gradient.is_contiguous(memory_format=torch.channels_last) else gradient.nbytes
        sizes += [w.nbytes, copy]
        if for_x:
            sizes += [None, w.nbytes, _PAD, -_PAD, -w.nbytes]
        if for_w:
            sizes += [w.nbytes, side, w.nbytes, None, *[None] * bool(for_bias), -w.nbytes, -w.nbytes, -side]
        return Scratch(tuple(map(_in_channels_last, results)), [*sizes, -copy, -w.nbytes])
    if for_x and max(how[0]) > 1:
        pad = gradient.nbytes // gradient.shape[0] + _STRIDED_PAD
        sizes += [gradient.nbytes, w.nbytes, x.nbytes, pad, -pad, -w.nbytes, -gradient.nbytes]
        sizes += [None, x.nbytes, -x.nbytes, -x.nbytes]
    elif for_x:
        sizes += [gradient.nbytes, w.nbytes, x.nbytes, -w.nbytes, -gradient.nbytes, None, -x.nbytes]
    if for_w:
        operand = _operand(x)
        sizes += [gradient.nbytes, operand, w.nbytes, side, -operand, -gradient.nbytes]
        sizes += [None, *[None] * bool(for_bias), -w.nbytes, -side]
    return Scratch(results, sizes)


def _is_onednn(
    x: Any, w: Any, stride: Any, padding: Any, dilation: Any, transposed: Any, out: Any, groups: Any
) -> bool:
    try:
        backend = private.select_conv_backend(x, w, None, stride, padding, dilation, transposed, out, groups, None)
    except (RuntimeError, TypeError):
        return False
    return str(backend).endswith("Mkldnn")


def _operand(x: Any) -> int:
    size: int = x.nbytes if x.shape[1] % _BLOCK == 0 else 0
    return size


def _is_channels_last(x: Any) -> bool:
    return x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _in_channels_last(x: Any) -> Any:
    return x.contiguous(memory_format=torch.channels_last) if x is not None and x.dim() == 4 else x


def _attention_scratch(results: Any, q: Any, k: Any, *_: Any) -> Scratch:
    rows, columns = _scores_tile(q, k)
    buffer = torch.get_num_threads() * _accumulated(q) * (rows * columns + 2 * rows + rows * q.shape[-1])
    half = torch.get_num_threads() * 2 * rows * columns if q.itemsize == 2 else 0
    return Scratch(results, [None, None, buffer, half, -half, -buffer])


def _attention_backward_scratch(results: Any, gradient: Any, q: Any, k: Any, *_: Any) -> Scratch:
    rows, columns = _scores_tile(q, k)
    copy = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    buffer = _accumulated(q) * (torch.get_num_threads() * 2 * rows * columns + rows)
    if q.itemsize == 2:  # the operands of its products
        buffer += torch.get_num_threads() * 4 * rows * columns
        if torch.backends.cpu.get_cpu_capability() != "AVX2":
            buffer += 2 * rows * columns + 4 * columns * q.shape[-1]  # about what oneDNN has in one of them
    return Scratch(results, [copy, None, None, None, buffer, -buffer, -copy])


def _accumulated(x: Any) -> int:
    """Return the bytes of a number in which products of such numbers are summed."""
    size: int = x.itemsize
    return max(size, 4)


def _scores_tile(q: Any, k: Any) -> tuple[int, int]:
    """Return the rows and columns of the scores that a thread has at once."""
    rows = 256 if q.shape[-2] >= 768 else 64 if q.shape[-2] >= 192 else 32
    return min(rows, q.shape[-2]), min(512, k.shape[-2])


_SCRATCH: dict[Any, Callable[..., Scratch | None]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention_scratch,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward_scratch,
    aten.convolution.default: _convolution_scratch,
    aten.convolution_backward.default: _convolution_backward_scratch,
}


def cuda_scratch_of(func: Any, args: Any, results: Any) -> Scratch | None:
    """Return what an operator allocates and releases, None if it allocates its results alone."""
    if func is not aten._scaled_dot_product_flash_attention_backward.default:
        return None
    query, key = args[1], args[2]
    batch, heads, rows, size = query.shape
    rows = -(-rows // 128) * 128
    sums = [4 * batch * heads * rows, 4 * batch * heads * rows * (-(-size // 32) * 32)]
    if key.shape[1] != heads:
        sums += 2 * [batch * key.shape[2] * heads * size * key.itemsize]
    return Scratch(results, [None, None, None, *sums, *(-size for size in reversed(sums))])


#: Operators whose 16-bit inputs CUDA's autocast casts to float32 and the CPU's does not.
_CAST = (
    *("layer_norm", "native_layer_norm", "group_norm", "rms_norm", "softplus", "rsqrt", "reciprocal", "exp", "expm1"),
    *("log", "log1p", "log2", "log10", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "logsumexp"),
)

#: Operators that it makes return float32 unless the caller gives a dtype.
_RETURN = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList")


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let autocast of the CPU cast as CUDA's, also where a recompute enters it in backward."""
    library = torch.library.Library("aten", "IMPL")
    for name in _CAST:
        library.impl(name, _casting(_overload(name)), "AutocastCPU")
    for name in _RETURN:
        library.impl(name, _returning(_overload(name)), "AutocastCPU")
    try:
        yield
    finally:
        del library  # which takes its kernels back


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _casting(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return op(*map(_widen, args), **{key: _widen(value) for key, value in kwargs.items()})

    return run


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALVES else value


def _returning(op: Any) -> Callable[..., Any]:
    place = [argument.name for argument in op._schema.arguments].index("dtype")

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if place <= len(args):  # softmax gets it by position
            kwargs["dtype"] = args[place - 1]
            args = args[: place - 1]
        if kwargs.get("dtype") is None and x.dtype in _HALVES:
            kwargs["dtype"] = torch.float32
        with torch.autocast("cpu", enabled=False):
            return op(x, *args, **kwargs)

    return run
