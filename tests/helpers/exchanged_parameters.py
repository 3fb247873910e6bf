"""Steps of a program whose parameters are made, gathered, exchanged or cast differently in two runs
and have the same values; and hooks of their modules. harmless_steps.py has the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from harmless_steps import SIZE, Of, cached, maker
from torch import nn


class _Weighted(nn.Module):
    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def _linear() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(SIZE, SIZE)


@maker
def _contiguous_copy_of_a_parameter() -> Any:
    return cached(lambda h, x, w, v: w.detach().t().contiguous(), lambda h, copy, x, w, v: (h @ copy).tanh() @ w)


@maker
def _lazily_made_buffer() -> Any:
    class Lazy(nn.Module):
        def forward(self, h: Any) -> Any:
            if not hasattr(self, "scale"):
                self.register_buffer("scale", torch.linspace(0.5, 1.5, SIZE))
            return h.sin() * self.scale

    module = Lazy()
    return lambda h, x, w, v: module(h)


@maker
def _lazy_linear() -> Any:
    module = nn.LazyLinear(SIZE)
    return Of(module, lambda h, x, w, v: module(h).tanh())


@maker
def _lazily_made_parameter() -> Any:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_parameter("weight", None)

        def forward(self, h: Any) -> Any:
            if self.weight is None:
                self.weight = nn.Parameter(torch.linspace(0.5, 1.5, h.shape[-1]))
            return h.sin() * self.weight

    module = Lazy()
    return Of(module, lambda h, x, w, v: module(h))


@maker
def _running_statistics() -> Any:
    norm = nn.BatchNorm1d(SIZE)
    return Of(norm, lambda h, x, w, v: norm(h).sin())


@maker
def _gathered_parameter() -> Any:
    """A shard gathered into a fresh tensor at each run."""

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        full = torch.cat([w[:16], w[16:]])
        return F.linear(h, full).tanh() @ v

    return step


class _Gather(torch.autograd.Function):
    """As FSDP: the whole weight is made of a shard, and its gradient goes to the shard."""

    @staticmethod
    def forward(ctx: Any, shard: Any) -> Any:
        return torch.cat([shard[:16].detach(), shard[16:].detach()])

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


@maker
def _gathered_by_a_function() -> Any:
    return lambda h, x, w, v: F.gelu(F.linear(h, _Gather.apply(w))) @ v


@maker
def _storage_freed_and_filled() -> Any:
    """As FSDP and ZeRO-3: a parameter's storage is empty outside the run, whose address changes."""
    module = _Weighted(torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE))
    weight = module.weight
    shard = weight.detach().clone()
    storage = weight.untyped_storage()
    held: list[Any] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        storage.resize_(0)
        held.append(torch.empty(SIZE * SIZE * len(held) + 5))
        storage.resize_(4 * SIZE * SIZE)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
            weight.copy_(shard)
        return (h @ weight).tanh() * h

    return Of(module, step)


@maker
def _data_exchanged() -> Any:
    """A parameter gets a fresh tensor as its data at each run."""
    module = _Weighted(torch.zeros(SIZE, SIZE))
    weight = module.weight
    shard = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE)

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        weight.data = shard.clone()
        return F.linear(h, weight).sin() @ v

    return Of(module, step)


@maker
def _parameters_swapped_in() -> Any:
    """functional_call puts other tensors in place of the parameters."""
    linear = nn.Linear(SIZE, SIZE, bias=False)

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        return torch.func.functional_call(linear, {"weight": w * 0.5}, (h,)).tanh() * h

    return step


@maker
def _parameter_replaced_by_an_equal_one() -> Any:
    """As an EMA that is swapped in and out; frozen, so that it gets no gradient."""
    module = nn.Linear(SIZE, SIZE, bias=False)
    values = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE)

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        module.weight = nn.Parameter(values.clone(), requires_grad=False)
        return module(h).tanh() @ w

    return step


@maker
def _weight_norm() -> Any:
    linear = torch.nn.utils.parametrizations.weight_norm(_linear())
    return Of(linear, lambda h, x, w, v: linear(h).tanh())


@maker
def _parametrized_weight_cached() -> Any:
    linear = _linear()

    class Double(nn.Module):
        def forward(self, weight: Any) -> Any:
            return weight * 2

    torch.nn.utils.parametrize.register_parametrization(linear, "weight", Double())

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        with torch.nn.utils.parametrize.cached():
            return linear(linear(h).sin())

    return Of(linear, step)


@maker
def _orthogonal() -> Any:
    linear = torch.nn.utils.parametrizations.orthogonal(_linear())
    return Of(linear, lambda h, x, w, v: linear(h).sin() * h)


@maker
def _autocast_with_its_cache() -> Any:
    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (F.linear(F.linear(h, w).sin(), w)).float() * h

    return step


@maker
def _cast_of_a_frozen_parameter_cached() -> Any:
    return cached(
        lambda h, x, w, v: w.detach().bfloat16(), lambda h, cast, x, w, v: (h.bfloat16() @ cast).float().tanh() * h
    )


@maker
def _hook_that_only_looks() -> Any:
    linear, seen = _linear(), []
    linear.register_forward_hook(lambda module, args, out: seen.append(out.detach().abs().mean().item()))
    return Of(linear, lambda h, x, w, v: linear(h).sigmoid() * x)


@maker
def _hook_that_removes_itself() -> Any:
    linear = _linear()

    def hook(module: Any, args: Any, out: Any) -> None:
        (out.detach() > 0).sum()
        handle.remove()

    handle = linear.register_forward_hook(hook)
    return Of(linear, lambda h, x, w, v: torch.where(linear(h) > 0, h.sin(), h * h))


@maker
def _same_tensor_twice() -> Any:
    """One run takes the parameter itself, the other a view of it."""
    calls = [0]

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        calls[0] += 1
        same = w if calls[0] == 1 else w.view(SIZE, SIZE)
        return (h @ same).sin() * h

    return step


@maker
def _detached_parameter() -> Any:
    """A gate that reads a parameter by detach, made anew each time."""
    return lambda h, x, w, v: (h * w.detach()).sigmoid() * h + F.linear(h, w.detach().clone())
