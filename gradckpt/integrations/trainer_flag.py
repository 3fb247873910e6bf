"""The Trainer's flag: our keys in ``TrainingArguments(gradient_checkpointing_kwargs=...)`` act alone.

transformers hands keys that it does not know to torch's checkpoint. So once gradckpt is imported, every Trainer gets
one more callback, by transformers' own list of default callbacks. No class is patched.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gradckpt.imports import after_import


def _install(trainer: ModuleType) -> None:
    from gradckpt.integrations.trainer_callback import GradckptFlag

    callbacks = getattr(trainer, "DEFAULT_CALLBACKS", None)
    if not isinstance(callbacks, list):
        raise RuntimeError(
            f"{trainer.__name__} has no list DEFAULT_CALLBACKS, so the Trainer's flag does nothing; call "
            "gradckpt.enable(model)"
        )
    earlier = [i for i, each in enumerate(callbacks) if _name(each) == _name(GradckptFlag)]
    if earlier:  # of a gradckpt that was imported before
        callbacks[earlier[0]] = GradckptFlag
    else:
        callbacks.append(GradckptFlag)


def _name(callback: Any) -> tuple[Any, Any]:
    """Also of what is no class: transformers takes instances."""
    return getattr(callback, "__module__", None), getattr(callback, "__qualname__", None)


def watch() -> None:
    """Now, when transformers' Trainer is imported already; else when it will be."""
    after_import("transformers.trainer", _install)
