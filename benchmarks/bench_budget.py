"""Plans within a budget of bytes beside real steps: what gradckpt.plan(budget=) promises.

    python benchmarks/bench_budget.py ROW [--models llama,gpt2] [--plans 200] [--budgets 6]
                                          [--codecs int8] [--threads 1] [--clock processor]

Rows: ``peaks`` and ``times`` of random plans, predicted and measured; ``holds``: measured peaks
within budgets, and the nearest faster plans that are not; ``error``: measured errors of gradients
within error budgets; ``monotone``, ``deterministic``: plans of one profile; ``torch``: the times of
plans whose budgets are the peaks of torch's checkpointing; ``places``: half of the budgets, where
payloads may go to a disk, and times by the rates of the same run (median of nine, by the wall).

Models: of the Hugging Face libraries with random weights, 12 to 22 regions. Peaks: by
gradckpt.track_memory, above the step's start; gradients do not exist then.

Checked: no measured peak is above its budget and no error above its error budget, plans of exact
options have the gradients of no checkpointing, plans of one profile are the same bytes, and no
step is faster than its matrix products.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import budget_models
import budget_peers
import budget_places
import budget_profiles
import guards
import machine
import timing
import torch
import transformers
from budget_models import MODELS, Case, Size, balanced, case_of

from gradckpt import _compression
from gradckpt._planning.device_memory import Budget
from gradckpt._planning.options import KEEP, RECOMPUTE
from gradckpt._planning.profile import Profile
from gradckpt._planning.region_plan import Plan
from gradckpt._settings import Setting
from gradckpt._training_step import alone

MIB = 2**20
CODECS = ("int8", "int4")
LOSSY = ("int8", "int6", "int4")
ERRORS = (0.002, 0.005, 0.01, 0.03, 0.1, 0.3)
FEWEST = 4  # distinct options of a random plan
ROUNDS = 3
NEAREST = 3  # faster plans that are run
Choice = tuple[int, ...]


# ---- plans


def random_choice(profile: Profile, rng: random.Random) -> Choice:
    """An option for each call, of four or more; calls of one block have the same."""
    blocks = sorted(set(profile.calls))
    few = rng.sample(range(len(profile.options)), rng.randint(FEWEST, len(profile.options)))
    options = few[:FEWEST] + [rng.choice(few) for _ in range(len(blocks) - FEWEST)]
    rng.shuffle(options)
    of = dict(zip(blocks, options, strict=True))
    return tuple(of[block] for block in profile.calls)


def neighbour(profile: Profile, choice: Choice, rng: random.Random) -> Choice:
    block, option = rng.choice(profile.calls), rng.randrange(len(profile.options))
    return tuple(option if each == block else old for each, old in zip(profile.calls, choice, strict=True))


def setting_of(profile: Profile, choice: Choice) -> Any:
    return profile.setting(profile.of_choice(choice))


def choice_of(profile: Profile, plan: Plan) -> Choice:
    of = {i: profile.options.index(region.option) for i, region in enumerate(plan.regions)}
    return tuple(of[block] for block in profile.calls)


def step_seconds(profile: Profile, choice: Choice) -> float:
    """As Profile predicts it."""
    recomputed = sum(profile.cost(block, RECOMPUTE).seconds for block in profile.calls)
    chosen = sum(profile.cost(b, profile.options[o]).seconds for b, o in zip(profile.calls, choice, strict=True))
    return max(profile.step_seconds - recomputed, 0.0) + chosen


def plan_of(profile: Profile, case: Case, size: int, error: float | None = None) -> Plan:
    """A plan for bytes above the step's start."""
    with alone(case.model):
        return profile.plan(Budget(size, True, f"activations:{size}"), error=error, batch=case.batch)


def cases(o: argparse.Namespace) -> Iterator[tuple[Case, int]]:
    """Each model, and how many of all plans are its own."""
    size = Size(o.width, o.tokens, o.batch, o.layers)
    for i, name in enumerate(o.models):
        case = case_of(name, size)
        if case is not None:
            with balanced(case):
                yield case, o.plans // len(o.models) + (i < o.plans % len(o.models))


# ---- rows


def peaks(o: argparse.Namespace) -> None:
    rows, all_errors = [], {"chain": [], "neighbour": [], "simulated": []}
    for case, n in cases(o):
        profile = case.profile(o.codecs or CODECS, measure=False)
        rng = random.Random(o.seed)
        errors: dict[str, list[float]] = {key: [] for key in all_errors}
        over = []
        for _ in range(n):
            choice = random_choice(profile, rng)
            near = neighbour(profile, choice, rng)
            chain = profile.chain()
            found = {"chain": max(chain.levels(choice))}
            with alone(case.model):
                chain.correct(near, chain.levels_of(profile.trace(profile.of_choice(near)).segments))
                found["neighbour"] = max(chain.levels(choice))
                found["simulated"] = profile.trace(profile.of_choice(choice)).peak().size
            measured = case.peak(setting_of(profile, choice))
            over.append(measured - found["simulated"])
            for key, size in found.items():
                errors[key].append(size / measured - 1)
                if o.verbose or (key == "simulated" and abs(size / measured - 1) > 0.01):
                    print(f"  {case.name} {key}: {size} for {measured} bytes, {size / measured - 1:+.3%}: {choice}")
        for key, found in errors.items():
            all_errors[key] += found
        rows.append([case.name, str(n), str(len(profile.blocks)), *_spread(errors), str(max(over, default=0))])
    rows.append(["all", str(sum(int(row[1]) for row in rows)), "", *_spread(all_errors), ""])
    heads = [f"{key}: median |error|; range" for key in all_errors]
    machine.print_table(
        "peak: predicted against measured", ["model", "plans", "regions", *heads, "bytes over simulated"], rows
    )


def _spread(errors: dict[str, list[float]]) -> list[str]:
    cells = []
    for found in errors.values():
        median = statistics.median(map(abs, found)) if found else 0
        cells.append(f"{median:.3%}; {min(found, default=0):+.3%} {max(found, default=0):+.3%}")
    return cells


def times(o: argparse.Namespace) -> None:
    rows, ratios = [], {"median": [], "least": []}
    for case, n in cases(o):
        profile = case.profile(o.codecs or CODECS)
        ceiling = guards.Products(case.step)
        print(f"  {case.name}: {ceiling}")
        rng = random.Random(o.seed)
        choices = [random_choice(profile, rng) for _ in range(n)]
        found: list[list[float]] = [[] for _ in choices]
        for _ in range(o.rounds):
            for i in rng.sample(range(n), n):
                found[i].append(case.seconds(setting_of(profile, choices[i])))
        for each in found:
            ceiling.check(f"{case.name}, step", min(each))
        predicted = [step_seconds(profile, choice) for choice in choices]
        row = [case.name, str(n), f"{profile.step_seconds * 1e3:.1f}"]
        for key, of in (("median", statistics.median), ("least", min)):
            measured = [of(each) for each in found]
            errors = [p / m - 1 for p, m in zip(predicted, measured, strict=True)]
            ratios[key] += errors
            row += [f"{statistics.median(map(abs, errors)):.1%}", f"{statistics.median(errors):+.1%}"]
            row.append(f"{rank_correlation(predicted, measured):.3f}" if n > 2 else "")
        rows.append(row)
    row = ["all", str(sum(int(row[1]) for row in rows)), ""]
    medians = [f"{statistics.median(map(abs, found)):.1%}" for found in ratios.values()]
    rows.append(row + [cell for median in medians for cell in (median, "", "")])
    heads = [f"{what}, {key}" for key in ratios for what in ("error", "bias", "rank correlation")]
    machine.print_table("step: predicted against measured", ["model", "plans", "recompute, ms", *heads], rows)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, for values without ties."""
    ranks = [[sorted(x).index(value) for value in x] for x in (a, b)]
    return statistics.correlation(*ranks)


def holds(o: argparse.Namespace) -> None:
    rows = []
    for case, _ in cases(o):
        profile = case.profile((o.codecs or CODECS) if o.lossy else None)
        plain = profile.traces[KEEP].peak().size
        smallest = smallest_of(profile, case)
        for i in range(o.budgets):
            budget = smallest + (plain - smallest) * i // o.budgets
            began = time.perf_counter()
            plan = plan_of(profile, case, budget)
            took = time.perf_counter() - began
            choice = choice_of(profile, plan)
            with plan_applied(case, plan):
                measured = case.peak(AS_IT_IS)
            guards.at_most(f"{case.name}: peak of a plan", measured, budget, "its budget")
            lossy = any(region.option.codec for region in plan.regions)
            wrong = measured_error(case, profile.setting([region.option for region in plan.regions]), 0)
            guards.gradients(f"{case.name}: a plan", wrong, lossy)
            near = faster(profile, case, choice, budget)
            closest = min((case.peak(setting_of(profile, each)) for _, each in near), default=None)
            gained = 1 - min((seconds for seconds, _ in near), default=plan.seconds) / plan.seconds
            rows.append(
                [
                    case.name,
                    f"{budget / MIB:.3f}",
                    f"{(plan.peak - sum(plan.fixed.values())) / budget - 1:+.3%}",
                    f"{measured / budget - 1:+.3%}",
                    "yes" if measured <= budget else "NO",
                    "" if closest is None else f"{closest / budget - 1:+.3%}",
                    "" if closest is None else "yes" if closest > budget else f"NO, {gained:.2%}",
                    f"{plan.gap:.2%}",
                    f"{took:.1f}",
                ]
            )
            print("  " + "  ".join(rows[-1]), flush=True)
    heads = ["model", "budget, MiB", "plan", "measured", "within", "nearest faster", "over", "gap", "planning, s"]
    machine.print_table("peaks of plans beside their budgets", heads, rows)


class _AsItIs:
    @contextlib.contextmanager
    def active(self, model: Any, modules: Any = None) -> Iterator[None]:
        yield


AS_IT_IS = _AsItIs()


@contextlib.contextmanager
def plan_applied(case: Case, plan: Plan) -> Iterator[None]:
    handle = plan.apply(case.model)
    try:
        yield
    finally:
        handle.remove()


def smallest_of(profile: Profile, case: Case, error: float | None = None) -> int:
    """The bytes above the step's start of the smallest budget."""
    plan = plan_of(profile, case, profile.traces[KEEP].peak().size * 2, error)
    return plan.smallest_budget - sum(plan.fixed.values())


def faster(profile: Profile, case: Case, choice: Choice, budget: int) -> list[tuple[float, Choice]]:
    """Plans that differ in one block and are faster: those of the lowest predicted peaks."""
    chain = profile.chain()
    with alone(case.model):
        chain.correct(choice, chain.levels_of(profile.trace(profile.of_choice(choice)).segments))
    now, found = step_seconds(profile, choice), []
    for block in sorted(set(profile.calls)):
        for option in range(len(profile.options)):
            other = tuple(option if each == block else old for each, old in zip(profile.calls, choice, strict=True))
            if step_seconds(profile, other) < now:
                found.append((max(chain.levels(other)), step_seconds(profile, other), other))
    return [(seconds, other) for _, seconds, other in sorted(found)[:NEAREST]]


def error(o: argparse.Namespace) -> None:
    rows = []
    for case, _ in cases(o):
        profile = case.profile(o.codecs or LOSSY, limits_error=True)
        exact = smallest_of(profile, case, min(ERRORS) / 100)
        budget = round(exact + o.tight * (profile.traces[KEEP].peak().size - exact))
        plans = {}
        errors = ERRORS[-1:] if o.quick else ERRORS
        for limit in (*errors, 0.9):
            torch.manual_seed(0)
            plans[limit] = plan_of(profile, case, budget, limit)
        for limit, larger in zip(errors, [*errors[1:], 0.9], strict=True):
            plan = plans[limit]
            found = [measured_error(case, profile.setting([r.option for r in plan.regions]), seed) for seed in (0, 1)]
            guards.at_most(f"{case.name}: error of a plan", found[0], limit, "its error budget")
            is_the_limit = plans[larger].seconds < 0.995 * plan.seconds
            rows.append(
                [
                    case.name,
                    f"{limit:.1%}",
                    f"{plan.error:.3%}" if plan.error is not None else "",
                    *(f"{each:.3%}" for each in found),
                    "yes" if found[0] <= limit else "NO",
                    "yes" if is_the_limit else "",
                    ("yes" if found[0] >= 0.3 * limit else "NO") if is_the_limit else "",
                    f"{plan.seconds * 1e3:.1f}",
                ]
            )
            print("  " + "  ".join(rows[-1]), flush=True)
    heads = ["model", "error budget", "plan", "measured", "other seed", "within", "is the limit", ">= 0.3", "step, ms"]
    machine.print_table("errors of gradients beside their budgets", heads, rows)


def measured_error(case: Case, setting: Any, seed: int) -> float:
    """The relative L2 error of the step's gradients, over all parameters."""
    state, found = _compression.get_rounding_state(), []
    for each in (Setting("none", "", "none"), setting):
        torch.manual_seed(seed)
        _compression.set_rounding_state(state)
        with each.active(case.model, case.modules):
            case.step()
        found.append([p.grad.double() for p in case.model.parameters() if p.grad is not None])
        case.model.zero_grad()
    wrong = sum(float((a - b).square().sum()) for a, b in zip(*found, strict=True))
    return (wrong / sum(float(a.square().sum()) for a in found[0])) ** 0.5


def monotone(o: argparse.Namespace) -> None:
    """Each plan is the profile of the next."""
    rows = []
    for case, _ in cases(o):
        limits = [ERRORS[i] for i in ((5,) if o.quick else (0, 2, 4, 5))]
        codecs = o.codecs or LOSSY
        torch.manual_seed(0)
        made = case.plan(2**50, error=limits[0], compress=codecs)
        held = sum(made.fixed.values())
        least, plain = made.smallest_budget - held, made.plain - held
        smallest, seconds = [], []
        for limit in limits:
            row = []
            for i in range(o.budgets):
                budget = least + (plain - least) * i // o.budgets
                torch.manual_seed(0)
                made = case.plan(f"activations:{budget}", error=limit, compress=codecs, profile=made)
                row.append(made.seconds)
            seconds.append(row)
            smallest.append(made.smallest_budget - sum(made.fixed.values()))
        by_bytes = sum(b > a * (1 + 1e-9) for row in seconds for a, b in itertools.pairwise(row))
        by_error = sum(b > a * (1 + 1e-9) for x, y in itertools.pairwise(seconds) for a, b in zip(x, y, strict=True))
        worst = max(b / a - 1 for row in seconds for a, b in itertools.pairwise(row))
        changes = (b / a - 1 for x, y in itertools.pairwise(seconds) for a, b in zip(x, y, strict=True))
        worst_error = max(changes, default=0.0)
        larger = sum(b > a for a, b in itertools.pairwise(smallest))
        rows.append(
            [case.name, str(len(limits) * o.budgets), f"{by_bytes} ({worst:+.2%})", f"{by_error} ({worst_error:+.2%})"]
        )
        rows[-1].append(f"{larger} " + " ".join(f"{size / MIB:.3f}" for size in smallest))
        print("  " + "  ".join(rows[-1]), flush=True)
    heads = ["model", "plans", "slower by more bytes", "slower by more error", "smallest budget grows"]
    machine.print_table("plans of one profile; worst change in brackets", heads, rows)


ROWS = {
    "peaks": peaks,
    "times": times,
    "holds": holds,
    "error": error,
    "monotone": monotone,
    "deterministic": lambda o: budget_profiles.deterministic(o, cases),
    "torch": lambda o: budget_peers.beside_torch(o, cases, plan_of),
    "places": lambda o: budget_places.with_places(o, cases, sys.modules[__name__]),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--models", default=",".join(MODELS), help="default %(default)s")
    parser.add_argument("--codecs", default="", help="that plans may use; default: those of the row")
    for name, value in (("plans", 200), ("budgets", 6), ("rounds", ROUNDS), ("threads", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value, help="default %(default)s")
    for name, value in (("width", 128), ("tokens", 256), ("batch", 2), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=value, help="default %(default)s")
    parser.add_argument("--tight", type=float, default=0.1, help="the budget of row error: 0 is the smallest, 1 all")
    parser.add_argument("--clock", choices=["processor", "wall"], default="processor")
    parser.add_argument("--lossy", action="store_true", help="row holds: plans may use codecs")
    parser.add_argument("--verbose", action="store_true")
    machine.add_quick(parser)
    o = parser.parse_args(argv)
    if o.quick:
        layers = 2 if o.row in ("monotone", "deterministic") else FEWEST
        codecs = "" if o.row == "error" else "int8"  # of which a plan chooses one
        vars(o).update({"models": "llama", "codecs": codecs, "width": 64, "tokens": 64, "batch": 1})
        vars(o).update({"layers": layers, "plans": 2, "budgets": 2, "rounds": 2})
    machine.choose(parser, o, "models", MODELS)
    machine.choose(parser, o, "codecs", LOSSY, or_none=True)
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(o.threads)
    if o.clock == "processor":
        budget_models.use_clock(timing.clock_of(o.threads))
    machine.print_head(f"{o.row}: width {o.width}, {o.batch} x {o.tokens} tokens", machine.facts())
    print(f"  load {os.getloadavg()[0]:.1f}, clock {o.clock if o.threads == 1 else 'wall'}")
    ROWS[o.row](o)


if __name__ == "__main__":
    main()
