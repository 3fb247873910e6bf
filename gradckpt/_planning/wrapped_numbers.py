"""Numbers among the operands of operators, which kernels make tensors of."""

from __future__ import annotations

import functools
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private

__all__ = ["KEEP_FACTORS", "WRAP", "in_exact_region", "wrapped_numbers"]

aten = torch.ops.aten

#: Autograd keeps their second operand for the backward of the first.
KEEP_FACTORS = {aten.mul.Tensor, aten.mul_.Tensor, aten.div.Tensor, aten.div_.Tensor}

#: Their kernels make a tensor of the number, as for a wrapped one.
WRAP = {getattr(aten, name).Scalar for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "rsub")}


@functools.cache
def _tensor_places(func: Any) -> frozenset[int]:
    return frozenset(i for i, a in enumerate(func._schema.arguments) if str(a.type) == "Tensor")


def in_exact_region() -> bool:
    """Return whether an exact region without a policy runs its forward, which keeps no number."""
    hooks = private.top_hooks(False)
    if hooks is None or type(hooks[0]).__name__ != "Frame":
        return False
    return not private.is_included(_C.selective_key())


def wrapped_numbers(func: Any, args: Any) -> dict[int, torch.Tensor]:
    """Return tensors for the numbers that a mode gets for wrapped ones, by their places."""
    if not any(isinstance(x, (bool, int, float)) for x in args):
        return {}
    places = _tensor_places(func)
    return {
        i: torch.scalar_tensor(x, dtype=torch.tensor(x).dtype)
        for i, x in enumerate(args)
        if isinstance(x, (bool, int, float)) and i in places
    }
