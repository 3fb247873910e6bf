"""Steps on paper, each of them once: :class:`StepTraces`."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import Module

from gradckpt._planning.options import Option
from gradckpt._planning.placement import Placement
from gradckpt._planning.step_trace import StateBeforePaper, StepTrace, side_by_side_on_paper

__all__ = ["StepTraces"]

logger = logging.getLogger("gradckpt")

#: An option for each block, and whether nearly all tokens choose the same experts.
_Key = tuple[tuple[Option, ...], bool]


class StepTraces(abc.ABC):
    """Traces of a step, by the option of each of its blocks.

    ``blocks``: the model's regions. ``placement``: where payloads may live, None: on their device.
    """

    def __init__(self, blocks: Sequence[Module], placement: Placement | None) -> None:
        self.blocks = list(blocks)
        self.placement = placement
        self._traced: dict[_Key, StepTrace] = {}

    def trace(self, options: Sequence[Option], *, concentrated: bool = False) -> StepTrace:
        """Return the step on paper with an option for each block; no segment stands for others.
        ``concentrated``: as for :func:`gradckpt._planning.step_trace.trace_step`.
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
        for key, found in zip(keys, side_by_side_on_paper(trials, self._keep, tell), strict=True):
            if found is not None:
                self._learn(key, found)

    def _try(self, options: Sequence[Option], concentrated: bool) -> Any:
        """Return a trace; None where it fails with parts, which no user has asked for."""
        try:
            return self._trace(options, concentrated)
        except Exception as error:
            if len(set(options)) > 1 or not options[0].in_parts:
                raise
            logger.debug("gradckpt: the option %s does not work (%s); it is left out", options[0].name, error)
            return None

    #: Returns what restores this process after a trace in it; None: there is nothing to restore.
    _keep: Callable[[], StateBeforePaper] | None = None

    @abc.abstractmethod
    def _trace(self, options: Sequence[Option], concentrated: bool) -> Any:
        """Run the step on paper; return what :meth:`_learn` takes."""

    def _learn(self, key: _Key, found: Any) -> None:
        self._traced[key] = self._noted(found, key[0])

    @abc.abstractmethod
    def _progressing(self) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Return a context that gives what tells of the work in it."""

    def _noted(self, trace: StepTrace, options: Sequence[Option]) -> StepTrace:
        """Note in a trace what a place takes, which each trace of a plan has."""
        return trace if self.placement is None else self.placement.note(trace, options)
