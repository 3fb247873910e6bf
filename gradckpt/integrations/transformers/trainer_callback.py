"""A callback for every Trainer that is made after ``import gradckpt``; this module imports
transformers.

It checks the checkpointing kwargs when the Trainer is made. When training begins (after the Trainer
has turned checkpointing on, before its first step and its first evaluation), it enables the
transformers models whose layers were given our keys.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers.trainer_callback import TrainerCallback

from gradckpt._compression import warn_inactive
from gradckpt._enable import enable
from gradckpt._models.keywords import (
    OURS,
    Settings,
    check_alone,
    check_together,
    check_torchs,
    is_planned,
    means_ours,
    misspelt,
    plan_keywords,
    pop_our_keys,
    unknown_key,
)
from gradckpt._models.regions import Region, region_of, regions_in
from gradckpt._models.switch import log_larger_errors, take_off
from gradckpt._models.transformers_method import (
    ADAPTERS,
    Adapter,
    adapter_of,
    adapter_over,
    held_function,
    layers_of,
    original,
)
from gradckpt.integrations.transformers.models import (
    carry_input_grads,
    enable_from_kwargs,
    is_model,
    models_in,
    other_way,
    unwrap,
)

__all__ = ["GradckptFlag"]

logger = logging.getLogger("gradckpt")

#: What a Trainer's flag put in place of forwards, with ``recompute=False``.
BY_FLAG: weakref.WeakSet[Region] = weakref.WeakSet()

#: Models that a Trainer's flag plans.
PLANNED_BY_FLAG: weakref.WeakSet[Any] = weakref.WeakSet()


class GradckptFlag(TrainerCallback):  # type: ignore[misc]
    """Follow the checkpointing kwargs that mean gradckpt; do nothing for others."""

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Check the kwargs when the Trainer is made."""
        if model is not None:
            _check(args, model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Enable the model of this training, which ``model_init`` may just have made."""
        if model is not None:
            _act(args, model, optimizer)


def _read(args: Any) -> tuple[str, Any]:
    """Return the flag's name in this transformers, and the Trainer's kwargs."""
    name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    return name, getattr(args, f"{name}_kwargs", None)


def _check(args: Any, model: Any) -> None:
    """Check kwargs that mean us, when the Trainer is made.

    Raises:
        ValueError, TypeError: A key beside ours is misspelt, a value is unknown, or values exclude
            each other.
    """
    name, kwargs = _read(args)
    if not means_ours(kwargs):
        return
    inner = unwrap(model)
    if is_model(inner):
        adapter = adapter_of(inner)
        check_alone(kwargs, None if adapter is None or adapter.by_flag else adapter.settings)
    elif kwargs.get("compress") and not models_in(model):
        warn_inactive(
            f"{name}_kwargs has compress={kwargs['compress']!r}, but {type(model).__name__} is {other_way(model)}",
        )


def _act(args: Any, model: Any, optimizer: Any) -> None:
    """Prepare the training of ``model``, whose activation_checkpointing_enable the Trainer has
    called.

    The flag of an earlier Trainer ends here, unless this one's replaces it.
    """
    name, kwargs = _read(args)
    ours = means_ours(kwargs)
    near = None if ours else misspelt(kwargs)
    if not ours and not (ADAPTERS or BY_FLAG or PLANNED_BY_FLAG) and near is None:
        return
    on = bool(getattr(args, name, False))
    models = models_in(model)
    if near is not None:
        _check_misspelt(kwargs, near, models)
    for region in list(BY_FLAG):
        if any(region_of(part) is region for each in models for part in each.modules()):
            region.remove()
            BY_FLAG.discard(region)
    for each in list(PLANNED_BY_FLAG):
        if any(part is each for whole in models for part in whole.modules()):
            take_off(each)
            PLANNED_BY_FLAG.discard(each)
    for adapter in list(ADAPTERS):
        if adapter.model is not None:
            _settle(adapter, adapter.model, models, replaced=ours and on)
    if ours and not on and is_model(unwrap(model)):
        key = next(key for key in OURS if key in kwargs)
        warn_inactive(
            f"{name}_kwargs has {key}={kwargs[key]!r}, but {name} is not True, so the Trainer does not pass them on; "
            f"set {name}=True",
        )
    elif ours and on and is_planned(kwargs):
        _plan_from_flag(models, kwargs, optimizer)
    elif ours and on and not kwargs.get("recompute", True):
        _save_from_flag(models, kwargs)
    elif ours and on:
        _enable_from_flag(model, models, kwargs)


def _check_misspelt(kwargs: Mapping[str, Any], key: str, models: Iterable[Any]) -> None:
    """Check a key that layers were given and ignore; a library may have taken it out before.

    Raises:
        ValueError: It is a misspelt one of ours.
    """
    for each in models:
        if key in getattr(held_function(each), "keywords", {}) and not any(
            key in inspect.signature(layer.forward).parameters for _, layer in layers_of(each)
        ):
            raise unknown_key(key, kwargs[key])


def _settle(adapter: Adapter, whole: Any, models: Iterable[Any], replaced: bool) -> None:
    """Update an enabled model, which may not be part of this training."""
    inside = set(map(id, whole.modules()))
    if any(id(each) in inside for each in models):  # the Trainer's call has passed through the adapter
        if adapter.by_flag and not replaced:
            adapter.remove(whole)
        else:
            carry_input_grads(whole)
    elif adapter.by_flag and any(part is whole for each in models for part in each.modules()):
        adapter.remove(whole)


def _save_from_flag(models: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Compress what autograd saves in models whose layers were given torch's checkpoint for it."""
    keywords = dict(kwargs)
    settings = pop_our_keys(keywords, Settings())
    check_torchs(keywords)
    check_together(settings, keywords)
    for each in models:
        original(each)(enable=False)
        carry_input_grads(each)
        enable(each, settings.config, recompute=False, offload=settings.offload)
        BY_FLAG.update(regions_in(each))


def _plan_from_flag(models: Iterable[Any], kwargs: Mapping[str, Any], optimizer: Any) -> None:
    """Let a budget or a plan decide in models whose layers were given torch's checkpoint for it."""
    keywords = plan_keywords(kwargs)
    if "budget" in keywords and isinstance(getattr(optimizer, "optimizer", optimizer), torch.optim.Optimizer):
        keywords["optimizer"] = optimizer
    for each in models:
        original(each)(enable=False)
        carry_input_grads(each)
        enable(each, **keywords)
        PLANNED_BY_FLAG.add(each)


def _enable_from_flag(model: Any, models: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    """Enable the models that are not enabled."""
    for each in models:
        if adapter_over(each) is None:
            function = held_function(each)
            if not means_ours(getattr(function, "keywords", None)):
                if unwrap(model) is not each:  # in a module that does not pass the kwargs on
                    continue
                function = functools.partial(torch_checkpoint, **kwargs)
            if kwargs.get("offload", True) is not True:  # the Trainer takes it out, and transformers knows yes or no
                function = functools.partial(function, offload=kwargs["offload"])
            enable_from_kwargs(each, function, kwargs.get("every_n_layers", 1))
        adapter = adapter_over(each)
        if adapter is not None:
            codec = adapter.active.codec if adapter.active is not None else None
            layers, name = len(adapter.layers(each)), type(each).__name__
            logger.info("gradckpt: the Trainer's flag: compress=%r on %d layers of %s", codec, layers, name)
            log_larger_errors(each)
