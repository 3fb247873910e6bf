"""Host cost of selective recompute beside torch's, on tensors so small that nothing else counts."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import guards
import torch
from timing import rounds_of, typical, with_hook
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

import gradckpt

aten = torch.ops.aten
Contexts = Callable[..., Any]
WAYS: dict[str, Contexts] = {"torch": torch_contexts, "gradckpt": gradckpt.compat.create_selective_checkpoint_contexts}
#: Of a Llama layer: its matrix products and its attention.
NAMED = [aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default]


# ---- per operator ----


def repeat(op: Callable[[], Any], n: int) -> None:
    for _ in range(n):
        op()


def within(contexts: Contexts, policy: Any, run: Callable[[], Any]) -> None:
    forward, recompute = contexts(policy)
    with forward:
        run()
    with recompute:
        run()


def twice(run: Callable[[], Any]) -> None:
    run()
    run()


def check_contexts(policy: Any, run: Callable[[], torch.Tensor]) -> None:
    """Forward and recompute give what the operators give."""
    wanted = run()
    for name, contexts in WAYS.items():
        found: list[torch.Tensor] = []
        within(contexts, policy, lambda found=found: found.append(run()))
        guards.check(all(torch.equal(each, wanted) for each in found), f"{name}: a context changes a result")


def added(policy: Any, run: Callable[[], Any], calls: int, rounds: int) -> dict[str, float]:
    """Way -> microseconds per call that forward and recompute take
    longer than without contexts; these not counted."""
    runs: dict[str, Callable[[], Any]] = {"plain": lambda: twice(run)}
    for name, contexts in WAYS.items():
        runs[name] = lambda contexts=contexts: within(contexts, policy, run)
        runs[f"{name}, nothing inside"] = lambda contexts=contexts: within(contexts, policy, lambda: None)
    found = rounds_of(runs, rounds)
    for name in WAYS:
        guards.takes(name, *(min(each[which] for each in found) for which in (name, "plain")), "without contexts")
    return {
        name: typical(found, lambda t, name=name: t[name] - t[f"{name}, nothing inside"] - t["plain"]) / calls * 1e6
        for name in WAYS
    }


def says_save(*named: Any) -> Callable[..., bool]:
    return lambda ctx, op, *args, **kwargs: op in named


def operators(rounds: int, calls: int = 50) -> list[dict[str, Any]]:
    x = torch.randn(4, 4, requires_grad=True)
    named = [aten.mm.default]
    rows = []
    for kind, policy in (("list", named), ("function", says_save(*named))):
        for what, op in (("not named", lambda: torch.sin(x)), ("saved", lambda: torch.mm(x, x))):
            check_contexts(policy, op)
            us = added(policy, lambda op=op: repeat(op, calls), calls, rounds)
            rows.append({"what": f"operator {what}, policy a {kind}", **us, **bound_of(what, kind)})
    return rows


def bound_of(what: str, kind: str) -> dict[str, Any]:
    if kind == "list":
        return {"bound_us": 0.5} if what == "not named" else {"bound": 0.6}
    return {"bound": 0.9} if what == "not named" else {"bound": 0.65}


# ---- a layer ----


class LlamaLayer(torch.nn.Module):
    """The operators of a Llama layer, without its framework."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ParameterList(torch.ones(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (torch.nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(2 * width, width, bias=False)

    def norm(self, x: torch.Tensor, i: int) -> torch.Tensor:
        return self.norms[i] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions, at an angle of pi / 4."""
        a, b = x.chunk(2, -1)
        return (x + torch.cat((-b, a), -1)) * 0.5**0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        y = self.norm(x, 0)
        q, k, v = (f(y).view(batch, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = torch.nn.functional.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.norm(x, 1)
        out: torch.Tensor = x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
        return out


def layer(rounds: int, times: int = 10) -> dict[str, Any]:
    """One pair of contexts for each time the layer runs, as in a model;
    what they cost is counted."""
    torch.manual_seed(0)
    block, x = LlamaLayer(), torch.randn(1, 4, 16, requires_grad=True)
    check_contexts(NAMED, lambda: block(x))
    runs: dict[str, Callable[[], Any]] = {"plain": lambda: repeat(lambda: twice(lambda: block(x)), times)}
    for name, contexts in WAYS.items():
        runs[name] = lambda c=contexts: repeat(lambda: within(c, NAMED, lambda: block(x)), times)
    found = rounds_of(runs, rounds, floor="plain")
    us = {name: typical(found, lambda t, name=name: t[name] - t["plain"]) / times * 1e6 for name in WAYS}
    return {"what": "Llama layer, matrix products and attention saved", **us, "bound": 1 / 6}


# ---- replay_discrete ----


def discrete_step(layers: list[LlamaLayer], x: torch.Tensor, replay_discrete: bool, by_mode: bool = False) -> None:
    config = {"codec": "int8", "min_numel": 1, "replay_discrete": replay_discrete}
    gradckpt._C.catch_by_mode(by_mode)
    try:
        h = x * 1
        for each in layers:
            h = gradckpt.checkpoint(each, h, compress=config)
        h.sum().backward()
    finally:
        gradckpt._C.catch_by_mode(False)


def replay_discrete(rounds: int, depth: int = 6) -> list[dict[str, Any]]:
    """A step of a Llama so small that only host time counts, inputs in int8: without
    replay_discrete, with results caught on the dispatch key, and by a dispatch mode in C."""
    torch.manual_seed(0)
    layers, x = [LlamaLayer(64) for _ in range(depth)], torch.randn(1, 32, 64, requires_grad=True)
    runs: dict[str, Callable[[], Any]] = {
        "without replay_discrete": functools.partial(discrete_step, layers, x, False),
        "on the dispatch key": functools.partial(discrete_step, layers, x, True),
        "by a dispatch mode in C": functools.partial(discrete_step, layers, x, True, True),
    }
    found = rounds_of(runs, rounds, floor="without replay_discrete")
    return [
        {
            "what": name,
            "least": min(each[name] for each in found) * 1e3,
            "median": statistics.median(each[name] for each in found) * 1e3,
            "ratio": statistics.median(each[name] / each["without replay_discrete"] for each in found),
        }
        for name in runs
    ]


# ---- a region of one node ----


class NoOp(torch.autograd.Function):
    """What any Function costs that is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (_,) = ctx.saved_tensors
        return grads[0]


class Nested(torch.autograd.Function):
    """The least that a reentrant checkpoint can be: no random state, no autocast,
    no check of anything."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        out: torch.Tensor = function(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(x)
        torch.autograd.backward(out, grads[0])
        return None, x.grad


REGIONS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear, ReLU": lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()),
    "Llama layer": LlamaLayer,
}
ONE_NODE: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "torch, reentrant": lambda f, h: torch_checkpoint(f, h, use_reentrant=True),
    "SelectiveRecompute": lambda f, h: gradckpt.SelectiveRecompute.apply(f, None, h),
    "floor: bare Function, nested backward": Nested.apply,
}


def chain(
    layers: list[torch.nn.Module], call: Callable[[Any, torch.Tensor], torch.Tensor], shape: Any, backward: bool = True
) -> None:
    h = torch.randn(shape, requires_grad=True) * 1
    for each in layers:
        h = call(each, h)
    if backward:
        h.sum().backward()


def check_gradients(layers: list[torch.nn.Module], shape: Any) -> None:
    """Each one-node region's, beside plain autograd's."""
    parameters = [p for each in layers for p in each.parameters()]
    wanted: list[torch.Tensor] = []
    for name, call in {"plain": plain, **ONE_NODE}.items():
        torch.manual_seed(1)
        chain(layers, call, shape)
        found = [p.grad for p in parameters if p.grad is not None]
        for p in parameters:
            p.grad = None
        wanted = wanted or found
        same = len(found) == len(wanted) and all(map(torch.equal, found, wanted))
        guards.check(same, f"{name}: its gradients are not those of plain autograd")


def no_grad_forward(layers: list[torch.nn.Module], shape: Any) -> None:
    with torch.no_grad():
        h = torch.randn(shape)
        for each in layers:
            h = each(h)


def plain(function: Callable[[torch.Tensor], torch.Tensor], h: torch.Tensor) -> torch.Tensor:
    return function(h)


def engine_in_engine(function: Any, h: torch.Tensor) -> torch.Tensor:
    """The plain region, and in its backward one run of the autograd engine over nothing."""
    out: torch.Tensor = function(h)
    leaf = torch.zeros((), requires_grad=True)
    grad = torch.ones(())

    def hook(grads: Any) -> None:
        run = torch.autograd.Variable._execution_engine.run_backward
        run((leaf,), (grad,), False, False, (leaf,), True, False)

    out.grad_fn.register_prehook(hook)
    return out


def regions(rounds: int, depth: int = 40) -> list[dict[str, Any]]:
    """Microseconds per region of forward and backward, less a forward without grad, the region's
    own backward, and the recompute: where it runs, inside a backward ("in place"), or as one more
    forward by itself ("plain")."""
    rows = []
    for case, make in REGIONS.items():
        torch.manual_seed(0)
        layers = [make() for _ in range(depth)]
        shape = (1, 4, 16) if case == "Llama layer" else (4, 8)
        check_gradients(layers, shape)
        calls = {
            "plain": plain,
            "hook": with_hook(plain, False),
            "again": with_hook(plain, True),
            "no-op": lambda f, h: NoOp.apply(f(h)),
            "engine": engine_in_engine,
            **ONE_NODE,
        }
        runs: dict[str, Callable[[], Any]] = {
            name: functools.partial(chain, layers, call, shape) for name, call in calls.items()
        }
        runs["no grad"] = functools.partial(no_grad_forward, layers, shape)
        runs["forward"] = functools.partial(chain, layers, plain, shape, False)
        found = rounds_of(runs, rounds, floor="no grad")

        def in_place(t: dict[str, float], name: str) -> float:
            return t[name] - t["no grad"] - (t["plain"] - t["forward"]) - (t["again"] - t["hook"])

        row: dict[str, Any] = {"region": case, "bound": 1 / 3}
        for name in ONE_NODE:
            over = typical(found, lambda t, name=name: in_place(t, name))
            once_more = typical(found, lambda t, name=name: t[name] - t["plain"] - t["no grad"])
            row[name] = {"in place": over / depth * 1e6, "plain": once_more / depth * 1e6}
        parts = {
            "a no-op Function alone": ("no-op", "plain"),
            "a run of the engine in a backward alone": ("engine", "hook"),
        }
        for name, (way, without) in parts.items():
            us = typical(found, lambda t, way=way, without=without: t[way] - t[without]) / depth * 1e6
            row[name] = {"in place": us, "plain": us}
        rows.append(row)
    return rows
