"""Steps and plans of a set-up without weights: :class:`ConfigSteps`, :func:`plan_source`.

Of a long run of equal blocks few run; each of the others is like one of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.nn import Module, ModuleList, Sequential

from gradckpt._offload import Offload
from gradckpt._planning.device_memory import Budget
from gradckpt._planning.devices import Device, Link, Placement, Rates, find, link_of_device, rates_of
from gradckpt._planning.options import RECOMPUTE, Cost, Option, RegionCosts, allowed, find_blocks, likeness
from gradckpt._planning.region_plan import Plan
from gradckpt._planning.report import as_flags
from gradckpt._planning.segments import Segment, StepTrace, held_blocks, memory_use, scaled, with_own_storages
from gradckpt._planning.step_profile import StepProfile
from gradckpt._planning.step_trace import side_by_side_simulated, trace_step
from gradckpt._settings import NONE, TORCH, quiet

#: Of a run of equal blocks, those that a shorter model keeps before and after the one that stands
#: for others. Before it: by then a device holds as many originals as ever, which are two, and the
#: first block's input may be a leaf.
_BEFORE, _AFTER = 3, 2

#: The longest pattern of blocks that is looked for: five with a window and one without, say.
_PERIOD = 8


@dataclasses.dataclass
class Blocks:
    """``modules``: those to run. ``copies``: for each the numbers, in the whole model, of the
    blocks that it stands for, itself first. Blocks that repeat together have ranges with the same
    step, which is how many they are, and the same end.
    """

    modules: list[Module]
    copies: list[range]


def whole(blocks: list[Module]) -> Blocks:
    """Return the blocks of a model that is not shorter."""
    return Blocks(blocks, [range(i, i + 1) for i in range(len(blocks))])


def unrolled(segments: Sequence[Segment], copies: Sequence[range]) -> list[Segment]:
    """Return the segments of the whole step, in its order, of those of a shorter one: the blocks
    that stand for others run forward by their numbers, and backward from the last.
    """
    if all(len(each) == 1 for each in copies):
        return list(segments)

    def unit(place: tuple[int, Segment]) -> int | None:
        block = place[1].block
        return None if block is None or len(copies[block]) == 1 else copies[block].stop

    found: list[tuple[int, Segment]] = []
    for stop, cycle in itertools.groupby(enumerate(segments), unit):
        once = list(cycle)
        rounds = range(1 if stop is None else len(copies[once[0][1].block or 0]))
        for number in reversed(rounds) if once[0][1].phase == "backward" else rounds:
            for place, segment in once:
                block = None if segment.block is None else copies[segment.block][number]
                found.append((place, dataclasses.replace(segment, block=block)))
    return with_own_storages(segments, copies, found)


@contextlib.contextmanager
def shortened(model: Module, blocks: list[Module], options: Sequence[Hashable] | None = None) -> Iterator[Blocks]:
    """Take out of the model most blocks of each run that repeats, for a ``with`` block: of equal
    blocks, or of patterns of them.

    ``options``: what is done with each block; blocks with different options are not equal. Nor are
    those for which a list of the config has different values (``layer_types``).
    """
    number = {id(block): i for i, block in enumerate(blocks)}
    copies = dict(enumerate(whole(blocks).copies))
    with contextlib.ExitStack() as stack:
        for container, lists in _containers(model):
            children: list[Any] = list(container._modules.values())
            if len({*map(id, children)}) < len(children):
                continue  # one of them runs several times
            kinds: list[Any] = [
                (likeness(child), options and options[number[id(child)]], [values[i] for values in lists])
                if id(child) in number
                else None
                for i, child in enumerate(children)
            ]
            dropped: set[int] = set()
            standing: dict[int, range] = {}
            for run in _runs(kinds):
                period = run.step
                first = run.start + _whole(_BEFORE, period)
                times = (run.stop - _whole(_AFTER, period) - first) // period
                dropped.update(range(first + period, first + times * period))
                start = number[id(children[first])]
                for i in range(start, start + period):
                    standing[i] = range(i, start + times * period, period)
            left = [i for i in range(len(children)) if i not in dropped]
            if not dropped or any(values[i] != values[place] for values in lists for place, i in enumerate(left)):
                continue
            stack.callback(setattr, container, "_modules", container._modules)
            container._modules = {str(place): children[i] for place, i in enumerate(left)}
            copies |= standing
            for i in dropped:
                del copies[number[id(children[i])]]
        yield Blocks([blocks[i] for i in copies], list(copies.values()))


def _containers(model: Module) -> Iterator[tuple[Module, list[Sequence[Any]]]]:
    """Return each list of modules, and the config's lists that have a value for each of them."""
    found: set[int] = set()
    for owner in model.modules():
        config = vars(getattr(owner, "config", None) or getattr(model, "config", None) or owner)
        for child in owner.children():
            if type(child) in (ModuleList, Sequential) and id(child) not in found:
                found.add(id(child))
                lists = [values for values in config.values() if isinstance(values, (list, tuple))]
                yield child, [values for values in lists if len(values) == len(child._modules)]


def _whole(blocks: int, period: int) -> int:
    """Return the blocks of as many whole patterns as have so many."""
    return -(-blocks // period) * period


def _runs(kinds: Sequence[Any]) -> Iterator[range]:
    """Return the longest runs in which some kinds repeat often enough for one time to stand for
    others; the step is how many they are. None is no kind.
    """
    known: list[Any] = []
    numbers = []
    for kind in kinds:
        if kind not in known:
            known.append(kind)
        numbers.append(None if kind is None else known.index(kind))
    begin = 0
    while begin < len(numbers):
        best, saved = None, 1
        for period in range(1, _PERIOD + 1):
            pattern = numbers[begin : begin + period]
            end = begin + len(pattern)
            if None in pattern:
                break
            while end < len(numbers) and numbers[end] == numbers[end - period]:
                end += 1
            left_out = (end - begin - _whole(_BEFORE, period) - _whole(_AFTER, period)) // period * period - period
            if left_out > saved:
                best, saved = range(begin, end, period), left_out
        if best is None:
            begin += 1
        else:
            yield best
            begin = best.stop


class ConfigSteps:
    """Steps of a :class:`gradckpt._planning.config_model.ConfigModel`, and of a shorter model where
    that needs the same: where layers share state, read each other's or are read by number, it may
    not, so both run once, without checkpointing and with torch's.

    ``tokens``: of the steps that are compared.
    """

    def __init__(self, source: Any, tokens: int | None, batch: int) -> None:
        self._source, self._batch = source, batch
        with quiet():
            self.blocks = find_blocks(source.model, source.modules)
        self._shortens = False
        with shortened(source.model, self.blocks) as short:
            is_shorter = len(short.modules) < len(self.blocks)
        if is_shorter:
            trials = [functools.partial(self._is_told, each, tokens) for each in (NONE, TORCH)]
            self._shortens = all(side_by_side_simulated(trials, None))

    def trace(
        self,
        active: Callable[[Blocks], AbstractContextManager[Any]],
        tokens: int | None,
        options: Sequence[Hashable] | None = None,
        *,
        concentrated: bool = False,
    ) -> StepTrace:
        """Trace a step.

        Args:
            active: Returns a context in which these blocks are as they are to be.
            tokens: The length of a sequence, None for other models.
            options: What is done with each block.
            concentrated: As :func:`gradckpt._planning.step_trace.trace_step`.
        """
        model = self._source.model
        cut = shortened(model, self.blocks, options) if self._shortens else contextlib.nullcontext(whole(self.blocks))
        with cut as short, quiet(), active(short):
            found = trace_step(
                model,
                lambda _: self._source.run(tokens, self._batch),
                blocks=short.modules,
                concentrated=concentrated,
                cuda=True,
            )
        segments = unrolled(scaled(found.segments, self._source.gradient_scale), short.copies)
        return dataclasses.replace(found, segments=segments)

    def _is_told(self, setting: Any, tokens: int | None) -> bool:
        """Return whether the shorter model tells what a step of the whole one needs."""

        def needs() -> Any:
            found = self.trace(lambda _: setting.active(self._source.model, self._source.modules), tokens)
            places = [(segment.phase, segment.block, segment.payload_bytes) for segment in found.segments]
            return places, [peak.size for peak in found.peaks()], memory_use(found.segments)

        self._shortens = True
        try:
            shorter = needs()
        except Exception:  # if the whole one raises, too, the user reads that error
            return False
        finally:
            self._shortens = False
        return bool(needs() == shorter)


#: Whose rates compare options if no device is named.
_USUAL_DEVICE = "A100-80GB"


def _estimates(profile: StepProfile, rates: Rates) -> RegionCosts:
    """Return the costs of regions by the work that traces of the step have in them."""
    seconds: defaultdict[tuple[int, Option], float] = defaultdict(float)
    for option, trace in profile.traces.items():
        for segment in trace.segments:
            if segment.block is not None:
                calls = profile.calls.count(segment.block)
                seconds[id(profile.blocks[segment.block]), option] += rates.of_segment(segment) / calls
    return {key: Cost(each, 0.0) for key, each in seconds.items()}


class ConfigProfile(StepProfile):
    """The profile of a :class:`gradckpt._planning.config_model.ConfigModel`.

    Of a long run of equal blocks with equal options six run, and few of a pattern that repeats; the
    others are like them.

    Args:
        source: The model.
        tokens: The length of a sequence, None for other models.
        batch: Sequences or images.
        compress: The codecs that a plan may use.
        rates: Of the device that times are estimated for.
        progress: Is told what is being computed.
        placement: Where payloads may live, or None: on their device.
        tiles: In how many tiles MLPs may run, or None.

    Raises:
        NotSimulated: The step asks for values.
        ValueError: As :func:`gradckpt.enable`, or the source refuses the batch.
    """

    estimated = True

    def __init__(
        self,
        source: Any,
        tokens: int | None,
        batch: int = 1,
        *,
        compress: Any = None,
        rates: Rates,
        progress: Callable[[str], None] = lambda text: None,
        placement: Placement | None = None,
        tiles: int | None = None,
    ) -> None:
        self._tokens, self._progress = tokens, progress
        self.hints = as_flags(source.flags, source.takes)
        self._steps = ConfigSteps(source, tokens, batch)
        offload = None if placement is None else placement.offload
        blocks = self._steps.blocks
        super().__init__(source.model, blocks, allowed(compress, False, offload, blocks, tiles), placement)
        self.device_blocks = held_blocks(source.model, {**source.fixed, **source.extra})
        self.costs = _estimates(self, rates)
        self.step_seconds = rates.of_step(self.traces[RECOMPUTE])

    @contextlib.contextmanager
    def _progressing(self) -> Iterator[Callable[[str], None]]:
        yield self._progress
        self._progress("choosing")

    def _trace(self, options: Sequence[Option], concentrated: bool) -> StepTrace:
        def active(short: Blocks) -> AbstractContextManager[Any]:
            return self.setting([options[each.start] for each in short.copies], short.modules).active(self.model)

        return self._steps.trace(active, self._tokens, options, concentrated=concentrated)


def plan_source(
    source: Any,
    tokens: int | None,
    batch: int,
    budget: Budget,
    *,
    compress: Any = None,
    device: Device | None = None,
    offload: Offload | None = None,
    link: Link | None = None,
    tiles: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Return the fastest plan of a :class:`gradckpt._planning.config_model.ConfigModel` within a
    budget.

    Raises:
        NoPlan: There is none.
        NotSimulated, ValueError: As :class:`ConfigProfile`.
    """
    rated = find(_USUAL_DEVICE) if device is None else device
    rates = rates_of(rated, source.computes_in_16_bits)
    placement = None
    if offload is not None:
        known = isinstance(offload.host_budget, int) and offload.place == "cpu"
        found = link_of_device(rated, offload.place) if link is None else link
        placement = Placement(offload, found, False, offload.host_bytes() if known else None)
    profile = ConfigProfile(
        source, tokens, batch, compress=compress, rates=rates, progress=progress, placement=placement, tiles=tiles
    )
    fixed = {**source.fixed, **source.extra}
    chosen = profile.fastest(profile.chain(), budget, fixed)
    named = "; name another device with --device" if device is None else ""
    about = [*source.about, f"Times are estimates by the data sheet of {rated.name}{named}."]
    if any(profile.options[option].codec for option in chosen.choice):
        about.append("Errors of gradients need weights: gradckpt.gradient_error(model, batch) measures them.")
    return profile.result(chosen, budget, fixed, about)
