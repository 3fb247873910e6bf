"""The memory of one training step on paper: :func:`trace_step`.

A trace is a list of segments: the forward and the backward of each block, and what lies between.
Each has the allocations and releases that happen in it, so the same segment may be counted as often
as the model repeats its block (blocks.py).
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.nn import Module, Parameter

from gradckpt import _C
from gradckpt._allocations import on_no_memory
from gradckpt._apart import apart, side_by_side
from gradckpt._engine import torch_private as private
from gradckpt._holders import holder_of
from gradckpt._host_random import host_random
from gradckpt._planning.paper import Event, PaperMode, Work
from gradckpt._planning.paper_addresses import tensors_on_paper
from gradckpt._planning.plan_reader import SIGNED
from gradckpt._planning.reads import refuse_reads
from gradckpt._planning.sharded import local, state_of
from gradckpt._planning.target_kernels import cuda_kernels
from gradckpt._planning.values import CAPTURED, ELSEWHERE, NotOnPaper
from gradckpt._stats import uncounted
from gradckpt._training_state import TrainingState
from gradckpt._training_step import StepWrites, higher_order_in

__all__ = [
    "Peak",
    "Segment",
    "StateBeforePaper",
    "StepTrace",
    "apart_on_paper",
    "condensed",
    "on_paper",
    "scaled",
    "side_by_side_on_paper",
    "total",
    "trace_step",
]

T = TypeVar("T")

#: What an allocation is for; the first two by when it was made.
KEPT, LOSS, GRADIENTS, WORKING = range(4)
KINDS = ("kept for the backward", "logits and loss", "gradients", "working set")

_seeds = itertools.count(0x6763_6B70)  # of which no seed of a user begins


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """``size`` bytes above the start of the step, at ``position``; ``parts``: bytes by kind."""

    size: int
    position: str
    parts: dict[str, int] = dataclasses.field(metadata=SIGNED)


@dataclasses.dataclass(slots=True)
class Segment:
    """A stretch of the step: ``phase`` of ``block``. ``events``: (bytes, kind). ``payload_bytes``:
    codecs read and write them for what they encode here. ``placed_bytes``: of payloads that get a
    place here, and ``largest`` of one. ``changes``: on a device the allocations and releases
    themselves, as :func:`gradckpt._planning.needed_memory.pairs` reads them.
    """

    phase: str
    block: int | None
    events: list[tuple[int, int]]
    work: list[Work]
    payload_bytes: int = 0
    placed_bytes: int = 0
    largest: int = 0
    changes: array.array[int] = dataclasses.field(default_factory=lambda: array.array("q"))

    @property
    def name(self) -> str:
        return self.phase if self.block is None else f"{self.phase} of layer {self.block}"


def apart_on_paper(trial: Callable[[], T], keep: Callable[[], StateBeforePaper]) -> T:
    """Return the result of a trial that runs steps on paper, as :func:`apart`."""
    _load()
    return apart(trial, keep)


def side_by_side_on_paper(
    trials: Sequence[Callable[[], T]],
    keep: Callable[[], StateBeforePaper] | None,
    progress: Callable[[int], None],
) -> list[T]:
    """Return the results of trials that run steps on paper, as :func:`side_by_side`."""
    _load()
    return side_by_side(trials, keep, progress)


@functools.cache
def _load() -> None:
    """Import what a step on paper imports, or each child would."""
    trace_step(torch.nn.Identity(), lambda x: (x @ x).mean().backward(), torch.ones(1, 1, requires_grad=True))


def scaled(segments: Sequence[Segment], gradients: float) -> list[Segment]:
    """Return the segments with gradients of other sizes: ``gradients`` of their bytes stay."""
    if gradients == 1:
        return list(segments)
    return [_resized(each, lambda size, kind: size * gradients if kind == GRADIENTS else size) for each in segments]


def _resized(segment: Segment, size_of: Callable[[int, int], float]) -> Segment:
    """Return a segment, which is not condensed, with other bytes for each size and kind."""
    events = [(round(size_of(size, kind)), kind) for size, kind in segment.events]
    changes = segment.changes[:]
    changes[::2] = array.array("q", [size for size, _ in events] if changes else [])
    return dataclasses.replace(segment, events=events, changes=changes)


def condensed(trace: StepTrace) -> StepTrace:
    """Return a trace with the same peaks, a few events and the sum of the work in each segment."""
    segments = [
        dataclasses.replace(each, events=_condensed(each.events), work=[total(each.work)]) for each in trace.segments
    ]
    return StepTrace(segments, trace.data_dependent)


def total(work: Sequence[Work]) -> Work:
    """Return the sum of what operators compute and move."""
    return Work(sum(each.flop for each in work), sum(each.bytes for each in work))


def _condensed(events: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sums of all events up to the highest point by kind, and of those after it."""
    sizes = list(itertools.accumulate(size for size, _ in events))
    end = sizes.index(max(sizes)) + 1 if max(sizes, default=0) > 0 else 0
    found = []
    for part in (events[:end], events[end:]):
        sums = dict.fromkeys(range(len(KINDS)), 0)
        for size, kind in part:
            sums[kind] += size
        found += sorted((size, kind) for kind, size in sums.items() if size)  # releases first
    return found


class StateBeforePaper(TrainingState):
    """What a step on paper can change in this process, to be restored if it does not run apart."""

    def __init__(self, model: Module, *others: Any) -> None:
        state_of(model).initialize()  # which FSDP does once
        super().__init__(model, *others, values=False)

    def restore(self, *, failed: bool = False) -> None:
        """Restore all; an error that is about to be raised may hold tensors on paper.

        Raises:
            RuntimeError: Something else keeps a tensor without values.
        """
        super().restore(failed=failed)
        if not tensors_on_paper():
            return
        gc.collect()
        for x in tensors_on_paper():
            if (holder := holder_of(x, self.known)) is not None or not failed:
                raise RuntimeError(
                    f"gradckpt: {holder or 'something'} keeps a tensor of a step on paper, which has no values; empty "
                    "it before the next step"
                )


class _Up:
    """How far a segment rises above its start, and its net, by kind."""

    def __init__(self, segment: Segment, scale: Sequence[float]) -> None:
        self.segment = segment
        self.net = [0.0] * len(KINDS)
        self.top = [0.0] * len(KINDS)
        total = highest = 0.0
        for size, kind in segment.events:
            self.net[kind] += size * scale[kind]
            total += size * scale[kind]
            if total > highest:
                highest, self.top = total, list(self.net)

    def peak(self, before: Sequence[float]) -> Peak:
        """Return its peak above what was alive before; what it adds, except gradients, is its
        working set.
        """
        parts = dict(zip(KINDS, map(round, before), strict=True))
        for kind, size in zip(KINDS, self.top, strict=True):
            parts[kind if kind == KINDS[GRADIENTS] else KINDS[WORKING]] += round(size)
        return Peak(round(sum(before) + sum(self.top)), self.segment.name, parts)


@dataclasses.dataclass(slots=True)
class StepTrace:
    """One step. ``data_dependent``: sizes depended on which experts tokens choose. ``operators``:
    those that ran. ``lift``: what the allocator needs beyond the peak; None: it was not asked yet.
    ``ring``: bytes that a place takes of what the budget counts, and ``placed`` those of the
    payloads in it.
    """

    segments: list[Segment]
    data_dependent: bool
    operators: int = 0
    lift: int | None = None
    ring: int = 0
    placed: int = 0

    def peaks(self, gradient_scale: float = 1.0) -> list[Peak]:
        """Return the peak of each segment, in order.

        ``gradient_scale``: the part of a gradient's bytes that stays on the device.
        """
        scale = (1.0, 1.0, gradient_scale, 1.0)
        alive = [0.0] * len(KINDS)
        found = []
        for segment in self.segments:
            up = _Up(segment, scale)
            found.append(up.peak(alive))
            alive = [x + d for x, d in zip(alive, up.net, strict=True)]
        return found

    def peak(self, gradient_scale: float = 1.0) -> Peak:
        """Return the highest peak, the first of equal ones."""
        return max(self.peaks(gradient_scale), key=lambda peak: peak.size)


def trace_step(
    model: Module,
    run: Callable[[Any], object],
    batch: Any = None,
    *,
    blocks: Sequence[Module] = (),
    concentrated: bool = False,
    cuda: bool = False,
) -> StepTrace:
    """Run one step on paper.

    The model's parameters and buffers are replaced for the time by tensors without values, and
    random generators and counters get back their states. What else the step changes stays, unless
    :func:`apart_on_paper` runs it.

    Args:
        model: The module that ``run`` calls; its tensors may be fake, meta, or on any device.
        run: Runs forward and backward on the batch that it is given.
        batch: Tensors in containers; floating point ones lose their values.
        blocks: The repeated modules that name the segments.
        concentrated: Let nearly every token choose the same experts. Few tokens must choose the
            others, since these get gradients then; sizes are larger by these tokens' part, so that
            no other choice needs more.
        cuda: Count what CUDA's kernels save, instead of the CPU's, keep payloads as a device does,
            and note ``changes``.

    Raises:
        StepWrites: The step changes parameters.
        NotOnPaper: The step asks for values. Other exceptions of ``run`` arrive unchanged.
    """
    mode = PaperMode(concentrated, device_is_cpu=not cuda)
    rewind_host = host_random()
    torch.default_generator.manual_seed(next(_seeds))  # no region shares a state of before the step
    originals = [p for p in model.parameters() if type(p) is Parameter]
    marks: list[_Mark] = []
    try:
        with on_no_memory(), uncounted(), on_paper(model, mode) as parameters, _marked(blocks, mode, marks):
            batch = _map(lambda x: _batch_on_paper(mode, x), batch)
            before = _payload_bytes()
            placed = placed_before = _C.placed_on_paper()
            with refuse_reads(mode), cuda_kernels() if cuda else contextlib.nullcontext(), mode:
                try:
                    run(batch)
                    placed = _C.placed_on_paper()
                except Exception as error:
                    _refuse_writes(mode, originals)
                    if isinstance(error, NotOnPaper) or (operator := higher_order_in(error)) is None:
                        raise
                    raise NotOnPaper(f"{operator}: {CAPTURED}") from error
            _refuse_writes(mode, originals)
            if not mode.work:
                raise NotOnPaper(ELSEWHERE)
            after = _payload_bytes()
            gradients = {
                number
                for p in parameters
                if p.grad is not None and (number := mode.number_of(local(p.grad))) is not None
            }
    finally:
        torch.clear_autocast_cache()  # of casts on paper
        rewind_host()
    events = mode.events[:]
    bounds = [_Mark(0, before, placed_before, "", -1), *marks, _Mark(len(events), after, placed, "", -1)]
    segments = _segments(events, mode.work, bounds, gradients, with_changes=cuda)
    segments = _enlarged(segments, mode.rest) if mode.data_dependent else segments
    return StepTrace(segments, mode.data_dependent, len(mode.work))


def _enlarged(segments: Sequence[Segment], part: float) -> list[Segment]:
    """Return the segments with all sizes larger by a part of them."""
    return [_resized(each, lambda size, kind: size * (1 + part)) for each in segments]


def _refuse_writes(mode: PaperMode, parameters: list[Parameter]) -> None:
    if mode.wrote.intersection(p.untyped_storage()._cdata for p in parameters):
        raise StepWrites


def _batch_on_paper(mode: PaperMode, x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        return mode.like(x).requires_grad_(x.requires_grad)
    return x.cpu()


@contextlib.contextmanager
def on_paper(model: Module, mode: PaperMode) -> Iterator[list[Parameter]]:
    """Replace the model's parameters and buffers by tensors on paper; small integer buffers keep
    their values.
    """
    old: list[tuple[dict[str, Any], str, Any]] = []
    new: dict[int, Any] = {}
    state = state_of(model)
    state.initialize()
    sharded = state.registered()
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is None:
                    continue
                if id(x) in sharded:
                    new[id(x)] = x  # until the shards are on paper
                elif id(x) not in new:
                    new[id(x)] = _parameter_or_buffer(mode, x)
                old.append((table, name, x))
    try:
        for table, name, x in old:
            table[name] = new[id(x)]
        with state.on_paper(mode) as shards:
            yield [*shards, *(x for key, x in new.items() if isinstance(x, Parameter) and key not in sharded)]
    finally:
        for table, name, x in old:
            table[name] = x


def _parameter_or_buffer(mode: PaperMode, x: torch.Tensor) -> torch.Tensor:
    plain = type(x) in (torch.Tensor, Parameter)
    if plain and x.device.type != "meta" and not x.is_floating_point() and not x.is_complex() and x.nbytes < 2**20:
        return x.detach().cpu().clone()
    if not isinstance(x, Parameter):
        return mode.like(x)
    new = Parameter(mode.like(x), requires_grad=x.requires_grad)
    if x.grad is not None:
        new.grad = mode.like(x.grad)
    return new


def _map(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    return private.tree_map(lambda x: function(x) if isinstance(x, torch.Tensor) else x, tree)


# ---- segments ----

_FORWARD, _BETWEEN, _BACKWARD = "forward", "end", "backward"


class _Mark(NamedTuple):
    """Where a segment begins: the number of events and the codecs' bytes until there. ``placed``:
    bytes that have a place until there, and the most of one since the mark before.
    """

    events: int
    payload_bytes: int
    placed: tuple[int, int]
    phase: str
    block: int


def _payload_bytes() -> int:
    """Return the bytes that codecs read and write for all that was encoded so far, decoding
    included.
    """
    stats = _C.stats()
    return int(2 * (stats["bytes_in"] + stats["bytes_out"]))


@contextlib.contextmanager
def _marked(blocks: Sequence[Module], mode: PaperMode, marks: list[_Mark]) -> Iterator[None]:
    """Note where each block's forward and backward begin."""

    def mark(phase: str, block: int) -> None:
        marks.append(_Mark(len(mode.events), _payload_bytes(), _C.placed_on_paper(), phase, block))

    def before(block: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            if private.graph_task_id() == -1:
                mark(_FORWARD, block)

        return hook

    def after(block: int) -> Callable[..., None]:
        def hook(module: Module, args: object, output: object) -> None:
            if private.graph_task_id() != -1:
                return
            mark(_BETWEEN, block)
            x = next((x for x in private.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad), None)
            if x is not None:
                x.register_hook(lambda grad: mark(_BACKWARD, block))

        return hook

    with contextlib.ExitStack() as stack:
        for i, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(before(i)).remove)
            stack.callback(block.register_forward_hook(after(i)).remove)
        yield


def _segments(
    events: list[Event],
    work: list[tuple[int, Work]],
    marks: list[_Mark],
    gradients: set[int],
    *,
    with_changes: bool,
) -> list[Segment]:
    last = max((i for i, mark in enumerate(marks) if mark.phase == _BETWEEN), default=None)
    kinds: dict[int, int] = {}
    segments = []
    works = iter(work)
    pending = next(works, None)
    backward = False
    for index, ((begin, payload_bytes, placed, phase, block), after) in enumerate(itertools.pairwise(marks)):
        end = after.events
        backward = backward or phase == _BACKWARD
        is_loss = index == last
        inside = []
        for event in events[begin:end]:
            if event.storage not in kinds:
                kinds[event.storage] = (
                    GRADIENTS if event.storage in gradients
                    else LOSS if is_loss
                    else WORKING if backward
                    else KEPT
                )  # fmt: skip
            inside.append((event.size, kinds[event.storage]))
        done = []
        while pending is not None and (pending[0] < end or end == len(events)):
            done.append(pending[1])
            pending = next(works, None)
        name = "loss" if is_loss else phase or "before the layers"
        moved = after.payload_bytes - payload_bytes
        made = Segment(
            name,
            None if is_loss or not phase else block,
            inside,
            done,
            moved,
            after.placed[0] - placed[0],
            after.placed[1],
        )
        if with_changes:
            made.changes.extend(x for event in events[begin:end] for x in (event.size, event.storage))
        segments.append(made)
    return segments
