"""The words of plans: tables of settings (:class:`Comparison`), and what lowers a part of a peak
(:func:`advice`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gradckpt._planning.segments import GRADIENTS, KEPT, KINDS, LOSS, WORKING, Peak
from gradckpt._stats import format_bytes

logger = logging.getLogger("gradckpt")

#: Part of a peak -> what lowers it.
Hints = Mapping[str, tuple[str, ...]]

#: Of the bytes of a step: how much less another way must need to be shown or named.
LESS = 0.01

#: So many tiles are tried, and what is said if they help: in Python, and of the command.
TILES = 16
_IN_TILES = f"let MLPs run in tiles (tiles={TILES})", f"let MLPs run in tiles (--tiles {TILES})"

#: For ``gradckpt.plan``.
IN_PYTHON: Hints = {
    "loss": ("compute the loss in chunks, or smaller ones, as TRL, Liger or torch's linear_cross_entropy do",),
    "kept": ("train on a smaller batch",),
    "working": ("checkpoint smaller modules (modules=)", "train on a smaller batch"),
    "trained": ("train adapters alone", "shard the model"),
    "weights": ("freeze the weights in 4 bits and train adapters", "shard the model"),
    "other": ("they are of this process: pass optimizer= if they are its states, delete other models",),
}

#: Part -> flags of the command, each with what it does.
_FLAGS = {
    "loss": {"--loss": "compute it in chunks (--loss trl, liger or torch)"},
    "kept": {},
    "working": {},
    "trained": {
        "--lora": "train adapters (--lora r=16)",
        "--shard": "shard (--gpus 8 --shard fsdp)",
        "--optimizer": "take an optimizer with smaller states (--optimizer adamw-8bit)",
    },
    "weights": {
        "--weights": "freeze the weights in 4 bits (--lora r=16 --weights nf4)",
        "--shard": "shard (--gpus 8 --shard fsdp)",
    },
}


def as_flags(given: Collection[str], takes: str) -> Hints:
    """Return the hints of the command, without the flags that it was given."""
    less = "train on fewer tokens" if takes == "tokens" else "train on a smaller batch"
    return {
        part: tuple(hint for flag, hint in flags.items() if flag not in given) or (less,)
        for part, flags in _FLAGS.items()
    }


def is_smallest(least: int, size: int) -> bool:
    """Return whether a step of so many bytes is about the least one."""
    return least >= (1 - LESS) * size


def with_a_smaller_budget(hints: Hints) -> Hints:
    """Return the hints of a plan that is not the smallest."""
    return _where_layers_are_largest(hints, "a smaller budget has a plan, which takes longer")


def with_tiles(hints: Hints) -> Hints:
    """Return the hints where tiles help."""
    return _where_layers_are_largest(hints, _IN_TILES[hints is not IN_PYTHON])


def _where_layers_are_largest(hints: Hints, hint: str) -> Hints:
    """Return the hints with this one where what layers keep, or their working set, is largest."""
    return {**hints, "kept": (hint,), "working": (hint,)}


def advice(peak: Peak, fixed: Mapping[str, int], hints: Hints, fixed_alone: bool = False) -> str:
    """Say what the largest part of a peak is, and what would lower it.

    ``fixed``: bytes that are there during the whole step; ``fixed_alone``: they alone count.
    """
    parts = fixed if fixed_alone else {**fixed, **peak.parts}
    name, size = max(parts.items(), key=lambda part: part[1])
    where = f"{peak.position.capitalize()} binds" if name in peak.parts else "What binds is there all the time"
    is_loss = peak.position == "loss" and name in (KINDS[LOSS], KINDS[WORKING])
    causes = {
        KINDS[KEPT]: "kept",
        KINDS[LOSS]: "loss",
        KINDS[WORKING]: "working",
        KINDS[GRADIENTS]: "trained",
        "other tensors": "other",
    }
    cause = "loss" if is_loss else "trained" if "states" in name else causes.get(name, "weights")
    hint = ", or ".join(hints[cause])
    return f"{where}: {name}, {format_bytes(size)}; {hint}."


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting. ``peak``: bytes above the start of the step, and where; ``total``: with what is
    there during the whole step. ``at_most``: ``total`` if nearly all tokens choose the same
    experts, None if sizes do not depend on that. ``needed``: bytes with which the allocator of the
    device can run the larger of the two, None on a CPU and for real steps. ``longest``: tokens of
    the longest sequence that fits, 0 if none does, None if unknown. ``seconds``: estimate for a
    step. ``problem``: why there are no figures.
    """

    name: str
    line: str
    peak: Peak | None
    total: int | None
    at_most: int | None = None
    fits: bool | None = None
    longest: int | None = None
    seconds: float | None = None
    problem: str | None = None
    needed: int | None = None

    @property
    def size(self) -> int | None:
        """The bytes that have to fit."""
        return next((size for size in (self.needed, self.at_most, self.total) if size is not None), None)

    @property
    def binds(self) -> str:
        """What the largest part of the peak is, with its bytes."""
        if self.peak is None:
            return self.problem or ""
        name, size = max(self.peak.parts.items(), key=lambda part: part[1])
        return f"{self.peak.position}: {name} {format_bytes(size)}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What each setting needs; ``print(plan)`` shows a table.

    ``rows``: one :class:`Row` for each setting. ``fixed``: bytes that are there during the whole
    step, by name. ``memory``: bytes to fit into, or None. ``about``: the assumptions, in sentences.
    ``hints``: what lowers the parts of a peak, in the words of plan() or of the command.
    """

    rows: tuple[Row, ...]
    fixed: dict[str, int]
    memory: int | None
    about: tuple[str, ...]
    tokens: int | None = None
    hints: Hints = dataclasses.field(default_factory=lambda: IN_PYTHON, repr=False)

    def __getitem__(self, name: str) -> Row:
        """Return the row of a setting."""
        return {row.name: row for row in self.rows}[name]

    @property
    def verdict(self) -> str:
        """The answer in one sentence or two."""
        known = [row for row in self.rows if row.total is not None]
        if not known:
            return "No setting could be computed."
        least = min(known, key=lambda row: row.size or 0)
        what = "smallest peak" if least.needed is None else "least that is needed"
        length = f" at {self.tokens:,} tokens" if self.tokens else ""
        if self.memory is None:
            return f"The {what}{length} is {_size(least.size)}, with {least.name}. {_advice(self, least)}"
        limit = _size(self.memory)
        fitting = [row for row in known if row.fits]
        if not fitting:
            return (
                f"Nothing fits {limit}{length}: the {what} is {_size(least.size)}, with {least.name}. "
                f"{_advice(self, least)}"
            )
        if fitting[0].name == "none" and not _barely(self, fitting[0]):
            return f"It fits {limit}{length} without checkpointing: {_size(fitting[0].size)}."
        names = ", ".join(
            f"{row.name} ({_size(row.size)}{', barely' if _barely(self, row) else ''})" for row in fitting
        )
        return f"It fits {limit}{length} with {names}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which JSON can carry."""
        given = dataclasses.asdict(self)
        del given["hints"]
        return {"verdict": self.verdict, **given}

    def __str__(self) -> str:
        about = list(self.about)
        if any(_barely(self, row) for row in self.rows):
            about.append(
                "Barely: less than 1 GiB is left, and the CUDA context and workspaces of libraries need about that."
            )
        return "\n".join([self.verdict, "", *_table(self), "", *_lines(self), *about])


# ---- text ----


#: Bytes that are not counted, and the most of a device that they are taken for.
_BESIDE, _PART = 2**30, 0.05


def _barely(plan: Comparison, row: Row) -> bool:
    """Return whether a row fits, and leaves little for what is not counted."""
    if not row.fits or row.size is None or plan.memory is None:
        return False
    return plan.memory - row.size < min(_BESIDE, _PART * plan.memory)


def _advice(plan: Comparison, row: Row) -> str:
    """Say what the largest part of a row's peak is, and what would lower it."""
    if row.peak is None:
        return ""
    alone = plan.memory is not None and sum(plan.fixed.values()) > plan.memory  # the rest does not matter yet
    return advice(row.peak, plan.fixed, plan.hints, fixed_alone=alone)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


def aligned(columns: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return the lines of a table; columns with these numbers are aligned to the right."""
    padded = []
    for i, cells in enumerate(columns):
        width = max(map(len, cells))
        padded.append([cell.rjust(width) if i in right else cell.ljust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


#: Columns of a comparison that are there in any case, and those of numbers.
_ALWAYS = ("setting", "peak", "allocated", "what binds")
_NUMBERS = ("peak", "allocated", "at most", "needed", "longest", "estimated")


def _table(plan: Comparison) -> list[str]:
    held = sum(plan.fixed.values())
    parts = ", ".join(f"{name} {_size(size)}" for name, size in plan.fixed.items() if size)
    needed = any(row.needed is not None for row in plan.rows)
    words = {True: "yes", False: "no"} if plan.memory is not None else {}
    columns = {
        "setting": [row.name for row in plan.rows],
        "allocated" if needed else "peak": [_size(row.total) for row in plan.rows],
        "at most": [_size(row.at_most) for row in plan.rows],
        "needed": [_size(row.needed) for row in plan.rows],
        f"fits {_size(plan.memory)}": [
            "barely" if _barely(plan, row) else words.get(row.fits or False, "") for row in plan.rows
        ],
        "longest": ["" if row.longest is None else f"{row.longest:,}" for row in plan.rows],
        "estimated": ["" if row.seconds is None else f"{row.seconds:.3g} s" for row in plan.rows],
        "what binds": [row.binds for row in plan.rows],
    }
    shown = [[name, *cells] for name, cells in columns.items() if any(cells) or name in _ALWAYS]
    right = {i for i, (name, *_) in enumerate(shown) if name in _NUMBERS}
    during = f"During the whole step: {_size(held)} ({parts})" if parts else ""
    return [during, "", *aligned(shown, right)]


def _lines(plan: Comparison) -> list[str]:
    rows = [row for row in plan.rows if plan.memory is None or row.fits]
    width = max((len(row.name) for row in rows), default=0)
    lines = [f"  {row.name.ljust(width)}  {row.line}" for row in rows]
    return ["To train so:", *lines, ""] if lines else []
