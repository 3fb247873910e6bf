"""Every differentiable operator of PyTorch's own sample table (OpInfo) inside a region:
gradients as without one.

Bit-equal to plain autograd in float64, float32 and bfloat16, but where torch.utils.checkpoint
itself differs from plain autograd in the same run (it raises, or the operator is not
deterministic); there ours must do what torch's does.

    python tests/equivalence/test_opinfo.py [--dtype float32] [--part 1/4] [--all] [--way "raw"]

does the sweep. Without --all it takes of each operator and dtype at most SAMPLES samples, spread
over the first SPREAD of its table. Every test is such a process: torch's test package freezes
backend flags, loads a hypothesis profile and may initialise CUDA when it is imported.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from exact_codecs import WAYS, Way
from operator_samples import Case, cases, operators
from processes import printed_by
from torch.utils._pytree import tree_leaves

import gradckpt

DTYPES = ("float64", "float32", "bfloat16")
PARTS = 2
SOAK_PARTS = 4
# Torch saves the noise before the kernel fills it, and the early stop comes in between: the
# gradient reads undefined memory, which may hold the right values (docs/equivalence.md).
UNDEFINED = ("nn_functional_rrelu",)


# ---- one sample ----


class Outcome(NamedTuple):
    """What a run of one sample showed: gradients to the last bit, or the exception.
    And how often the operator ran."""

    raised: tuple[str, str] | None
    grads: tuple[Any, ...]
    calls: int


def bits(x: torch.Tensor | None) -> Any:
    if x is None:
        return None
    layout = x.layout
    if x.is_nested:
        return str(layout), tuple(bits(part) for part in x.unbind())
    if layout != torch.strided:
        x = x.to_dense()
    x = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return str(layout), x.dtype, bytes(x.view(torch.uint8).numpy()) if x.numel() else b""


def run(case: Case, checkpoint: Callable[..., Any]) -> Outcome:
    """Gradients of all inputs that require grad, for outputs weighted the same way in every run."""
    calls = 0

    def region(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return case.function(*args, **kwargs)

    leaves = [t for t in tree_leaves((case.args, case.kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    torch.manual_seed(1)
    try:
        result = checkpoint(region, *case.args, **case.kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not outputs:
            return Outcome(None, (), calls)
        torch.manual_seed(2)
        weights = [torch.randn_like(t) if t.layout == torch.strided else torch.ones_like(t) for t in outputs]
        grads = torch.autograd.grad(outputs, leaves, weights, allow_unused=True)
        return Outcome(None, tuple(bits(g) for g in grads), calls)
    except Exception as error:
        return Outcome((type(error).__name__, str(error)), (), calls)


def plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


theirs = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)
NONE = Way(functools.partial(gradckpt.checkpoint, compress=None), theirs)


class Sweep:
    """Counts, and where ours is wrong."""

    def __init__(self, way: Way = NONE) -> None:
        self.way = way
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def check(self, case: Case) -> None:
        self.counts["samples"] += 1
        expected = run(case, plain)
        if expected.raised or not expected.grads:
            self.counts["without gradient"] += 1
            return
        found = run(case, self.way.ours)
        reference = run(case, self.way.reference)
        self.counts["recomputed"] += found.calls > 1
        right = found == reference
        if reference[:2] != expected[:2] or case.name in UNDEFINED:
            self.counts["differing in torch"] += 1
            # The values may be anyone's. The kind must be torch's.
            kinds = [outcome.raised and outcome.raised[0] for outcome in (found, reference)]
            right = kinds[0] == kinds[1]
        if not right:
            self.wrong.append(f"{case.name}: torch's checkpoint {describe(reference)}, ours {describe(found)}")


def describe(outcome: Outcome) -> str:
    what = f"raises {': '.join(outcome.raised)}" if outcome.raised else f"gives {hash(outcome.grads):x}"
    return f"{what} ({outcome.calls} calls)"


# ---- the sweep ----


def sweep(dtype: str, part: int, parts: int, everything: bool, way: Way = NONE) -> Sweep:
    result = Sweep(way)
    wanted = getattr(torch, dtype)
    for op in operators()[part::parts]:
        if op.supports_autograd and wanted in op.supported_backward_dtypes("cpu"):
            result.counts["operators"] += 1
            for case in cases(op, wanted, everything):
                result.check(case)
    return result


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th operator, from the I-th")
    parser.add_argument("--all", action="store_true", help="all samples")
    parser.add_argument("--way", choices=WAYS, action="append", help="with a codec without loss")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    part, parts = map(int, chosen.part.split("/"))
    wrong = 0
    for dtype, way in itertools.product(chosen.dtype or DTYPES, chosen.way or [None]):
        result = sweep(dtype, part, parts, chosen.all, WAYS[way] if way else NONE)
        print(f"{dtype}: " + ", ".join(f"{n} {name}" for name, n in result.counts.items()), f"({way})")
        for line in result.wrong:
            print(f"  WRONG {line}")
        wrong += len(result.wrong)
    return int(wrong > 0)


# ---- the tests ----


def check(dtype: str, part: str, *options: str) -> None:
    printed = printed_by(__file__, "--dtype", dtype, "--part", part, *options)
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (\w+)", printed.splitlines()[0])}
    assert counts["operators"] > 100
    assert counts["recomputed"] > counts["samples"] / 2


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_every_operator_are_those_of_plain_autograd(dtype, part):
    check(dtype, f"{part}/{PARTS}")


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(SOAK_PARTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_every_sample_of_every_operator_are_those_of_plain_autograd(dtype, part):
    check(dtype, f"{part}/{SOAK_PARTS}", "--all")


if __name__ == "__main__":
    sys.exit(main())
