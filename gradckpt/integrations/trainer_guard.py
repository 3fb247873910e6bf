"""Says so when the flag is set in TrainingArguments but nothing listens to it.

``TrainingArguments(gradient_checkpointing_kwargs={"compress": ...})`` acts only on a model that
``gradckpt.enable(model)`` prepared: without it, transformers hands the unknown key to the layers,
which swallow it. So once gradckpt is imported, every Trainer gets one more callback, by
transformers' own list of default callbacks; it raises before the first step. No class is patched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from gradckpt.integrations.huggingface import is_enabled

_TRAINER = "transformers.trainer"
_FIELDS = ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs")
_KEYS = ("compress", "replay")


def check(args: Any, model: Any) -> None:
    """``ValueError`` when our keys are in the arguments and the model was not prepared."""
    for field in _FIELDS:
        given = getattr(args, field, None) or {}
        key = next((k for k in _KEYS if isinstance(given, dict) and given.get(k)), None)
        if key is not None and not is_enabled(model):
            raise ValueError(
                f"gradckpt: {field} asks for {key}={given[key]!r}, but this model was not prepared: call "
                "gradckpt.enable(model) before building the Trainer"
            )


def _install(trainer: ModuleType) -> None:
    from transformers.trainer_callback import TrainerCallback

    class GradckptGuard(TrainerCallback):  # type: ignore[misc]
        """Raises when the checkpointing kwargs ask for compression that nothing provides."""

        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            check(args, model)

    callbacks = trainer.DEFAULT_CALLBACKS
    if not any(c.__name__ == GradckptGuard.__name__ for c in callbacks):
        callbacks.append(GradckptGuard)


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets the import of transformers.trainer run as always, then installs; once."""

    def __init__(self) -> None:
        self.spec: importlib.machinery.ModuleSpec | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _TRAINER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = self.loader  # type: ignore[union-attr]
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        _install(module)


def watch() -> None:
    """Now, when transformers' Trainer is imported already; else when it will be."""
    trainer = sys.modules.get(_TRAINER)
    if trainer is not None:
        _install(trainer)
    else:
        sys.meta_path.insert(0, _AfterImport())
