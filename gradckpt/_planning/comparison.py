"""Will a training step fit? :func:`compare` answers for each ready setting."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from gradckpt import _C
from gradckpt._apart import apart
from gradckpt._memory import track_memory
from gradckpt._models.switch import Modules
from gradckpt._planning.blocks import find_blocks
from gradckpt._planning.config_steps import ConfigSteps
from gradckpt._planning.devices import Device
from gradckpt._planning.estimates import rates_of
from gradckpt._planning.hints import IN_PYTHON, TILES, Hints, advice, as_flags, with_tiles
from gradckpt._planning.longest import longest
from gradckpt._planning.needed_memory import held_blocks, memory_use
from gradckpt._planning.progress import late_progress
from gradckpt._planning.rows import Row, is_less, of_tiles, with_parts
from gradckpt._planning.sharded import gradient_bytes, parameter_bytes, real_steps
from gradckpt._planning.step_trace import (
    Peak,
    StateBeforePaper,
    StepTrace,
    side_by_side_on_paper,
    trace_step,
)
from gradckpt._settings import READY, Setting, in_parts, in_tiles, quiet
from gradckpt._sizes import parse_bytes
from gradckpt._stats import format_bytes, uncounted
from gradckpt._training_state import TrainingState
from gradckpt._training_step import (
    StepWrites,
    alone,
    refuse_writes,
    run_alone,
    step_of_batch,
    step_of_function,
    tensors_of_batch,
)

__all__ = [
    "Comparison",
    "Row",
    "compare",
    "compare_source",
    "fixed_bytes",
    "peak_of_run",
    "step_of",
    "unwrapped",
]

logger = logging.getLogger("gradckpt")

#: Operators of a step on paper from which on no longer one is looked for.
_MANY = 30_000


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
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def verdict(self) -> str:
        """The answer in one sentence or two."""
        return _verdict(self)

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


def compare(
    model: Module,
    batch: Any,
    modules: Modules,
    memory: int | str | None,
    measure: bool,
    tiles: int | None = None,
) -> Comparison:
    """Return what a step needs in each ready setting; :func:`gradckpt.plan` describes it."""
    limit = None if memory is None else parse_bytes(memory)
    run = step_of(model, batch)
    blocks = find_blocks(model, modules)
    about = ["Peaks contain parameters, buffers and gradients that exist, and no optimizer states."]
    if modules is not None:
        about.append("The lines take the same modules= as this plan.")
    fixed = fixed_bytes(model)
    rows: list[Row] = []
    hints: Hints = IN_PYTHON
    keep = functools.cache(lambda: StateBeforePaper(model, batch))
    if not measure:
        try:
            with alone(model), quiet(), late_progress("planning") as progress:

                def rows_of(settings: Sequence[Setting]) -> list[Row]:
                    trials = [
                        functools.partial(_on_paper, model, setting, run, batch, blocks, modules, fixed, limit)
                        for setting in settings
                    ]
                    return side_by_side_on_paper(trials, keep, lambda number: progress(settings[number].name))

                rows = with_parts(rows_of, blocks, tiles)
                hints = _hints(IN_PYTHON, rows_of, rows, tiles)
        except StepWrites:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            rows = []
            about.append(f"The step cannot be run on paper ({reason}); real steps were measured.")
            logger.info("gradckpt: %s", about[-1])

    def measured() -> list[Row]:
        with quiet(), real_steps(model):

            def rows_of(settings: Sequence[Setting]) -> list[Row]:
                return [_measured(model, setting, run, batch, modules, fixed, limit) for setting in settings]

            return with_parts(rows_of, blocks, tiles)

    rows = rows or run_alone(model, measured)
    about += of_tiles(rows, tiles)
    return Comparison(tuple(rows), fixed, limit, tuple(about), hints=hints)


def _hints(
    hints: Hints,
    rows_of: Callable[[Sequence[Setting]], list[Row]],
    rows: Sequence[Row],
    tiles: int | None,
) -> Hints:
    """Return the hints of a comparison: tiles, if nothing fits and they would need less."""
    known = [row for row in rows if row.peak is not None]
    if tiles is not None or not known or any(row.fits for row in rows):
        return hints
    least = min(known, key=lambda row: row.size or 0)
    settings = [each for ready in READY for each in (ready, in_parts(ready)) if each is not None]
    tiled = next((in_tiles(each, TILES) for each in settings if each.name == least.name), None)
    try:
        helps = tiled is not None and is_less(rows_of([tiled])[0], least)
    except Exception:  # the tokens do not divide, or it has no MLP
        helps = False
    return with_tiles(hints) if helps else hints


def fixed_bytes(model: Module) -> dict[str, int]:
    """Return the bytes that this rank has of a model before the step, by name."""
    return {
        "parameters and buffers": parameter_bytes(model) + sum(x.nbytes for x in model.buffers()),
        "gradients": gradient_bytes(model),
    }


def unwrapped(model: Module) -> Module:
    """Return the module of DistributedDataParallel, whose forward may allocate its buckets."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def step_of(model: Module, batch: Any) -> Callable[[Any], object]:
    if callable(batch) and not isinstance(batch, (torch.Tensor, Mapping)):
        step = step_of_function(model, batch)
        return lambda _: step()
    return lambda batch: step_of_batch(model, batch)()


def _on_paper(
    model: Module,
    setting: Setting,
    run: Callable[[Any], object],
    batch: Any,
    blocks: Sequence[Module],
    modules: Modules,
    fixed: dict[str, int],
    limit: int | None,
) -> Row:
    cuda = any(p.device.type == "cuda" for p in model.parameters())

    def trace(concentrated: bool) -> StepTrace:
        with setting.active(model, modules):
            given = None if callable(batch) and not isinstance(batch, torch.Tensor) else batch
            return trace_step(model, run, given, blocks=blocks, concentrated=concentrated, cuda=cuda)

    found = trace(False)
    peak, held = found.peak(), sum(fixed.values())
    largest = trace(True) if found.data_dependent else found
    at_most = held + largest.peak().size if found.data_dependent else None
    needed = memory_use(largest.segments, held_blocks(model, fixed))["needed"] if cuda else None
    return _row(setting, peak, held, limit, at_most=at_most, needed=needed)


def _row(setting: Setting, peak: Peak, held: int, limit: int | None, **more: Any) -> Row:
    row = Row(setting.name, setting.line, peak, peak.size + held, **more)
    return row if limit is None else dataclasses.replace(row, fits=row.size is not None and row.size <= limit)


def _measured(
    model: Module,
    setting: Setting,
    run: Callable[[Any], object],
    batch: Any,
    modules: Modules,
    fixed: dict[str, int],
    limit: int | None,
) -> Row:
    try:
        peak = peak_of_run(model, setting, run, batch, modules)
    except torch.OutOfMemoryError:
        return Row(setting.name, setting.line, None, None, fits=False, problem="out of memory")
    return _row(setting, peak, sum(fixed.values()), limit)


def peak_of_run(
    model: Module, setting: Setting, run: Callable[[Any], object], batch: Any, modules: Modules = None
) -> Peak:
    """Return the peak of a real step in a setting, above its start; all is put back afterwards.

    Raises:
        StepWrites: The step changes parameters.
        torch.OutOfMemoryError: It needs more than there is.
    """
    trial = functools.partial(_peak_of_run, model, setting, run, batch, modules)
    return apart(trial, lambda: TrainingState(model, batch, run))


def _peak_of_run(
    model: Module, setting: Setting, run: Callable[[Any], object], batch: Any, modules: Modules = None
) -> Peak:
    leaves = [x for x in (*model.parameters(), *tensors_of_batch(batch)) if x.requires_grad and x.is_leaf]
    for x in leaves:
        if x.grad is not None:
            x.grad = x.grad.clone()  # the step adds to it in place
    torch.clear_autocast_cache()  # as before the first setting
    _C.forget_random_state()  # a later step may have to keep one of its own, too
    with uncounted(), refuse_writes(leaves), setting.active(model, modules), track_memory(model) as memory:
        run(batch)
    at_start = next((point.total for point in memory.timeline[:1]), 0) if memory.device != "cpu" else 0
    region = max(memory.by_region.items(), key=lambda pair: pair[1], default=("step", 0))[0]
    return Peak(memory.peak - at_start, region, dict(memory.by_kind))


# ---- a model on paper ----


def compare_source(
    source: Any,
    tokens: int | None,
    batch: int = 1,
    *,
    memory: int | None = None,
    device: Device | None = None,
    tiles: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Return the plan of a :class:`gradckpt._planning.config_model.ConfigModel`."""
    limit = memory if memory is not None else device.memory if device is not None else None
    fixed = {**source.fixed, **source.extra}
    held, blocks_held = sum(fixed.values()), held_blocks(source.model, fixed)
    rates = None if device is None else rates_of(device, source.computes_in_16_bits)
    progress("a shorter model, and the whole one")
    steps = ConfigSteps(source, tokens, batch)

    def trace(setting: Setting, length: int | None, concentrated: bool = False) -> StepTrace:
        active = functools.partial(setting.active, source.model, source.modules)
        return steps.trace(lambda _: active(), length, concentrated=concentrated)

    def needed_by(found: StepTrace) -> int:
        return int(memory_use(found.segments, blocks_held)["needed"])

    def row(setting: Setting) -> Row:
        first = largest = trace(setting, tokens)
        more: dict[str, Any] = {"seconds": None if rates is None else rates.of_step(first)}
        if first.data_dependent:
            largest = trace(setting, tokens, True)
            more["at_most"] = held + largest.peak().size
        needed = more["needed"] = needed_by(largest)
        if tokens is not None and limit is not None and first.operators < _MANY:
            each = setting.options.get("tiles", 1)  # divides the tokens

            def needed_at(length: int) -> int:
                return needed_by(trace(setting, each * length, first.data_dependent))

            positions = source.positions and source.positions // each
            found = longest(tokens // each, needed, needed_at, held, limit, positions)
            more["longest"] = None if found is None else each * found
        return _row(setting, first.peak(), held, limit, **more)

    def rows_of(settings: Sequence[Setting]) -> list[Row]:
        trials = [functools.partial(row, each) for each in settings]
        return side_by_side_on_paper(trials, None, lambda number: progress(settings[number].name))

    rows = with_parts(rows_of, steps.blocks, tiles)
    hints = _hints(as_flags(source.flags, source.takes), rows_of, rows, tiles)
    about = [*source.about, *of_tiles(rows, tiles)]
    if tokens is not None and limit is not None and any(each.longest is None for each in rows):
        why = "where a step has very many operators, or other lengths raise"
        about.append(f"The longest sequence is unknown {why}; try others with --tokens.")
    return Comparison(tuple(rows), fixed, limit, tuple(about), tokens, hints)


# ---- text ----


def _verdict(plan: Comparison) -> str:
    known = [row for row in plan.rows if row.total is not None]
    if not known:
        return "No setting could be computed."
    least = min(known, key=lambda row: row.size or 0)
    what = "smallest peak" if least.needed is None else "least that is needed"
    length = f" at {plan.tokens:,} tokens" if plan.tokens else ""
    if plan.memory is None:
        return f"The {what}{length} is {_size(least.size)}, with {least.name}. {_advice(plan, least)}"
    limit = _size(plan.memory)
    fitting = [row for row in known if row.fits]
    if not fitting:
        return (
            f"Nothing fits {limit}{length}: the {what} is {_size(least.size)}, with {least.name}. "
            f"{_advice(plan, least)}"
        )
    if fitting[0].name == "none" and not _barely(plan, fitting[0]):
        return f"It fits {limit}{length} without checkpointing: {_size(fitting[0].size)}."
    names = ", ".join(f"{row.name} ({_size(row.size)}{', barely' if _barely(plan, row) else ''})" for row in fitting)
    return f"It fits {limit}{length} with {names}."


#: Bytes that are not counted, and the most of a device that they are taken for.
_BESIDE, _PART = 2**30, 0.05


def _barely(plan: Comparison, row: Row) -> bool:
    """Return whether a row fits, and leaves little for what is not counted."""
    if not row.fits or row.size is None or plan.memory is None:
        return False
    return plan.memory - row.size < min(_BESIDE, _PART * plan.memory)


def _advice(plan: Comparison, row: Row) -> str:
    """Say what binds in a row, and what would move it."""
    if row.peak is None:
        return ""
    alone = plan.memory is not None and sum(plan.fixed.values()) > plan.memory  # the rest does not matter yet
    return advice(row.peak, plan.fixed, plan.hints, fixed_alone=alone)


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else format_bytes(nbytes)


#: Columns of numbers.
_NUMBERS = ("peak", "allocated", "at most", "needed", "longest", "estimated")


def _table(plan: Comparison) -> list[str]:
    held = sum(plan.fixed.values())
    parts = ", ".join(f"{name} {_size(size)}" for name, size in plan.fixed.items() if size)
    needed = any(row.needed is not None for row in plan.rows)
    head = ["setting", "allocated" if needed else "peak"]
    limit = plan.memory is not None
    longest = any(row.longest is not None for row in plan.rows)
    seconds = any(row.seconds is not None for row in plan.rows)
    bound = any(row.at_most is not None for row in plan.rows)
    head += ["at most"] * bound + ["needed"] * needed + [f"fits {_size(plan.memory)}"] * limit + ["longest"] * longest
    head += ["estimated"] * seconds + ["what binds"]
    cells = []
    for row in plan.rows:
        line = [row.name, _size(row.total)]
        line += [_size(row.at_most)] * bound + [_size(row.needed)] * needed
        fits = {True: "barely" if _barely(plan, row) else "yes", False: "no", None: ""}[row.fits]
        line += [fits] * limit
        line += [f"{row.longest:,}" if row.longest is not None else ""] * longest
        line += [f"{row.seconds:.3g} s" if row.seconds is not None else ""] * seconds
        cells.append([*line, row.binds])
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    right = {i for i, name in enumerate(head) if name in _NUMBERS}
    rows = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in (head, *cells)
    ]
    return [f"During the whole step: {_size(held)} ({parts})" if parts else "", "", *(row.rstrip() for row in rows)]


def _lines(plan: Comparison) -> list[str]:
    rows = [row for row in plan.rows if plan.memory is None or row.fits]
    width = max((len(row.name) for row in rows), default=0)
    lines = [f"  {row.name.ljust(width)}  {row.line}" for row in rows]
    return ["To train so:", *lines, ""] if lines else []
