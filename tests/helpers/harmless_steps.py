"""Steps of a program that differ between two runs and change no value: caches that the first call
fills, counters, metrics, gathered and exchanged parameters."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import gradckpt
from gradckpt.policies import is_recomputing

SIZE = 32

#: What makes a step (h, x, w, v) -> h, whose state is its own.
MAKERS: dict[str, Callable[[], Callable[..., Any]]] = {}


class Of(NamedTuple):
    """A step with a module, whose parameters get gradients too."""

    module: nn.Module
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def maker(maker: Callable[[], Callable[..., Any]]) -> Callable[[], Callable[..., Any]]:
    MAKERS[maker.__name__.removeprefix("_").replace("_", " ")] = maker
    return maker


def step(function: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose first argument is a dict of its own, empty in the first run."""
    MAKERS[function.__name__.removeprefix("_").replace("_", " ")] = lambda: functools.partial(function, {})
    return function


def cached(make: Callable[..., Any], use: Callable[..., Any]) -> Callable[..., Any]:
    """The first call makes a value, the later ones find it."""
    cache: dict[str, Any] = {}

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if "value" not in cache:
            cache["value"] = make(h, x, w, v)
        return use(h, cache["value"], x, w, v)

    return step


# ---- caches ----


@maker
def _causal_mask() -> Any:
    return cached(
        lambda h, x, w, v: torch.arange(SIZE)[:, None] >= torch.arange(SIZE),
        lambda h, mask, x, w, v: h.masked_fill(~mask, -9.0).softmax(-1) @ v,
    )


@maker
def _additive_mask() -> Any:
    return cached(
        lambda h, x, w, v: torch.zeros(SIZE, SIZE).masked_fill(torch.ones(SIZE, SIZE).triu(1) > 0, -1e4),
        lambda h, mask, x, w, v: (h + mask).softmax(-1) @ w + torch.where(h > 0, h, h.tanh()),
    )


@maker
def _mask_of_the_first_call() -> Any:
    """From the values of an exact argument, so that it is the same whenever it is made."""
    return cached(
        lambda h, x, w, v: w.detach() > 0.5,
        lambda h, mask, x, w, v: torch.where(mask, h.sin(), h) * torch.where(h > 0, h, h.tanh()),
    )


@step
def _mask_in_another_layout(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    mask = state.get("mask")
    if mask is None:
        mask = torch.arange(SIZE).view(1, SIZE).expand(SIZE, SIZE) % 3 == 0
        state["mask"] = mask.contiguous()
    return h.masked_fill(mask, 0.0).sin() * h


@maker
def _rotary_tables() -> Any:
    def make(h: Any, x: Any, w: Any, v: Any) -> Any:
        angles = torch.outer(torch.arange(SIZE).float(), torch.linspace(0, 1, SIZE))
        return angles.cos(), angles.sin()

    return cached(make, lambda h, cs, x, w, v: h * cs[0] + h.roll(1, -1) * cs[1])


@maker
def _index_cached() -> Any:
    return cached(
        lambda h, x, w, v: (torch.arange(SIZE) * 7 % SIZE).view(SIZE, 1).expand(SIZE, SIZE),
        lambda h, index, x, w, v: h.gather(0, index).sin() * h,
    )


@maker
def _index_cached_as_a_list() -> Any:
    return cached(
        lambda h, x, w, v: torch.argsort(w.detach().sum(0)).tolist(),
        lambda h, index, x, w, v: h[:, index] * torch.where(h > 0, h, -h),
    )


@maker
def _zero_dimensional_constant_cached() -> Any:
    return cached(lambda h, x, w, v: torch.tensor(SIZE**-0.5), lambda h, scale, x, w, v: (h @ w * scale).sin() * h)


@maker
def _number_cached_from_a_tensor() -> Any:
    return cached(lambda h, x, w, v: w.detach().abs().amax().item(), lambda h, top, x, w, v: (h / top).sin() * h)


@step
def _windows_of_a_buffer(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    """A table that grows: the later run takes a slice of the larger one."""
    table = state.setdefault("table", torch.linspace(0.1, 1, SIZE))
    state["table"] = torch.cat([table, torch.ones(SIZE)])
    return h.sin() * table[:SIZE]


@step
def _inner_region_with_a_cache(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    def inner(h: Any, w: Any) -> Any:
        if "mask" not in state:
            state["mask"] = torch.ones(SIZE, SIZE).tril() > 0
        return (h @ w).masked_fill(~state["mask"], 0).tanh()

    return gradckpt.checkpoint(inner, h.sin(), w) * h


# ---- counters and metrics ----


@step
def _counter_in_a_tensor(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    state.setdefault("count", torch.zeros(())).add_(1)
    return F.gelu(h) * x


@step
def _metric_once(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    if not is_recomputing():
        state["seen"] = (h > 1.5).float().mean().item()
    gate = h @ w
    return torch.where(gate > 0, h * 3, h * h * 0.1)


@step
def _metric_once_with_products(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    if not is_recomputing():
        with torch.no_grad():
            state["seen"] = (h @ v).norm().item(), h.topk(3).values.mean().item(), h.argmax().item()
    return torch.where(h @ w > 0, h * 3, h.tanh()) @ v


@step
def _metric_each_time(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    with torch.no_grad():
        state["seen"] = h.abs().max().item(), (h > 0).sum().item()
    return torch.where(h > 0.1, h.sin(), h @ w)


@step
def _metric_in_the_recompute_only(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    if is_recomputing():
        state["seen"] = h.detach().mean()
    return torch.where(h > 0.1, h.sin(), h * x)


@step
def _comparison_of_other_shape_first(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    if not is_recomputing():
        state["seen"] = (h[0] > 0.7).sum().item() + (h.sum(0) >= 1).sum().item()
    top = h.topk(4, dim=-1)
    return h.tanh().scatter(1, top.indices, top.values)


@step
def _running_maximum(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    """Observers of quantization-aware training; not read by the forward."""
    highest = state.setdefault("highest", torch.zeros(()))
    with torch.no_grad():
        torch.maximum(highest, h.abs().amax(), out=highest)
    return (h @ w).sigmoid() * h


@step
def _debug_checks_once(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    if "good" not in state:
        state["good"] = bool(torch.isfinite(h.detach()).all()) and not bool((h != h).any())
    return torch.where(h != 0, h.tanh(), h) * w


@step
def _ring_buffer(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    """The last outputs, for a later look; the oldest is written over."""
    ring, at = state.setdefault("ring", torch.zeros(3, SIZE, SIZE)), state.get("at", 0)
    ring[at % 3].copy_(h.detach())
    state["at"] = at + 1
    return h.tanh() @ w


# ---- hooks and memory ----


@step
def _gradient_hook(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    y = h.sin()
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 1)
    return y @ w


@step
def _freed_addresses_reused(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    for i in range(4):
        torch.full((SIZE, SIZE), float(i)).exp_()
    y = h.exp().clamp(max=3)
    del h
    return torch.empty(SIZE, SIZE).fill_(0.5) * y


@step
def _garbage_collected_between(state: Any, h: Any, x: Any, w: Any, v: Any) -> Any:
    if is_recomputing():
        gc.collect()
    return (h * x).sin() * w
