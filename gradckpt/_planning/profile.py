"""What a live model's step needs in each option of each region: :class:`Profile`."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from gradckpt._gradient_error import StepErrors
from gradckpt._models.switch import Modules
from gradckpt._planning.block_times import measure_regions, wait
from gradckpt._planning.blocks import regions_to_plan
from gradckpt._planning.budget import Budget, device_of, other_tensors
from gradckpt._planning.chain import Chain
from gradckpt._planning.choose import Choice, Chosen
from gradckpt._planning.comparison import fixed_bytes, quiet
from gradckpt._planning.optimizers import OptimizerMemory, optimizer_memory
from gradckpt._planning.options import RECOMPUTE, Option, allowed
from gradckpt._planning.region_plan import Plan
from gradckpt._planning.step_profile import NoPlan, StepProfile, whole_kib
from gradckpt._planning.step_trace import StepTrace, trace_step
from gradckpt._settings import Setting
from gradckpt._stats import format_bytes, uncounted
from gradckpt._training_state import TrainingState
from gradckpt._training_step import StepWrites

__all__ = ["Profile", "parse_error"]

logger = logging.getLogger("gradckpt")

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")

#: Steps that are measured, after one that warms up.
_STEPS = 2

#: How often an error is measured, and the share of the error budget that is enough.
_ERROR_ROUNDS, _ENOUGH = 8, 0.6

#: A weight of a region that a plan leaves exact becomes smaller by this factor at most.
_LESS = 0.25

Run = Callable[[Any], object]


def parse_error(error: float | str) -> float:
    """Return the relative error that ``"1%"`` or 0.01 means.

    Raises:
        ValueError: It is neither, or not between 0 and 1.
    """
    parsed: float | None = None
    if isinstance(error, str) and (match := _PERCENT.fullmatch(error.strip())) is not None:
        parsed = float(match[1]) / 100
    elif isinstance(error, (int, float)) and not isinstance(error, bool):
        parsed = float(error)
    if parsed is None or not 0 < parsed < 1:
        raise ValueError(f'gradckpt: error={error!r} is no relative error; write "1%" or 0.01')
    return parsed


class Profile(StepProfile):
    """The profile of a live model, whose regions are measured.

    Args:
        model: A module in training mode.
        run: Runs forward and backward on the batch that it is given.
        batch: As for ``run``.
        modules: As for :func:`gradckpt.enable`.
        compress: The codecs that a plan may use.
        limits_error: Plans will have an error budget, which permits lossy codecs.

    Raises:
        NotOnPaper: The step asks for values.
        ValueError: As :func:`gradckpt.enable`.
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
    ) -> None:
        self._run = run
        self._batch = batch
        self.device = device_of(model)
        with quiet():
            blocks = regions_to_plan(model, modules)
        super().__init__(model, blocks, allowed(compress, limits_error))

    def trace(self, options: Sequence[Option]) -> StepTrace:
        """Return the step on paper with an option for each block."""
        with quiet(), self.setting(options).active(self.model):
            return trace_step(self.model, self._run, self._batch, blocks=self.blocks, cuda=self.device.type == "cuda")

    # ---- real steps

    def measure(self, batch: Any) -> None:
        """Measure the step with exact recomputing, and each distinct region in each option.

        Raises:
            StepWrites: The step changes parameters.
        """
        seconds = []
        state = TrainingState(self.model)
        setting = self.setting([RECOMPUTE] * len(self.blocks))
        try:
            state.rewind()  # a step would add to the gradients in place
            with quiet(), uncounted():
                with setting.active(self.model), measure_regions(self.blocks, self.options) as costs:
                    self._run(batch)
                for _ in range(_STEPS):
                    state.rewind()
                    with setting.active(self.model):
                        seconds.append(self._timed(batch))
            if state.leaves_changed():
                raise StepWrites
        finally:
            state.restore()
        self.costs = costs
        self.step_seconds = min(seconds)

    def _timed(self, batch: Any) -> float:
        wait(self.device)
        began = time.perf_counter()
        self._run(batch)
        wait(self.device)
        return time.perf_counter() - began

    # ---- plans

    def plan(self, budget: Budget, *, error: float | None = None, optimizer: Any = None, batch: Any = None) -> Plan:
        """Return the fastest plan within the budgets; ``batch``: to measure the error of lossy
        options on.

        Raises:
            ValueError: There is none.
        """
        about = [
            "No optimizer states are counted; pass optimizer= to count them."
            if optimizer is None
            else "Optimizer states count as after the first step."
        ]
        fixed, memory = self._fixed(optimizer)
        needed = self._check_optimizer(budget, fixed, memory)
        chosen, measured = self._choose(error, batch, budget, fixed)
        made = self.result(chosen, budget, fixed, about, measured=measured, error=error)
        smallest = whole_kib(needed + (sum(fixed.values()) if budget.step_only else 0))
        return dataclasses.replace(made, smallest_budget=max(made.smallest_budget, smallest))

    def check_optimizer(self, budget: Budget, optimizer: Any) -> None:
        """Check that the optimizer's step is within the budget.

        Raises:
            NoPlan: It is not.
        """
        self._check_optimizer(budget, *self._fixed(optimizer))

    def _fixed(self, optimizer: Any) -> tuple[dict[str, int], OptimizerMemory]:
        """Return the bytes that are there during the whole step, and the optimizer's."""
        fixed = fixed_bytes(self.model)
        memory = OptimizerMemory(0, 0, 0)
        if optimizer is not None:
            memory = optimizer_memory(self.model, optimizer)
            fixed["optimizer states"] = memory.states + memory.new
        fixed["other tensors"] = other_tensors(self.device, sum(fixed.values()) - memory.new)
        return fixed, memory

    def held(self, optimizer: Any) -> int:
        """Return the bytes that are there during the whole step."""
        return sum(self._fixed(optimizer)[0].values())

    def smallest_peak(self) -> int:
        """Return about the least bytes that a step adds."""
        return min(trace.peak().size for trace in self.traces.values())

    def _check_optimizer(self, budget: Budget, fixed: dict[str, int], memory: OptimizerMemory) -> int:
        """Return the smallest budget for the optimizer's step, which no option of a region changes.

        Raises:
            NoPlan: It is larger than the budget.
        """
        if not memory.working:
            return 0
        gradients = sum(p.nbytes for p in self.model.parameters() if p.requires_grad and p.grad is None)
        needed = gradients + memory.working - memory.new + (0 if budget.step_only else sum(fixed.values()))
        if needed > budget.size:
            smallest = whole_kib(needed)
            try:
                self.fastest(self.chain(), dataclasses.replace(budget, size=smallest), fixed)
            except NoPlan as error:
                smallest = error.smallest_budget
            hint = f"The optimizer's step alone needs {format_bytes(needed)}; take one with smaller states."
            raise NoPlan.within(budget, smallest, hint)
        return needed

    def _choose(
        self, error: float | None, batch: Any, budget: Budget, fixed: dict[str, int]
    ) -> tuple[Chosen, float | None]:
        """Return the fastest plan and its measured error."""
        chain = self.chain()
        if error is None:
            chosen = self.fastest(chain, budget, fixed)
            lossy = any(self.options[option].codec for option in chosen.choice)
            if not lossy or batch is None:
                return chosen, None
            return chosen, StepErrors(self.model, batch).of(self._setting_of(chosen))
        return self._within_error(error, StepErrors(self.model, batch), chain, budget, fixed)

    def _within_error(
        self, error: float, errors: StepErrors, chain: Chain, budget: Budget, fixed: dict[str, int]
    ) -> tuple[Chosen, float | None]:
        """Return the fastest plan whose measured error is within a budget.

        Squares of regions' errors are summed, each with a weight. The first plan is that without a
        limit. If a plan's error is larger than its sum, its lossy regions get larger weights; if it
        is smaller, these get smaller ones, and the other regions too, which may have got their
        weights beside a worse region.
        """
        best: tuple[Chosen, float] | None = None
        weights = [1.0] * len(self.blocks)
        known: dict[Choice, float] = {}
        for turn in range(_ERROR_ROUNDS):
            try:
                chosen = self.fastest(chain, budget, fixed, *((error, weights) if turn else ()))
            except NoPlan:
                if best is None:
                    raise
                break
            options = self.of_choice(chosen.choice)
            squares = [self.square(block, options[block], weights) for block in self.calls]
            expected = math.sqrt(sum(squares))
            if chosen.choice not in known:
                known[chosen.choice] = errors.of(self._setting_of(chosen)) if expected else 0.0
            measured = known[chosen.choice]
            if measured <= error and (best is None or chosen.seconds < best[0].seconds):
                best = chosen, measured
            if measured <= error and (measured >= _ENOUGH * error or not turn):
                break
            lossy = {block for block, square in zip(self.calls, squares, strict=True) if square}
            ratio = (measured / expected) ** 2 * 1.05 if expected else _LESS
            for block in range(len(weights)):
                if block in lossy or not turn:
                    weights[block] *= ratio
                elif ratio < 1:
                    weights[block] *= max(math.sqrt(ratio), _LESS)
        if best is None:
            best = self.fastest(chain, budget, fixed, error, [math.inf] * len(self.blocks)), 0.0
        return best

    def _setting_of(self, chosen: Chosen) -> Setting:
        return self.setting(self.of_choice(chosen.choice))
