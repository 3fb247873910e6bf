"""Steps of a program that differ between two runs and change no value: caches that the first call
fills, counters, metrics, gathered and exchanged parameters."""

from __future__ import annotations

import collections
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


def cached(make: Callable[..., Any], use: Callable[..., Any]) -> Callable[..., Any]:
    """The first call makes a value, the later ones find it."""
    cache: dict[str, Any] = {}

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if "value" not in cache:
            cache["value"] = make(h, x, w, v)
        return use(h, cache["value"], x, w, v)

    return step


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


@maker
def _mask_in_another_layout() -> Any:
    cache: dict[str, Any] = {}

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        mask = cache.get("mask")
        if mask is None:
            mask = torch.arange(SIZE).view(1, SIZE).expand(SIZE, SIZE) % 3 == 0
            cache["mask"] = mask.contiguous()
        return h.masked_fill(mask, 0.0).sin() * h

    return step


@maker
def _rotary_tables() -> Any:
    def make(h: Any, x: Any, w: Any, v: Any) -> Any:
        angles = torch.outer(torch.arange(SIZE).float(), torch.linspace(0, 1, SIZE))
        return angles.cos(), angles.sin()

    return cached(make, lambda h, cs, x, w, v: h * cs[0] + h.roll(1, -1) * cs[1])


@maker
def _rotary_tables_expanded() -> Any:
    cache: dict[str, Any] = {}

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        table = cache.get("table")
        if table is None:
            table = torch.linspace(0, 1, SIZE).cos().expand(SIZE, SIZE)
            cache["table"] = table.clone()
        return h * table

    return step


@maker
def _counter() -> Any:
    steps: list[int] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        steps.append(1)
        return F.gelu(h) * x

    return step


@maker
def _counter_in_a_tensor() -> Any:
    count = torch.zeros(())

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        count.add_(1)
        return F.gelu(h) * x

    return step


@maker
def _metric_once() -> Any:
    seen: list[float] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if not is_recomputing():
            seen.append((h > 1.5).float().mean().item())
        gate = h @ w
        return torch.where(gate > 0, h * 3, h * h * 0.1)

    return step


@maker
def _metric_once_with_products() -> Any:
    seen: list[Any] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if not is_recomputing():
            with torch.no_grad():
                seen.append(((h @ v).norm().item(), h.topk(3).values.mean().item(), h.argmax().item()))
        return torch.where(h @ w > 0, h * 3, h.tanh()) @ v

    return step


@maker
def _metric_each_time() -> Any:
    seen: list[Any] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        with torch.no_grad():
            seen.append((h.abs().max().item(), (h > 0).sum().item()))
        return torch.where(h > 0.1, h.sin(), h @ w)

    return step


@maker
def _metric_of_the_first_call_only() -> Any:
    seen: list[Any] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if not seen:
            seen.append((h.detach() > 0.7).sum())
        return torch.where(h > 0.1, h.sin(), h * x)

    return step


@maker
def _metric_in_the_recompute_only() -> Any:
    seen: list[Any] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if is_recomputing():
            seen.append(h.detach().mean())
        return torch.where(h > 0.1, h.sin(), h * x)

    return step


@maker
def _comparison_of_other_shape_first() -> Any:
    seen: list[Any] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if not is_recomputing():
            seen.append((h[0] > 0.7).sum().item() + (h.sum(0) >= 1).sum().item())
        top = h.topk(4, dim=-1)
        return h.tanh().scatter(1, top.indices, top.values)

    return step


@maker
def _running_maximum() -> Any:
    """Observers of quantization-aware training; not read by the forward."""
    highest = torch.zeros(())

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        with torch.no_grad():
            torch.maximum(highest, h.abs().amax(), out=highest)
        return (h @ w).sigmoid() * h

    return step


@maker
def _gradient_hook() -> Any:
    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        y = h.sin()
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 1)
        return y @ w

    return step


@maker
def _dropout_counter() -> Any:
    drawn = [0]

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        drawn[0] += 1
        return F.dropout(h @ w, 0.2) * h

    return step


@maker
def _ring_buffer() -> Any:
    """The last outputs, for a later look; the oldest is written over."""
    ring, at = torch.zeros(3, SIZE, SIZE), [0]

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        ring[at[0] % 3].copy_(h.detach())
        at[0] += 1
        return h.tanh() @ w

    return step


@maker
def _list_of_the_last_outputs() -> Any:
    last: collections.deque[Any] = collections.deque(maxlen=2)

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        y = h.sin()
        last.append(y.detach())
        return y * x

    return step


@maker
def _freed_addresses_reused() -> Any:
    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        for i in range(4):
            torch.full((SIZE, SIZE), float(i)).exp_()
        y = h.exp().clamp(max=3)
        del h
        return torch.empty(SIZE, SIZE).fill_(0.5) * y

    return step


@maker
def _garbage_collected_between() -> Any:
    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if is_recomputing():
            gc.collect()
        return (h * x).sin() * w

    return step


@maker
def _constants_by_lru_cache() -> Any:
    @functools.lru_cache
    def table(size: int) -> Any:
        return torch.linspace(0.1, 1, size)

    return lambda h, x, w, v: (h * table(SIZE)).tanh() * h


@maker
def _index_cached() -> Any:
    return cached(
        lambda h, x, w, v: (torch.arange(SIZE) * 7 % SIZE).view(SIZE, 1).expand(SIZE, SIZE),
        lambda h, index, x, w, v: h.gather(0, index).sin() * h,
    )


@maker
def _index_cached_as_a_list() -> Any:
    cache: list[int] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if not cache:
            cache.extend(torch.argsort(w.detach().sum(0)).tolist())
        return h[:, cache] * torch.where(h > 0, h, -h)

    return step


@maker
def _windows_of_a_buffer() -> Any:
    """A table that grows: the later run takes a slice of the larger one."""
    table = [torch.linspace(0.1, 1, SIZE)]

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        found = table[0][:SIZE]
        table[0] = torch.cat([table[0], torch.ones(SIZE)])
        return h.sin() * found

    return step


@maker
def _zero_dimensional_constant_cached() -> Any:
    return cached(lambda h, x, w, v: torch.tensor(SIZE**-0.5), lambda h, scale, x, w, v: (h @ w * scale).sin() * h)


@maker
def _number_cached_from_a_tensor() -> Any:
    return cached(lambda h, x, w, v: w.detach().abs().amax().item(), lambda h, top, x, w, v: (h / top).sin() * h)


@maker
def _debug_checks_once() -> Any:
    checked: list[bool] = []

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if not checked:
            checked.append(bool(torch.isfinite(h.detach()).all()) and not bool((h != h).any()))
        return torch.where(h != 0, h.tanh(), h) * w

    return step


@maker
def _debug_checks_each_time() -> Any:
    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        assert not torch.isnan(h).any()
        return h.tanh() @ w

    return step


@maker
def _workspace() -> Any:
    """Scratch memory that operators write to, under no_grad."""
    scratch = torch.empty(SIZE, SIZE)

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        with torch.no_grad():
            torch.mul(h, 2, out=scratch)
        return h.sin() * w

    return step


@maker
def _inner_region_with_a_cache() -> Any:
    cache: dict[str, Any] = {}

    def inner(h: Any, w: Any) -> Any:
        if "mask" not in cache:
            cache["mask"] = torch.ones(SIZE, SIZE).tril() > 0
        return (h @ w).masked_fill(~cache["mask"], 0).tanh()

    return lambda h, x, w, v: gradckpt.checkpoint(inner, h.sin(), w) * h
