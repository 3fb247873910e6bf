"""The Trainer's flag: our keys in ``TrainingArguments(activation_checkpointing_kwargs=...)`` need
no other call.

transformers passes unknown keys on to torch's checkpoint. Therefore, once gradckpt is imported,
every Trainer gets one more callback, through transformers' own list of default callbacks. No class
is patched.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gradckpt._import_hooks import after_import


def _install(trainer: ModuleType) -> None:
    from gradckpt.integrations.transformers.trainer_callback import GradckptFlag

    callbacks = getattr(trainer, "DEFAULT_CALLBACKS", None)
    if not isinstance(callbacks, list):
        raise RuntimeError(
            f"gradckpt: {trainer.__name__} has no list DEFAULT_CALLBACKS, so the Trainer's flag does nothing; call "
            "gradckpt.enable(model)"
        )
    earlier = [i for i, each in enumerate(callbacks) if _name(each) == _name(GradckptFlag)]
    if earlier:  # from a gradckpt that was imported before
        callbacks[earlier[0]] = GradckptFlag
    else:
        callbacks.append(GradckptFlag)


def _name(callback: Any) -> tuple[Any, Any]:
    """Return the qualified name of a callback; transformers also takes instances."""
    return getattr(callback, "__module__", None), getattr(callback, "__qualname__", None)


def hook_import() -> None:
    """Install the callback now if transformers' Trainer is imported, else when it will be."""
    after_import("transformers.trainer", _install)
