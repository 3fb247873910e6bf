"""What bench_training.py shows of its runs: comparisons with ``exact``, tables, a picture."""

from __future__ import annotations

import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import page_marks
from training_runs import Run
from training_tasks import TASKS
from training_ways import BF16, CUT, EXACT, NOISE, WAYS

MARKS = "<!-- by benchmarks/bench_training.py -->", "<!-- end of training -->"
#: Of the page's first sentence.
FIRST = "<!-- first, by benchmarks/bench_training.py -->", "<!-- end of first -->"
#: Of int8, with which training must not mind: the larger of bf16 autocast's mean difference and
#: this share of the seeds' standard deviation.
SHARE = 0.05
#: Student's t, two-sided 95 %, by degrees of freedom.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Comparison(NamedTuple):
    """The paired differences of a way from ``exact``, in the last validation loss."""

    task: str
    way: str
    seeds: int
    loss: float  # mean
    accuracy: float  # mean
    spread: float  # the standard deviation of exact's losses over the seeds
    differences: tuple[float, ...]
    seconds: float  # mean of a run

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval of the mean."""
        degrees = self.seeds - 1
        t = T95[degrees - 1] if degrees <= len(T95) else 1.96 + 2.7 / degrees
        return t * statistics.stdev(self.differences) / math.sqrt(self.seeds)

    @property
    def contains_zero(self) -> bool:
        return abs(self.mean) <= self.half

    @property
    def words(self) -> str:
        return f"{self.mean:+.5f} ± {self.half:.5f}"


def compare(runs: list[Run]) -> list[Comparison]:
    """Return a comparison for each task and way, with the seeds that both it and exact have."""
    found = []
    groups: dict[tuple[str, str], dict[int, Run]] = {}
    for run in runs:
        groups.setdefault((run["task"], run["way"]), {})[run["seed"]] = run
    for task, way in sorted(groups, key=lambda key: (list(TASKS).index(key[0]), list(WAYS).index(key[1]))):
        exact, mine = groups[task, EXACT], groups[task, way]
        seeds = sorted(exact.keys() & mine.keys())
        found.append(
            Comparison(
                task,
                way,
                len(seeds),
                statistics.fmean(mine[seed]["loss"] for seed in seeds),
                statistics.fmean(mine[seed]["accuracy"] for seed in seeds),
                statistics.stdev(exact[seed]["loss"] for seed in seeds),
                tuple(mine[seed]["loss"] - exact[seed]["loss"] for seed in seeds),
                statistics.fmean(mine[seed]["seconds"] for seed in seeds),
            )
        )
    return found


def of(found: list[Comparison], task: str, way: str) -> Comparison | None:
    return next((one for one in found if (one.task, one.way) == (task, way)), None)


def bound(found: list[Comparison], task: str) -> float:
    """Return what int8's mean difference may be in this task."""
    exact, bf16 = of(found, task, EXACT), of(found, task, BF16)
    return max(SHARE * exact.spread if exact else 0.0, abs(bf16.mean) if bf16 else 0.0)


# ---- words


def tasks_of(found: list[Comparison]) -> list[str]:
    return [task for task in TASKS if of(found, task, EXACT)]


def losers(found: list[Comparison]) -> list[Comparison]:
    """Return the formats that end with a higher loss, beyond chance."""
    return [one for one in found if one.way not in (EXACT, BF16, NOISE, CUT) and one.mean > one.half]


def within(found: list[Comparison], way: str) -> tuple[list[str], list[str]]:
    """Return the tasks in which this way is within int8's bound, and the others."""
    both: tuple[list[str], list[str]] = ([], [])
    for one in found:
        if one.way == way:
            both[abs(one.mean) > bound(found, one.task)].append(one.task)
    return both


def first_sentence(found: list[Comparison]) -> str:
    """Return where formats lose, for the head of the page."""
    by_way: dict[str, list[str]] = {}
    for one in losers(found):
        by_way.setdefault(one.way, []).append(f"{one.task} by {signed(one.mean)}")
    if not by_way:
        return "No format ended with a higher validation loss than exact training beyond chance."
    parts = [f"{WAYS[way].about} in {' and '.join(tasks)}" for way, tasks in by_way.items()]
    return f"Beyond chance, validation losses ended higher than exact training's with {'; '.join(parts)}."


def signed(x: float) -> str:
    """Return two digits that count."""
    digits = max(0, 1 - math.floor(math.log10(abs(x)))) if x else 0
    return f"{x:+.{digits}f}"


def interval(one: Comparison) -> str:
    digits = max(0, 1 - math.floor(math.log10(one.half))) if one.half else 5
    return f"{one.mean:+.{digits}f} ± {one.half:.{digits}f}"


def table(found: list[Comparison]) -> list[list[str]]:
    """Return rows: a way, and for each task the mean difference with its interval."""
    tasks = tasks_of(found)
    rows = []
    for way in WAYS:
        ones = [of(found, task, way) for task in tasks]
        if way == EXACT or not any(ones):
            continue
        rows.append([WAYS[way].about, *(interval(one) if one else "" for one in ones)])
    bounds = [of(found, task, EXACT) for task in tasks]
    rows.append(["the seeds' standard deviation", *(f"{one.spread:.2g}" if one else "" for one in bounds)])
    return rows


def levels(found: list[Comparison], runs: list[Run]) -> list[list[str]]:
    """Return rows: a task, its size, and the loss and accuracy that the ways end with."""
    rows = []
    for task in tasks_of(found):
        exact, four = of(found, task, EXACT), of(found, task, "int8")
        size = next(run["parameters"] for run in runs if run["task"] == task)
        steps = next(run["steps"] for run in runs if run["task"] == task)
        assert exact is not None
        cells = [f"{one.loss:.3f}, {100 * one.accuracy:.1f} %" if one else "" for one in (exact, four)]
        rows.append([task, TASKS[task].about, f"{size / 1e6:.2f} M", f"{steps:,}", *cells])
    return rows


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(runs: list[Run], found: list[Comparison]) -> str:
    tasks, seeds = tasks_of(found), found[0].seeds
    parts = [
        first_sentence(found),
        markdown(
            ["task", "model and data", "parameters", "steps", "exact: loss, accuracy", "`int8`"], levels(found, runs)
        ),
        f"Last validation loss minus exact training's, mean of {seeds} paired seeds and 95 % interval:",
        markdown(["way", *tasks], table(found)),
    ]
    inside, outside = within(found, "int8")
    if inside or outside:
        beyond = f"; not in {', '.join(outside)}" if outside else ""
        parts.append(
            f"`int8` stays within bf16 autocast's difference, or {SHARE:g} of the seeds' standard deviation, "
            f"in {', '.join(inside) or 'no task'}{beyond}."
        )
    return "\n\n".join(parts)


def page_with(runs: list[Run], found: list[Comparison], page: str) -> str:
    """Return the page with the tables and its first sentence."""
    for (start, end), words in ((FIRST, first_sentence(found)), (MARKS, text(runs, found))):
        page = str(page_marks.fill(page, (re.escape(start), end), lambda _, words=words: words))
    return page


# ---- the picture

#: Distinct for colour-blind readers.
COLOURS = {
    EXACT: "#000000",
    BF16: "#5f6368",
    "int8": "#0072b2",
    "int6": "#009e73",
    "int4": "#cc79a7",
    "fp8": "#d55e00",
    "saved": "#56b4e9",
    "products": "#e69f00",
    "stochastic": "#8c6bb1",
    NOISE: "#9aa0a6",
    CUT: "#b00020",
}
SHORT = {
    BF16: "bf16 autocast",
    "saved": "int8, nothing recomputed",
    "products": "products in int8",
    "stochastic": "int8, stochastic",
    NOISE: "control: 1e-6",
    CUT: "control: 25 %",
}


def curves(runs: list[Run], task: str, way: str) -> tuple[list[int], list[float]]:
    """Return the validation loss on the way, mean over the seeds."""
    mine = [run["validations"] for run in runs if (run["task"], run["way"]) == (task, way)]
    steps = [step for step, *_ in mine[0]]
    return steps, [statistics.fmean(one[i][1] for one in mine) for i in range(len(steps))]


def draw(runs: list[Run], found: list[Comparison], path: Path) -> None:
    """Above, validation losses on the way; below, the differences at the end in units of the
    seeds' standard deviation, with their intervals."""
    from matplotlib.figure import Figure

    tasks = tasks_of(found)
    figure = Figure(figsize=(3.1 * len(tasks) + 1.2, 7), layout="constrained")
    grid = figure.subplots(2, len(tasks), squeeze=False, height_ratios=(1, 1.25))
    ways = [way for way in WAYS if any(one.way == way for one in found)]
    compared = [way for way in ways if way != EXACT]
    for column, task in enumerate(tasks):
        above, below = grid[0][column], grid[1][column]
        for way in (*(w for w in ways if w not in (EXACT, NOISE)), EXACT):
            if of(found, task, way):
                dashed = {"linestyle": "--"} if way == EXACT else {}
                above.plot(
                    *curves(runs, task, way), color=COLOURS[way], linewidth=1.6 if way == EXACT else 1.2, **dashed
                )
        above.set_title(task, size=13, loc="left")
        above.set_xlabel("step", size=11)
        for row, way in enumerate(compared):
            one = of(found, task, way)
            if one is None:
                below.annotate("no products", (0, row), ha="center", va="center", size=9, color="#5f6368")
                continue
            unit = one.spread
            style: dict[str, Any] = {"color": COLOURS[way], "fmt": "o", "markersize": 5, "capsize": 3, "linewidth": 1.6}
            below.errorbar([one.mean / unit], [row], xerr=[one.half / unit], **style)
        below.axvline(0, color="#000000", linewidth=0.8)
        below.axvspan(-SHARE, SHARE, color="#0072b2", alpha=0.12, linewidth=0)
        below.set_xscale("symlog", linthresh=0.1, linscale=0.6)
        below.set_xlim(-20, 20)
        below.set_xticks([-10, -1, -0.1, 0, 0.1, 1, 10], ["-10", "-1", "", "0", "", "1", "10"])
        below.set_ylim(len(compared) - 0.5, -0.5)
        below.set_yticks(range(len(compared)), [SHORT.get(way, way) for way in compared] if column == 0 else [])
        below.set_xlabel("difference / seeds' deviation", size=11)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=11)
    grid[0][0].set_ylabel("validation loss", size=12)
    figure.suptitle("Exact (dashed) and other ways, mean of the seeds; below: differences at the end, 95 %", size=13)
    figure.savefig(path, dpi=90)
