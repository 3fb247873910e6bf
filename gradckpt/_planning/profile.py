"""What a live model's step needs in each option of each region: :class:`Profile`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module

from gradckpt import _C
from gradckpt._apart import apart
from gradckpt._engine import torch_private as private
from gradckpt._engine.places import figures
from gradckpt._gradient_error import StepErrors
from gradckpt._models.switch import Modules
from gradckpt._planning.chain import Choice, Chosen, approach
from gradckpt._planning.comparison import peak_of_run
from gradckpt._planning.device_memory import (
    Budget,
    device_of,
    fixed_bytes,
    free_memory,
    gathered_bytes,
    missing_gradient_bytes,
    other_tensors,
    real_steps,
    refuse_shards,
)
from gradckpt._planning.devices import Placement
from gradckpt._planning.options import (
    KEEP,
    RECOMPUTE,
    Option,
    RegionCosts,
    allowed,
    measure_regions,
    regions_to_plan,
    wait,
)
from gradckpt._planning.plan_files import KnownPlan, Measured, SavedProfile, parameters_of
from gradckpt._planning.region_plan import NoPlan, Plan
from gradckpt._planning.segments import StepTrace, condensed, held_blocks
from gradckpt._planning.step_profile import StepProfile
from gradckpt._planning.step_trace import StateBeforeSimulation, late_progress, optimizer_memory, trace_step
from gradckpt._settings import quiet
from gradckpt._stats import format_bytes, uncounted
from gradckpt._training_state import TrainingState
from gradckpt._training_step import refuse_writes, tensors_of_batch

#: Steps are measured for about so many seconds, and so often at least and at most, after one that
#: warms up; the least among ranks, which may have to run equally many.
_SECONDS, _LEAST, _MOST = 2.0, 2, 6

#: Choices whose errors are measured at most: to find the smallest budget, and the fastest plan.
_FOR_SMALLEST, _FOR_FASTEST = 3, 4

#: So often real steps try a plan, and the one that needs least: again only if they need more than
#: the simulated step.
_RUNS = 3

#: If there are more kinds of regions, what their errors weigh is measured of all together.
_KINDS = 4
Run = Callable[[Any], object]


class Profile(StepProfile):
    """The profile of a live model, whose regions are measured.

    Args:
        model: A module in training mode.
        run: Runs forward and backward on the batch that it is given.
        batch: As for ``run``.
        modules: As for :func:`gradckpt.enable`.
        compress: The codecs that a plan may use.
        limits_error: Plans will have an error budget, which permits lossy codecs.
        optimizer: The optimizer that counts, or None.
        placement: Where payloads may live, or None: on their device.
        tiles: In how many tiles MLPs may run, or None.

    ``fixed``: the bytes that are there during the whole step, by name, as they are now.

    Raises:
        NotSimulated: The step asks for values.
        TypeError: ``optimizer`` is no torch optimizer.
        ValueError: As :func:`gradckpt.enable`; the optimizer's step cannot be simulated, or it
            trains other parameters.
    """

    def __init__(
        self,
        model: Module,
        run: Run,
        batch: Any,
        *,
        modules: Modules = None,
        compress: Any = None,
        limits_error: bool = False,
        optimizer: Any = None,
        placement: Placement | None = None,
        tiles: int | None = None,
    ) -> None:
        self._step = run
        self._batch = batch
        self.device = device_of(model)
        #: Assumptions that plans say.
        self.notes: list[str] = []
        self._errors: dict[Choice, float] = {}  # of those that are exact, or were measured
        self._peaks: dict[Choice, int] = {}  # bytes that known choices add
        self._ran: set[Choice] = set()  # of those, what a real step has tried
        self._excess = 0  # bytes that real steps needed beyond their traces, at most
        self._may_run = False
        self._real_batch: Any = None
        self._is_weighed = False
        self._before: StateBeforeSimulation | None = None  # of this call
        with quiet():
            blocks = regions_to_plan(model, modules)
        refuse_shards(model, blocks)
        offload = None if placement is None else placement.offload
        super().__init__(model, blocks, allowed(compress, limits_error, offload, blocks, tiles), placement)
        self._before = None
        self._count(optimizer)

    def _count(self, optimizer: Any) -> None:
        """Count what is there during the whole step, and what the optimizer's step adds to it."""
        self.fixed = fixed_bytes(self.model)
        known = self.held + gathered_bytes(self.model)  # traces have what is gathered
        self._optimizer_adds = 0  # bytes, the step's gradients included
        if optimizer is None:
            self.notes.append("No optimizer states are counted; pass optimizer= to count them.")
        else:
            self.notes.append("Optimizer states count as after the first step.")
            states, new, working = optimizer_memory(self.model, optimizer)
            self.fixed["optimizer states"] = states + new
            known += states
            if working:
                self._optimizer_adds = missing_gradient_bytes(self.model) + working - new
        _C.forget_random_state()  # of the last step, which the next one does not keep
        self.fixed["other tensors"] = other_tensors(self.device, known)
        if self.device.type == "cuda":
            self.device_blocks = held_blocks(self.model, self.fixed)

    def _progressing(self) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        return late_progress("planning")

    def _trace(self, options: Sequence[Option], concentrated: bool) -> StepTrace:
        with quiet(), self.setting(options).active(self.model):
            found = trace_step(
                self.model,
                self._step,
                self._batch,
                blocks=self.blocks,
                concentrated=concentrated,
                cuda=self.device.type == "cuda",
            )
        return condensed(found)

    def _keep(self) -> StateBeforeSimulation:
        """Return what traces in this process restore; the step changes nothing between them."""
        if self._before is None:
            self._before = StateBeforeSimulation(self.model, self._batch, self._step)
        return self._before

    # ---- real steps

    def measure(self, batch: Any) -> None:
        """Measure the step with exact recomputing, and each distinct region in each option.

        Raises:
            StepWrites: The step changes parameters.
        """
        has_ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        most = _LEAST if has_ranks else _MOST
        with real_steps(self.model):
            state = TrainingState(self.model, batch, self._step)
            self.costs, self.step_seconds = apart(lambda: self._measure(state, batch, most), lambda: state)
        self._may_run, self._real_batch = not has_ranks, batch  # ranks would run other numbers of steps

    def _measure(self, state: TrainingState, batch: Any, most: int) -> tuple[RegionCosts, float]:
        seconds: list[float] = []
        leaves = [x for x in (*self.model.parameters(), *tensors_of_batch(batch)) if x.requires_grad and x.is_leaf]
        setting = self.setting([RECOMPUTE] * len(self.blocks))
        state.rewind()  # a step would add to the gradients in place
        with quiet(), uncounted(), refuse_writes(leaves):
            with setting.active(self.model), measure_regions(self.blocks, self.options) as costs:
                self._step(batch)
            while len(seconds) < _LEAST or (len(seconds) < most and sum(seconds) < _SECONDS):
                state.rewind()
                with setting.active(self.model):
                    seconds.append(self._timed(batch))
        return costs, min(seconds)

    def _timed(self, batch: Any) -> float:
        wait(self.device)
        began = time.perf_counter()
        self._step(batch)
        wait(self.device)
        return time.perf_counter() - began

    # ---- plans

    def plan(self, budget: Budget, *, error: float | None = None, batch: Any = None) -> Plan:
        """Return the fastest plan within the budgets; ``batch``: to measure the error of lossy
        options on.

        Raises:
            ValueError: There is none.
        """
        needed = self.check_optimizer(budget)
        try:
            chosen, measured = self._choose(error, batch, budget)
            about = list(self.notes)
            if self._excess:
                about.append(
                    f"A real step needed {format_bytes(self._excess)} more than the simulated one, which plans count."
                )
            made = self.result(chosen, budget, self.fixed, about, measured=measured, error=error)
        finally:
            self._before = None
        smallest = max(made.smallest_budget, needed + (self.held if budget.step_only else 0))
        keep = (self.options.index(KEEP),) * len(self.calls)
        plain = made.plain + self._peaks[keep] - self.size_of(self.trace_of(keep))
        return dataclasses.replace(made, plain=plain, smallest_budget=smallest, profile=self._saved())

    @property
    def held(self) -> int:
        """The bytes that are there during the whole step."""
        return sum(self.fixed.values())

    def check_optimizer(self, budget: Budget) -> int:
        """Return the smallest budget for the optimizer's step, which no option of a region changes.

        Raises:
            NoPlan: It is larger than the budget.
        """
        if not self._optimizer_adds:
            return 0
        needed = self._optimizer_adds + (0 if budget.step_only else self.held)
        if needed > budget.size:
            larger = dataclasses.replace(budget, size=needed)
            try:
                self.fastest(self.chain(), larger, self.fixed)  # or regions need more
            finally:
                self._before = None
            hint = f"The optimizer's step alone needs {format_bytes(needed)}; take one with smaller states."
            raise NoPlan.within(budget, needed, hint)
        return needed

    def _choose(self, error: float | None, batch: Any, budget: Budget) -> tuple[Chosen, float | None]:
        """Return the fastest of all known choices within the budgets, and its measured error."""
        errors: list[StepErrors] = []

        def measure(options: Sequence[Option]) -> float:
            if not errors:
                errors.append(StepErrors(self.model, batch, self.blocks))
            return errors[0].of(self.setting(options))

        if error is not None and not self._is_weighed:
            self._weigh(measure)
        limit = self.limit(budget, self.fixed)
        for option in (KEEP, RECOMPUTE):
            self._note((self.options.index(option),) * len(self.calls))
        found = self._find(error, measure, budget)
        if self._excess:
            found += self._find(error, measure, dataclasses.replace(budget, size=budget.size - self._excess))
        chosen = self._best(found, error, limit)
        for _ in range(_RUNS):
            learned = [self._learn_from_a_run(each) for each in (chosen.choice, chosen.smallest[1])]
            if not any(learned):
                break
            if self._peaks[chosen.choice] > limit:
                found += self._find(error, measure, dataclasses.replace(budget, size=budget.size - self._excess))
            chosen = self._best(found, error, limit)
        if chosen.smallest[0] > limit:
            least = chosen.smallest[1]
            raise self.no_plan(budget, self.fixed, least, self.trace_of(least), self._peaks[least])
        best = chosen.choice
        if self._is_lossy(best) and best not in self._errors and batch is not None:
            self._errors[best] = measure(self.of_choice(best))
        return chosen, None if error is None and not self._is_lossy(best) else self._errors.get(best)

    def _best(self, found: Sequence[Chosen], error: float | None, limit: int) -> Chosen:
        """Return the fastest of all known choices within the limits, or the one that needs least if
        none is; ``found``: the planner's.
        """
        permitted = [each for each in self._peaks if error is None or self._errors.get(each, math.inf) <= error]
        least = best = self._traced_first(permitted, lambda each: (self._peaks[each], each))
        if self._peaks[least] <= limit:
            best = self._traced_first(permitted, lambda each: (self._peaks[each] > limit, self.seconds(each), each))
        seconds = self.seconds(best)
        nearest = min((each for each in found if each.choice in permitted), key=lambda each: each.seconds, default=None)
        bound, front = (nearest.bound, nearest.front) if nearest is not None else (0.0, ())
        trace = self.trace_of(best)
        return Chosen(
            best,
            trace,
            seconds,
            min(bound, seconds),
            (self._peaks[least], least),
            tuple((size + self._excess, each) for size, each in front),
            self._peaks[best] - self.size_of(trace),
        )

    def _traced_first(self, choices: Sequence[Choice], rank: Callable[[Choice], Any]) -> Choice:
        """Return the choice of the lowest rank, which needs what its trace does or more."""
        while True:
            first = min(choices, key=rank)
            peak = self.size_of(self.trace_of(first))
            if self._peaks[first] >= peak:
                return first
            self._peaks[first] = peak + self._excess

    def _learn_from_a_run(self, choice: Choice) -> bool:
        """Run a real step of a choice, if any may be run; return whether it needs other than was
        known. What it needs beyond its trace counts for all choices that no step has tried.
        """
        if not self._may_run or choice in self._ran:
            return False
        self._ran.add(choice)
        known = self._peaks[choice]
        reason = "a profiler is active" if private.profiler_entered() else None
        if known > free_memory(self.device):
            reason = reason or "it needs more memory than is free here"
        if reason is not None:
            self._may_run = False
            self.notes.append(f"No real step has tried the plan, since {reason}.")
            return False
        try:
            with quiet():
                rings = figures().get("ring", 0)
                peak = peak_of_run(self.model, self.setting(self.of_choice(choice)), self._step, self._real_batch).size
                peak -= figures().get("ring", 0) - rings  # which its trace has apart from the peak
        except torch.OutOfMemoryError:
            self._may_run = False
            self.notes.append("A real step of the plan ran out of memory here.")
            return False
        trace = self.trace_of(choice)
        traced = trace.peak().size
        more = peak - traced - self._excess
        if more > 0:
            self._excess += more
            self._peaks = {each: size + (0 if each in self._ran else more) for each, size in self._peaks.items()}
        self._peaks[choice] = max(peak, traced) + self.lift(trace)
        return self._peaks[choice] != known

    def _find(self, error: float | None, measure: Callable[[Sequence[Option]], float], budget: Budget) -> list[Chosen]:
        """Look for the smallest and the fastest choice within the budgets, which then are known."""
        found: list[Chosen] = []
        chain, other, most = self.chain(), self.chain(), self.limit(budget, self.fixed)

        def fastest(limit: float | None) -> Choice | None:
            chosen = self.cheapest(chain, most, None if limit is None else limit**2)
            if error is None:
                self._note(chosen.smallest[1])
            if self.size_of(chosen.trace) > most:
                return None
            found.append(chosen)
            return self._note(chosen.choice)

        if error is None:
            fastest(None)
        else:
            for pick, steps in (
                (lambda limit: self._note(self.smallest(other, limit)), _FOR_SMALLEST),
                (fastest, _FOR_FASTEST),
            ):
                approach(error, pick, self.expected, self._errors, lambda each: measure(self.of_choice(each)), steps)
        return found

    def _weigh(self, measure: Callable[[Sequence[Option]], float]) -> None:
        """Measure what errors of each kind of region add to the step's: all of the kind have their
        least one.
        """
        kinds: dict[Any, list[int]] = {}
        for block in dict.fromkeys(self.calls):
            kinds.setdefault(self._measured(block), []).append(block)
        for blocks in kinds.values() if len(kinds) <= _KINDS else [list(dict.fromkeys(self.calls))]:
            options = [RECOMPUTE] * len(self.blocks)
            for block in blocks:
                lossy = [each for each in self.options if self.cost(block, each).error]
                options[block] = min(lossy, key=lambda each: self.cost(block, each).error, default=RECOMPUTE)
            expected = math.hypot(*(self.cost(block, options[block]).error for block in self.calls))
            weight = (measure(options) / expected) ** 2 if expected else 0.0
            for block in blocks:
                self.weights[block] = weight if 0 < weight < math.inf else 1.0
        self._is_weighed = True

    def _measured(self, block: int) -> Measured:
        """Return what is known of a region alone."""
        costs = [self.cost(block, option) for option in self.options]
        return Measured(
            self._likeness(block),
            tuple(cost.seconds for cost in costs),
            tuple(cost.error for cost in costs),
            self.weights[block] if self._is_weighed else None,
        )

    def _note(self, choice: Choice) -> Choice:
        """Let a choice be known."""
        if choice not in self._peaks:
            self._peaks[choice] = self.size_of(self.trace_of(choice)) + self._excess
        if not self._is_lossy(choice):
            self._errors[choice] = 0.0
        return choice

    def needs(self, choice: Choice) -> int:
        return self._peaks[self._note(choice)]

    def _is_lossy(self, choice: Choice) -> bool:
        return any(self.options[option].codec for option in choice)

    # ---- in files

    def _saved(self) -> SavedProfile:
        """Return what is known, for the file of a plan."""
        regions = [self._measured(block) for block in range(len(self.blocks))]
        distinct = list(dict.fromkeys(regions))
        return SavedProfile(
            self.step_seconds,
            self.traces[KEEP].peak().size,
            self._excess,
            tuple(self.options),
            tuple(distinct),
            tuple(map(distinct.index, regions)),
            tuple(
                KnownPlan(tuple(map(self.options.index, self.of_choice(each))), peak, self._errors.get(each))
                for each, peak in self._peaks.items()
            ),
        )

    def _likeness(self, block: int) -> str:
        inputs = self.traces[KEEP].inputs.get(block, "nothing")
        return f"{parameters_of(self.blocks[block])}, called with {inputs}"

    def load(self, plan: Plan) -> None:
        """Take what was measured for a plan, instead of measuring it.

        Raises:
            ValueError: It was measured in another step, or the plan has estimates; the message says
                what differs first.
        """
        saved = plan.profile
        if saved is None:
            raise ValueError(
                "gradckpt: profile= is a plan with estimated times; leave it out, and this plan will be a profile"
            )
        plan.rules_for(self.model)
        names, own = [region.name for region in plan.regions], [self._names[id(block)] for block in self.blocks]
        saved.check(names, own, self.options, [*map(self._likeness, range(len(self.blocks)))])
        self.costs = saved.costs_of(self.blocks)
        self.step_seconds = saved.step_seconds
        weights = [saved.of(i).weight for i in range(len(self.blocks))]
        self._is_weighed = None not in weights
        self.weights = [1.0 if weight is None else weight for weight in weights]
        self._excess = saved.excess
        same = saved.plain == self.traces[KEEP].peak().size and self.device_blocks is None
        for each in saved.known:
            choice = tuple(each.options[block] for block in self.calls)
            self._peaks[choice] = each.peak if same else self.size_of(self.trace_of(choice)) + self._excess
            if each.error is not None:
                self._errors[choice] = each.error
