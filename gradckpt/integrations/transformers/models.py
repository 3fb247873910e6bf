"""Hugging Face transformers: the part of :func:`gradckpt.enable` and :func:`gradckpt.disable` for
its models.

Every way of turning checkpointing on in transformers (the old and the new method names, the
Trainer, PEFT, TRL's off-and-on around generation) ends in one method of the model,
``_set_gradient_checkpointing``. :func:`turn_on` puts an :class:`Adapter` in its place on that one
instance; no class and no module of transformers or torch is changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from gradckpt._engine.places import offload_of
from gradckpt._engine.selective import contexts_key
from gradckpt._models.inactivity import ADAPTER, describe, is_on
from gradckpt._models.keywords import Settings
from gradckpt._models.kinds import Tree, repeated_blocks
from gradckpt._models.rules import without_working_set
from gradckpt._models.transformers_method import (
    Adapter,
    InnerAdapter,
    adapter_of,
    has_every_n_layers,
    has_old_form,
    input_grad_hooks,
    replacement_of,
)
from gradckpt._models.working_set import are_called, install
from gradckpt._offload import Offload

__all__ = [
    "OF_DIFFUSERS",
    "adapters_in",
    "check_holds_none",
    "enable_from_kwargs",
    "is_enabled",
    "is_model",
    "settings_of",
    "turn_on",
    "turn_on_torchs",
    "unwrap",
]

#: What a model of diffusers is, and what to write for it.
OF_DIFFUSERS = (
    "a model of diffusers; call model.enable_gradient_checkpointing("
    'gradient_checkpointing_func=functools.partial(gradckpt.checkpoint, compress="int8"))'
)


def settings_from(options: Mapping[str, Any], every_n_layers: int = 1, offload: Offload | None = None) -> Settings:
    """Return the settings of layers from keywords of :func:`gradckpt.checkpoint`."""
    options, working_set = without_working_set(dict(options))
    keywords = {key: value for key, value in options.items() if key not in ("compress", "context_fn")}
    return Settings(
        options["compress"],
        options.get("context_fn"),
        every_n_layers=every_n_layers,
        offload=offload,
        keywords=keywords,
        working_set=working_set,
    )


def turn_on(model: Any, options: Mapping[str, Any], every_n_layers: int, offload: Offload | None) -> None:
    """Turn checkpointing on in a transformers model, through an :class:`Adapter`.

    Raises:
        ValueError: transformers cannot checkpoint the model, or other code has replaced the same
            method.
    """
    settings = settings_from(options, every_n_layers, offload)
    _check_model(model, settings)
    was_on = is_on(model)
    had_input_grads = bool(input_grad_hooks(model))
    adapter = Adapter(model, settings)
    adapter.install(model)
    turn_on_torchs(model, settings.every_n_layers)
    # These are set after the call, which the adapter takes for a call of the user.
    adapter.undo_on_remove, adapter.undo_input_grads = not was_on, not had_input_grads
    _check_taken(model, adapter)
    if settings.working_set:
        install(Tree(model), settings_of(model))


def is_enabled(model: Any, options: Mapping[str, Any], every_n_layers: int, offload: Offload | None) -> bool:
    """Return whether :func:`turn_on` was called with these arguments, and checkpointing is still
    on.
    """
    adapter = adapter_of(model)
    if adapter is None or adapter.by_flag or adapter.function is None or not is_on(model):
        return False
    settings = settings_from(options, every_n_layers, offload)
    same = adapter.active == settings.config and _comparable(adapter.settings) == _comparable(settings)
    return same and are_called(model)


def _comparable(settings: Settings) -> Settings:
    return dataclasses.replace(settings, context_fn=contexts_key(settings.context_fn))


def settings_of(model: Any) -> dict[Any, dict[str, Any]]:
    """Return the layers of an enabled model that checkpoint, with their keywords of
    gradckpt.checkpoint.
    """
    adapter = adapter_of(model)
    if adapter is None or adapter.function is None:
        return {}
    keywords = {key: value for key, value in adapter.function.keywords.items() if key != "use_reentrant"}  # type: ignore[attr-defined]
    if "offload" in keywords:
        keywords["offload"] = offload_of(keywords["offload"])
    return {layer: {**keywords, **adapter.settings.working_set} for layer in adapter.layers(model)}


def enable_from_kwargs(model: Any, function: Any, every_n_layers: int) -> None:
    """Carry out the Trainer's flag, on a model whose layers were given this function with our keys.

    It stays on after training, as checkpointing does; the next Trainer's flag replaces it.

    Raises:
        ValueError, TypeError: As :func:`enable`, and for errors in the kwargs.
    """
    _check_model(model, Settings())
    for part, held in adapters_in(model):
        held.remove(part)
    adapter = Adapter(model, Settings(), by_flag=True)
    try:
        adapter.install(model)
        adapter(True, function, every_n_layers)
        _check_taken(model, adapter)
        carry_input_grads(model)
    except BaseException:
        adapter.remove(model)
        raise


def turn_on_torchs(model: Any, every_n_layers: int) -> None:
    """Turn checkpointing on as transformers does: with torch's function, if no adapter replaces
    it.
    """
    kwargs = {"use_reentrant": False}
    every = {"every_n_layers": every_n_layers} if every_n_layers > 1 else {}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs, **every)
    else:
        # This is for transformers before 5.23. The adapter already knows every_n_layers.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    carry_input_grads(model)


def _check_taken(model: Any, adapter: Adapter) -> None:
    if adapter.function is not None and not adapter.layers(model):
        raise ValueError(
            f"gradckpt: {type(model).__name__} did not give its layers the checkpointing function it was called "
            f"with; {_with_modules(model)}"
        )


def carry_input_grads(model: Any) -> None:
    """Replace the local function of enable_input_require_grads by one that pickles.

    transformers has just hooked it onto the embeddings; the function of this module does the same.
    """
    for handle in input_grad_hooks(model):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = _require_grad


def _require_grad(module: Any, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def inner_model(model: Any) -> Any:
    """Return the transformers model inside PEFT, DataParallel, DDP or ``torch.compile``.

    A module that holds a single one also counts.
    """
    model = unwrap(model)
    found = [] if is_model(model) else models_in(model)
    return found[0] if len(found) == 1 else model


def unwrap(model: Any) -> Any:
    """Return the model inside PEFT, DataParallel, DDP or ``torch.compile``, which pass all calls
    on.
    """
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
    """Return the transformers models in a module, without those that lie inside others."""
    found: list[Any] = []
    inside: set[int] = set()
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():  # from the outside inwards
        if is_model(module):
            if id(module) not in inside:
                found.append(module)
            inside.update(map(id, module.modules()))
    return found


def check_holds_none(model: Any) -> None:
    """Check that no transformers models are inside, each of which has to be enabled by itself.

    Raises:
        ValueError: There are some.
    """
    count = len(models_in(model))
    if count:
        name = type(model).__name__
        raise ValueError(f"gradckpt: {name} holds {count} transformers models; call gradckpt.enable on each of them")


def is_model(model: Any) -> bool:
    """Return whether this is a transformers model; those of diffusers have only one of the
    methods.
    """
    return hasattr(type(model), ADAPTER) and hasattr(type(model), "gradient_checkpointing_enable")


def _with_modules(model: Any) -> str:
    """Return the call that names a model's blocks."""
    names = [each.kind.__name__ for each in repeated_blocks(model)]
    if not names:
        return "no block of it repeats, so call gradckpt.checkpoint in its forward"
    written = names[0] if len(names) == 1 else f"[{', '.join(names)}]"
    return f"call gradckpt.enable(model, modules={written})"


def _check_model(model: Any, settings: Settings) -> None:
    name = type(model).__name__
    marked = any(hasattr(module, "gradient_checkpointing") for module in model.modules())
    if not getattr(model, "supports_gradient_checkpointing", False) or not marked:
        raise ValueError(f"gradckpt: transformers cannot checkpoint {name}; {_with_modules(model)}")
    Adapter.check_alone(model)
    if isinstance(replacement_of(model), InnerAdapter):
        raise ValueError(
            f"gradckpt: the layers of this {name} are already enabled, as part of another model; call "
            "gradckpt.disable on that one first"
        )
    if replacement_of(model) is not None:
        raise ValueError(
            f"gradckpt: {describe(replacement_of(model))} already replaces {name}.{ADAPTER} on this instance; "
            "remove it before gradckpt.enable(model)"
        )
    if has_old_form(model):
        raise ValueError(
            f"gradckpt: {name} defines {ADAPTER} in the form of transformers < 4.35, which takes no checkpointing "
            f"function; {_with_modules(model)}"
        )
    if settings.every_n_layers > 1 and not has_every_n_layers(model):
        raise ValueError("gradckpt: every_n_layers above 1 needs transformers >= 5.17")


def other_way(model: Any) -> str:
    """Return a description of a model from another library, and what to write instead."""
    if callable(getattr(model, "enable_gradient_checkpointing", None)):
        return OF_DIFFUSERS
    return "not a transformers model; call gradckpt.enable(model) and turn the flag off"


def adapters_in(model: Any) -> list[tuple[Any, Adapter]]:
    """Return the enabled models in a module, each with its adapter."""
    return [(module, adapter) for module in model.modules() if (adapter := adapter_of(module)) is not None]
