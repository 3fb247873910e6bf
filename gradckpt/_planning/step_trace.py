"""Simulated steps: of a model, :func:`trace_step`, and of its optimizer, :func:`optimizer_memory`.

A trace is a list of segments: the forward and the backward of each block, and what lies between.
Each has the allocations and releases that happen in it, so the same segment may be counted as often
as the model repeats its block (config_profile.py).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gradckpt import _C
from gradckpt._allocations import on_no_memory
from gradckpt._apart import side_by_side
from gradckpt._engine import torch_private as private
from gradckpt._planning.device_memory import local, state_of, trained_parts
from gradckpt._planning.kernels import cuda_kernels
from gradckpt._planning.segments import GRADIENTS, KEPT, LOSS, WORKING, Segment, StepTrace, resized
from gradckpt._planning.simulated_tensors import NotSimulated, refuse_reads, tensors_without_values
from gradckpt._planning.simulation import Event, SimulationMode, Work
from gradckpt._stats import uncounted
from gradckpt._training_state import TrainingState, holder_of, host_random
from gradckpt._training_step import StepWrites, higher_order_in

T = TypeVar("T")
_seeds = itertools.count(0x6763_6B70)  # of which no seed of a user begins


def side_by_side_simulated(
    trials: Sequence[Callable[[], T]],
    keep: Callable[[], StateBeforeSimulation] | None,
    progress: Callable[[int], None] = lambda number: None,
) -> list[T]:
    """Return the results of trials that simulate steps, as :func:`side_by_side`."""
    _load()
    return side_by_side(trials, keep, progress)


@functools.cache
def _load() -> None:
    """Import what a simulated step imports, or each child would."""
    trace_step(torch.nn.Identity(), lambda x: (x @ x).mean().backward(), torch.ones(1, 1, requires_grad=True))


class StateBeforeSimulation(TrainingState):
    """What a simulated step can change in this process, to be restored if it does not run apart."""

    def __init__(self, model: Module, *others: Any) -> None:
        state_of(model).initialize()  # which FSDP does once
        super().__init__(model, *others, values=False)

    def restore(self, *, failed: bool = False) -> None:
        """Restore all; an error that is about to be raised may hold simulated tensors.

        Raises:
            RuntimeError: Something else keeps a tensor without values.
        """
        super().restore(failed=failed)
        if not tensors_without_values():
            return
        gc.collect()
        for x in tensors_without_values():
            if (holder := holder_of(x, self.known)) is not None or not failed:
                raise RuntimeError(
                    f"gradckpt: {holder or 'something'} keeps a tensor of a simulated step, which has no values; empty "
                    "it before the next step"
                )


def trace_step(
    model: Module,
    run: Callable[[Any], object],
    batch: Any = None,
    *,
    blocks: Sequence[Module] = (),
    concentrated: bool = False,
    cuda: bool = False,
) -> StepTrace:
    """Simulate one step.

    The model's parameters and buffers are replaced for the time by tensors without values, and
    random generators and counters get back their states. What else the step changes stays, unless
    :func:`side_by_side_simulated` runs it.

    Args:
        model: The module that ``run`` calls; its tensors may be fake, meta, or on any device.
        run: Runs forward and backward on the batch that it is given; a text is the trace's remark.
        batch: Tensors in containers; floating point ones lose their values.
        blocks: The repeated modules that name the segments.
        concentrated: Let nearly every token choose the same experts. Few tokens must choose the
            others, since these get gradients then; sizes are larger by these tokens' part, so that
            no other choice needs more.
        cuda: Count what CUDA's kernels save, instead of the CPU's, keep payloads as a device does,
            and note ``changes``.

    Raises:
        StepWrites: The step changes parameters.
        NotSimulated: The step asks for values. Other exceptions of ``run`` arrive unchanged.
    """
    mode = SimulationMode(concentrated, device_is_cpu=not cuda)
    rewind_host = host_random()
    torch.default_generator.manual_seed(next(_seeds))  # no region shares a state of before the step
    originals = [p for p in model.parameters() if type(p) is Parameter]
    marks: list[_Mark] = []
    inputs: dict[int, str] = {}
    try:
        with on_no_memory(), uncounted(), simulated(model, mode) as parameters, _marked(blocks, mode, marks, inputs):
            batch = private.tree_map(lambda x: _simulated_batch(mode, x) if isinstance(x, Tensor) else x, batch)
            before = _payload_bytes()
            placed = placed_before = _C.simulated_placed()
            with refuse_reads(mode.has_values), cuda_kernels() if cuda else contextlib.nullcontext(), mode:
                try:
                    remark = _text_of(run(batch))
                    placed = _C.simulated_placed()
                except Exception as error:
                    _refuse_writes(mode, originals)
                    if isinstance(error, NotSimulated) or (operator := higher_order_in(error)) is None:
                        raise
                    raise NotSimulated(f"{operator}: Dynamo has to capture it first") from error
            _refuse_writes(mode, originals)
            if not mode.work:
                raise NotSimulated("it ran in another thread")
            after = _payload_bytes()
            gradients = {
                number
                for p in parameters
                if p.grad is not None and (number := mode.number_of(local(p.grad))) is not None
            }
    finally:
        torch.clear_autocast_cache()  # of simulated casts
        rewind_host()
    events = mode.events[:]
    bounds = [_Mark(0, before, placed_before, "", -1), *marks, _Mark(len(events), after, placed, "", -1)]
    segments = _segments(events, mode.work, bounds, gradients, with_changes=cuda)
    if mode.data_dependent:
        segments = [resized(each, lambda size, kind: size * (1 + mode.rest)) for each in segments]
    return StepTrace(segments, mode.data_dependent, len(mode.work), inputs=inputs, remark=remark)


def _text_of(result: object) -> str:
    return result if isinstance(result, str) else ""


def _refuse_writes(mode: SimulationMode, parameters: list[Parameter]) -> None:
    if mode.wrote.intersection(p.untyped_storage()._cdata for p in parameters):
        raise StepWrites


def _simulated_batch(mode: SimulationMode, x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        return mode.like(x).requires_grad_(x.requires_grad)
    return x.cpu()


@contextlib.contextmanager
def simulated(model: Module, mode: SimulationMode) -> Iterator[list[Parameter]]:
    """Replace the model's parameters and buffers by simulated tensors; small integer buffers keep
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
                    new[id(x)] = x  # until the shards are simulated
                elif id(x) not in new:
                    new[id(x)] = _parameter_or_buffer(mode, x)
                old.append((table, name, x))
    try:
        for table, name, x in old:
            table[name] = new[id(x)]
        with state.simulated(mode) as shards:
            yield [*shards, *(x for key, x in new.items() if isinstance(x, Parameter) and key not in sharded)]
    finally:
        for table, name, x in old:
            table[name] = x


def _parameter_or_buffer(mode: SimulationMode, x: torch.Tensor) -> torch.Tensor:
    plain = type(x) in (torch.Tensor, Parameter)
    if plain and x.device.type != "meta" and not x.is_floating_point() and not x.is_complex() and x.nbytes < 2**20:
        return x.detach().cpu().clone()
    if not isinstance(x, Parameter):
        return mode.like(x)
    new = Parameter(mode.like(x), requires_grad=x.requires_grad)
    if x.grad is not None:
        new.grad = mode.like(x.grad)
    return new


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
def _marked(
    blocks: Sequence[Module], mode: SimulationMode, marks: list[_Mark], inputs: dict[int, str]
) -> Iterator[None]:
    """Note where each block's forward and backward begin, and what its first call gets."""

    def mark(phase: str, block: int) -> None:
        marks.append(_Mark(len(mode.events), _payload_bytes(), _C.simulated_placed(), phase, block))

    def before(block: int, module: Module, args: object, kwargs: object) -> None:
        if private.graph_task_id() == -1:
            if block not in inputs:
                leaves = private.tree_leaves((args, kwargs))
                inputs[block] = ", ".join(_words(x) for x in leaves if isinstance(x, Tensor))
            mark(_FORWARD, block)

    def after(block: int, module: Module, args: object, output: object) -> None:
        if private.graph_task_id() != -1:
            return
        mark(_BETWEEN, block)
        x = next((x for x in private.tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad), None)
        if x is not None:
            x.register_hook(lambda grad: mark(_BACKWARD, block))

    with contextlib.ExitStack() as stack:
        for i, block in enumerate(blocks):
            stack.callback(block.register_forward_pre_hook(functools.partial(before, i), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(functools.partial(after, i)).remove)
        yield


def _words(x: Tensor) -> str:
    size = "x".join(map(str, x.shape))
    return f"{size} {str(x.dtype).removeprefix('torch.')}{' with a gradient' if x.requires_grad else ''}"


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
        other = LOSS if is_loss else WORKING if backward else KEPT
        inside = [
            (event.size, kinds.setdefault(event.storage, GRADIENTS if event.storage in gradients else other))
            for event in events[begin:end]
        ]
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


def state_bytes(optimizer: Any) -> int:
    """Return the bytes of an optimizer's states."""
    values: list[Any] = list(chain.from_iterable([each.values() for each in optimizer.state.values()]))
    if not set(map(type, values)) <= {Tensor}:  # which is fast, and each training call asks
        values = [local(x) for x in private.tree_leaves(values) if isinstance(x, Tensor)]
    return sum(map(attrgetter("nbytes"), values))


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate may have wrapped.

    Raises:
        TypeError: It is none.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(f"gradckpt: optimizer= takes a torch optimizer, not {type(optimizer).__name__}")
    return inner


def optimizer_memory(model: Module, optimizer: Any) -> tuple[int, int, int]:
    """Simulate an optimizer's next step; return bytes of the states that exist, of those that the
    step makes, and of its highest point above its start, these states included.

    Raises:
        TypeError: It is no torch optimizer.
        ValueError: Its step cannot be simulated, or it trains other parameters.
    """
    inner = torch_optimizer(optimizer)
    own = trained_parts(model)
    if not any(id(p) in own for group in inner.param_groups for p in group["params"]):
        raise ValueError("gradckpt: optimizer= has no parameter of this model; pass the one that trains it")
    trial = functools.partial(_optimizer_step, inner)
    return side_by_side_simulated([trial], lambda: StateBeforeSimulation(model, vars(inner)))[0]


def _optimizer_step(inner: torch.optim.Optimizer) -> tuple[int, int, int]:
    mode = _OptimizerMode()
    twins: dict[int, Parameter] = {}
    groups = []
    for group in inner.param_groups:
        for p in group["params"]:
            twins[id(p)] = Parameter(mode.like(local(p)), requires_grad=p.requires_grad)
            if p.requires_grad:
                twins[id(p)].grad = mode.like(local(p))
        groups.append({**group, "params": [twins[id(p)] for p in group["params"]]})
    twin = copy.copy(inner)
    vars(twin).update(param_groups=groups, state=type(inner.state)(inner.state.default_factory))
    for p, state in inner.state.items():
        if id(p) in twins:
            twin.state[twins[id(p)]] = private.tree_map(lambda x: _twin(mode, x), state)
    before = state_bytes(twin)
    try:
        with mode, torch.no_grad():
            step = type(inner).step
            getattr(step, "__wrapped__", step)(twin)  # without the hooks of the real one
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"gradckpt: the step of {type(inner).__name__} cannot be simulated ({reason}); leave optimizer= out "
            "and let enable(budget=) plan again when its states exist"
        ) from error
    top = max(itertools.accumulate((event.size for event in mode.events), initial=0))
    return before, state_bytes(twin) - before, top


class _OptimizerMode(SimulationMode):
    """Small tensors of the states keep their values: a step asks for the number of steps."""

    def _made_here(self, func: Any, args: Any, kwargs: Any) -> bool:
        return True


def _twin(mode: SimulationMode, x: Any) -> Any:
    if not isinstance(x, Tensor):
        return copy.copy(x)
    return mode.like(local(x)) if x.numel() > 1 else x.detach().cpu().clone()


#: Seconds of work that is not worth a word.
_SILENT = 3.0


@contextlib.contextmanager
def late_progress(work: str, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Give a function that shows what is being computed, from the third second on and if stderr is
    a terminal; at the end of the block nothing of it remains.
    """
    shown = shown and sys.stderr is not None and sys.stderr.isatty()
    began, written = time.monotonic(), False

    def show(text: str) -> None:
        nonlocal written
        if shown and time.monotonic() - began >= _SILENT:
            written = True
            print(f"\r\x1b[Kgradckpt: {work}: {text} ...", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if written:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
