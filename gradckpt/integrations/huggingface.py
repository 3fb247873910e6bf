"""Hugging Face transformers: the part of :func:`gradckpt.enable` and :func:`gradckpt.disable` for its models.

Every way of turning checkpointing on in transformers (the old and the new method names, the
Trainer, PEFT, TRL's off-and-on around generation) ends in one method of the model,
``_set_gradient_checkpointing``. :func:`turn_on` puts a :class:`Seam` in its place on that one
instance; no class and no module of transformers or torch is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from gradckpt.integrations.kwargs import Settings
from gradckpt.integrations.offload import offloaded
from gradckpt.integrations.seam import (
    InnerSeam,
    Seam,
    has_every_n_layers,
    has_old_form,
    input_grad_hooks,
    overlap_in,
    seam_of,
    stands_in,
)
from gradckpt.integrations.watch import SEAM, describe, is_on
from gradckpt.policies import contexts_key

__all__ = ["check_holds_none", "is_enabled", "is_model", "obey", "seams_in", "settings_of", "turn_on", "unwrap"]


def settings_from(options: Mapping[str, Any], every_n_layers: int = 1, offload: bool = False) -> Settings:
    """Return what keywords of :func:`gradckpt.checkpoint` say of the layers."""
    keywords = {key: value for key, value in options.items() if key not in ("compress", "context_fn")}
    return Settings(options["compress"], options.get("context_fn"), every_n_layers, offload, keywords)


def turn_on(model: Any, options: Mapping[str, Any], every_n_layers: int, offload: bool) -> None:
    """Turn checkpointing on in a transformers model, its layers' calls led through a :class:`Seam`.

    Raises:
        ValueError: a model that transformers cannot checkpoint, or with something else in our place.
    """
    settings = settings_from(options, every_n_layers, offload)
    _check_model(model, settings)
    was_on = is_on(model)
    had_input_grads = bool(input_grad_hooks(model))
    seam = Seam(model, settings)
    seam.install(model)
    _turn_on(model, settings.every_n_layers)
    # Set after the call, which the seam takes for a call of the user's.
    seam.undo_on_remove, seam.undo_input_grads = not was_on, not had_input_grads
    _check_taken(model, seam)


def is_enabled(model: Any, options: Mapping[str, Any], every_n_layers: int, offload: bool) -> bool:
    """Return whether :func:`turn_on` was called with these arguments, and checkpointing is still on."""
    seam = seam_of(model)
    if seam is None or seam.by_flag or seam.function is None or not is_on(model):
        return False
    asked = settings_from(options, every_n_layers, offload)
    return seam.active == asked.config and _comparable(seam.settings) == _comparable(asked)


def _comparable(settings: Settings) -> Settings:
    return dataclasses.replace(settings, context_fn=contexts_key(settings.context_fn))


def settings_of(model: Any) -> dict[Any, dict[str, Any]]:
    """Return the layers of an enabled model that checkpoint, each with the keywords of gradckpt.checkpoint."""
    seam = seam_of(model)
    if seam is None or seam.function is None:
        return {}
    keywords = {key: value for key, value in seam.function.keywords.items() if key != "use_reentrant"}  # type: ignore[attr-defined]
    if seam.active is not None:  # without leaves=True, which the seam adds for what enable_input_require_grads made
        keywords["compress"] = seam.active
    if seam.function.func is offloaded:  # type: ignore[attr-defined]
        keywords["offload"] = True
    return {layer: dict(keywords) for layer in seam.layers(model)}


def obey(model: Any, function: Any, every_n_layers: int) -> None:
    """Do what the Trainer's flag asks for, on a model whose layers were given this function with our keys.

    It stays so after training, as checkpointing does; the next Trainer's flag takes its place.

    Raises:
        ValueError, TypeError: as :func:`enable`, and for what is wrong in the kwargs.
    """
    _check_model(model, Settings())
    for part, held in seams_in(model):
        held.remove(part)
    seam = Seam(model, Settings(), by_flag=True)
    obeyed = False
    try:
        seam.install(model)
        seam(True, function, every_n_layers)
        _check_taken(model, seam)
        carry_input_grads(model)
        obeyed = True
    finally:
        if not obeyed:
            seam.remove(model)


def _turn_on(model: Any, every_n_layers: int) -> None:
    kwargs = {"use_reentrant": False}
    every = {"every_n_layers": every_n_layers} if every_n_layers > 1 else {}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs, **every)
    else:
        # Before 5.23. The seam already knows every_n_layers.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    carry_input_grads(model)


def _check_taken(model: Any, seam: Seam) -> None:
    if seam.function is not None and not seam.layers(model):
        raise ValueError(
            f"gradckpt: {type(model).__name__} did not give its layers the checkpointing function it was called "
            "with; name its blocks, enable(model, modules=Block)"
        )


def carry_input_grads(model: Any) -> None:
    """transformers has just hooked a local function onto the embeddings (enable_input_require_grads),
    which no pickle can carry; the same as a function of this module can be carried."""
    for handle in input_grad_hooks(model):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = _require_grad


def _require_grad(module: Any, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def inner_model(model: Any) -> Any:
    """Return the transformers model inside PEFT, DataParallel, DDP, ``torch.compile``, or the only one in a module."""
    model = unwrap(model)
    found = [] if is_model(model) else models_in(model)
    return found[0] if len(found) == 1 else model


def unwrap(model: Any) -> Any:
    """What is inside PEFT, DataParallel, DDP, ``torch.compile``, which pass everything on."""
    for _ in range(8):
        if is_model(model):
            break
        if callable(getattr(type(model), "get_base_model", None)):
            model = model.get_base_model()
        elif isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod
        elif type(model).__module__.startswith("torch.nn.parallel") and hasattr(model, "module"):
            model = model.module
        else:
            break
    return model


def models_in(model: Any) -> list[Any]:
    """The transformers models of a module, without those that lie inside others."""
    found: list[Any] = []
    inside: set[int] = set()
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():  # from the outside inwards
        if is_model(module):
            if id(module) not in inside:
                found.append(module)
            inside.update(map(id, module.modules()))
    return found


def check_holds_none(model: Any) -> None:
    """Raise ``ValueError`` where transformers models are inside, of which each has to be enabled by itself."""
    count = len(models_in(model))
    if count:
        name = type(model).__name__
        raise ValueError(f"gradckpt: {name} holds {count} transformers models; call gradckpt.enable on each of them")


def is_model(model: Any) -> bool:
    """Return whether this is a model of transformers; diffusers' have the same method, and others to turn it on."""
    return hasattr(type(model), SEAM) and hasattr(type(model), "gradient_checkpointing_enable")


def _check_model(model: Any, settings: Settings) -> None:
    name = type(model).__name__
    marked = any(hasattr(module, "gradient_checkpointing") for module in model.modules())
    if not getattr(model, "supports_gradient_checkpointing", False) or not marked:
        raise ValueError(
            f"gradckpt: transformers cannot checkpoint {name}; name its blocks, enable(model, modules=Block)"
        )
    _check_checkpointed_once(model)
    if isinstance(stands_in(model), InnerSeam):
        raise ValueError(
            f"gradckpt: the layers of this {name} are already enabled, as part of another model; call "
            "gradckpt.disable on that one first"
        )
    if stands_in(model) is not None:
        raise ValueError(
            f"gradckpt: {describe(stands_in(model))} already stands in for {name}.{SEAM} on this instance; "
            "remove it before gradckpt.enable(model)"
        )
    if has_old_form(model):
        raise ValueError(
            f"gradckpt: {name} defines {SEAM} in the form of transformers < 4.35, which takes no checkpointing "
            "function; name its blocks, enable(model, modules=Block)"
        )
    if settings.every_n_layers > 1 and not has_every_n_layers(model):
        raise ValueError("gradckpt: every_n_layers above 1 needs transformers >= 5.17")


def other_way(model: Any) -> str:
    """Return what a model is that is none of transformers, and what to write instead."""
    if callable(getattr(model, "enable_gradient_checkpointing", None)):
        function = 'functools.partial(gradckpt.checkpoint, compress="int8")'
        return f"a model of diffusers; call model.enable_gradient_checkpointing(gradient_checkpointing_func={function})"
    return "not a transformers model; call gradckpt.enable(model) and leave the keys out"


def _check_checkpointed_once(model: Any) -> None:
    overlap = overlap_in(model)
    if overlap is not None:
        label, how, undo = overlap
        raise ValueError(
            f"gradckpt: {label} is already {how}, so its layers would be recomputed twice; {undo}, or do without "
            "gradckpt.enable"
        )


def seams_in(model: Any) -> list[tuple[Any, Seam]]:
    """Return the enabled models in a module, each with its seam."""
    return [(module, seam) for module in model.modules() if (seam := seam_of(module)) is not None]
