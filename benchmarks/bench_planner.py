"""How long choosing an option for each of 126 regions takes, and how far from the best it may be.

    python benchmarks/bench_planner.py [--repeat 9]
    python benchmarks/bench_planner.py ways [--models llama,gpt2] [--peers]

The first: 12 options per region, none of them worse than another in everything (tests/helpers/
planner_chains.py). Each time is the least of the repetitions, with the front as a Python list and
the lower bound. The gap is (time - lower bound) over the extra time of the plan, the largest of six
budgets between the smallest and that without checkpointing. On a busy machine see the seconds of
the CPU, which are of this thread.

Checked: a choice keeps its budgets of bytes and error by the tables, its time is their sum and not
below the lower bound. The ceiling is a copy of the tables.

The second: exact plans beside greedy and uniform ones, of models and budgets (planner_ways.py);
with ``--peers`` beside torch.compile's activation_memory_budget and torch_remat, by real steps.

Checked: each real step stays within its budget, no way is faster than the exact plan, and no step
faster than its matrix products.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import guards
import timing
from machine import add_quick, choose, facts, print_head, print_json, print_table

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "helpers"))
from planner_chains import arguments_of, chain_of_126, plain_time, sums_of

from gradckpt import _C

SHARES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9)
#: ms that are aimed at: bytes alone, by buckets.
BOUNDS = {4096: 10, 16384: 40}


def least_ms(call: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Of the clock, and of this thread."""
    found = []
    for _ in range(repeat):
        start = time.thread_time()
        found.append((timing.seconds(call), time.thread_time() - start))
    wall, cpu = (min(each) * 1e3 for each in zip(*found, strict=True))
    return wall, cpu


def check(tables: dict[str, Any], choice: dict[str, Any], budget: int, error_budget: int, chain: str) -> None:
    peak, spent, error = sums_of(tables, choice["choices"])
    found = tuple(choice[name] for name in ("peak", "time", "error"))
    guards.check(found == (peak, spent, error), f"{chain}: {found} are not the sums of what was chosen")
    guards.at_most(f"{chain}: bytes chosen", peak, budget, "the budget")
    guards.at_most(f"{chain}: error chosen", error, error_budget, "the error budget")
    guards.at_least(f"{chain}: time of the choice", spent, choice["lower_bound"], "the lower bound")


def measure(shape: str, seed: int, errors: bool, buckets: int, repeat: int) -> dict[str, Any]:
    tables = chain_of_126(random.Random(seed), shape, errors=errors)
    arguments = arguments_of(tables)
    error_budget = sum(map(max, tables["error"])) // 10 if errors else 0
    whole = _C.choose_options(*arguments, None, 2**59, buckets)
    least, most = whole["smallest_budget"], whole["front"][-1][0]
    copied = min(timing.seconds(lambda: [table[:] for table in arguments[2:6] if table is not None]) for _ in range(3))
    gaps, walls, cpus = [], [], []
    for share in SHARES:
        budget = int(least + share * (most - least))
        choice = _C.choose_options(*arguments, budget, error_budget, buckets)
        if choice["choices"] is None:
            continue
        check(tables, choice, budget, error_budget, shape)
        wall, cpu = least_ms(lambda b=budget: _C.choose_options(*arguments, b, error_budget, buckets), repeat)  # type: ignore[misc]
        guards.takes(f"{shape}: choosing", wall / 1e3, copied, "a copy of the tables")
        walls.append(wall)
        cpus.append(cpu)
        extra = choice["time"] - plain_time(tables)
        gaps.append((choice["time"] - choice["lower_bound"]) / extra if extra else 0.0)
    return {
        "chain": shape if seed == 0 else f"{shape} ({seed})",
        "errors": errors,
        "buckets": buckets,
        "exact": choice["exact"],
        "wall_ms": min(walls),
        "cpu_ms": min(cpus),
        "gap": max(gaps),
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("row", nargs="?", choices=["speed", "ways"], default="speed", help="default %(default)s")
    parser.add_argument("--repeat", type=int, default=9, help="of each call, with errors 2 (default %(default)s)")
    parser.add_argument("--models", default="llama,gpt2,t5,bert,vit,unet", help="of ways; default %(default)s")
    parser.add_argument("--layers", type=int, default=12, help="of ways; default %(default)s")
    parser.add_argument("--peers", action="store_true", help="of ways: measure those of others, too")
    add_quick(parser)
    options = parser.parse_args(argv)
    if options.row == "ways":
        ways(parser, options)
    else:
        speed(options)


def ways(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    import planner_ways  # takes seconds

    vars(options).update({"shares": SHARES, "fractions": planner_ways.FRACTIONS, "width": 128, "batch": 2})
    if options.quick:
        vars(options).update({"models": "llama", "shares": SHARES[2:4], "fractions": (1.0, 0.5)})
        vars(options).update({"width": 64, "batch": 1, "layers": 4})
    choose(parser, options, "models", planner_ways.budget_models.MODELS)
    planner_ways.prepare()
    found = facts()
    print_head(f"ways of choosing: width {options.width}, {options.batch} x {2 * options.width} tokens", found)
    print_json({**found, "rows": planner_ways.run(options)})


def speed(options: argparse.Namespace) -> None:
    found = facts()
    if options.quick:
        options.repeat = 1
    print_head("planner: 126 regions, 12 options", found)
    rows = [
        measure(shape, seed, errors, buckets, 2 if errors else options.repeat)
        for errors in ((False,) if options.quick else (False, True))
        for shape in ("different", "alike", "stages", "encoder_decoder")
        for seed in ((0, 1, 2) if errors and shape == "alike" else (0,))
        for buckets in (BOUNDS if not errors else (4096,))
    ]
    print_table(
        "least of the repetitions",
        ["chain", "errors", "buckets", "labels", "ms", "ms of CPU", "aim", "largest gap"],
        [
            [
                row["chain"],
                "yes" if row["errors"] else "no",
                f"{row['buckets']:,}",
                "all" if row["exact"] else "thinned",
                f"{row['wall_ms']:.1f}",
                f"{row['cpu_ms']:.1f}",
                "-" if row["errors"] else f"{BOUNDS[row['buckets']]}",
                f"{row['gap']:.2%}",
            ]
            for row in rows
        ],
    )
    print_json({**found, "rows": rows})


if __name__ == "__main__":
    main()
