"""What convolutions, attention and collectives of the CPU allocate while they run:
:func:`scratch_of`, :func:`gloo_bytes`.

oneDNN copies operands into its own layouts and results out of them; gloo gathers into a flat tensor
and reduces a copy. The order and the sizes are those that torch 2.13's CPU allocator reports.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gradckpt._engine import torch_private as private

__all__ = ["Scratch", "gloo_bytes", "scratch_of"]

aten = torch.ops.aten

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


def _forward(result: Any, x: Any, w: Any, bias: Any, *how: Any) -> Scratch | None:
    if not _is_onednn(x, w, *how):
        return None
    if _is_channels_last(x):
        return Scratch(_in_channels_last(result), [w.nbytes, None, _PAD, w.nbytes, -w.nbytes, -_PAD, -w.nbytes])
    operand = _operand(x)
    return Scratch(result, [operand, w.nbytes, result.nbytes, -w.nbytes, -operand, None, -result.nbytes])


def _backward(results: Any, gradient: Any, x: Any, w: Any, bias: Any, *rest: Any) -> Scratch | None:
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


def _attention(results: Any, q: Any, k: Any, *_: Any) -> Scratch:
    rows, columns = _tile(q, k)
    buffer = torch.get_num_threads() * _accumulated(q) * (rows * columns + 2 * rows + rows * q.shape[-1])
    half = torch.get_num_threads() * 2 * rows * columns if q.itemsize == 2 else 0
    return Scratch(results, [None, None, buffer, half, -half, -buffer])


def _attention_backward(results: Any, gradient: Any, q: Any, k: Any, *_: Any) -> Scratch:
    rows, columns = _tile(q, k)
    copy = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    buffer = _accumulated(q) * (torch.get_num_threads() * 2 * rows * columns + rows)
    if q.itemsize == 2:  # the operands of its products, and about what oneDNN has in one of them
        buffer += torch.get_num_threads() * 4 * rows * columns + 2 * rows * columns + 4 * columns * q.shape[-1]
    return Scratch(results, [copy, None, None, None, buffer, -buffer, -copy])


def _accumulated(x: Any) -> int:
    """Return the bytes of a number in which products of such numbers are summed."""
    size: int = x.itemsize
    return max(size, 4)


def _tile(q: Any, k: Any) -> tuple[int, int]:
    """Return the rows and columns of the scores that a thread has at once."""
    rows = 256 if q.shape[-2] >= 768 else 64 if q.shape[-2] >= 192 else 32
    return min(rows, q.shape[-2]), min(512, k.shape[-2])


_SCRATCH: dict[Any, Callable[..., Scratch | None]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
