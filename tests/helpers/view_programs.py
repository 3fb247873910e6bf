"""Random programs whose arguments, closures and containers are views of one another.

Nothing in them differs between two runs, so a checkpoint must give plain autograd's gradients, to
the last bit where no codec rounds. In a recompute the arguments share no memory, hooks may have
laid them out anew, and closures have the forward's: none of this may raise.

``python view_programs.py 17`` runs the program with that seed in every way, and prints what is
wrong.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

import gradckpt

N = 4

VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.view(N, N) if t.is_contiguous() else t.reshape(N, N),
    lambda t: t.t(),
    lambda t: t[:],
    lambda t: t.unsqueeze(0).squeeze(0),
    lambda t: t.expand(N, N),
    lambda t: t.reshape(N * N).view(N, N),
    lambda t: t.transpose(0, 1).contiguous(),
    lambda t: t.contiguous(),
    lambda t: t.t().t(),
    lambda t: t[:2].repeat(2, 1),
    lambda t: t.narrow(0, 0, N),
    lambda t: t.chunk(2, 1)[1].repeat(1, 2),
    lambda t: t.diagonal().expand(N, N),
    lambda t: t.detach(),
    lambda t: t.clone(),
]
OPERATORS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda a, b: a.sin() * b,
    lambda a, b: a @ b / N,
    lambda a, b: (a * b).exp().clamp(max=3),
    lambda a, b: a + b.cos(),
    lambda a, b: torch.where(a > b, a.tanh(), b),
    lambda a, b: (a - b).softmax(-1),
    lambda a, b: torch.cat([a[:2], b[2:]]).sigmoid(),
]


def body(region: Any, seed: int, depth: int, *values: torch.Tensor) -> torch.Tensor:
    """The same statements in every run: some operators, and regions inside."""
    draw, known = random.Random(seed), list(values)
    for _ in range(draw.randint(2, 5)):
        a, b = (draw.choice(VIEWS)(draw.choice(known)) for _ in range(2))
        inside, inner = depth < 2 and draw.random() < 0.3, draw.randrange(2**30)
        if not inside:
            known.append(draw.choice(OPERATORS)(a, b))
        elif draw.random() < 0.3:

            def of_containers(table: Any, items: Any, inner: int = inner) -> torch.Tensor:
                return body(region, inner, depth + 1, table["a"], items[0], table["a"])

            known.append(region(of_containers, {"a": a}, [b]))
        else:
            known.append(region(functools.partial(body, region, inner, depth + 1), a, b, draw.choice(known)))
    return known[-1]


def gradients(region: Any, seed: int, around: Any = contextlib.nullcontext) -> list[torch.Tensor]:
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    x, p = (torch.randn(N, N, generator=generator, requires_grad=True) for _ in range(2))
    constant = torch.randn(N, N, generator=generator)
    with around():
        h = x * 1
        closure = [h, p, constant] if draw.random() < 0.5 else [p]
        args = [draw.choice(VIEWS)(draw.choice([h, h, p, constant])) for _ in range(draw.randint(1, 3))]
        args.insert(draw.choice([0, len(args)]), h)
        inner = draw.randrange(2**30)
        y = region(lambda *args: body(region, inner, 0, *args, *closure), *args)
    grads = torch.autograd.grad((y * y).sum() + 0 * x.sum() + 0 * p.sum(), (x, p))
    return list(grads)


def _lays_anew() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: torch.empty(t.shape, dtype=t.dtype).copy_(t), lambda t: t)


LOSSLESS = {"codec": "lossless", "min_numel": 1}
WAYS: dict[str, Any] = {
    "None": {},
    "lossless": {"compress": LOSSLESS},
    "a policy": {"policy": "save_matmuls"},
    "a policy, lossless": {"policy": "save_matmuls", "compress": LOSSLESS},
}
AROUND = {"": contextlib.nullcontext, "in hooks that lay out anew": _lays_anew}


def wrong(seed: int) -> list[str]:
    """What is wrong with the program, for each way."""
    found = []
    want = gradients(lambda f, *args: f(*args), seed)
    if not all(bool(g.isfinite().all()) for g in want):
        return []
    for (hooks, around), (way, options) in ((a, w) for a in AROUND.items() for w in WAYS.items()):
        region = functools.partial(gradckpt.checkpoint, **options)
        try:
            got = gradients(region, seed, around)
        except Exception as error:
            found.append(f"{seed} {way} {hooks}: {type(error).__name__}: {str(error)[:400]}")
            continue
        close = functools.partial(torch.allclose, rtol=1e-4, atol=1e-5) if hooks else torch.equal
        if not all(map(close, got, want)):
            found.append(f"{seed} {way} {hooks}: other gradients")
    return found


if __name__ == "__main__":
    print("\n".join(wrong(int(sys.argv[1]))) or "right")
