"""What bench_training.py shows of its runs: comparisons with ``exact``, tables, a picture."""

from __future__ import annotations

import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import pages
from training_runs import Run
from training_tasks import TASKS
from training_ways import BF16, CUT, EXACT, NOISE, OURS, WAYS

MARKS = "<!-- by benchmarks/bench_training.py -->", "<!-- end of training -->"
#: Of the page's first sentence.
FIRST = "<!-- first, by benchmarks/bench_training.py -->", "<!-- end of first -->"
#: What int8's mean difference may be, as a share of the seeds' standard deviation.
SHARE = 0.05
LEVEL = 0.05  # of intervals: 95 %


def outside(t: float, degrees: int) -> float:
    """Return the share of Student's distribution beyond t on both sides, by Simpson's rule."""
    if t == 0:
        return 1.0
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    # In x = atan(t / sqrt(degrees)), the density is smooth and the range is finite.
    end, parts = math.atan(t / math.sqrt(degrees)), 200
    values = [math.cos(i * end / parts) ** (degrees - 1) for i in range(parts + 1)]
    whole = values[0] + values[-1] + 4 * sum(values[1:-1:2]) + 2 * sum(values[2:-1:2])
    return max(0.0, 1 - 2 * scale * math.sqrt(degrees) * whole * end / parts / 3)


def quantile(level: float, degrees: int) -> float:
    """Return t beyond which this share lies, both sides together."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if outside(middle, degrees) > level else (low, middle)
    return high


class Comparison(NamedTuple):
    """The paired differences of a way from ``exact``, in the last validation loss."""

    task: str
    way: str
    seeds: int
    loss: float  # mean
    accuracy: float  # mean
    spread: float  # the standard deviation of exact's losses over the seeds
    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.differences)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.differences)

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval of the mean."""
        return quantile(LEVEL, self.seeds - 1) * self.deviation / math.sqrt(self.seeds)

    @property
    def chance(self) -> float:
        """How often chance alone has a mean as far from 0."""
        if self.deviation == 0:
            return float(self.mean == 0)
        return outside(abs(self.mean) / self.deviation * math.sqrt(self.seeds), self.seeds - 1)

    @property
    def contains_zero(self) -> bool:
        return abs(self.mean) <= self.half

    @property
    def words(self) -> str:
        """The mean and its interval, with two digits of the latter."""
        digits = max(0, 1 - math.floor(math.log10(self.half))) if self.half else 5
        return f"{self.mean:+.{digits}f} ± {self.half:.{digits}f}"


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
                statistics.stdev(run["loss"] for run in exact.values()),
                tuple(mine[seed]["loss"] - exact[seed]["loss"] for seed in seeds),
            )
        )
    return found


def of(found: list[Comparison], task: str, way: str) -> Comparison | None:
    return next((one for one in found if (one.task, one.way) == (task, way)), None)


# ---- words


def tasks_of(found: list[Comparison]) -> list[str]:
    return [task for task in TASKS if of(found, task, EXACT)]


def beyond_chance(found: list[Comparison]) -> list[Comparison]:
    """Return the formats that end elsewhere than exact training, by Holm's procedure over all
    tasks and formats: some differ by chance in one report of twenty."""
    formats = sorted((one for one in found if one.way in OURS), key=lambda one: one.chance)
    chosen = []
    for tried, one in enumerate(formats):
        if one.chance > LEVEL / (len(formats) - tried):
            break
        chosen.append(one)
    return [one for one in found if one in chosen]


def deviations(one: Comparison) -> str:
    return f"{one.mean / one.spread:+.2g}"


def first_sentence(found: list[Comparison]) -> str:
    """Return where formats end elsewhere, for the head of the page."""
    by_way: dict[str, list[str]] = {}
    for one in beyond_chance(found):
        by_way.setdefault(one.way, []).append(f"{one.task} {deviations(one)}")
    if not by_way:
        return "No difference from exact training could be told from chance." + other_side(found)
    parts = [f"{WAYS[way].about} in {', '.join(tasks)}" for way, tasks in by_way.items()]
    return (
        f"Validation losses that differ from those of exact training by more than chance explains, in "
        f"standard deviations of the seeds (+: higher): {'; '.join(parts)}." + other_side(found)
    )


def other_side(found: list[Comparison]) -> str:
    """Return which formats have a higher mean in every task, named or not."""
    words = []
    for way in OURS:
        ones = [one for one in found if one.way == way]
        parts = [one.mean / one.spread for one in ones]
        if ones and min(parts) > 0 and not all(one.contains_zero for one in ones):
            words.append(f" {WAYS[way].about} has the higher mean in all {len(ones)} tasks, by {min(parts):.2g} to ")
            words[-1] += f"{max(parts):.2g}."
    return "".join(words) + " Other differences may be chance; their intervals say how large they may be."


def of_int8(found: list[Comparison]) -> str:
    """Return how far int8 ends from exact training, beside SHARE."""
    ones = [one for one in found if one.way == "int8"]
    if not ones:
        return ""
    most = max(ones, key=lambda one: abs(one.mean) / one.spread)
    sure = [one.task for one in ones if abs(one.mean) + one.half <= SHARE * one.spread]
    unsure = [one.task for one in ones if one.task not in sure]
    words = f"The mean loss of `int8` differs by at most {abs(most.mean) / most.spread:.2g} of the seeds' standard "
    words += f"deviation from that of exact training ({most.task}). The whole interval is within {SHARE:g} in "
    words += ", ".join(sure) or "no task"
    return words + (f", but not in {', '.join(unsure)}." if unsure else ".")


def table(found: list[Comparison]) -> list[list[str]]:
    """Return rows: a way, and for each task the mean difference with its interval."""
    tasks = tasks_of(found)
    rows = []
    most = max(one.seeds for one in found)
    for way in WAYS:
        ones = [of(found, task, way) for task in tasks]
        if way == EXACT or not any(ones):
            continue
        fewer = min(one.seeds for one in ones if one)
        label = WAYS[way].about + (f" ({fewer} seeds)" if fewer < most else "")
        rows.append([label, *(one.words if one else "no products" for one in ones)])
    bounds = [of(found, task, EXACT) for task in tasks]
    rows.append(["the seeds' deviation", *(f"{one.spread:.3g}" if one else "" for one in bounds)])
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
        rows.append([task, TASKS[task].about, f"{size / 1e6:.2f} M", f"{steps:,}", f"{TASKS[task].lr:g}", *cells])
    return rows


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(runs: list[Run], found: list[Comparison]) -> str:
    tasks, seeds = tasks_of(found), found[0].seeds
    parts = [
        markdown(
            ["task", "model and data", "parameters", "steps", "learning rate", "exact: loss, accuracy", "`int8`"],
            levels(found, runs),
        ),
        f"Last validation loss minus exact training's, mean of {seeds} paired seeds and 95 % interval:",
        markdown(["way", *tasks], table(found)),
    ]
    parts += [words for words in [of_int8(found)] if words]
    return "\n\n".join(parts)


def page_with(runs: list[Run], found: list[Comparison], page: str) -> str:
    """Return the page with the tables and its first sentence."""
    for (start, end), words in ((FIRST, first_sentence(found)), (MARKS, text(runs, found))):
        page = str(pages.fill(page, (re.escape(start), end), lambda _, words=words: words))
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
    "saved": "int8, recompute=False",
    "products": "save_matmuls:int8",
    "stochastic": "int8, stochastic=True",
    NOISE: "control: 1e-6",
    CUT: "control: bad codec, 25 %",
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
    figure = Figure(figsize=(3.1 * len(tasks) + 1.8, 8), layout="constrained")
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
        above.set_title(task, size=15, loc="left")
        above.set_xlabel("step", size=13)
        for row, way in enumerate(compared):
            one = of(found, task, way)
            if one is None:
                below.annotate("no products", (0, row), ha="center", va="center", size=11, color="#5f6368")
                continue
            unit = one.spread
            style: dict[str, Any] = {"color": COLOURS[way], "fmt": "o", "markersize": 5, "capsize": 3, "linewidth": 1.6}
            below.errorbar([one.mean / unit], [row], xerr=[one.half / unit], **style)
        below.axvline(0, color="#000000", linewidth=0.8)
        below.axvspan(-SHARE, SHARE, color="#0072b2", alpha=0.12, linewidth=0)
        below.set_xscale("symlog", linthresh=0.1, linscale=0.6)
        below.set_xlim(-2, 20)
        below.set_xticks([-1, -0.1, 0, 0.1, 1, 10], ["-1", "-0.1", "0", "0.1", "1", "10"])
        below.set_ylim(len(compared) - 0.5, -0.5)
        below.set_yticks(range(len(compared)), [SHORT.get(way, way) for way in compared] if column == 0 else [])
        below.set_xlabel("difference / seeds' deviation\n(logarithmic beyond 0.1)", size=13)
        for axes in (above, below):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=13)
    grid[0][0].set_ylabel("validation loss", size=14)
    grid[1][0].annotate(
        f"band: {SHARE:g} deviations",
        (SHARE, -0.4),
        xytext=(4, 0),
        textcoords="offset points",
        size=11,
        color="#0072b2",
    )
    figure.suptitle(
        "Validation loss: exact (dashed) and all other ways, which overlap; red: the bad codec. Below: last difference "
        "from exact, mean and 95 % interval",
        size=15,
    )
    figure.savefig(path, dpi=90)
