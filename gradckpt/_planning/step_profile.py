"""A simulated step in each option of its regions, and plans from that: :class:`StepProfile`."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn import Module

from gradckpt._planning.chain import Chain, Choice, Chosen, Costs
from gradckpt._planning.choose import PRICES, Chooser, front_of, improved
from gradckpt._planning.device_memory import Budget, class_of, named_modules, parameters_before
from gradckpt._planning.devices import Call, Placement, placed_by_block
from gradckpt._planning.options import KEEP, RECOMPUTE, Cost, Option, RegionCosts, in_tiles
from gradckpt._planning.region_plan import NoPlan, Offloaded, Plan, PlannedRegion, digest_of, outside_of
from gradckpt._planning.report import IN_PYTHON, LESS, TILES, Hints, advice, is_smallest, with_tiles
from gradckpt._planning.segments import Peak, StepTrace, memory_use, total
from gradckpt._planning.step_trace import StateBeforeSimulation, side_by_side_simulated
from gradckpt._settings import Setting

logger = logging.getLogger("gradckpt")

#: An option for each block, and whether nearly all tokens choose the same experts.
_Key = tuple[tuple[Option, ...], bool]

#: More bytes than any budget has.
_NEVER = 1 << 59

#: Seconds of a region that should place nothing.
_DEAR = 1e4

#: New traces of plans that use a place, of all of them.
_TRACES = 16

#: Parts for which waiting does not count, of a step's time, and codecs do not, of offloaded bytes.
_HIDDEN, _FEW_BYTES = 0.005, 0.1


class StepProfile(abc.ABC):
    """The memory of a simulated step in each option, and the times of its regions.

    ``traces``: by option, with all regions in it; ``largest``: the same if nearly all tokens choose
    the same experts, where sizes depend on that. Budgets are kept by the latter.

    ``blocks``: the model's regions. ``options``: those that a plan may choose from. ``costs``: of
    the regions, and ``step_seconds``: of the step with exact recomputing; set before a plan is
    made. ``weights``: of the squares of the blocks' errors, which sum up to that of the step's.
    ``estimated``: these times come from a data sheet. ``hints``: as in :class:`Plan`.
    ``placement``: where payloads may live, None: on their device.
    """

    estimated = False
    #: What is there during the whole step of a device, block by block; None on the CPU, where the
    #: peak is what a step needs.
    device_blocks: Sequence[int] | None = None
    hints: Hints = IN_PYTHON

    def __init__(
        self,
        model: Module,
        blocks: Sequence[Module],
        options: Sequence[Option],
        placement: Placement | None = None,
    ) -> None:
        self.model = model
        self.blocks = list(blocks)
        self.placement = placement
        self._traced: dict[_Key, StepTrace] = {}
        self._names = {id(module): name for name, module in named_modules(model).items()}
        self.traces = self._distinct({each: self.trace([each] * len(blocks)) for each in self._trace_each(options)})
        self.options = list(self.traces)
        self._depends = any(trace.data_dependent for trace in self.traces.values())
        self.largest = self.traces
        if self._depends:
            self._trace_each(self.options, concentrated=True)
            self.largest = {option: self.largest_of([option] * len(self.blocks)) for option in self.options}
        self.calls = self.chain().calls
        self.places = {o: placed_by_block(trace.segments) for o, trace in self.traces.items() if trace.placed}
        self._waits: dict[Choice, float] = {}  # seconds
        self.seen: set[Choice] = set()  # choices that were traced
        self.costs: RegionCosts = {}
        self.step_seconds = 0.0
        self.weights = [1.0] * len(self.blocks)

    @staticmethod
    def _distinct(traces: Mapping[Option, StepTrace]) -> dict[Option, StepTrace]:
        """Return the traces without those of options that do the same here as one before: whose
        policies find nothing, or nothing more, or whose payloads get no place.
        """
        found: dict[Any, Option] = {}
        for option, trace in traces.items():
            if option.place is None or trace.placed:
                work = tuple((each.name, total(each.work)) for each in trace.segments)
                found.setdefault((option.without_policy(), work), option)
        return {option: traces[option] for option in found.values()}

    # ---- simulated steps

    #: Returns what restores this process after a trace in it; None: there is nothing to restore.
    _keep: Callable[[], StateBeforeSimulation] | None = None

    @abc.abstractmethod
    def _trace(self, options: Sequence[Option], concentrated: bool) -> StepTrace:
        """Simulate the step."""

    @abc.abstractmethod
    def _progressing(self) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Return a context that gives what tells of the work in it."""

    def trace(self, options: Sequence[Option], *, concentrated: bool = False) -> StepTrace:
        """Return the simulated step with an option for each block; it runs once. No segment stands
        for others. ``concentrated``: as for :func:`gradckpt._planning.step_trace.trace_step`.
        """
        key = tuple(options), concentrated
        if key not in self._traced:
            self._run([key])
        return self._traced[key]

    def _trace_each(self, options: Sequence[Option], *, concentrated: bool = False) -> list[Option]:
        """Trace the steps in which all blocks have one of these options. Return those that work:
        not every module can be recomputed in parts.
        """
        keys = [((option,) * len(self.blocks), concentrated) for option in options]
        with self._progressing() as progress:
            names = [f"option {i} of {len(options)}: {option.name}" for i, option in enumerate(options, 1)]
            self._run(keys, lambda number: progress(names[number]))
        return [option for option, key in zip(options, keys, strict=True) if key in self._traced]

    def _run(self, keys: Sequence[_Key], tell: Callable[[int], None] = lambda number: None) -> None:
        trials = [functools.partial(self._try, *key) for key in keys]
        for key, found in zip(keys, side_by_side_simulated(trials, self._keep, tell), strict=True):
            if found is not None:
                self._traced[key] = found if self.placement is None else self.placement.note(found, key[0])

    def _try(self, options: Sequence[Option], concentrated: bool) -> StepTrace | None:
        """Return a trace; None where it fails with parts, which no user has asked for."""
        try:
            return self._trace(options, concentrated)
        except Exception as error:
            if len(set(options)) > 1 or not options[0].in_parts:
                raise
            logger.debug("gradckpt: the option %s does not work (%s); it is left out", options[0].name, error)
            return None

    def largest_of(self, options: Sequence[Option]) -> StepTrace:
        """Return the step that needs most, whatever experts tokens choose."""
        return self.trace(options, concentrated=self._depends)

    def setting(self, options: Sequence[Option], blocks: Sequence[Module] | None = None) -> Setting:
        """Return the setting of the model with an option for each block."""
        if all(option == KEEP for option in options):
            return Setting("plan", "", "none")
        rules = {block: option.rule for block, option in zip(blocks or self.blocks, options, strict=True)}
        return Setting("plan", "", options={"compress": None, "modules": rules})

    def of_choice(self, choice: Choice) -> list[Option]:
        """Return the option of each block; blocks that the step does not call are recomputed."""
        found = [RECOMPUTE] * len(self.blocks)
        for block, option in zip(self.calls, choice, strict=True):
            found[block] = self.options[option]
        return found

    def trace_of(self, choice: Choice) -> StepTrace:
        """Return the simulated step with an option for each call, that which needs most."""
        self.seen.add(choice)
        return self.largest_of(self.of_choice(choice))

    def lift(self, trace: StepTrace) -> int:
        """Return the bytes that the device's allocator needs beyond the peak of a step, those of a
        ring included.
        """
        if self.device_blocks is None:
            return trace.ring
        if trace.lift is None:
            needed = int(memory_use(trace.segments, [*self.device_blocks, trace.ring])["needed"])
            trace.lift = needed - sum(self.device_blocks) - trace.peak().size
        return trace.lift

    def size_of(self, trace: StepTrace) -> int:
        """Return the bytes that count in a budget, above what is there during the whole step; more
        than any budget where the host has no room for what is placed there.
        """
        if self.placement is not None and not self.placement.holds(trace):
            return _NEVER
        return trace.peak().size + self.lift(trace)

    def needs(self, choice: Choice) -> int:
        """Return the same of a choice, which then is known."""
        return self.size_of(self.trace_of(choice))

    def smallest_peak(self) -> int:
        """Return about the least bytes that a step adds."""
        return min(map(self.size_of, self.largest.values()))

    # ---- costs

    def cost(self, block: int, option: Option) -> Cost:
        """Return the cost of a block in an option."""
        return self.costs.get((id(self.blocks[block]), option), Cost(0.0, 0.0))

    def seconds(self, choice: Choice) -> float:
        """Return the seconds of all calls, and for which they wait for a place."""
        busy = sum(self.cost(block, self.options[o]).seconds for block, o in zip(self.calls, choice, strict=True))
        return busy + self.waits(choice)

    def _extra(self, block: int, option: int, unit: float, kinds: Sequence[bool]) -> float:
        """Return the price of what a call places, for the search."""
        size = self.placed_by(block, option)[0]
        return 0.0 if not size else size * unit if self.options[option].recomputes in kinds else _DEAR

    def waits(self, choice: Choice) -> float:
        """Return the seconds for which a step waits for a place, by simulation."""
        if self.placement is None or not any(self.placed_by(*each)[0] for each in zip(self.calls, choice, strict=True)):
            return 0.0
        if choice not in self._waits:
            self._waits[choice] = self.placement.exposed([*map(self._call, self.calls, choice)])
        return self._waits[choice]

    def placed_by(self, block: int, option: int) -> tuple[int, int]:
        """Return the bytes that a call of a block places, and those of the largest payload."""
        size, largest = self.places.get(self.options[option], {}).get(block, (0, 0))
        return size // max(self.calls.count(block), 1), largest

    def _call(self, block: int, option: int) -> Call:
        chosen = self.options[option]
        keep, recompute, seconds = (self.cost(block, each).seconds for each in (KEEP, RECOMPUTE, chosen))
        size, largest = self.placed_by(block, option)
        moves = max(seconds - (recompute if chosen.recomputes else keep), 0.0) if size else 0.0
        return Call(keep, recompute, seconds, moves, chosen.recomputes, size, largest)

    def expected(self, choice: Choice) -> float:
        """Return the error of the step's gradients if those of its calls add up as squares."""
        squares = (self._square(block, self.options[o]) for block, o in zip(self.calls, choice, strict=True))
        return math.sqrt(sum(squares))

    def _square(self, block: int, option: Option) -> float:
        return self.weights[block] * self.cost(block, option).error ** 2

    def call_costs(self, limits_error: bool, price: float = 0.0, kinds: Sequence[bool] = ()) -> Costs:
        """Return the costs of all calls; ``price``: of each byte that gets a place, in parts of
        what it takes on a busy link; ``kinds``: the regions that may use one.
        """
        unit = price * self.placement.most if self.placement is not None else 0.0
        seconds = [
            [
                self.cost(block, option).seconds + self._extra(block, i, unit, kinds)
                for i, option in enumerate(self.options)
            ]
            for block in self.calls
        ]
        if not limits_error:
            return Costs(seconds)
        return Costs(seconds, [[self._square(block, option) for option in self.options] for block in self.calls])

    # ---- plans

    def chain(self) -> Chain:
        """Return the chain of the step's calls, which knows no plan yet."""
        return Chain({option: trace.segments for option, trace in self.largest.items()})

    def limit(self, budget: Budget, fixed: Mapping[str, int]) -> int:
        """Return the bytes that the simulated step may add.

        ``fixed``: bytes that are there during the whole step, by name.
        """
        return budget.size - (0 if budget.step_only else sum(fixed.values()))

    def fastest(self, chain: Chain, budget: Budget, fixed: Mapping[str, int], error: float | None = None) -> Chosen:
        """Return the fastest choice within the budgets.

        ``chain``: traces of plans correct it. ``error``: the largest root of the sum of the
        regions' squared errors, or None.

        Raises:
            NoPlan: There is none.
        """
        limit, squares = self.limit(budget, fixed), None if error is None else error**2
        chosen = self.cheapest(chain, limit, squares)
        if self.size_of(chosen.trace) > limit:
            raise self.no_plan(budget, fixed, chosen.choice, chosen.trace)
        return chosen

    def cheapest(self, chain: Chain, limit: int, squares: float | None) -> Chosen:
        """Return the fastest choice that was found, waits for a place included, or the one that
        needs least if none is within the limit; the bound is without waits.

        What a place takes is the same for most choices that use it, so it is taken off the limit
        beforehand: regions that recompute have one ring, others another.
        """
        if not self.places:
            return self._chosen(chain, limit, squares, (), 0.0)
        found: list[Chosen] = []
        for kinds in self.kinds():
            rooms = dict.fromkeys(self._rooms(kinds))
            for room, price in itertools.product(rooms, PRICES if kinds else (0.0,)):
                if price and (room != max(rooms) or not found or not self.waits(found[-1].choice)):
                    continue  # nothing waits where a place costs nothing
                each = self._chosen(chain, limit - room, squares, kinds, price)
                if each.peak + self.lift(each.trace) - each.trace.ring <= limit - room:
                    found.append(each)
        most = len(self.seen) + _TRACES
        for each in sorted(found, key=lambda each: (self.seconds(each.choice), each.choice)):
            better = improved(self, each.choice, chain, limit, squares, most)
            found.append(dataclasses.replace(each, choice=better, trace=self.trace_of(better)))
        smallest = self._least(chain, squares, [each.choice for each in found])
        within = [each.choice for each in found if self.size_of(each.trace) <= limit]
        best = min(within or [smallest[1]], key=lambda each: (self.seconds(each), each))
        seconds = self.seconds(best)
        bound = min((each.bound for each in found), default=0.0)
        return Chosen(best, self.trace_of(best), seconds, min(bound, seconds), smallest, ())

    def _least(self, chain: Chain, squares: float | None, others: Sequence[Choice]) -> tuple[int, Choice]:
        """Return the least bytes that a choice needs, and that one: of the smallest that is found,
        of those with one option in all calls, and of others.
        """
        uniform = [(o,) * len(self.calls) for o in range(len(self.options))]
        known = {self.smallest(chain, None if squares is None else squares**0.5), *others}
        known |= {each for each in uniform if squares is None or self.expected(each) ** 2 <= squares}
        return min((self.size_of(self.trace_of(each)), each) for each in known)

    def _chosen(self, chain: Chain, limit: int, squares: float | None, kinds: Sequence[bool], price: float) -> Chosen:
        """Return the fastest choice by these costs; what a place takes is not in the limit."""
        costs = self.call_costs(squares is not None, price, kinds)

        def improve(choice: Choice, within: int) -> Choice:
            return choice if self.places else improved(self, choice, chain, within, squares)

        chooser = Chooser(chain, costs, squares, self.trace_of, lambda trace: self.lift(trace) - trace.ring, improve)
        found = chooser.choose(limit)
        return dataclasses.replace(found, bound=found.bound if not price else math.inf)

    def kinds(self) -> list[tuple[bool, ...]]:
        """Return the sets of regions that may use a place: those that recompute, and others."""
        kinds = sorted({option.recomputes for option in self.places})
        return [part for n in range(len(kinds) + 1) for part in itertools.combinations(kinds, n)]

    def _rooms(self, kinds: Sequence[bool]) -> tuple[int, int]:
        """Return the most and the least bytes that a place takes where all these kinds use it."""
        most = least = 0
        for kind in kinds:
            assert self.placement is not None
            traces = [self.largest[option] for option in self.places if option.recomputes == kind]
            most += max(trace.ring for trace in traces)
            sizes = [size for o, of in self.places.items() if o.recomputes == kind for _, size in of.values()]
            least += min(self.placement.room(min(sizes), min(sizes), kind), max(trace.ring for trace in traces))
        return most, least

    def smallest(self, chain: Chain, error: float | None = None) -> Choice:
        """Return the choice that needs the least bytes; otherwise as :meth:`fastest`."""
        squares = None if error is None else error**2
        costs = self.call_costs(squares is not None)
        return Chooser(chain, costs, squares, self.trace_of, self.lift).smallest()[1]

    def no_plan(
        self, budget: Budget, fixed: Mapping[str, int], choice: Choice, trace: StepTrace, needed: int | None = None
    ) -> NoPlan:
        """Return the error of a budget that is too small for this choice, which needs least;
        ``needed``: bytes, None: those of the trace.
        """
        peak = trace.peak()
        size = (self.size_of(trace) if needed is None else needed) + budget.size - self.limit(budget, fixed)
        hint = advice(peak, {} if budget.step_only else fixed, self._hints(choice, self.size_of(trace)))
        return NoPlan.within(budget, size, f"{hint} {'' if trace.placed else self._useless(peak)}".rstrip())

    def _hints(self, choice: Choice, size: int) -> Hints:
        """Return what lowers the peak of the smallest choice, which needs so many bytes."""
        options = self.of_choice(choice)
        tiled = [in_tiles(option, TILES) if option.recomputes else option for option in options]
        if any("tiles" in each.rule for each in self.options if each.rule != KEEP.rule) or tiled == options:
            return self.hints
        try:
            helps = self.size_of(self.largest_of(tiled)) < (1 - LESS) * size
        except Exception:  # the tokens do not divide, or there is no MLP
            helps = False
        return with_tiles(self.hints) if helps else self.hints

    def _useless(self, peak: Peak) -> str:
        """Return why offload lowers no plan, whose peak is this one; or nothing."""
        if self.placement is None:
            return ""
        placed = [self.size_of(trace) for trace in self.largest.values() if trace.placed]
        others = [self.size_of(trace) for trace in self.largest.values() if not trace.placed]
        if not placed:
            place = self.placement.offload.place
            return f"Nothing can be offloaded to {place!r}: it is there, or smaller than min_bytes."
        if min(placed) < min(others):
            return ""
        smaller = " Its host memory counts here, so a smaller host_budget may." if self.placement.on_host else ""
        return f"Offload would not lower the peak: {peak.position} binds.{smaller}"

    def result(
        self,
        chosen: Chosen,
        budget: Budget,
        fixed: Mapping[str, int],
        about: Sequence[str],
        *,
        measured: float | None = None,
        error: float | None = None,
    ) -> Plan:
        """Return the plan of a choice; ``measured``: its error, of the budget ``error``."""
        held = sum(fixed.values())
        front = front_of(self, chosen, None if error is None else self.expected(chosen.choice) ** 2)
        base = max(self.step_seconds - math.fsum(self.cost(block, RECOMPUTE).seconds for block in self.calls), 0.0)
        options = self.of_choice(chosen.choice)
        binds = chosen.trace.peak()
        ring = chosen.trace.ring
        peak, at_most = chosen.peak + held + ring, None
        needed = None if self.device_blocks is None else chosen.peak + held + self.lift(chosen.trace)
        if chosen.trace.data_dependent:
            peak, at_most = self.trace(options).peak().size + chosen.excess + held + ring, peak
            about = [*about, "Times are for equally used experts; the budget is kept whatever tokens choose."]
        hints = self.hints
        if is_smallest(chosen.smallest[0], chosen.peak):
            hints = self._hints(chosen.choice, chosen.peak)
        return Plan(
            model=class_of(self.model).__name__,
            regions=tuple(self._planned(options)),
            budget=budget.size + (held if budget.step_only else 0),
            budget_text=budget.text,
            peak=peak,
            plain=self.traces[KEEP].peak().size + held,
            binds=binds,
            fixed=dict(fixed),
            seconds=base + chosen.seconds,
            plain_seconds=base + sum(self.cost(block, KEEP).seconds for block in self.calls),
            bound=base + chosen.bound,
            smallest_budget=chosen.smallest[0] + held,
            estimated=self.estimated,
            error=measured,
            error_budget=error,
            front=tuple((size, base + seconds) for size, seconds in front),
            about=tuple(about),
            at_most=at_most,
            needed=needed,
            outside=outside_of(self.model, self.blocks),
            hints=hints,
            offloaded=self._offloaded(chosen, budget, fixed),
        )

    def _offloaded(self, chosen: Chosen, budget: Budget, fixed: Mapping[str, int]) -> Offloaded | None:
        """Return what the plan offloads, and why not more."""
        if self.placement is None:
            return None
        chosen_options = {self.options[o] for o in chosen.choice}
        waits, offload, trace = self.waits(chosen.choice), self.placement.offload, chosen.trace
        why = ""
        if trace.placed:
            placed_by = [
                (self.options[o], self.placed_by(b, o)[0]) for b, o in zip(self.calls, chosen.choice, strict=True)
            ]
            encoded = sum(size for option, size in placed_by if option.encodes)
            if waits <= _HIDDEN * chosen.seconds and encoded <= _FEW_BYTES * trace.placed:
                why = "The link is fast enough that no codec is needed: payloads move as they are."
        elif not (why := self._useless(trace.peak())) and chosen_options != {KEEP}:
            why = "Offload would lower the peak, and this plan is faster than those that offload."
        return Offloaded(offload.place, trace.placed, trace.ring, waits, self.placement.link, why)

    def _planned(self, options: Sequence[Option]) -> list[PlannedRegion]:
        chain = self.chain()
        first_call = {block: call for call, block in reversed(list(enumerate(self.calls)))}
        parameters = parameters_before(self.model)
        regions = []
        for i, (block, option) in enumerate(zip(self.blocks, options, strict=True)):
            cost, keep = self.cost(i, option), self.cost(i, KEEP)
            kept = chain.kept(first_call[i], self.options.index(option)) if i in first_call else 0
            seconds = (cost.seconds - keep.seconds) * self.calls.count(i)
            name, digest = self._names[id(block)], digest_of(block, parameters)
            regions.append(PlannedRegion(name, class_of(block).__name__, option, kept, seconds, cost.error, digest))
        return regions
