"""Frozen weights in 4 or 8 bits, laid out as bitsandbytes lays them out: :func:`quantize`.

Only bytes and their lifetimes are right: weights have no values on paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["FORMATS", "QuantizedLinear", "is_linear", "linear_sizes", "quantize"]

#: Values of one nf4 scale, and scales of one second-level scale.
_BLOCK, _BLOCKS = 64, 256


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, among them the transposed ones of GPT-2."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def linear_sizes(module: Any) -> tuple[int, int]:
    """Return the input and the output features of a linear layer."""
    if hasattr(module, "in_features"):
        return module.in_features, module.out_features
    rows, columns = module.weight.shape
    return rows, columns


def _nf4(out_features: int, in_features: int) -> dict[str, torch.Tensor]:
    n = out_features * in_features
    return {
        "packed": torch.empty(-(-n // 2), dtype=torch.uint8),
        "scales": torch.empty(-(-n // _BLOCK), dtype=torch.float32),
        "code": torch.empty(16, dtype=torch.float32),
    }


def _nested(out_features: int, in_features: int) -> dict[str, torch.Tensor]:
    """As _nf4, with scales in 8 bits: bnb_4bit_use_double_quant=True."""
    made = _nf4(out_features, in_features)
    blocks = len(made["scales"])
    return {
        **made,
        "scales": torch.empty(blocks, dtype=torch.uint8),
        "scales_of_scales": torch.empty(-(-blocks // _BLOCKS), dtype=torch.float32),
    }


def _int8(out_features: int, in_features: int) -> dict[str, torch.Tensor]:
    return {
        "packed": torch.empty(out_features, in_features, dtype=torch.int8),
        "scales": torch.empty(out_features, dtype=torch.float32),
    }


def _dequantize_nf4(layer: QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
    scales = layer.scales.float()  # of nested scales those in float32, which die when the weight is written
    weight = torch.empty(layer.out_features, layer.in_features, dtype=dtype)
    del scales
    return weight


def _dequantize_int8(layer: QuantizedLinear, dtype: torch.dtype) -> torch.Tensor:
    return layer.packed.to(dtype).mul_(layer.scales.unsqueeze(1).mul(1.0 / 127.0))


class _Matmul4Bit(torch.autograd.Function):
    """bitsandbytes' MatMul4Bit: the weight is dequantized in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantizedLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer = layer
        return nn.functional.linear(x, _dequantize_nf4(layer, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return torch.matmul(gradient, _dequantize_nf4(ctx.layer, gradient.dtype)), None, None


class _Matmul8Bit(torch.autograd.Function):
    """bitsandbytes' MatMul8bitLt without outliers: the input is quantized, too.

    The input stays an attribute of the node, as there: checkpointing does not free it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: QuantizedLinear, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.layer, ctx.input = layer, x if ctx.needs_input_grad[0] else None
        rows = x.reshape(-1, x.shape[-1])
        half = rows.to(torch.float16)
        quantized, scales = torch.empty_like(rows, dtype=torch.int8), torch.empty(rows.shape[0])
        del half
        product = torch.ops.aten._int_mm(quantized, layer.packed.t())  # int32
        output = torch.empty_like(product, dtype=x.dtype)
        del quantized, scales, product
        return output.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        weight = _dequantize_int8(ctx.layer, ctx.input.dtype)
        return torch.matmul(gradient.to(weight.dtype), weight), None, None


_Tensors = Callable[[int, int], dict[str, torch.Tensor]]

#: Name -> the tensors of a weight, and its product with an input.
FORMATS: dict[str, tuple[_Tensors, type[torch.autograd.Function]]] = {
    "nf4": (_nf4, _Matmul4Bit),
    "nf4-nested": (_nested, _Matmul4Bit),
    "int8": (_int8, _Matmul8Bit),
}


class QuantizedLinear(nn.Module):
    """A frozen linear layer whose weight is stored in fewer bits."""

    packed: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: Any, bits: str, compute_dtype: torch.dtype) -> None:
        super().__init__()
        tensors, self.product = FORMATS[bits]
        self.in_features, self.out_features = linear_sizes(linear)
        # Inputs of int8 layers are quantized in any dtype; those of nf4 layers are cast first.
        self.compute_dtype = None if bits == "int8" else compute_dtype
        for name, tensor in tensors(self.out_features, self.in_features).items():
            self.register_buffer(name, tensor)
        self.bias = linear.bias

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight, which models ask for its dtype."""
        return self.packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        output: torch.Tensor = self.product.apply(x, self, bias)
        return output.to(given)


def quantize(model: nn.Module, bits: str, compute_dtype: torch.dtype, head: nn.Module | None) -> int:
    """Replace the linear layers of a model except its output head and those that transformers keeps
    in float32; return their number of weights.
    """
    names = [getattr(model, name, None) or () for name in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")]
    kept = {name for each in names for name in each}
    count = 0
    for name, module in list(model.named_modules()):
        if not is_linear(module) or (isinstance(module, nn.Linear) and type(module) is not nn.Linear):
            continue  # transformers leaves subclasses, such as routers with several outputs
        if module is not head and not kept & {*name.split(".")}:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, QuantizedLinear(module, bits, compute_dtype))
            count += math.prod(linear_sizes(module))
    return count
