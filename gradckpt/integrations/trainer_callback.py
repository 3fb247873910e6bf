"""``gradckpt.stats()`` among what the Trainer of Hugging Face logs: ``Trainer(..., callbacks=[GradckptCallback()])``.

The Trainer calls the callbacks of its user after its reporters (TensorBoard, Weights & Biases, ...), too late for
them to see a number that is added to a log. Its default callbacks come first. So importing this module adds one to
them, which does nothing but let a :class:`GradckptCallback` of the same Trainer have its turn before the reporters.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import transformers.trainer
from transformers.trainer_callback import TrainerCallback

from gradckpt.stats import Stats, stats

__all__ = ["GradckptCallback"]

#: What of stats().scalars() is logged; the rest is seldom looked at, and the Trainer prints everything.
SCALARS = ("asked", "compressed", "bytes_in_mib", "bytes_out_mib", "ratio", "peak_live_mib")

_PREFIX = "gradckpt/"


class GradckptCallback(TrainerCallback):  # type: ignore[misc]
    """Adds ``gradckpt/compressed``, ``gradckpt/asked``, ``gradckpt/bytes_in_mib``, ``gradckpt/bytes_out_mib`` and
    ``gradckpt/ratio`` of the steps since the last log, and ``gradckpt/peak_live_mib``, to every log of a training loss.

    They are numbers of this process, as those of the Trainer are; ``ratio`` is missing where nothing was compressed.
    """

    def __init__(self) -> None:
        self._since: Stats | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = stats()
        first = _First.of(state)
        if first is not None:
            first.callback = self

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.add_to(logs, state)

    def add_to(self, logs: Any, state: Any) -> None:
        """To the log, and to the Trainer's copy of it in ``log_history``; once."""
        if not isinstance(logs, dict) or "loss" not in logs or _PREFIX + SCALARS[0] in logs:
            return
        now = stats()
        scalars = (now if self._since is None else now.since(self._since)).scalars(_PREFIX)
        self._since = now
        added = {_PREFIX + name: scalars[_PREFIX + name] for name in SCALARS if _PREFIX + name in scalars}
        logs.update(added)
        copy = state.log_history[-1] if state.log_history else {}
        if copy.get("step") == state.global_step and "loss" in copy:
            copy.update(added)


class _First(TrainerCallback):  # type: ignore[misc]
    """Of every Trainer, before its reporters; the callback that it calls tells it so when a training begins."""

    _here = threading.local()  # the one that began last in this thread, and the state it was called with

    def __init__(self) -> None:
        self.callback: GradckptCallback | None = None

    @classmethod
    def of(cls, state: Any) -> _First | None:
        """The one of the Trainer that is calling ``on_train_begin`` now."""
        began = getattr(cls._here, "began", None)
        if began is None or began[1]() is not state:
            return None
        first: _First | None = began[0]()
        return first

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.callback = None
        self._here.began = weakref.ref(self), weakref.ref(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.callback is not None:
            self.callback.add_to(logs, state)


if _First not in transformers.trainer.DEFAULT_CALLBACKS:
    transformers.trainer.DEFAULT_CALLBACKS.append(_First)
