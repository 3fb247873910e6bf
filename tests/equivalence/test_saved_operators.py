"""compress_saved("int8") over every differentiable operator of PyTorch's own sample table (OpInfo).

An operator's inputs are brought to ordinary scales and made hostile: tiny, huge, saturated, full of
ties and zeros, with rows of very different size. What is encoded must leave gradients close; what
is not must leave them as they are, to the last bit; nothing may become infinite or NaN that was
finite.

    python tests/equivalence/test_saved_operators.py [--part 1/4] [--all] [--only mul]

prints the operators that are wrong and, with --only, the error of each case. Every test is such a
process, as those of test_opinfo.py.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from operator_samples import cases, operators
from processes import printed_by
from torch.utils._pytree import tree_leaves, tree_map

import gradckpt

SOAK_PARTS = 3
BOUND = 0.05


# ---- inputs ----


def scaled(size: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * (size / x.abs().amax().clamp_min(1e-20))


def rows(x: torch.Tensor) -> torch.Tensor:
    first = x.shape[0] if x.ndim else 1
    return x * torch.logspace(-3, 3, first).view(-1, *[1] * (x.ndim - 1)) if x.ndim else x


def saturated(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, 60 + x, x - 60)


def half_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(x.numel()).view(x.shape) % 2 == 0, x, 0)


ORDINARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as they are": lambda x: x.clone(),
    "up to 0.1": scaled(0.1),
    "up to 3": scaled(3.0),
}

HOSTILE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "up to 1e-3": scaled(1e-3),
    "up to 1e3": scaled(1e3),
    "saturated": saturated,
    "ties": lambda x: x.round(),
    "half zero": half_zero,
    "uneven rows": rows,
}


#: Where rounded inputs alone change a gradient by more (sharp attention, division by a difference),
#: compress_saved may be off by this multiple of what a region of the operator is off by: root mean
#: squares over so many draws, since a single error there is an accident.
OF_A_REGION, DRAWS = 2.0, 12


# ---- one case ----


def of_inputs(case: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """The arguments with what requires grad changed, and these leaves."""
    leaves: list[torch.Tensor] = []

    def replaced(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return x
        if x.layout != torch.strided or not x.is_floating_point():
            leaves.append(x.detach().clone().requires_grad_())
        else:
            leaves.append(change(x.detach()).to(x.dtype).requires_grad_())
        return leaves[-1]

    return tree_map(replaced, (case.args, case.kwargs)), leaves


INT8 = {"codec": "int8", "min_numel": 1}
Way = Callable[..., Any]


def saved(compress: Any) -> Way:
    return lambda function, *args, **kwargs: gradckpt.compress_saved(compress)(function)(*args, **kwargs)


def region(function: Any, *args: Any, **kwargs: Any) -> Any:
    return gradckpt.checkpoint(function, *args, compress=INT8, **kwargs)


def gradients(case: Any, arguments: Any, leaves: list[torch.Tensor], way: Way) -> tuple[list[Any], Any]:
    """Gradients of the operator on non-leaves which a product saves, too;
    and its weighted outputs' norm."""
    known = {id(leaf): leaf * 1 for leaf in leaves}
    args, kwargs = tree_map(lambda x: known.get(id(x), x) if isinstance(x, torch.Tensor) else x, arguments)
    torch.manual_seed(1)
    result = way(case.function, *args, **kwargs)
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs:
        return [], 0.0
    torch.manual_seed(2)
    weights = [torch.randn_like(t) if t.layout == torch.strided else torch.ones_like(t) for t in outputs]
    size = sum(float(w.abs().square().sum()) for w in weights if w.layout == torch.strided) ** 0.5
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True)), size


def dense(g: torch.Tensor) -> torch.Tensor:
    return (g.to_dense() if g.layout != torch.strided else g).detach()


def together(values: list[Any], of: list[Any]) -> torch.Tensor:
    """The gradients that exist, as one vector."""
    pairs = zip(values, of, strict=True)
    return torch.cat([dense(x).flatten().to(torch.complex128) for x, e in pairs if isinstance(e, torch.Tensor)])


def drawn(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The values, a third of their size apart."""
    return x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype)


def off(case: Any, way: Way, change: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The error of a way's gradients, all together."""
    arguments, leaves = of_inputs(case, change)
    exact, _ = gradients(case, arguments, leaves, saved(None))
    e = together(exact, exact)
    difference = together(gradients(case, arguments, leaves, way)[0], exact) - e
    return float(difference[e.isfinite()].norm())


class Sweep:
    """Counts, what was wrong, and the largest derivative and input of the operator so far."""

    def __init__(self, verbose: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.verbose = verbose
        self.steepest, self.size = 0.0, 0.0

    def check(self, case: Any, name: str, change: Callable[[torch.Tensor], torch.Tensor], hostile: bool) -> None:
        try:
            arguments, leaves = of_inputs(case, change)
            exact, size = gradients(case, arguments, leaves, saved(None))
            again, _ = gradients(case, arguments, leaves, saved(None))
        except Exception:
            self.counts["refused"] += 1
            return
        if not any(isinstance(g, torch.Tensor) for g in exact):
            return
        self.counts["cases"] += 1
        gradckpt.stats.reset()
        try:
            got, _ = gradients(case, arguments, leaves, saved(INT8))
        except Exception as error:
            self.wrong.append(f"{case.name} ({name}): {type(error).__name__}: {str(error)[:200]}")
            return
        lossy = gradckpt.stats()["compressed"] > 0
        self.counts["encoded"] += lossy
        g, e, a = (together(each, exact) for each in (got, exact, again))
        largest = max(float(dense(leaf).abs().max()) if leaf.numel() else 0.0 for leaf in leaves)
        self.size = self.size if hostile else max(self.size, largest)
        growth = max(1.0, largest / self.size) if hostile and len(leaves) > 1 and self.size > 0 else 1.0
        found = self.compare(case, name, g, e, a, size * growth, hostile, lossy)
        near = found is not None and found <= OF_A_REGION * off(case, region, change)
        if near or (found is not None and self.is_amplified(case, change)):
            self.counts["amplified"] += 1
            self.wrong.pop()

    def is_amplified(self, case: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        squares = {saved: 0.0, region: 0.0}
        for seed in range(DRAWS):
            for way in squares:
                generator = torch.Generator().manual_seed(seed)
                made = saved(INT8) if way is saved else region
                squares[way] += off(case, made, lambda x, g=generator: change(drawn(x, g))) ** 2
        return squares[saved] <= OF_A_REGION**2 * squares[region]

    def compare(
        self, case: Any, name: str, g: Any, e: Any, a: Any, size: float, hostile: bool, lossy: bool
    ) -> float | None:
        """All gradients of the operator together:
        each by itself may be the small rest of a cancellation. Returns an error that is too large.

        The largest derivative is at least what ordinary inputs have shown;
        that of a product grows with its factors.
        """
        finite = e.isfinite()
        if not lossy:
            if not torch.equal(g[finite], e[finite]) and torch.equal(a[finite], e[finite]):
                self.wrong.append(f"{case.name} ({name}): nothing encoded, and other gradients")
            return None
        if not g[finite].isfinite().all():
            self.wrong.append(f"{case.name} ({name}): not finite")
            return None
        error, norm = float((g[finite] - e[finite]).norm()), float(e[finite].norm())
        if not hostile:
            self.steepest = max(self.steepest, norm / max(size, 1e-30))
        allowed = BOUND * max(norm, size * self.steepest if hostile else 0.0)
        if self.verbose:
            print(f"  {case.name:40s} {name:12s} error {error:.3g} of {norm:.3g}, allowed {allowed:.3g}")
        if error > allowed + 1e-30:
            self.wrong.append(f"{case.name} ({name}): error {error:.3g}, allowed {allowed:.3g}, gradient {norm:.3g}")
            return error
        return None


def run(part: int, parts: int, everything: bool, only: str | None) -> Sweep:
    sweep = Sweep(only is not None)
    for op in operators()[part::parts]:
        if torch.float32 not in op.supported_backward_dtypes("cpu") or (only is not None and op.name != only):
            continue
        sweep.counts["operators"] += 1
        for i, case in enumerate(cases(op, torch.float32, everything)):
            if i >= 1 and not everything:
                break
            sweep.steepest = sweep.size = 0.0
            for name, change in ORDINARY.items():
                sweep.check(case, name, change, hostile=False)
            for name, change in HOSTILE.items():
                sweep.check(case, name, change, hostile=True)
    return sweep


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", default="0/1", help="I/N: every N-th operator, from the I-th")
    parser.add_argument("--all", action="store_true", help="all samples")
    parser.add_argument("--only", help="one operator")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    part, parts = map(int, chosen.part.split("/"))
    sweep = run(part, parts, chosen.all, chosen.only)
    print(", ".join(f"{n} {name}" for name, n in sweep.counts.items()))
    for line in sweep.wrong:
        print(f"WRONG {line}")
    return int(bool(sweep.wrong))


# ---- the tests ----


def check(part: str, *options: str) -> None:
    printed = printed_by(__file__, "--part", part, *options)
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (\w+)", printed.splitlines()[0])}
    assert counts["operators"] > 100
    assert counts["cases"] > counts["encoded"] > 100


def test_gradients_of_every_operator_are_close_or_exact():
    check("0/1")


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("part", range(SOAK_PARTS))
def test_gradients_of_every_sample_of_every_operator_are_close_or_exact(part):
    check(f"{part}/{SOAK_PARTS}", "--all")


if __name__ == "__main__":
    sys.exit(main())
