"""The picture of bench_frontier.py: memory against time, as an SVG for light and dark pages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from html import escape
from typing import Any, NamedTuple

Row = dict[str, Any]
MIB = 2**20
WIDTH, HEIGHT = 880, 520
LEFT, RIGHT, TOP, BOTTOM = 62, 862, 92, 466

#: class -> its colour on a light page, and on a dark one
COLOURS = {
    "torch": ("#0072b2", "#58a6ff"),
    "remat": ("#9a4f80", "#d99bc2"),
    "compile": ("#5f6368", "#adb5bd"),
    "ours": ("#d55e00", "#ff8f4c"),
    "compiled": ("#009e73", "#3fc79a"),
}


def colours(dark: bool) -> str:
    """Rules for marks, hollow marks, labels and lines of each class."""
    paper = "#0d1117" if dark else "#ffffff"
    rules = []
    for name, pair in COLOURS.items():
        colour = pair[dark]
        rules += [
            f".{name} .mark {{ fill: {colour}; stroke: {paper}; }}",
            f".{name} .open {{ fill: {paper}; stroke: {colour}; }}",
            f".{name} .label {{ fill: {colour}; }}",
            f".{name} .front {{ stroke: {colour}; }}",
        ]
    return "\n    ".join(rules)


STYLE = f"""
    text {{ font-family: system-ui, sans-serif; font-size: 12px; fill: #24292f; }}
    .title {{ font-size: 16px; font-weight: 600; }}
    .tick, .note, .label {{ font-size: 11px; }}
    .tick, .note {{ fill: #57606a; }}
    .paper {{ fill: #ffffff; stroke: #d0d7de; }}
    .grid {{ stroke: #e3e7eb; }}
    .open {{ stroke-width: 1.6; }}
    .front {{ fill: none; stroke-width: 1.6; stroke-opacity: .55; }}
    .peers {{ stroke-dasharray: 5 4; }}
    {colours(dark=False)}
    @media (prefers-color-scheme: dark) {{
    text {{ fill: #e6edf3; }}
    .tick, .note {{ fill: #9198a1; }}
    .paper {{ fill: #0d1117; stroke: #3d444d; }}
    .grid {{ stroke: #262c34; }}
    {colours(dark=True)}
    }}
"""

#: group -> (class of the colour, form)
LOOKS = {
    "none": ("compile", "diamond"),
    "torch": ("torch", "circle"),
    "sac": ("torch", "square"),
    "remat": ("remat", "triangle"),
    "compile": ("compile", "square"),
    "boundaries": ("ours", "circle"),
    "selective": ("ours", "square"),
    "saved": ("ours", "triangle"),
    "mixed": ("ours", "diamond"),
    "compiled": ("compiled", "square"),
}
LEGEND = {
    "torch": "torch's checkpoint",
    "sac": "torch's SAC",
    "remat": "torch_remat",
    "compile": "torch.compile, budget",
    "boundaries": "gradckpt: inputs",
    "selective": "and outputs",
    "saved": "nothing recomputed",
    "mixed": "mixed",
    "compiled": "gradckpt, compiled",
}


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def mark(form: str, x: float, y: float, look: str) -> str:
    r = 5.0
    shapes = {
        "circle": f'<circle class="{look}" cx="{x:.1f}" cy="{y:.1f}" r="{r}"/>',
        "square": f'<rect class="{look}" x="{x - r + 0.5:.1f}" y="{y - r + 0.5:.1f}" width="9" height="9"/>',
        "triangle": f'<path class="{look}" d="M{x:.1f} {y - 6:.1f} l6 10.5 h-12z"/>',
        "diamond": f'<path class="{look}" d="M{x:.1f} {y - 6.5:.1f} l6.5 6.5 -6.5 6.5 -6.5 -6.5z"/>',
    }
    return shapes[form]


def stairs(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of the points (memory, time), those to which no other has less of both, by memory."""
    front: list[tuple[float, float]] = []
    for memory, time in sorted(points):
        if not front or time < front[-1][1]:
            front.append((memory, time))
    return front


def ticks(low: float, high: float) -> Iterator[float]:
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (step * 10.0**power for step in (1, 2, 5) if low <= step * 10.0**power <= high)


def placed(text: str, x: float, y: float, taken: list[Box]) -> tuple[float, float] | None:
    """A place beside the point where the text meets nothing; None: there is none."""
    wide, high = 5.9 * len(text) + 2, 12.0
    for dx, dy in ((9, 4), (-9 - wide, 4), (-wide / 2, -9), (-wide / 2, 18), (7, -6), (7, 14), (-7 - wide, -6)):
        box = Box(x + dx, y + dy - high + 2, x + dx + wide, y + dy + 2)
        if box.left > LEFT and box.right < RIGHT and not any(box.meets(other) for other in taken):
            taken.append(box)
            return x + dx, y + dy
    return None


def draw(found: Row) -> str:
    rows, floor = found["rows"], found["floor"]
    peaks, times = [row["peak"] / MIB for row in rows], [row["of_none"] for row in rows]
    low, high = min(peaks) / 1.12, max(peaks) * 1.12
    bottom, top = min(times) - 0.03, max(times) + 0.03

    def at_x(mib: float) -> float:
        return LEFT + (RIGHT - LEFT) * math.log(mib / low) / math.log(high / low)

    def at_y(time: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (time - bottom) / (top - bottom)

    lines = [*axes(at_x, at_y, (low, high), (bottom, top)), *fronts(rows, floor, at_x, at_y)]
    places = [(at_x(mib), at_y(time)) for mib, time in zip(peaks, times, strict=True)]
    taken = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in places]
    for row, (x, y) in zip(rows, places, strict=True):
        colour, form = LOOKS[row["group"]]
        lines.append(f'<g class="{colour}">{mark(form, x, y, "mark" if row["error"] <= floor else "open")}</g>')
    first = sorted(range(len(rows)), key=lambda i: (rows[i]["ours"], rows[i]["error"] > floor, peaks[i] * times[i]))
    for i in first:
        place = placed(rows[i]["name"], *places[i], taken)
        if place is not None:
            colour, _ = LOOKS[rows[i]["group"]]
            words = escape(rows[i]["name"])
            at = f'x="{place[0]:.1f}" y="{place[1]:.1f}"'
            lines.append(f'<g class="{colour}"><text class="label" {at}>{words}</text></g>')
    return page(found, "\n  ".join(lines))


def axes(
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
    across: tuple[float, float],
    upwards: tuple[float, float],
) -> Iterator[str]:
    for mib in ticks(*across):
        x = at_x(mib)
        yield f'<path class="grid" d="M{x:.1f} {TOP}V{BOTTOM}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{BOTTOM + 17}" text-anchor="middle">{mib:g}</text>'
    step = 0.1 if upwards[1] - upwards[0] < 1.2 else 0.5
    for number in range(math.ceil(upwards[0] / step), math.floor(upwards[1] / step) + 1):
        y = at_y(number * step)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number * step:.1f}</text>'


def fronts(
    rows: list[Row], floor: float, at_x: Callable[[float], float], at_y: Callable[[float], float]
) -> Iterator[str]:
    """The best of the peers, and of gradckpt with an error up to the floor."""
    for ours in (False, True):
        points = [
            (row["peak"] / MIB, row["of_none"]) for row in rows if row["ours"] == ours and (row["error"] <= floor)
        ]
        front = stairs(points)
        if front:
            path = f"M{at_x(front[0][0]):.1f} {TOP}V{at_y(front[0][1]):.1f}"
            path += "".join(f"H{at_x(mib):.1f}V{at_y(time):.1f}" for mib, time in front[1:])
            look = "ours" if ours else "torch"
            yield f'<g class="{look}"><path class="front{"" if ours else " peers"}" d="{path}H{RIGHT}"/></g>'


def page(found: Row, inside: str) -> str:
    groups = [group for group in LEGEND if any(row["group"] == group for row in found["rows"])]
    legend, x, y = [], 24.0, 62.0
    for group in groups:
        colour, form = LOOKS[group]
        legend.append(f'<g class="{colour}">{mark(form, x, y - 4, "mark")}</g>')
        legend.append(f'<text class="note" x="{x + 10:.0f}" y="{y:.0f}">{LEGEND[group]}</text>')
        x += 6.1 * len(LEGEND[group]) + 34
        if x > WIDTH - 130:
            x, y = 24.0, y + 18
    chip = re.sub(r"\(\w+\)| Processor", "", found.get("gpu", found["cpu"]))  # "(R)"
    words = f"{found['size']}; {chip}; open marks: error above "
    words += f"bf16 autocast's {found['floor']:.2%}; lines: the best of the peers (dashed) and of gradckpt"
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="title">
  <title id="title">Peak memory and time of a training step: gradckpt beside other ways of recomputing</title>
  <style>{STYLE}  </style>
  <rect class="paper" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="8"/>
  <text class="title" x="18" y="28">Memory and time of a training step</text>
  <text class="note" x="18" y="45">{escape(words)}</text>
  {"".join(legend)}
  <text class="tick" x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">peak, MiB (log scale)</text>
  <text class="tick" transform="translate(18 {(TOP + BOTTOM) / 2}) rotate(-90)" text-anchor="middle">time, of no
    checkpointing</text>
  {inside}
</svg>
"""
