"""What a random program can do to its registers: 3x3 floats in, 3x3 floats out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def _halves(a: torch.Tensor) -> torch.Tensor:
    top, rest = a[:1], a[1:]
    return torch.cat([top.sin(), rest * rest])


OPERATORS: dict[str, Any] = {
    "sin": lambda a, b: a.sin(),
    "tanh": lambda a, b: a.tanh(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "gelu": lambda a, b: F.gelu(a),
    "relu": lambda a, b: a.relu(),
    "softmax": lambda a, b: a.softmax(-1),
    "norm": lambda a, b: F.layer_norm(a, (3,)),
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "scale": lambda a, b: a * 0.5,
    "neg": lambda a, b: -a,
    "mm": lambda a, b: a.float() @ b.float(),
    "linear": lambda a, b: F.linear(a.float(), b.float()).tanh(),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "max": lambda a, b: a.max(dim=1, keepdim=True).values.expand(3, 3),
    "cumsum": lambda a, b: a.cumsum(0) * 0.3,
    "index": lambda a, b: a[torch.tensor([0, 2, 2])],
    "empty": lambda a, b: torch.cat([a[:0].sin(), a]),
    "item": lambda a, b: b * a.detach().float().mean().item(),
    # views
    "transpose": lambda a, b: a.t(),
    "flat": lambda a, b: a.reshape(-1).view(3, 3),
    "expand": lambda a, b: a[:1].expand(3, 3),
    "halves": lambda a, b: _halves(a),
    "unbind": lambda a, b: torch.stack(a.unbind(1)),
    "chunk": lambda a, b: torch.cat([c.tanh() for c in a.t().chunk(2)]),
    "alias": lambda a, b: a.view_as(a),
    # dtypes
    "double": lambda a, b: a.double().sin(),
    "bf16": lambda a, b: a.bfloat16().tanh(),
    "float": lambda a, b: a.float(),
    # random
    "dropout": lambda a, b: F.dropout(a, 0.4),
    "rand": lambda a, b: a * torch.rand(3, 3),
    "randn": lambda a, b: (a + torch.randn(3, 3)).sin(),
    "bernoulli": lambda a, b: a * torch.bernoulli(torch.full((3, 3), 0.5)),
    # graph
    "detach": lambda a, b: a.detach(),
    "clone": lambda a, b: a.clone(),
    "new leaf": lambda a, b: a.detach().clone().requires_grad_(),
}
VIEWS = {"transpose", "flat", "expand", "halves", "unbind", "chunk", "alias"}
RANDOM = {"dropout", "rand", "randn", "bernoulli"}
SAVES_NOTHING = {"add", "scale", "neg", "transpose", "flat", "expand", "alias", "unbind", "clone"}


def _fill_row(a: torch.Tensor, b: torch.Tensor) -> None:
    a[1] = 0.25


IN_PLACE: dict[str, Any] = {
    "add_": lambda a, b: a.add_(0.5),
    "mul_": lambda a, b: a.mul_(b),
    "sin_": lambda a, b: a.sin_(),
    "tanh_": lambda a, b: a.tanh_(),
    "relu_": lambda a, b: a.relu_(),
    "copy_": lambda a, b: a.copy_(b),
    "row": _fill_row,
    "on a view": lambda a, b: a.t().mul_(0.5),
    "dropout_": lambda a, b: F.dropout(a, 0.3, inplace=True),
    "data": lambda a, b: a.data.mul_(0.5),
}


# ---- autograd Functions ----


class _SavesInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        a, b = ctx.saved_tensors
        return (grad * b).to(a.dtype), (grad * a).to(b.dtype)


class _SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        result = a.sigmoid()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (result,) = ctx.saved_tensors
        return grad * result * (1 - result), None


class _SavesNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        return a * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * 2, None


class _TwoOutputs(torch.autograd.Function):
    """Saves an input, None, an output, and a number beside them."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        first, second = a.sin(), a + b
        ctx.save_for_backward(a, None, second)
        ctx.factor = 3
        return first, second

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        a, nothing, out = ctx.saved_tensors
        assert nothing is None
        return first * a.cos() + second + out.detach() * 0, second * ctx.factor


class _ChangesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.mark_dirty(a)
        ctx.save_for_backward(b)
        return a.mul_(b.detach())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (b,) = ctx.saved_tensors
        return grad * b, None


class _KeepsOnContext(torch.autograd.Function):
    """A tensor that no hook sees, and an output without gradient."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.kept = a.detach().cos()
        mask = (a > 0).to(a.dtype)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return a.sin(), mask

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return grad * ctx.kept * mask, None


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a)
        return a.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (a,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        return grad * (1 - a.tanh() * again.tanh()), None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a)
        return a.exp().clamp(max=9)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        (a,) = ctx.saved_tensors
        return grad * a.exp(), None


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a)
        return a * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _ = ctx.saved_tensors
        raise ValueError("no gradient today")


CUSTOM: dict[str, Any] = {
    "saves inputs": _SavesInputs,
    "saves output": _SavesOutput,
    "saves nothing": _SavesNothing,
    "two outputs": _TwoOutputs,
    "changes input": _ChangesInput,
    "keeps on context": _KeepsOnContext,
    "reads twice": _ReadsTwice,
    "once differentiable": _Once,
    "fails in backward": _FailsInBackward,
}
