"""What CUDA's kernels save, for a step on paper: :func:`cuda_kernels`.

On paper every tensor is on the CPU, whose attention, dropout and RMS norm save other tensors than
CUDA's. Convolutions, layer, group and batch norms, losses and activations save the same.

What flash attention works with is in cuda_scratch.py. Not counted: workspaces of cuBLAS and cuDNN,
cuDNN's attention, which Hopper and Blackwell choose first and which saves what flash attention
saves, cuDNN's recurrent layers and its batch norm's reserve.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import pad

from gradckpt._engine import saved_roles

__all__ = ["cuda_kernels"]

aten = torch.ops.aten

_HALVES = (torch.bfloat16, torch.float16)
#: Values of the last dimension that flash attention reads at once; rows of a mask begin at
#: multiples of it.
_ALIGNMENT = 8


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Let operators on paper save what CUDA's save, also where a recompute runs them in backward.

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
    raise NotImplementedError("gradckpt: CUDA's kernels have no values; run them in a PaperMode")


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
        return output
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
