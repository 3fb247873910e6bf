"""Will a training step fit? :func:`compare` answers for each ready setting, of a live model, and
:func:`compare_source` of a config; :func:`longest` finds the longest sequence that fits.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from gradckpt import _C
from gradckpt._memory import track_memory
from gradckpt._models.switch import Modules
from gradckpt._models.working_set import have_parts
from gradckpt._offload import parse_bytes
from gradckpt._planning.config_profile import ConfigSteps
from gradckpt._planning.device_memory import fixed_bytes, real_steps
from gradckpt._planning.devices import Device, rates_of
from gradckpt._planning.options import find_blocks
from gradckpt._planning.report import IN_PYTHON, LESS, TILES, Comparison, Hints, Row, as_flags, with_tiles
from gradckpt._planning.segments import KINDS, WORKING, Peak, StepTrace, held_blocks, memory_use
from gradckpt._planning.simulated_tensors import NotSimulated
from gradckpt._planning.step_trace import StateBeforeSimulation, late_progress, side_by_side_simulated, trace_step
from gradckpt._settings import READY, TORCH, Setting, in_parts, in_tiles, quiet
from gradckpt._stats import uncounted
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
from gradckpt._trial_process import apart

logger = logging.getLogger("gradckpt")


def of_tiles(rows: Sequence[Row], tiles: int | None) -> list[str]:
    """Return a sentence where tiles were asked for and no row has them."""
    is_shown = tiles is None or any(f"{tiles} tiles" in row.name for row in rows)
    return [] if is_shown else [f"No setting needs less with tiles={tiles}: MLPs are not what binds."]


#: Of the bytes of a step: how large a working set must be for rows in parts.
_LARGE = 0.05


#: Runs trials of these settings, and returns their results.
Runs = Callable[[Sequence[Callable[[], Any]], Sequence[Setting]], list[Any]]


def with_parts(
    row_of: Callable[[Setting], Row], run_all: Runs, blocks: Sequence[Module], tiles: int | None
) -> list[Row]:
    """Return the rows of the ready settings, each followed by those of the same in parts, and in
    tiles as well, if these need less.
    """
    rows: list[Row] = run_all([functools.partial(row_of, each) for each in READY], READY)
    can = have_parts(blocks)
    more: list[tuple[Setting, Setting]] = []
    for row, setting in zip(rows, READY, strict=True):
        is_large = row.peak is not None and row.peak.parts.get(KINDS[WORKING], 0) > _LARGE * (row.total or 0)
        if is_large or (tiles is not None and setting == TORCH):  # one at least tells whether tiles can be
            found = [in_parts(setting)] * can
            found += [] if tiles is None else [in_parts(setting, tiles) if can else in_tiles(setting, tiles)]
            more += [(each, setting) for each in found if each is not None]
    trials = [functools.partial(_row_if_it_works, row_of, setting) for setting, _ in more]
    others: list[Row | None] = run_all(trials, [setting for setting, _ in more])
    # Where modules cannot be recomputed in parts, tiles alone; what these raise arrives.
    alone_in_tiles = {
        i: tiled
        for i, (setting, ready) in enumerate(more)
        if others[i] is None and "tiles" in setting.options
        if (tiled := in_tiles(ready, setting.options["tiles"])) is not None
    }
    again = [functools.partial(row_of, tiled) for tiled in alone_in_tiles.values()]
    for i, row in zip(alone_in_tiles, run_all(again, list(alone_in_tiles.values())), strict=True):
        others[i] = row
    result = []
    for row, setting in zip(rows, READY, strict=True):
        result.append(row)
        for (_, ready), other in zip(more, others, strict=True):
            if ready is setting and other is not None and is_less(other, result[-1]):
                result.append(other)
    return result


def _row_if_it_works(row_of: Callable[[Setting], Row], setting: Setting) -> Row | None:
    """Return the row of a setting in parts or tiles, None if it does not work."""
    try:
        return row_of(setting)
    except Exception as error:
        logger.debug("gradckpt: a row in parts does not work (%s); it is left out", error)
        return None


def is_less(row: Row, other: Row) -> bool:
    return (row.size or math.inf) < (1 - LESS) * (other.size or math.inf)


#: Operators of a simulated step from which on no longer one is looked for.
_MANY = 30_000


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
    run, given = step_of(model, batch)
    blocks = find_blocks(model, modules)
    about = ["Peaks contain parameters, buffers and gradients that exist, and no optimizer states."]
    if modules is not None:
        about.append("The lines take the same modules= as this plan.")
    fixed = fixed_bytes(model)
    rows: list[Row] = []
    hints: Hints = IN_PYTHON
    keep = functools.cache(lambda: StateBeforeSimulation(model, batch))
    if not measure:
        try:
            with alone(model), quiet(), late_progress("planning") as progress:
                row_of = functools.partial(_simulated, model, run, given, blocks, modules, fixed, limit)
                run_all = functools.partial(_side_by_side, keep, progress)
                rows = with_parts(row_of, run_all, blocks, tiles)
                hints = _hints(IN_PYTHON, row_of, run_all, rows, tiles)
        except StepWrites:
            raise
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            rows = []
            about.append(f"The step cannot be simulated ({reason}); real steps were measured.")
            logger.info("gradckpt: %s", about[-1])

    def measured() -> list[Row]:
        row_of = functools.partial(_measured, model, run, batch, modules, fixed, limit)
        with quiet(), real_steps(model):
            return with_parts(row_of, lambda trials, _: [trial() for trial in trials], blocks, tiles)

    rows = rows or run_alone(model, measured)
    about += of_tiles(rows, tiles)
    return Comparison(tuple(rows), fixed, limit, tuple(about), hints=hints)


def _side_by_side(
    keep: Callable[[], StateBeforeSimulation] | None,
    progress: Callable[[str], None],
    trials: Sequence[Callable[[], Any]],
    settings: Sequence[Setting],
) -> list[Any]:
    return side_by_side_simulated(trials, keep, lambda number: progress(settings[number].name))


def _hints(
    hints: Hints, row_of: Callable[[Setting], Row], run_all: Runs, rows: Sequence[Row], tiles: int | None
) -> Hints:
    """Return the hints of a comparison: tiles, if nothing fits and they would need less."""
    known = [row for row in rows if row.peak is not None]
    if tiles is not None or not known or any(row.fits for row in rows):
        return hints
    least = min(known, key=lambda row: row.size or 0)
    settings = [each for ready in READY for each in (ready, in_parts(ready)) if each is not None]
    tiled = next((in_tiles(each, TILES) for each in settings if each.name == least.name), None)
    try:
        helps = tiled is not None and is_less(run_all([functools.partial(row_of, tiled)], [tiled])[0], least)
    except Exception:  # the tokens do not divide, or it has no MLP
        helps = False
    return with_tiles(hints) if helps else hints


def unwrapped(model: Module) -> Module:
    """Return the module of DistributedDataParallel, whose forward may allocate its buckets."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def step_of(model: Module, batch: Any) -> tuple[Callable[[Any], object], Any]:
    """Return what runs forward and backward on a batch, and that batch; None: a function has it."""
    if callable(batch) and not isinstance(batch, (torch.Tensor, Mapping)):
        step = step_of_function(model, batch)
        return lambda _: step(), None
    return lambda batch: step_of_batch(model, batch)(), batch


def _simulated(
    model: Module,
    run: Callable[[Any], object],
    batch: Any,
    blocks: Sequence[Module],
    modules: Modules,
    fixed: dict[str, int],
    limit: int | None,
    setting: Setting,
) -> Row:
    cuda = any(p.device.type == "cuda" for p in model.parameters())

    def trace(concentrated: bool) -> StepTrace:
        with setting.active(model, modules):
            return trace_step(model, run, batch, blocks=blocks, concentrated=concentrated, cuda=cuda)

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
    run: Callable[[Any], object],
    batch: Any,
    modules: Modules,
    fixed: dict[str, int],
    limit: int | None,
    setting: Setting,
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


# ---- a model without weights ----


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

    run_all = functools.partial(_side_by_side, None, progress)
    rows = with_parts(row, run_all, steps.blocks, tiles)
    hints = _hints(as_flags(source.flags, source.takes), row, run_all, rows, tiles)
    about = [*source.about, *of_tiles(rows, tiles)]
    if tokens is not None and limit is not None and any(each.longest is None for each in rows):
        why = "where a step has very many operators, or other lengths raise"
        about.append(f"The longest sequence is unknown {why}; try others with --tokens.")
    return Comparison(tuple(rows), fixed, limit, tuple(about), tokens, hints)


#: A sequence longer by this factor has been found not to fit.
_CLOSE = 1.03

#: Where a step is tried, of where it should fit.
_BELOW = 0.99

#: Logarithm of the factor between lengths that tell how sizes grow, through the allocator's steps.
_APART = 0.2

#: Steps that are tried at most, those whose sizes are trusted to tell the next, and tokens.
_TRIES, _TRUSTED, _MOST = 14, 6, 2**26


def longest(
    tokens: int, size: int, needed: Callable[[int], int], held: int, limit: int, positions: int | None
) -> int | None:
    """Return the tokens of a step that was tried and fits, where one of 1.03 times as many was
    tried and does not, or the model's positions end there; 0: none fits. None: unknown.

    Args:
        tokens: Of a step whose size is known.
        size: That size, in bytes.
        needed: Returns the size of a step of so many tokens.
        held: What is there during the whole step.
        limit: The bytes that are there.
        positions: The most tokens of the model, or None.
    """
    if held > limit:
        return 0
    most = positions or _MOST
    sizes = {0: held, tokens: size}
    for _ in range(_TRIES):
        fits = max(length for length, each in sizes.items() if each <= limit)
        fails = min((length for length, each in sizes.items() if each > limit), default=most + 1)
        if fails <= max(fits + 1, int(fits * _CLOSE)) or fits >= most:
            return fits
        length = _next(sizes, limit, fits, fails)
        try:
            sizes[length] = needed(length)
        except NotSimulated:  # so long a step asks for values that a shorter one knows
            return fits or None
        except Exception:  # the model takes other lengths alone
            return None
    return None


def _next(sizes: dict[int, int], limit: int, fits: int, fails: int) -> int:
    """Return the tokens to try, between those that fit and those that do not."""
    guess = _guess(sizes, limit, fits, fails)
    if fits and fits * _CLOSE >= guess:
        length = int(fits * _CLOSE)
    elif guess * _CLOSE >= fails:
        length = math.ceil(fails / _CLOSE)
    else:
        length = int(guess * _BELOW)
    if fails not in sizes and length * _CLOSE >= fails:  # so many positions there are
        length = fails - 1
    return min(max(length, fits + 1), fails - 1)


def _guess(sizes: dict[int, int], limit: int, fits: int, fails: int) -> float:
    """Return where the size should reach the limit: above what is held it grows with a power of the
    length, which the nearest step and another one tell.
    """
    held, near = sizes[0], fits or fails
    if fits and fails in sizes and len(sizes) > _TRUSTED:
        return math.sqrt(fits * fails)
    if sizes[near] <= held:
        return near * 2.0
    apart = (length for length in sizes if length and sizes[length] > held and abs(math.log(length / near)) > _APART)
    other = fails if fits and fails in sizes else next(apart, None)
    power = 1.0
    if other is not None:
        power = math.log((sizes[other] - held) / (sizes[near] - held)) / math.log(other / near)
    guess = near * ((limit - held) / (sizes[near] - held)) ** (1 / min(max(power, 0.5), 3.0))
    return float(min(max(guess, fits), fails))
