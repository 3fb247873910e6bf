"""A step on paper in each option of its regions, and plans from that: :class:`StepProfile`."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch.nn import Module

from gradckpt._planning.block_times import Cost
from gradckpt._planning.budget import Budget
from gradckpt._planning.chain import Chain
from gradckpt._planning.choose import Choice, Chosen, Costs, Infeasible, choose
from gradckpt._planning.hints import IN_PYTHON, advice
from gradckpt._planning.options import KEEP, RECOMPUTE, Option
from gradckpt._planning.region_plan import Plan, PlannedRegion, digest_of
from gradckpt._planning.step_trace import Segment, StepTrace
from gradckpt._settings import Setting
from gradckpt._stats import format_bytes

__all__ = ["NoPlan", "StepProfile", "whole_kib"]


#: Smallest budgets are in whole KiB: a step may need a few bytes beyond its trace, of a number that
#: a recompute stops at.
_WHOLE = 1024


def whole_kib(size: int) -> int:
    """Return a number of bytes, rounded up."""
    return -(-size // _WHOLE) * _WHOLE


class NoPlan(ValueError):
    """No plan stays within the budget. ``smallest_budget``: bytes of the one that needs least."""

    def __init__(self, message: str, smallest_budget: int) -> None:
        super().__init__(message)
        self.smallest_budget = smallest_budget

    @classmethod
    def within(cls, budget: Budget, smallest: int, hint: str) -> NoPlan:
        """Return the error of a budget; ``smallest``: bytes; ``hint``: a sentence."""
        return cls(
            f"gradckpt: no plan stays within {budget.text}; the smallest budget is {format_bytes(smallest)} "
            f"({smallest} bytes). {hint}",
            smallest,
        )


class CostSource(Protocol):
    """Measured or estimated costs of regions."""

    def of(self, block: Module, option: Option) -> Cost | None:
        """Return the cost of a call of a block in an option, None if it is unknown."""


class StepProfile(abc.ABC):
    """The memory of a step on paper in each option, and the times of its regions.

    ``blocks``: the model's regions. ``options``: those that a plan may choose from. ``costs``: of
    the regions, and ``step_seconds``: of the step with exact recomputing; set before a plan is
    made. ``estimated``: these times come from a data sheet. ``hints``: as in :class:`Plan`.
    """

    estimated = False
    hints: Mapping[str, Sequence[str]] = IN_PYTHON

    def __init__(self, model: Module, blocks: Sequence[Module], options: Sequence[Option]) -> None:
        self.model = model
        self.blocks = list(blocks)
        self.options = list(options)
        self._names = {id(module): name for name, module in model.named_modules()}
        self.traces = {option: self.trace([option] * len(self.blocks)) for option in self.options}
        self._segments: dict[Option, Sequence[Segment]] = {o: trace.segments for o, trace in self.traces.items()}
        self.calls = self.chain().calls
        self.costs: CostSource | None = None
        self.step_seconds = 0.0

    # ---- on paper

    @abc.abstractmethod
    def trace(self, options: Sequence[Option]) -> StepTrace:
        """Return the step on paper with an option for each block; no segment stands for others."""

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

    # ---- costs

    def cost(self, block: int, option: Option) -> Cost:
        """Return the cost of a block in an option."""
        found = self.costs.of(self.blocks[block], option) if self.costs is not None else None
        return found if found is not None else Cost(0.0, 0.0)

    def _costs(self, weights: Sequence[float] | None) -> Costs:
        """Return the costs of all calls; ``weights``: as for :meth:`fastest`."""
        seconds = [[self.cost(block, option).seconds for option in self.options] for block in self.calls]
        if weights is None:
            return Costs(seconds)
        return Costs(
            seconds, [[self.square(block, option, weights) for option in self.options] for block in self.calls]
        )

    def square(self, block: int, option: Option, weights: Sequence[float]) -> float:
        """Return what a call of a block adds to the square of the step's error."""
        error = self.cost(block, option).error
        return weights[block] * error**2 if error else 0.0  # a weight may be infinite

    # ---- plans

    def chain(self) -> Chain:
        """Return the chain of the step's calls, which knows no plan yet."""
        return Chain(self._segments)

    def fastest(
        self,
        chain: Chain,
        budget: Budget,
        fixed: Mapping[str, int],
        error: float | None = None,
        weights: Sequence[float] | None = None,
    ) -> Chosen:
        """Return the fastest choice within the budgets.

        ``chain``: traces of plans correct it. ``fixed``: bytes that are there during the whole
        step, by name. ``weights``: what the square of each block's error is multiplied by, None
        without an ``error`` budget.

        Raises:
            NoPlan: There is none.
        """
        held = 0 if budget.step_only else sum(fixed.values())
        squares = None if error is None else error**2

        def run(choice: Choice) -> StepTrace:
            return self.trace(self.of_choice(choice))

        try:
            return choose(chain, self._costs(weights), budget.size - held, squares, run, list(self.traces.values()))
        except Infeasible as found:
            hint = advice(found.trace.peak(), {} if budget.step_only else fixed, self.hints)
            raise NoPlan.within(budget, whole_kib(found.smallest + held), hint) from None

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
        base = max(self.step_seconds - math.fsum(self.cost(block, RECOMPUTE).seconds for block in self.calls), 0.0)
        peak = chosen.trace.peak()
        if any(trace.data_dependent for trace in self.traces.values()):
            about = [*about, "Experts are assumed to be chosen equally often."]
        return Plan(
            model=type(self.model).__name__,
            regions=tuple(self._planned(self.of_choice(chosen.choice))),
            budget=budget.size + (held if budget.step_only else 0),
            budget_text=budget.text,
            peak=peak.size + held,
            plain=self.traces[KEEP].peak().size + held,
            binds=peak,
            fixed=dict(fixed),
            seconds=base + chosen.seconds,
            plain_seconds=base + sum(self.cost(block, KEEP).seconds for block in self.calls),
            bound=base + chosen.bound,
            smallest_budget=whole_kib(chosen.smallest + held),
            estimated=self.estimated,
            error=measured,
            error_budget=error,
            front=tuple((size, base + seconds) for size, seconds in chosen.front),
            about=tuple(about),
            hints=self.hints,
        )

    def _planned(self, options: Sequence[Option]) -> list[PlannedRegion]:
        chain = self.chain()
        first_call = {block: call for call, block in reversed(list(enumerate(self.calls)))}
        regions = []
        for i, (block, option) in enumerate(zip(self.blocks, options, strict=True)):
            cost, keep = self.cost(i, option), self.cost(i, KEEP)
            kept = chain.kept(first_call[i], self.options.index(option)) if i in first_call else 0
            seconds = (cost.seconds - keep.seconds) * self.calls.count(i)
            name, digest = self._names[id(block)], digest_of(block)
            regions.append(PlannedRegion(name, type(block).__name__, option, kept, seconds, cost.error, digest))
        return regions
