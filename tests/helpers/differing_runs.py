"""Programs whose recompute differs from the forward in something that the engine can see.

A program is a chain of steps on squares of one size. One step, the difference, does one thing in
the first run and another later. A region around it is right, or says where the runs part.

Out of scope, since no fingerprint of shapes, dtypes, strides, identities and operators sees it:

- another Python constant in an operator that nothing catches (``h * 2``, ``leaky_relu`` slopes);
- other values in the same buffer or parameter (an EMA codebook, a step of the optimizer too early;
  ``debug=True`` names parameters);
- a tensor of the program replaced by a new one that the forward never saw: FSDP gathers so;
- two intermediate results that nodes of one type made, one in place of the other;
- a comparison of another kind or with another constant: nothing tells its mask from that of the
  forward, and where comparisons are matched, such a call is one that the forward never made;
- random numbers from outside torch;
- a difference that nothing saves and that changes no value which is saved.

``python differing_runs.py NUMBER MODE`` runs one program.
"""

from __future__ import annotations

import functools
import random
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from nestings import Tail
from torch.utils.checkpoint import CheckpointError

import gradckpt

SIZE = 32


# ---- steps that are the same in each run: (h, x, w, v) -> h


def _comparison(h: Any, x: Any, w: Any, v: Any) -> Any:
    return torch.where(h > 0, h * 1.5, h.tanh())


def _routed(h: Any, x: Any, w: Any, v: Any) -> Any:
    top = h.topk(8, dim=-1)
    return h.scatter(1, top.indices, top.values.tanh())


STEPS: dict[str, Callable[..., Any]] = {
    "sin": lambda h, x, w, v: h.sin(),
    "tanh": lambda h, x, w, v: h.tanh(),
    "gelu": lambda h, x, w, v: F.gelu(h),
    "mm w": lambda h, x, w, v: h @ w,
    "mm v": lambda h, x, w, v: h @ v,
    "linear": lambda h, x, w, v: F.linear(h, w, v[0]),
    "times x": lambda h, x, w, v: h * x,
    "softmax": lambda h, x, w, v: h.softmax(-1) * h,
    "comparison": _comparison,
    "topk": _routed,
}


# ---- differences: what the first run does, and what a later one does


class Difference(NamedTuple):
    first: Callable[..., Any]
    later: Callable[..., Any]


def _hooked(h: Any, w: Any, factor: Any) -> Any:
    linear = torch.nn.Linear(SIZE, SIZE, bias=False)
    del linear.weight
    linear.weight = w
    if factor is not None:
        linear.register_forward_hook(lambda module, args, out: out * factor)
    return linear(h)


def _normed(h: Any, training: bool) -> Any:
    norm = F.batch_norm
    mean, var = torch.zeros(SIZE), torch.ones(SIZE)
    return norm(h, mean, var, training=training)


def _two(first: str) -> Callable[..., Any]:
    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if first == "sin":
            a = h.sin()
            b = h.sigmoid()
        else:
            b = h.sigmoid()
            a = h.sin()
        return a * b

    return step


def _products(first: str) -> Callable[..., Any]:
    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        if first == "w":
            a = h @ w
            b = h @ v
        else:
            b = h @ v
            a = h @ w
        return a.sin() + b

    return step


def _metrics(n: int) -> Callable[..., Any]:
    """n comparisons that only a metric reads, then one that is needed."""

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        for i in range(n):
            (h > 0.3 * (i + 1)).float().mean()
        return torch.where(h > 0, h.sin(), h * h)

    return step


def _extra_topk(n: int) -> Callable[..., Any]:
    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        for _ in range(n):
            (-h).topk(4, dim=-1)
        return _routed(h.tanh(), x, w, v)

    return step


def _topk(k: int) -> Callable[..., Any]:
    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        top = h.topk(k, dim=-1)
        return h.sin().scatter(1, top.indices, top.values.tanh())

    return step


def _metric_products(n: int) -> Callable[..., Any]:
    """n products whose results only a metric reads, then one that is needed."""

    def step(h: Any, x: Any, w: Any, v: Any) -> Any:
        for _ in range(n):
            with torch.no_grad():
                (h @ v).mean()
        return (h @ w).tanh()

    return step


D = Difference
DIFFERENCES: dict[str, Difference] = {
    "an operator more": D(lambda h, x, w, v: h.sin(), lambda h, x, w, v: h.sin().tanh()),
    "an operator fewer": D(lambda h, x, w, v: h.sin().tanh(), lambda h, x, w, v: h.tanh()),
    "another operator": D(lambda h, x, w, v: h.sin().exp(), lambda h, x, w, v: h.tanh().exp()),
    "operands swapped": D(lambda h, x, w, v: x @ w + h, lambda h, x, w, v: w @ x + h),
    "operands of an intermediate swapped": D(lambda h, x, w, v: h.tanh() @ w, lambda h, x, w, v: w @ h.tanh()),
    "parameters swapped": D(lambda h, x, w, v: (h @ w).sin() @ v, lambda h, x, w, v: (h @ v).sin() @ w),
    "arguments swapped": D(lambda h, x, w, v: (h * x).sin() * w, lambda h, x, w, v: (h * w).sin() * x),
    "two branches swapped": D(_two("sin"), _two("sigmoid")),
    "two products swapped": D(_products("w"), _products("v")),
    "an argument in place of another": D(
        lambda h, x, w, v: (h * x) @ w + v.sin(), lambda h, x, w, v: (h * v) @ w + v.sin()
    ),
    "a parameter in place of an intermediate": D(lambda h, x, w, v: h.sin() * w, lambda h, x, w, v: w * w),
    "a factor left out": D(lambda h, x, w, v: h * x * w, lambda h, x, w, v: h * w),
    "train, then eval": D(lambda h, x, w, v: _normed(h, True).sin(), lambda h, x, w, v: _normed(h, False).sin()),
    "eval, then train": D(lambda h, x, w, v: _normed(h, False).sin(), lambda h, x, w, v: _normed(h, True).sin()),
    "dropout off later": D(
        lambda h, x, w, v: F.dropout(h.tanh(), 0.3) * h, lambda h, x, w, v: F.dropout(h.tanh(), 0.3, training=False) * h
    ),
    "dropout on later": D(
        lambda h, x, w, v: F.dropout(h.tanh(), 0.3, training=False) * h, lambda h, x, w, v: F.dropout(h.tanh(), 0.3) * h
    ),
    "a hook is removed": D(lambda h, x, w, v: _hooked(h, w, x).sin(), lambda h, x, w, v: _hooked(h, w, None).sin()),
    "a hook acts later": D(lambda h, x, w, v: _hooked(h, w, None).sin(), lambda h, x, w, v: _hooked(h, w, x).sin()),
    "an early return": D(lambda h, x, w, v: (h.sin() @ w).tanh(), lambda h, x, w, v: h.sin()),
    "a later return": D(lambda h, x, w, v: h.sin(), lambda h, x, w, v: (h.sin() @ w).tanh()),
    "another branch": D(lambda h, x, w, v: (h @ w).sigmoid() * h, lambda h, x, w, v: (h * h).exp().log1p()),
    "another dtype": D(lambda h, x, w, v: h.bfloat16().sin().float(), lambda h, x, w, v: h.half().sin().float()),
    "a cast more": D(lambda h, x, w, v: h.tanh().sin(), lambda h, x, w, v: h.bfloat16().tanh().float().sin()),
    "another layout": D(lambda h, x, w, v: h.t().contiguous().sin().t(), lambda h, x, w, v: h.t().sin().t()),
    "a view in place of a copy": D(lambda h, x, w, v: h.t().contiguous() * x, lambda h, x, w, v: h.t() * x),
    "a copy in place of a view": D(lambda h, x, w, v: h.t() * x, lambda h, x, w, v: h.t().contiguous() * x),
    "a transpose more": D(lambda h, x, w, v: h.sin() @ w, lambda h, x, w, v: h.sin() @ w.t()),
    "a detach more": D(lambda h, x, w, v: h * h.sin(), lambda h, x, w, v: h.detach() * h.sin()),
    "a detach fewer": D(lambda h, x, w, v: h.detach() * h.sin(), lambda h, x, w, v: h * h.sin()),
    "in place later": D(lambda h, x, w, v: h.exp().sin() * x, lambda h, x, w, v: h.exp().sin_() * x),
    "in place first": D(lambda h, x, w, v: (h * x).tanh_() * w, lambda h, x, w, v: (h * x).tanh() * w),
    "a comparison fewer": D(_metrics(1), _metrics(0)),
    "a comparison more": D(_metrics(0), _metrics(1)),
    "two comparisons fewer": D(_metrics(2), _metrics(0)),
    "a topk fewer": D(_extra_topk(1), _extra_topk(0)),
    "a topk more": D(_extra_topk(0), _extra_topk(1)),
    "topk with a larger k": D(_topk(4), _topk(8)),
    "topk with a smaller k": D(_topk(8), _topk(4)),
    "a product fewer": D(_metric_products(1), _metric_products(0)),
    "a product more": D(_metric_products(0), _metric_products(1)),
    "a product that is used, fewer": D(lambda h, x, w, v: h @ w @ v + h, lambda h, x, w, v: h @ v + h),
    "a product that is used, more": D(lambda h, x, w, v: h @ v + h, lambda h, x, w, v: h @ w @ v + h),
    "a mask made once": D(
        lambda h, x, w, v: torch.where(x > 0.2, h.sin(), h) * (h > 0), lambda h, x, w, v: h.sin() * (h > 0)
    ),
    "another operand of a comparison": D(
        lambda h, x, w, v: torch.where(h > x, h.sin(), h) * (h > v),
        lambda h, x, w, v: torch.where(h > v, h.sin(), h) * (h > x),
    ),
    "a nested region more": D(lambda h, x, w, v: h.sin() * w, lambda h, x, w, v: gradckpt.checkpoint(torch.sin, h) * w),
    "a sum in place of a product": D(lambda h, x, w, v: (h * w).sin(), lambda h, x, w, v: (h + w).sin()),
    "another dimension": D(lambda h, x, w, v: h.softmax(-1).unsqueeze(0)[0] * w, lambda h, x, w, v: h.sum(0).sin() * w),
}


# ---- programs


class Program(NamedTuple):
    """The steps of a chain; the difference is one of them, perhaps in a nested region."""

    number: int
    difference: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    nested: bool

    def __str__(self) -> str:
        steps = [*self.before, f"<{self.difference}>", *self.after]
        return f"{self.number} ({' | '.join(steps)}{', nested' if self.nested else ''})"


POSITIONS = ((0, 3), (0, 0), (2, 2), (1, 3), (3, 1), (3, 0), (1, 1))


def programs() -> list[Program]:
    """Each difference at each position; the other steps are drawn."""
    found = []
    for place, (before, after) in enumerate(POSITIONS):
        for difference in DIFFERENCES:
            draw = random.Random(f"{difference} {place}")
            steps = draw.choices(list(STEPS), k=before + after)
            nested = place in (2, 4) and draw.random() < 0.5
            found.append(Program(len(found), difference, tuple(steps[:before]), tuple(steps[before:]), nested))
    return found


def by_function(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.mm.default or op is torch.ops.aten.gelu.default


#: How the region is made.
MODES: dict[str, dict[str, Any]] = {
    "None": {},
    "late": {"early_stop": False},
    "lossless": {"compress": "lossless"},
    "int8": {"compress": "int8"},
    "int8 late": {"compress": "int8", "early_stop": False},
    "int4": {"compress": "int4"},
    "save_matmuls": {"policy": "save_matmuls"},
    "save_matmuls:int8": {"policy": "save_matmuls:int8", "compress": "int8"},
    "policy function": {"policy": by_function},
    "every_other_matmul": {"policy": "every_other_matmul"},
    "discrete": {"policy": gradckpt.policies.discrete},
}
LOSSY = ("int8", "int8 late", "int4", "save_matmuls:int8", "one node int8")
#: One node compares no saved tensors, as torch's does not, but it matches what it keeps and
#: replays: differences in calls whose results nothing reads.
ONE_NODE = {"one node": ("save_matmuls", {}), "one node int8": ("save_matmuls", {"compress": "int8"})}
READ_BY_NOTHING = (
    "a comparison fewer",
    "a comparison more",
    "two comparisons fewer",
    "a topk fewer",
    "a topk more",
    "a product fewer",
    "a product more",
)


#: Nothing tells masks apart; where comparisons are matched, that gives the right ones.
MATCHED_ALONE = ("another operand of a comparison",)
DISCRETE = ("int8", "int8 late", "int4", "save_matmuls:int8", "discrete")


def modes_of(program: Program) -> list[str]:
    if program.difference in MATCHED_ALONE:
        return [mode for mode in DISCRETE if not (program.nested and mode == "discrete")]
    return [*MODES, *(ONE_NODE if program.difference in READ_BY_NOTHING and not program.nested else ())]


def _region(mode: str, function: Any, *args: Any) -> Any:
    if mode in ONE_NODE:
        policy, options = ONE_NODE[mode]
        return gradckpt.SelectiveRecompute.apply(Tail(function), policy, *args, **options)
    return gradckpt.checkpoint(function, *args, **MODES[mode])


class Chain:
    """The program as a function; ``differs``: does a later run take the other way?"""

    def __init__(self, program: Program, mode: str | None, differs: bool) -> None:
        self.program, self.mode, self.differs, self.runs = program, mode, differs, 0

    def difference(self, h: Any, x: Any, w: Any, v: Any) -> Any:
        """Read here and not passed: a nested region keeps its arguments."""
        self.runs += 1
        step = DIFFERENCES[self.program.difference]
        return (step.later if self.differs and self.runs > 1 else step.first)(h, x, w, v)

    def __call__(self, h: Any, x: Any, w: Any, v: Any) -> Any:
        for name in self.program.before:
            h = STEPS[name](h, x, w, v)
        if self.program.nested and self.mode is not None:
            h = gradckpt.checkpoint(self.difference, h, x, w, v)
        else:
            h = self.difference(h, x, w, v)
        for name in self.program.after:
            h = STEPS[name](h, x, w, v)
        return h

    def gradients(self) -> list[Any]:
        torch.manual_seed(self.program.number)
        x, w, v = (torch.randn(SIZE, SIZE, requires_grad=True) for _ in range(3))
        bound = torch.linspace(-1, 1, SIZE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = (x * 1, x.sin(), w, v)
            y = self(*arguments) if self.mode is None else _region(self.mode, self, *arguments)
            ((y @ (w * 0.1 + v * 0.1)) * bound).sum().backward()
        return [x.grad, w.grad, v.grad]


def error_of(got: list[Any], want: list[Any]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True))


#: What a text that names the place has.
PLACE = re.compile(
    r"number of tensors|different metadata|position \d|more tensors during recomp|invocation|slot|operator|call"
)
#: torch's own, for a tensor that was written to, or a value that is gone.
TORCHS = re.compile(r"modified by an inplace operation|extra time|not found in storage|already unpacked")


@functools.lru_cache(maxsize=8)
def _plain(program: Program) -> list[Any]:
    return Chain(program, None, False).gradients()


def verdict(program: Program, mode: str) -> tuple[str, str | None]:
    """ "right" or "raises", and what is wrong with that."""
    want = _plain(program)
    try:
        got = Chain(program, mode, True).gradients()
    except CheckpointError as error:
        text = " ".join(str(error).split())
        return "raises", None if PLACE.search(text) else f"the text names no place: {text[:200]}"
    except RuntimeError as error:
        text = " ".join(str(error).split())
        return "raises", None if TORCHS.search(text) else f"{type(error).__name__}: {text[:200]}"
    except Exception as error:
        return "raises", f"{type(error).__name__}: {error}"
    off = error_of(got, want)
    if mode not in LOSSY:
        # One node adds up the gradients of an argument in another order.
        equal = all(map(torch.equal, got, want)) or (mode in ONE_NODE and off < 1e-6)
        return "right", None if equal else f"silently wrong by {off:.2e}"
    same = error_of(Chain(program, mode, False).gradients(), want)
    return "right", None if off <= 1.5 * same + 1e-3 else f"silently wrong by {off:.2e}, equal runs by {same:.2e}"


if __name__ == "__main__":
    chosen = programs()[int(sys.argv[1])]
    print(chosen)
    print(*verdict(chosen, sys.argv[2]))
