"""Checkpoints, hooks and kept calls inside one another, and what comes out of them.

A nesting is a list of levels, outermost first. Each level calls the one below between operators of
its own. All tensors are squares of one size, so that no shape tells two of them apart, and every
weight is an argument of every level.

``python nestings.py 'int8 > kept > torch' dressed once`` runs one and prints what came out.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torchs_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torchs_contexts

import gradckpt
from gradckpt import policies

SIZE = 32  # 1,024 values: the least that a codec takes by default
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
FAKE = {"codec": "int8", "fake_quantize": True}


def by_function(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op in MATMULS


# ---- the levels


class Tail(torch.nn.Module):
    """A function as a module without parameters: all tensors are arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _under(context: Callable[[], Any]) -> Callable[..., Any]:
    def call(function: Any, *args: Any) -> Any:
        with context():
            return function(*args)

    return call


def _region(**options: Any) -> Callable[..., Any]:
    return lambda function, *args: gradckpt.checkpoint(function, *args, **options)


def _torchs(**options: Any) -> Callable[..., Any]:
    return lambda function, *args: torchs_checkpoint(function, *args, **options)


def _named(recompute: bool) -> Callable[..., Any]:
    return lambda function, *args: policies.region(function, f"call {function.depth}", recompute=recompute)(*args)


def _one_node(policy: Any) -> Callable[..., Any]:
    return lambda function, *args: gradckpt.SelectiveRecompute.apply(Tail(function), policy, *args)


def _without_grad(function: Any, *args: Any) -> Any:
    with torch.no_grad():
        aside = function(*args)
    return aside * args[0].cos()


def _plain(function: Any, *args: Any) -> Any:
    return function(*args)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return gradckpt.codecs.encode(x, "int8").decode()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def _rounded(function: Any, *args: Any) -> Any:
    """What a fake-quantized region computes, without one."""
    if not torch.is_grad_enabled():
        return function(*args)
    return function(
        *(_Rounded.apply(t) if t.requires_grad and not t.is_leaf and t.numel() >= 1024 else t for t in args)
    )


def _copies() -> Any:
    """Hooks that pack a copy, as ``compress_saved`` does."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)


_SAC = {"use_reentrant": False, "context_fn": lambda: torchs_contexts(list(MATMULS))}

#: Name of a level: how it calls what is below, and what torch itself has for it.
LEVELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "None": (_region(), _torchs(use_reentrant=False)),
    "lossless": (_region(compress="lossless"), _torchs(use_reentrant=False)),
    "int8": (_region(compress="int8"), _torchs(use_reentrant=False)),
    "fake": (_region(compress=FAKE), _torchs(use_reentrant=False)),
    "reentrant": (_region(use_reentrant=True), _torchs(use_reentrant=True)),
    "torch": (_torchs(use_reentrant=False), _torchs(use_reentrant=False)),
    "torch reentrant": (_torchs(use_reentrant=True), _torchs(use_reentrant=True)),
    "one node": (_one_node(None), _torchs(use_reentrant=True)),
    "one node policy": (_one_node("save_matmuls"), _torchs(**_SAC)),
    "policy": (_region(policy="save_matmuls"), _torchs(**_SAC)),
    "policy function": (_region(policy=by_function), _torchs(**_SAC)),
    "kept": (_named(recompute=False), _plain),
    "named": (_named(recompute=True), _plain),
    "saved lossless": (_under(lambda: gradckpt.compress_saved("lossless")), _under(_copies)),
    "saved int8": (_under(lambda: gradckpt.compress_saved("int8")), _under(_copies)),
    "offload": (
        _under(lambda: torch.autograd.graph.save_on_cpu()),
        _under(lambda: torch.autograd.graph.save_on_cpu()),
    ),
    "no grad": (_without_grad, _without_grad),
}
LOSSY = {"int8", "saved int8"}
HOOKS = {"saved lossless", "saved int8", "offload"}
NODES = {"one node", "one node policy"}
ONE_NODE = NODES | {"reentrant", "torch reentrant"}
KEEPS = {"policy", "policy function", "one node policy"}
#: Regions of ours: inside them a backward in the forward reads what the forward has. Elsewhere it
#: cannot be told from a step's own: numerics.md.
REGIONS = {"None", "lossless", "int8", "fake", "reentrant", "one node", "one node policy", "policy", "policy function"}


# ---- the programs


def _body(x: Any, w: Any, v: Any, b: Any) -> Any:
    """Distinct saved tensors of one shape, discrete results and a mask."""
    h = F.linear(x, w, b)
    g = F.gelu(h) @ v
    y = g.tanh() * h.sin()
    return F.dropout(torch.where(y > 0, y * h, y * g), 0.2)


def _energy(x: Any, w: Any, v: Any, b: Any) -> Any:
    """A backward inside the forward."""
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(F.linear(z, w.detach(), b.detach()).tanh().square().sum(), z)
    return (force * x.sin()) @ v


def _level_up(call: Callable[..., Any], below: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def bare(x: Any, w: Any, v: Any, b: Any) -> Any:
        return call(below, x, w, v, b)

    def dressed(x: Any, w: Any, v: Any, b: Any) -> Any:
        y = call(below, x.sin(), w, v, b)
        return (y @ w.tanh()).sigmoid() * x

    def swapped(x: Any, w: Any, v: Any, b: Any) -> Any:
        y = call(below, F.linear(x, w, b), v, w, b)
        return torch.where(y > 0.1, y.tanh() * x, (x * y).cos())

    def forces(x: Any, w: Any, v: Any, b: Any) -> Any:
        """The backward inside the forward goes through the levels below."""
        with torch.enable_grad():
            z = x.detach().sin().requires_grad_()
            energy = call(below, z * 1, w.detach().requires_grad_(), v.detach(), b.detach()).square().mean()
            (force,) = torch.autograd.grad(energy, z)
        return (x + force).sin() @ w

    return {"bare": bare, "dressed": dressed, "swapped": swapped, "forces": forces}[kind]


#: A program: the innermost function, what the outermost level has around the one below, and what
#: the others have.
PROGRAMS = {
    "bare": (_body, "bare", "bare"),
    "dressed": (_body, "dressed", "dressed"),
    "swapped": (_body, "swapped", "swapped"),
    "energy": (_energy, "dressed", "dressed"),
    "forces inside": (_body, "dressed", "forces"),
    "forces outside": (_body, "forces", "dressed"),
}


def _tensors() -> tuple[Any, ...]:
    torch.manual_seed(0)
    s, w, v = (torch.randn(SIZE, SIZE) for _ in range(3))
    return tuple(t.requires_grad_() for t in (s, w / SIZE**0.5, v / SIZE**0.5, torch.randn(SIZE)))


def _once(loss: Any, leaves: Any) -> None:
    loss.backward()


def _twice(loss: Any, leaves: Any) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def _double(loss: Any, leaves: Any) -> None:
    grads = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    sum(g.square().sum() for g in grads if g is not None).backward()


ENDINGS = {"once": _once, "twice": _twice, "double": _double}


class Outcome(NamedTuple):
    output: Any
    grads: tuple[Any, ...]
    error: BaseException | None

    def __str__(self) -> str:
        if self.error is None:
            return "a result"
        return f"{type(self.error).__name__}: " + " ".join(str(self.error).split())[:300]


def run(calls: Iterable[Callable[..., Any]], program: str, ending: str) -> Outcome:
    """The program with these calls as its levels."""
    below, outer, inner = PROGRAMS[program]
    calls = list(calls)
    for i, call in reversed(list(enumerate(calls))):
        below.depth = i
        below = _level_up(call, below, inner if i else outer)
    leaves = _tensors()
    torch.manual_seed(1)
    output = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = _level_up(_plain, below, "dressed")(*leaves)
            ENDINGS[ending](output.square().sum(), leaves)
    except Exception as error:
        error.__traceback__ = None
        return Outcome(None if output is None else output.detach(), (), error)
    return Outcome(output.detach(), tuple(t.grad for t in leaves), None)


def _equal(a: Outcome, b: Outcome) -> bool:
    pairs = zip((a.output, *a.grads), (b.output, *b.grads), strict=True)
    return all((p is q is None) or (p is not None and q is not None and torch.equal(p, q)) for p, q in pairs)


def error_of(got: Outcome, want: Outcome) -> float:
    """The largest relative error of a gradient; of the output too."""
    worst = 0.0
    for p, q in zip((got.output, *got.grads), (want.output, *want.grads), strict=True):
        if (p is None) != (q is None):
            return float("inf")
        if p is not None:
            off = ((p - q).norm() / q.norm().clamp_min(1e-30)).item()
            worst = max(worst, off if off == off else float("inf"))
    return worst


# ---- the verdict


def _inside(levels: tuple[str, ...], outer: set[str], inner: set[str]) -> bool:
    """Is one of the inner levels inside one of the outer ones?"""
    return any(a in outer and b in inner for a, b in itertools.combinations(levels, 2))


#: Errors that torch's own nesting does not have: why, when, and what the text has.
DOCUMENTED: list[tuple[str, Callable[[tuple[str, ...], str, str], bool], str]] = [
    (
        "selective.md: one node has no gradient of the gradient",
        lambda levels, program, ending: ending == "double" and not NODES.isdisjoint(levels),
        "create_graph|twice|second",
    ),
    (
        "selective.md: one node keeps no graph, so a kept call raises",
        lambda levels, program, ending: _inside(levels, ONE_NODE, {"kept"}),
        "recompute=False",
    ),
    (
        "selective.md: inside a kept call recompute=True raises",
        lambda levels, program, ending: _inside(levels, {"kept"}, {"named"}),
        "recompute=True",
    ),
    (
        "selective.md: a second backward, if outputs were kept",
        lambda levels, program, ending: ending != "once" and not KEEPS.isdisjoint(levels),
        "extra time|second backward|reusable",
    ),
    (
        "the recompute of a kept call gives its outputs, without a graph",
        lambda levels, program, ending: program.startswith("forces") and "kept" in levels,
        "not have been used in|other tensors",
    ),
    (
        "one node's forward has no grad, so a region in it or around it calls less than in the recompute",
        lambda levels, program, ending: program == "energy" and "one node policy" in levels and len(levels) > 1,
        r"not found in storage|alike \d+ x",
    ),
    (
        "one node calls autograd.grad, which torch's form refuses",
        lambda levels, program, ending: _inside(levels, NODES, {"reentrant", "torch reentrant"}),
        "use_reentrant=True",
    ),
]


def _output_is_exact(levels: tuple[str, ...], program: str) -> bool:
    """Is a backward inside the forward known as one? One node has no hooks, and others' hooks hide
    those of a region, so what is inside them acts as outside of regions."""
    if program == "forces outside":
        return False
    if program == "forces inside":
        other = [i for i, name in enumerate(levels) if name in {*ONE_NODE, "offload"}]
        inside = levels[min(other, default=len(levels)) :]
        return levels[0] in REGIONS and not {"fake", "saved int8"}.intersection(inside)
    return True


#: What a level computes, without checkpoints and hooks.
WITHOUT = {"plain": _plain, "without fake": _rounded, "without no grad": _without_grad}


def _hooked(name: str) -> Callable[..., Any]:
    """The same, with hooks around what is below, as every region has them."""
    return lambda function, *args: WITHOUT[name](functools.partial(LEVELS["offload"][0], function), *args)


def _without(name: str, outer: tuple[str, ...]) -> str:
    exact = name == "fake" and ONE_NODE.intersection(outer)
    return f"without {name}" if f"without {name}" in WITHOUT and not exact else "plain"


class Reference:
    """Runs without checkpoints, with torch's own, and with one lossy level alone; each once."""

    def __init__(self) -> None:
        self.seen: dict[Any, Outcome] = {}

    def of(self, levels: Iterable[str], program: str, ending: str) -> Outcome:
        """Names of levels, "plain" and "torch's NAME" among them."""
        key = (tuple(levels), program, ending)
        if key not in self.seen:
            self.seen[key] = run([self._call(name) for name in key[0]], program, ending)
        return self.seen[key]

    @staticmethod
    def _call(name: str) -> Callable[..., Any]:
        if name in WITHOUT:
            return WITHOUT[name]
        if name.endswith(", hooked"):
            return _hooked(name.removesuffix(", hooked"))
        return LEVELS[name.removeprefix("torch's ")][name.startswith("torch's ")]

    def plain(self, levels: tuple[str, ...], program: str, ending: str) -> Outcome:
        """What the forward computes: one node runs it without grad, and so without rounding."""
        return self.of([_without(n, levels[:i]) for i, n in enumerate(levels)], program, ending)

    def twin(self, levels: tuple[str, ...], program: str, ending: str) -> Outcome:
        """torch's own nesting. ``compress_saved`` has no effect inside a region."""
        regions = [i for i, n in enumerate(levels) if n in REGIONS or n == "torch"]
        inside = levels[min(regions, default=len(levels)) :]
        outside = levels[: len(levels) - len(inside)]
        inside = tuple("plain" if n.startswith("saved") else n for n in inside)
        return self.of([n if n == "plain" else f"torch's {n}" for n in (*outside, *inside)], program, ending)

    def alone(self, levels: tuple[str, ...], program: str, ending: str) -> float:
        """The errors of the lossy levels, each alone, as if they had no cause in common.
        ``compress_saved`` rounds the arguments of a region, which is then a lossy one; the
        recompute of one node rounds for a fake-quantized region where its forward did not."""
        want, errors = self.plain(levels, program, ending), []
        without = [_without(n, levels[:i]) for i, n in enumerate(levels)]
        for i, name in enumerate(levels):
            ways = [name] * (name in LOSSY)
            if name in REGIONS and name not in LOSSY and "saved int8" in levels[:i]:
                ways.append("int8")
            if name == "fake" and ONE_NODE.intersection(levels[:i]):
                ways.append("without fake")
            # compress_saved() leaves alone what is saved outside too, unless below hooks.
            outer = [without[j] + ", hooked" * (levels[j] in HOOKS | REGIONS | {"torch"}) for j in range(i)]
            for way in ways:
                got = self.of([*outer, way, *without[i + 1 :]], program, ending)
                errors.append(error_of(got, want) if got.error is None else float("inf"))
        return sum(e * e for e in errors) ** 0.5


def verdict(levels: tuple[str, ...], program: str, ending: str, reference: Reference) -> str | None:
    """What is wrong with this nesting, or None."""
    got = run([LEVELS[name][0] for name in levels], program, ending)
    want = reference.plain(levels, program, ending)
    assert want.error is None, (levels, program, ending, want.error)
    if got.error is not None:
        twin = reference.twin(levels, program, ending)
        if twin.error is not None:
            return None
        for _, where, text in DOCUMENTED:
            if where(levels, program, ending) and re.search(text, str(got.error)):
                return None
        return f"raises where torch's does not: {got}"
    if _output_is_exact(levels, program) and not torch.equal(got.output, want.output):
        return f"the output is not that of the forward: {error_of(got, want):.2e}"
    alone = reference.alone(levels, program, ending)
    if _equal(got, want):
        return None
    # One node adds up gradients in another order, as torch's does, and so do others beside a codec.
    error, most = error_of(got, want), 2.0 if ending == "double" else 1.5
    if error <= most * alone + 1e-6 * bool({*ONE_NODE, *LOSSY}.intersection(levels)):
        return None
    twin = reference.twin(levels, program, ending)
    return f"error {error:.2e}, alone {alone:.2e}; torch's: {error_of(twin, want) if twin.error is None else twin}"


def pairs() -> list[tuple[str, ...]]:
    return list(itertools.product(LEVELS, repeat=2))


def triples() -> list[tuple[str, ...]]:
    return list(itertools.product(LEVELS, repeat=3))


def command(levels: tuple[str, ...], program: str, ending: str) -> str:
    return f"python nestings.py {' > '.join(levels)!r} {program} {ending}"


if __name__ == "__main__":
    names = tuple(sys.argv[1].split(" > "))
    with contextlib.suppress(IndexError):
        print(verdict(names, sys.argv[2], sys.argv[3], Reference()) or "right")
