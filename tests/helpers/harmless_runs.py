"""Programs whose two runs differ harmlessly. torch's checkpoint is right with each.

``python harmless_runs.py NUMBER MODE`` runs one program.
"""

from __future__ import annotations

import collections
import functools
import random
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import exchanged_parameters  # noqa: F401 adds its steps to MAKERS
import torch
import torch.nn.functional as F
from harmless_steps import MAKERS, SIZE
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt

STEPS: dict[str, Callable[..., Any]] = {
    "sin": lambda h, x, w, v: h.sin(),
    "gelu": lambda h, x, w, v: F.gelu(h),
    "mm": lambda h, x, w, v: h @ v,
    "linear": lambda h, x, w, v: F.linear(h, w, v[0]).tanh(),
    "where": lambda h, x, w, v: torch.where(h > 0, h * 1.5, h.tanh()),
    "topk": lambda h, x, w, v: h.scatter(1, h.topk(8, dim=-1).indices, 0.5) * x,
    "dropout": lambda h, x, w, v: F.dropout(h.tanh(), 0.2) * h,
}
POSITIONS = ((0, 2), (2, 2), (2, 0), (0, 0))


class Program(NamedTuple):
    number: int
    kind: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.number} ({' | '.join([*self.before, f'<{self.kind}>', *self.after])})"


def programs() -> list[Program]:
    """Each kind at each position; the other steps are drawn."""
    found = []
    for place, (before, after) in enumerate(POSITIONS):
        for kind in MAKERS:
            steps = random.Random(f"{kind} {place}").choices(list(STEPS), k=before + after)
            found.append(Program(len(found), kind, tuple(steps[:before]), tuple(steps[before:])))
    return found


def by_function(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
    return op is torch.ops.aten.mm.default or op is torch.ops.aten.addmm.default


def _ours(**options: Any) -> Callable[..., Any]:
    return lambda function, *args: gradckpt.checkpoint(function, *args, **options)


def _one_node(policy: Any, **options: Any) -> Callable[..., Any]:
    return lambda function, *args: gradckpt.SelectiveRecompute.apply(function, policy, *args, **options)


def _enabled(compress: Any) -> Callable[..., Any]:
    def region(function: Any, *args: Any) -> Any:
        model = nn.Sequential(collections.OrderedDict(block=function))
        with gradckpt.enable(model, compress, modules="block"):
            return model.block(*args)

    return region


def _around(codec: str, region: Callable[..., Any]) -> Callable[..., Any]:
    def call(function: Any, *args: Any) -> Any:
        with gradckpt.compress_saved(codec):
            return region(function, *args)

    return call


SMALL = {"int8": {"codec": "int8", "min_numel": 0}, "int4": {"codec": "int4", "min_numel": 0}}
MODES: dict[str, Callable[..., Any]] = {
    "torch": lambda function, *args: torchs_checkpoint(function, *args, use_reentrant=False),
    "None": _ours(),
    "late": _ours(early_stop=False),
    "reentrant": _ours(use_reentrant=True),
    "lossless": _ours(compress="lossless"),
    "raw": _ours(compress="raw"),
    "int8": _ours(compress=SMALL["int8"]),
    "int8 late": _ours(compress=SMALL["int8"], early_stop=False),
    "int4": _ours(compress=SMALL["int4"]),
    "save_matmuls": _ours(policy="save_matmuls"),
    "discrete": _ours(policy=gradckpt.policies.discrete),
    "policy function": _ours(policy=by_function),
    "save_matmuls:int8": _ours(policy="save_matmuls:int8", compress=SMALL["int8"]),
    "one node": _one_node(None),
    "one node policy": _one_node("save_matmuls"),
    "one node int8": _one_node("save_matmuls", compress=SMALL["int8"]),
    "enable": _enabled(None),
    "enable int8": _enabled("int8"),
    "saved raw": _around("raw", _ours()),
    "saved int8": _around("int8", _ours()),
    "saved int8 around int8": _around("int8", _ours(compress=SMALL["int8"])),
}
#: The largest error of a gradient; wrong ones of int8 had 0.3 and more. And no more than twice
#: what the program has after a first call that filled its caches.
TOLERANCE = {"int4": 1.0} | {name: 0.3 for name in MODES if "int8" in name}


#: One node must know its parameters.
MADE_BY_THE_FIRST_CALL = ("lazy linear", "lazily made parameter")


#: The first run calls more of what a policy keeps or a codec replays, and nothing tells these calls
#: from those of the program: one node's forward saves no tensors, by which others are told apart.
CALLED_ALIKE = ("additive mask", "metric once with products")


def modes_of(program: Program) -> list[str]:
    known = program.kind not in MADE_BY_THE_FIRST_CALL
    return [mode for mode in MODES if known or not mode.startswith("one node")]


class Chain(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.number)
        self.program, self.step = program, [MAKERS[program.kind]()]
        self.module = getattr(self.step[0], "module", None)

    def forward(self, h: Any, x: Any, w: Any, v: Any) -> Any:
        for name in self.program.before:
            h = STEPS[name](h, x, w, v)
        h = self.step[0](h, x, w, v)
        for name in self.program.after:
            h = STEPS[name](h, x, w, v)
        return h


def gradients(program: Program, mode: str | None, warm: bool = False) -> list[Any]:
    chain = Chain(program)
    torch.manual_seed(program.number + 1)
    x, w, v = (torch.randn(SIZE, SIZE) for _ in range(3))
    x, w, v = (t.requires_grad_() for t in (x, w / SIZE**0.5, v / SIZE**0.5))
    if warm:
        with torch.no_grad():
            chain(x, x.sin(), w, v)
        torch.manual_seed(program.number + 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = (x * 1, x.sin(), w, v)
        y = chain(*arguments) if mode is None else MODES[mode](chain, *arguments)
        ((y @ (w * 0.1 + v * 0.1)) * torch.linspace(-1, 1, SIZE)).sum().backward()
    return [x.grad, w.grad, v.grad, *(p.grad for p in chain.parameters())]


def error_of(got: list[Any], want: list[Any]) -> float:
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True) if b is not None and b.norm()]
    return max(errors)


def verdict(program: Program, mode: str) -> str | None:
    """What is wrong, or None."""
    want = _plain(program, False)
    try:
        got = gradients(program, mode)
    except Exception as error:
        text = " ".join(str(error).split())
        if (
            program.kind in CALLED_ALIKE
            and mode.startswith("one node")
            and re.search(r" alike \d+ x and the recompute \d+ x", text)
        ):
            return None
        return f"raises {type(error).__name__}: {text[:300]}"
    if [g is None for g in got] != [g is None for g in want]:
        return "other gradients"
    off = error_of(got, want)
    if mode in TOLERANCE:
        most = min(TOLERANCE[mode], 2 * _warm_error(program, mode) + 1e-3)
        return None if off <= most else f"error {off:.2e}, more than {most:.2e}"
    equal = all(a is None or torch.equal(a, b) for a, b in zip(got, want, strict=True))
    # One node adds up the gradients of an argument in another order.
    equal = equal or (off < 1e-6 and mode in ("one node", "one node policy", "reentrant"))
    return None if equal else f"error {off:.2e}"


@functools.lru_cache(maxsize=8)
def _plain(program: Program, warm: bool) -> list[Any]:
    return gradients(program, None, warm)


def _warm_error(program: Program, mode: str) -> float:
    return error_of(gradients(program, mode, warm=True), _plain(program, True))


if __name__ == "__main__":
    chosen = programs()[int(sys.argv[1])]
    print(chosen, verdict(chosen, sys.argv[2]) or "right")
