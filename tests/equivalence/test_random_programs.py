"""Random programs behave with gradckpt's checkpoint as with torch's: values, gradients, RNG,
calls, exceptions."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours import saves_inputs_alone
from hypothesis import HealthCheck, Phase, given, seed, settings
from random_operators import BETWEEN, CUSTOM, ENDINGS
from random_program_runs import Run, difference, implementation, torchs
from random_programs import CONTEXT, DIVERGENCE, EXCEPTION, INNER_GRAD, SCOPE, features, programs

import gradckpt

# ---- Random programs whose arguments, closures and containers are views of one another.
#
# Nothing in them differs between two runs, so a checkpoint must give plain autograd's gradients,
# to the last bit where no codec rounds. In a recompute the arguments share no memory, hooks may
# have laid them out anew, and closures have the forward's: none of this may raise.
#
# ``python test_random_programs.py 17`` runs the program with that seed in every way, and prints
# what is wrong.

N = 4

VIEW_FUNCTIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
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
        a, b = (draw.choice(VIEW_FUNCTIONS)(draw.choice(known)) for _ in range(2))
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
        args = [draw.choice(VIEW_FUNCTIONS)(draw.choice([h, h, p, constant])) for _ in range(draw.randint(1, 3))]
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


CHUNK = 300  # programs of one test
CHUNKS = 10  # 3,000 programs in an ordinary run
SOAK_CHUNKS = 67  # 20,100 with -m soak
VIEWS = 150  # programs of views of one test


def drawn(chunk, count, body):
    """body(program) for that many programs, the same in every run; a failing one is shrunk."""
    ran = 0

    @seed(chunk)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def run(program):
        nonlocal ran
        ran += 1
        body(program)

    run()
    assert ran >= count


def check(program):
    found = difference(program, implementation(program))
    assert found is None, f'{found}\npython {Run.__module__}.py "{program}"'


SOAK = [pytest.param(chunk, marks=pytest.mark.soak) for chunk in range(CHUNKS, CHUNKS + SOAK_CHUNKS)]


@saves_inputs_alone
@pytest.mark.parametrize("chunk", [*range(CHUNKS), *SOAK])
def test_random_programs_behave_as_with_torch(chunk):
    drawn(chunk, CHUNK, check)


@pytest.mark.parametrize("share", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 60))])
def test_programs_of_views(share):
    """Nothing differs between the two runs, so nothing raises."""
    found = [text for seed in range(share * VIEWS, (share + 1) * VIEWS) for text in wrong(seed)]
    assert found == []


# ---- the generator itself ----

EVERY = {
    *(f"ending {kind}" for kind in ENDINGS),
    *(f"between {kind}" for kind in (*BETWEEN, "nothing", "autocast", "no_grad", "device")),
    *(f"scope {kind}" for kind in SCOPE),
    *(f"Custom {name}" for name in CUSTOM),
    *(f"Diverge {kind}" for kind in DIVERGENCE),
    *(f"Raise {kind}" for kind in EXCEPTION),
    *(f"Raise at call {call}" for call in (1, 2, 3)),
    *(f"InnerGrad {kind}" for kind in INNER_GRAD),
    *(f"option contexts={kind}" for kind in CONTEXT),
    *(f"option {name}={value}" for name in ("early_stop", "preserve_rng_state") for value in (False, True)),
    *(f"option use_reentrant={value}" for value in (False, True)),
    *(f"option determinism_check={value}" for value in ("none", "default")),
    *(f"argument {kind}" for kind in ("list", "tuple", "dict", "pair", "value")),
    *(f"result {kind}" for kind in ("list", "tuple", "dict", "pair", "value", "mask", "detached")),
    *(f"{kind} {where}" for kind in ("view", "random", "operator", "in place") for where in ("inside", "outside")),
    *(f"callable {kind}" for kind in ("function", "partial", "module", "method")),
    *("depth 1", "depth 2", "depth 3", "kwargs", "captured", "operators counted", "running statistics"),
    *("api gradckpt", "api gradckpt, buffers as torch", "api compat"),
}
OFTEN = {"depth 2": 0.4, "depth 3": 0.15, "random inside": 0.5, "view inside": 0.5, "in place inside": 0.2}


def test_every_feature_occurs_in_the_random_programs():
    counts = Counter()
    drawn(0, 800, lambda program: counts.update(features(program)))
    rare = {name: counts[name] / 800 for name in EVERY if counts[name] < 0.01 * 800}
    assert not rare
    assert {name: share for name, share in OFTEN.items() if counts[name] < share * 800} == {}


def test_most_random_programs_end_with_gradients():
    counts = Counter()

    def count(program):
        log = Run(program, torchs).execute().log
        seen = dict(log)
        before, after = seen["calls after forward"], seen["calls after backward"]
        gradients = any(g is not None for g in seen["grads"]) or "grad" in seen
        counts["gradients"] += gradients
        counts["recomputed"] += gradients and after != before
        counts["nothing raised"] += not any(isinstance(v, tuple) and v[:1] == ("raised",) for _, v in log)

    drawn(0, 200, count)
    shares = {name: n / 200 for name, n in counts.items()}
    assert shares["gradients"] > 0.6, shares
    assert shares["recomputed"] > 0.4, shares
    assert shares["nothing raised"] > 0.5, shares


def test_a_program_behaves_the_same_twice():
    """Else the comparison would find differences that are none."""

    def twice(program):
        assert difference(program, torchs) is None

    drawn(1, 100, twice)


if __name__ == "__main__":
    print("\n".join(wrong(int(sys.argv[1]))) or "right")
