"""The Trainer's flag: our keys in ``TrainingArguments(gradient_checkpointing_kwargs=...)`` act alone.

transformers hands keys that it does not know to the layers, which swallow them. So once gradckpt is imported, every
Trainer gets one more callback, by transformers' own list of default callbacks. It reads the kwargs when the Trainer is
built, and says what is wrong in them; when training begins (after the Trainer has turned checkpointing on, before
its first step and its first evaluation) it does what they ask to the model at hand, which ``model_init`` may have made
a moment ago. No class is patched.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from gradckpt.config import warn_inactive
from gradckpt.imports import after_import
from gradckpt.integrations.huggingface import carry_input_grads, obey, seam_in
from gradckpt.integrations.kwargs import TORCHS, Settings, check_torchs, means_ours, take
from gradckpt.integrations.stray_keys import listen

_NAMES = ("activation_checkpointing", "gradient_checkpointing")


def asked(args: Any) -> tuple[str, Mapping[str, Any] | None]:
    """The name of the flag, and the kwargs when they mean us."""
    for name in _NAMES:
        kwargs = getattr(args, f"{name}_kwargs", None)
        if isinstance(kwargs, Mapping) and means_ours(kwargs):
            return name, kwargs
    return _NAMES[0], None


def check(args: Any, model: Any) -> None:
    """What can be said when the Trainer is built.

    Raises:
        ValueError, TypeError: an unknown key beside ours, or a value that there is not.
    """
    _, kwargs = asked(args)
    if kwargs is not None:
        seam = seam_in(model)
        torchs = dict(kwargs)
        take(torchs, seam.settings if seam is not None and not seam.by_flag else Settings())
        check_torchs(torchs)


def act(args: Any, model: Any) -> None:
    """Training of ``model`` begins, and the Trainer has called its activation_checkpointing_enable."""
    name, kwargs = asked(args)
    turned_on = any(getattr(args, each, False) for each in _NAMES)
    if not turned_on:
        if kwargs is not None:
            key = next(key for key in kwargs if key not in TORCHS)
            warn_inactive(
                f"{name}_kwargs has {key}={kwargs[key]!r}, but {name} is not True, so the Trainer passes them to "
                f"nobody; set {name}=True",
            )
        return
    seam = seam_in(model)
    if seam is not None and seam.by_flag:
        # Another Trainer's, or this one's last train(): what it said is over.
        seam.remove(seam.model)
        seam = None
    if seam is not None:
        carry_input_grads(seam.model)
    elif kwargs is not None:
        obey(model, kwargs)


def _install(trainer: ModuleType) -> None:
    from transformers.trainer_callback import TrainerCallback

    class GradckptFlag(TrainerCallback):  # type: ignore[misc]
        """Does what the checkpointing kwargs ask of gradckpt."""

        def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if model is not None:
                check(args, model)

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if model is not None:
                act(args, model)

    callbacks = trainer.DEFAULT_CALLBACKS
    if not any(c.__name__ == GradckptFlag.__name__ for c in callbacks):
        callbacks.append(GradckptFlag)


def watch() -> None:
    """Now, when transformers is imported already; else when it will be."""
    after_import("transformers.trainer", _install)
    after_import("transformers.modeling_utils", listen)
