"""Steps on paper of a set-up without weights: :class:`ConfigSteps`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from gradckpt._planning.blocks import Blocks, find_blocks, shortened, unrolled, whole
from gradckpt._planning.needed_memory import memory_use
from gradckpt._planning.step_trace import StepTrace, scaled, side_by_side_on_paper, trace_step
from gradckpt._settings import NONE, TORCH, quiet

__all__ = ["ConfigSteps"]


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
            self._shortens = all(side_by_side_on_paper(trials, None, lambda number: None))

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
