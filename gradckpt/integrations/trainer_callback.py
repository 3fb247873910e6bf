"""The callback of every Trainer that is made once gradckpt is imported; importing this module imports transformers.

It checks the checkpointing kwargs when the Trainer is made. When training begins (after the Trainer has turned
checkpointing on, before its first step and its first evaluation) it enables the models of transformers whose layers
were given our keys.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers.trainer_callback import TrainerCallback

from gradckpt.config import warn_inactive
from gradckpt.integrations.huggingface import carry_input_grads, is_model, models_in, obey, other_way, unwrap
from gradckpt.integrations.kwargs import OURS, check_alone, means_ours
from gradckpt.integrations.seam import SEAMS, Seam, held_function, seam_of, seam_over

__all__ = ["GradckptFlag"]

logger = logging.getLogger("gradckpt")


class GradckptFlag(TrainerCallback):  # type: ignore[misc]
    """Obey the checkpointing kwargs that mean gradckpt; do nothing for others."""

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Check the kwargs when the Trainer is made."""
        if model is not None:
            _check(args, model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Enable the model of this training, which ``model_init`` may have made a moment ago."""
        if model is not None:
            _act(args, model)


def _read(args: Any) -> tuple[str, Any]:
    """What this Trainer reads: the name of the flag in this transformers, and the kwargs."""
    name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    return name, getattr(args, f"{name}_kwargs", None)


def _check(args: Any, model: Any) -> None:
    """Say what is wrong in kwargs that mean us, when the Trainer is made.

    Raises:
        ValueError, TypeError: a misspelt key beside ours, a value that does not exist, values that exclude each other.
    """
    name, kwargs = _read(args)
    if not means_ours(kwargs):
        return
    inner = unwrap(model)
    if is_model(inner):
        seam = seam_of(inner)
        check_alone(kwargs, None if seam is None or seam.by_flag else seam.settings)
    elif kwargs.get("compress") and not models_in(model):
        warn_inactive(
            f"{name}_kwargs has compress={kwargs['compress']!r}, but {type(model).__name__} is {other_way(model)}",
        )


def _act(args: Any, model: Any) -> None:
    """Training of ``model`` begins, and the Trainer has called its activation_checkpointing_enable.

    What an earlier Trainer's flag said ends here, unless this one's replaces it.
    """
    name, kwargs = _read(args)
    ours = means_ours(kwargs)
    if not ours and not SEAMS:
        return
    on = bool(getattr(args, name, False))
    models = models_in(model)
    for seam in list(SEAMS):
        if seam.model is not None:
            _settle(seam, seam.model, models, replaced=ours and on)
    if ours and not on and is_model(unwrap(model)):
        key = next(key for key in OURS if key in kwargs)
        warn_inactive(
            f"{name}_kwargs has {key}={kwargs[key]!r}, but {name} is not True, so the Trainer does not pass them on; "
            f"set {name}=True",
        )
    elif ours and on:
        _obey(model, models, kwargs)


def _settle(seam: Seam, whole: Any, models: Iterable[Any], replaced: bool) -> None:
    """Look at an enabled model, which may have nothing to do with those that are trained."""
    inside = set(map(id, whole.modules()))
    if any(id(each) in inside for each in models):  # the Trainer's call has passed through the seam
        if seam.by_flag and not replaced:
            seam.remove(whole)
        else:
            carry_input_grads(whole)
    elif seam.by_flag and any(part is whole for each in models for part in each.modules()):
        seam.remove(whole)


def _obey(model: Any, models: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Enable what is not enabled."""
    for each in models:
        if seam_over(each) is None:
            function = held_function(each)
            if not means_ours(getattr(function, "keywords", None)):
                if unwrap(model) is not each:  # in a module that keeps the kwargs to itself
                    continue
                function = functools.partial(torch_checkpoint, **kwargs)
            obey(each, function, kwargs.get("every_n_layers", 1))
        seam = seam_over(each)
        if seam is not None:
            codec = seam.active.codec if seam.active is not None else None
            layers, name = len(seam.layers(each)), type(each).__name__
            logger.info("the Trainer's flag: compress=%r on %d layers of %s", codec, layers, name)
