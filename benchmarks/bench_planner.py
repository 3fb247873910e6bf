"""How long choosing an option for each of 126 regions takes, and how far from the best it may be.

    python benchmarks/bench_planner.py [--repeat 9]

12 options per region, none of them worse than another in everything (tests/helpers/
planner_chains.py). Each time is the least of the repetitions, with the front as a Python list and
the lower bound. The gap is (time - lower bound) over the extra time of the plan, the largest of six
budgets between the smallest and that without checkpointing. On a busy machine see the seconds of
the CPU, which are of this thread.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from machine import facts, print_head, print_json, print_table

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "helpers"))
from planner_chains import arguments_of, chain_of_126, plain_time

from gradckpt import _C

SHARES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9)
#: ms that are asked for: bytes alone, by buckets.
BOUNDS = {4096: 10, 16384: 40}


def least_ms(call: Callable[[], Any], repeat: int) -> tuple[float, float]:
    """Of the clock, and of this thread."""
    found = []
    for _ in range(repeat):
        start = time.perf_counter(), time.thread_time()
        call()
        found.append((time.perf_counter() - start[0], time.thread_time() - start[1]))
    wall, cpu = (min(each) * 1e3 for each in zip(*found, strict=True))
    return wall, cpu


def measure(shape: str, seed: int, errors: bool, buckets: int, repeat: int) -> dict[str, Any]:
    tables = chain_of_126(random.Random(seed), shape, errors=errors)
    arguments = arguments_of(tables)
    error_budget = sum(map(max, tables["error"])) // 10 if errors else 0
    whole = _C.choose_options(*arguments, None, 2**59, buckets)
    least, most = whole["smallest_budget"], whole["front"][-1][0]
    gaps, walls, cpus = [], [], []
    for share in SHARES:
        budget = int(least + share * (most - least))
        choice = _C.choose_options(*arguments, budget, error_budget, buckets)
        if choice["choices"] is None:
            continue
        wall, cpu = least_ms(lambda b=budget: _C.choose_options(*arguments, b, error_budget, buckets), repeat)  # type: ignore[misc]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=9, help="of each call, with errors 2 (default %(default)s)")
    options = parser.parse_args()
    found = facts()
    print_head("planner: 126 regions, 12 options", found)
    rows = [
        measure(shape, seed, errors, buckets, 2 if errors else options.repeat)
        for errors in (False, True)
        for shape in ("different", "alike", "stages", "encoder_decoder")
        for seed in ((0, 1, 2) if errors and shape == "alike" else (0,))
        for buckets in (BOUNDS if not errors else (4096,))
    ]
    print_table(
        "least of the repetitions",
        ["chain", "errors", "buckets", "labels", "ms", "ms of CPU", "asked for", "largest gap"],
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
