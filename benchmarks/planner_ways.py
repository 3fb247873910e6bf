"""The planner beside simpler ways of choosing, of the same options, times and traces.

exact: gradckpt's plan, with its certificate: no plan takes less time than its bound. greedy: from
no recompute on, again and again the change of one region's option that costs the fewest seconds for
each byte that the region then keeps less, until the step fits; ties go to the earlier region.
uniform: every n-th region recomputed, the others not, with the largest n that fits (torchtitan's
``selective`` with a number). one: the fastest option that fits in all regions at once.

A budget is the smallest one for which there is a plan, and a part of what is missing to the peak
without recompute. Times are by the profile; every peak is that of a real step.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import bench_budget
import budget_models
import frontier_ways
import guards
import machine
import timing
import torch
import transformers
from bench_budget import Choice, setting_of, smallest_of, step_seconds
from budget_models import Case, Profile

from gradckpt._planning.options import KEEP, RECOMPUTE
from gradckpt._settings import Setting
from gradckpt._training_step import alone

SIMPLER = ("greedy", "uniform", "one")
FRACTIONS = (1.0, 0.75, 0.5, 0.25, 0.0)
#: Of a Llama's block: what torch_remat does not recompute.
PARTS: tuple[tuple[str, ...], ...] = ((), ("self_attn",), ("mlp",), ("self_attn", "mlp"))
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Found:
    """``extra``: of the time without recompute. ``peak``: bytes of a real step."""

    choice: Choice
    seconds: float
    extra: float
    peak: int


# ---- simpler ways: choices, from the one that keeps most on


def greedy(profile: Profile) -> Iterator[Choice]:
    chain, keep = profile.chain(), profile.options.index(KEEP)
    calls = {block: [i for i, each in enumerate(profile.calls) if each == block] for block in profile.calls}
    chosen = dict.fromkeys(calls, keep)
    while True:
        yield tuple(chosen[block] for block in profile.calls)
        changes = []
        for (block, now), option in itertools.product(chosen.items(), range(len(profile.options))):
            freed = sum(chain.kept(call, now) - chain.kept(call, option) for call in calls[block])
            if freed > 0:
                cost = profile.cost(block, profile.options[option]).seconds
                cost -= profile.cost(block, profile.options[now]).seconds
                changes.append((cost * len(calls[block]) / freed, block, option))
        if not changes:
            return
        _, block, option = min(changes)
        chosen[block] = option


def uniform(profile: Profile) -> Iterator[Choice]:
    keep, recompute = profile.options.index(KEEP), profile.options.index(RECOMPUTE)
    number = {block: i for i, block in enumerate(sorted(set(profile.calls)), 1)}
    for n in range(len(number) + 1, 0, -1):
        yield tuple(keep if number[block] % n else recompute for block in profile.calls)


def one(profile: Profile) -> list[Choice]:
    choices = [(option,) * len(profile.calls) for option in range(len(profile.options))]
    return sorted(choices, key=lambda choice: step_seconds(profile, choice))


WAYS: dict[str, Callable[[Profile], Iterable[Choice]]] = {each.__name__: each for each in (greedy, uniform, one)}


class Tried:
    """The choices of a way, each traced when it is asked for first."""

    def __init__(self, profile: Profile, choices: Iterable[Choice]) -> None:
        self.profile, self._more = profile, iter(choices)
        self._known: list[tuple[int, Choice]] = []

    def within(self, budget: int) -> Choice | None:
        """Return the first choice whose trace fits."""
        for size, choice in itertools.chain(list(self._known), self._traced()):
            if size <= budget:
                return choice
        return None

    def _traced(self) -> Iterator[tuple[int, Choice]]:
        for choice in self._more:
            self._known.append((self.profile.size_of(self.profile.trace_of(choice)), choice))
            yield self._known[-1]


# ---- a model


def cells(case: Case, profile: Profile, shares: Iterable[float]) -> list[dict[str, Any]]:
    """For each share: the budget, and what each way found, None where it found nothing."""
    keep = (profile.options.index(KEEP),) * len(profile.calls)
    ceiling = guards.Products(case.step)
    case.model.zero_grad()  # a simulated step has no gradients at first, either
    plain, least = profile.traces[KEEP].peak().size, smallest_of(profile, case)
    tried = {name: Tried(profile, way(profile)) for name, way in WAYS.items()}
    rows = []
    for share in shares:
        budget = int(least + share * (plain - least))
        plan = bench_budget.plan_of(profile, case, budget)
        choices = {"exact": bench_budget.choice_of(profile, plan)}
        with alone(case.model):
            choices |= {name: tried[name].within(budget) for name in SIMPLER}
        row: dict[str, Any] = {"model": case.name, "share": share, "budget": budget}
        for name, choice in choices.items():
            row[name] = None if choice is None else _found(case, profile, choice, keep)
        row["certificate"] = 1 - plan.bound / plan.seconds
        for name in choices:
            _check(f"{case.name}, {share:.0%}, {name}", row[name], row["exact"], budget, ceiling)
        rows.append(row)
    return rows


def _found(case: Case, profile: Profile, choice: Choice, keep: Choice) -> Found:
    seconds = step_seconds(profile, choice)
    return Found(choice, seconds, seconds / step_seconds(profile, keep) - 1, case.peak(setting_of(profile, choice)))


def _check(what: str, found: Found | None, exact: Found, budget: int, ceiling: guards.Products) -> None:
    if found is None:
        return
    guards.at_most(f"{what}: peak of a real step", found.peak, budget, "the budget")
    slack = 1e-9 * exact.seconds  # of sums in another order
    guards.at_most(f"{what}: time of the exact plan", exact.seconds, found.seconds + slack, "this way's")
    ceiling.check(what, found.seconds)


# ---- peers, which choose something else than options of regions: by real steps alone


def beside_peers(case: Case, profile: Profile, rows: list[dict[str, Any]], fractions: Iterable[float]) -> None:
    """Add to each row the extra times of real steps: of the exact plan, and of the fastest that
    was tried and fits of torch.compile with a budget and of torch_remat; None if none fits.
    """
    none = Setting("none", "", "none")
    _, least = _measured(case, none)
    exact = {row["exact"].choice: _measured(case, setting_of(profile, row["exact"].choice)) for row in rows}
    compiled = [_measured(*_compiled(case, fraction)) for fraction in fractions]
    has_parts = case.name == "llama" and frontier_ways.remat is not None
    kept = [_measured(*_remat(case, parts)) for parts in PARTS] if has_parts else []
    for row in rows:
        row["exact, measured"] = exact[row["exact"].choice][1] / least - 1
        for name, found, base in (("compiled", compiled, compiled[0][1]), ("remat", kept, least)):
            row[name] = min((seconds / base - 1 for size, seconds in found if size <= row["budget"]), default=None)


def _measured(case: Case, setting: Any) -> tuple[int, float]:
    """The peak of a step, and the least seconds of some."""
    size = case.peak(setting)
    return size, min(case.seconds(setting) for _ in range(ROUNDS))


def _compiled(case: Case, fraction: float) -> tuple[Case, Any]:
    """torch's partitioner divides the graph, and torch's own kernels run it."""
    torch._dynamo.reset()  # else the graph of another fraction would serve
    twin = dataclasses.replace(case, model=frontier_ways.twin(case.model))
    twin.model.compile(backend="aot_eager_decomp_partition", dynamic=False)
    with torch._functorch.config.patch(activation_memory_budget=fraction):
        twin.step()
    return twin, bench_budget.AS_IT_IS


def _remat(case: Case, parts: tuple[str, ...]) -> tuple[Case, Any]:
    twin = dataclasses.replace(case, model=frontier_ways.twin(case.model))
    frontier_ways.by_remat(*parts)(twin.model)
    return twin, bench_budget.AS_IT_IS


# ---- tables


def prepare() -> None:
    """One thread, and its own time: that of an idle machine."""
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    budget_models.use_clock(timing.clock_of(1))


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print the tables; return their rows."""
    size = budget_models.Size(options.width, 2 * options.width, options.batch, options.layers)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        case = budget_models.case_of(name, size)
        if case is None:
            continue
        profile = case.profile()
        found = cells(case, profile, options.shares)
        if options.peers:
            beside_peers(case, profile, found, options.fractions)
        rows += found
        for row in found:
            print("  " + "  ".join(_cells_of(row)), flush=True)
    heads = ["model", "budget", *(f"{name}: time, peak" for name in ("exact", *SIMPLER)), "certificate"]
    machine.print_table("time more than without recompute, and peaks in MiB", heads, [_cells_of(row) for row in rows])
    _print_gaps(rows)
    if options.peers:
        names = ("exact, measured", "compiled", "remat")
        table = [[row["model"], f"{row['share']:.0%}", *(_percent(row[name]) for name in names)] for row in rows]
        heads = ["model", "budget", "exact plan", "torch.compile's budget", "torch_remat"]
        machine.print_table("real steps: time more than without recompute", heads, table)
    return [{key: getattr(value, "extra", value) for key, value in row.items()} for row in rows]


def _cells_of(row: dict[str, Any]) -> list[str]:
    found = [row[name] for name in ("exact", *SIMPLER)]
    cells = ["-" if each is None else f"{each.extra:+.1%}, {each.peak / 2**20:.1f}" for each in found]
    budget = f"{row['share']:.0%}, {row['budget'] / 2**20:.1f}"
    return [row["model"], budget, *cells, f"{row['certificate']:.2%}"]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _print_gaps(rows: list[dict[str, Any]]) -> None:
    table = []
    for name in SIMPLER:
        gaps = [row[name].seconds / row["exact"].seconds - 1 for row in rows if row[name] is not None]
        none = len(rows) - len(gaps)
        table.append(
            [name, f"{statistics.median(gaps):.1%}", f"{max(gaps):.1%}", f"{none} of {len(rows)}"]
            if gaps
            else [name, "-", "-", f"{none} of {len(rows)}"]
        )
    machine.print_table(
        "a step's time over that of the exact plan", ["way", "median", "most", "budgets without a plan"], table
    )
