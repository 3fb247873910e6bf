"""Hugging Face transformers: :func:`enable`, :func:`disable` and the :class:`Handle` between them.

Every way of turning checkpointing on in transformers (the old and the new method names, the
Trainer, PEFT, TRL's off-and-on around generation) ends in one method of the model,
``_set_gradient_checkpointing``. :func:`enable` puts a :class:`Seam` in its place on that one
instance; no class and no module of transformers or torch is changed.

A failed ``enable`` leaves the model as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gradckpt.config import Compress, CompressionConfig, parse_compress
from gradckpt.integrations.kwargs import Settings, check_bool, check_every_n_layers, check_torchs, take
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
from gradckpt.policies import PolicyLike, contexts_of

__all__ = ["Handle", "disable", "enable"]


def enable(
    model: Any,
    compress: Compress = "int8",
    every_n_layers: int = 1,
    *,
    replay: bool = False,
    policy: PolicyLike = None,
    offload: bool = False,
) -> Handle:
    """Turns on activation checkpointing of a transformers model, with compressed checkpoints.

    From then on the keys of ``gradient_checkpointing_kwargs`` (by the new name,
    ``activation_checkpointing_kwargs``) that are ours are understood, and win over what is said here:
    ``compress``, ``replay``, ``min_numel``, ``policy``, ``every_n_layers`` and ``offload``. The Trainer's flag needs
    no ``enable``: the kwargs alone are enough.

    Args:
        model: A ``PreTrainedModel``, or a wrapper of one (PEFT, DDP, ``torch.compile``).
        compress: ``None`` (torch's checkpointing, bit for bit), ``True``, a codec's name, a
            :class:`gradckpt.CompressionConfig` or its dict.
        every_n_layers: Checkpoint the layers 1, 1 + n, ...; transformers >= 5.17. A value above 1
            that transformers passes later wins over this one.
        replay: Let the forward run on the restored values; see :class:`gradckpt.CompressionConfig`.
        policy: Which outputs inside a layer are kept instead of computed again: a name
            (``"save_attention"``, ``"save_attention|save_matmuls:int8"``), a :class:`gradckpt.policies.Policy`, or
            what :func:`gradckpt.compat.create_selective_checkpoint_contexts` takes. Costs memory, saves time.
        offload: Keep the compressed inputs in host memory, pinned where there is a device. With
            ``compress=None`` this is what transformers' own ``offload=True`` does.

    Returns:
        A :class:`Handle`, whose ``remove()`` undoes all of it. It may be dropped; :func:`disable` does the same.

    Raises:
        ValueError: unknown codec or policy; a model that transformers cannot checkpoint; enabled twice;
            something else in our place. The message says what to do instead.
    """
    config = parse_compress(compress)
    if config is not None and check_bool("replay", replay):
        config = dataclasses.replace(config, replay=True)
    settings = Settings(
        config=config,
        replay=check_bool("replay", replay),
        context_fn=contexts_of(policy),
        every_n_layers=check_every_n_layers(every_n_layers),
        offload=check_bool("offload", offload),
    )
    model = _unwrap(model)
    _check_model(model, settings)

    was_on = is_on(model)
    had_input_grads = bool(input_grad_hooks(model))
    seam = Seam(model, settings)
    turned_on = False
    try:
        seam.install(model)
        _turn_on(model, settings.every_n_layers)
        _check_taken(model, seam)
        turned_on = True
    finally:
        # Set after the call: the seam takes every call for somebody else's.
        seam.undo_on_remove, seam.undo_input_grads = not was_on, not had_input_grads
        if not turned_on:
            seam.remove(model)
    return Handle(model, seam)


def obey(model: Any, kwargs: Mapping[str, Any]) -> None:
    """What the Trainer's flag asks for, on a model that the Trainer has just turned checkpointing on for.

    It stays so after training, as checkpointing does; the next Trainer's flag takes its place.

    Raises:
        ValueError, TypeError: as :func:`enable`, and for what is wrong in the kwargs.
    """
    torchs = dict(kwargs)
    settings = take(torchs, Settings())
    check_torchs(torchs)
    model = _unwrap(model)
    _check_model(model, settings)
    seam = Seam(model, settings, by_flag=True)
    obeyed = False
    try:
        seam.install(model)
        seam(True, functools.partial(torch_checkpoint, **torchs))
        _check_taken(model, seam)
        carry_input_grads(model)
        obeyed = True
    finally:
        if not obeyed:
            seam.remove(model)


def disable(model: Any) -> None:
    """Undoes :func:`enable`: ``handle.remove()`` for those who did not keep the handle.

    Raises:
        ValueError: the model is not enabled.
    """
    model = _unwrap(model)
    seam = seam_of(model)
    if seam is None:
        raise ValueError(f"gradckpt: this {type(model).__name__} is not enabled; gradckpt.enable(model) comes first")
    seam.remove(model)


class Handle:
    """What :func:`enable` returns: ``remove()`` it, or use it in a ``with`` statement. Keeps no model alive.

    If it was :func:`enable` that turned checkpointing on, and nobody turned it on again since,
    removing turns it off; otherwise the layers get torch's checkpoint back.
    """

    def __init__(self, model: Any, seam: Seam) -> None:
        self._model = weakref.ref(model)
        self._seam = seam
        self._name = type(model).__name__

    @property
    def layers(self) -> int:
        """The number of layers that checkpoint through gradckpt now."""
        model = self._model()
        return 0 if model is None else self._seam.layers(model)

    @property
    def config(self) -> CompressionConfig | None:
        """What is in force, after what the Trainer passed; ``None``: no compression."""
        return self._seam.active

    def remove(self) -> None:
        """Puts the model back as it was. Again, or after the model died: does nothing."""
        model = self._model()
        if model is not None:
            self._seam.remove(model)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        if self._seam.removed:
            return f"<gradckpt handle: removed from {self._name}>"
        codec = self.config.codec if self.config else None
        return f"<gradckpt handle: compress={codec!r} on {self.layers} layers of {self._name}>"


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
            "with; wrap its layers with gradckpt.checkpoint instead"
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


def _unwrap(model: Any) -> Any:
    """The transformers model inside PEFT, DataParallel, DDP, ``torch.compile``, or the only one in a module."""
    for _ in range(8):
        if _is_model(model):
            return model
        if callable(getattr(type(model), "get_base_model", None)):
            model = model.get_base_model()
        elif isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod
        elif type(model).__module__.startswith("torch.nn.parallel") and hasattr(model, "module"):
            model = model.module
        else:
            break
    found = models_in(model)
    return found[0] if len(found) == 1 else model


def models_in(model: Any) -> list[Any]:
    """The transformers models of a module, without those that lie inside others."""
    found: list[Any] = []
    inside: set[int] = set()
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():  # from the outside inwards
        if _is_model(module):
            if id(module) not in inside:
                found.append(module)
            inside.update(map(id, module.modules()))
    return found


def _is_model(model: Any) -> bool:
    return hasattr(type(model), SEAM)


def _check_model(model: Any, settings: Settings) -> None:
    name = type(model).__name__
    count = len(models_in(model))
    if not _is_model(model) and count:
        raise ValueError(
            f"gradckpt: {name} is not a transformers model, but holds {count}; call gradckpt.enable on each"
        )
    if not _is_model(model) or not hasattr(model, "supports_gradient_checkpointing"):
        raise ValueError(f"gradckpt: {name} is {_other_way(model)}")
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"gradckpt: {name} does not support checkpointing in transformers; wrap its layers with "
            "gradckpt.checkpoint instead"
        )
    if not any(hasattr(module, "gradient_checkpointing") for module in model.modules()):
        raise ValueError(
            f"gradckpt: no module of this {name} can be checkpointed; wrap its layers with gradckpt.checkpoint instead"
        )
    _check_enabled_once(model)
    _check_checkpointed_once(model)
    if stands_in(model) is not None:
        raise ValueError(
            f"gradckpt: {describe(stands_in(model))} already stands in for {name}.{SEAM} on this instance; "
            "remove it before gradckpt.enable(model)"
        )
    if has_old_form(model):
        raise ValueError(
            f"gradckpt: {name} defines {SEAM} in the form of transformers < 4.35, which takes no checkpointing "
            "function; wrap its layers with gradckpt.checkpoint instead"
        )
    if settings.every_n_layers > 1 and not has_every_n_layers(model):
        raise ValueError("gradckpt: every_n_layers above 1 needs transformers >= 5.17")


def _other_way(model: Any) -> str:
    """Of a model that is none of transformers: what it is, and what to write instead."""
    if callable(getattr(model, "enable_gradient_checkpointing", None)):
        function = 'functools.partial(gradckpt.checkpoint, compress="int8")'
        return f"a model of diffusers; call model.enable_gradient_checkpointing(gradient_checkpointing_func={function})"
    if callable(getattr(model, "set_grad_checkpointing", None)):
        return (
            "a model of timm; call model.set_grad_checkpointing() and train inside `with "
            'gradckpt.patched("int8"):`, or choose its blocks with gradckpt.apply'
        )
    return "not a transformers model; wrap its layers with gradckpt.checkpoint, or choose them with gradckpt.apply"


def _check_enabled_once(model: Any) -> None:
    name = type(model).__name__
    inner = next((type(module).__name__ for module in model.modules() if seam_of(module) is not None), None)
    if inner is not None:
        part = "" if inner == name else f" (its {inner} is)"
        raise ValueError(
            f"gradckpt: this {name} is already enabled{part}; call .remove() or gradckpt.disable(model) first"
        )
    if isinstance(stands_in(model), InnerSeam):
        raise ValueError(
            f"gradckpt: the layers of this {name} are already enabled, as part of another model; call "
            "gradckpt.disable on that one first"
        )


def _check_checkpointed_once(model: Any) -> None:
    overlap = overlap_in(model)
    if overlap is not None:
        label, how, undo = overlap
        raise ValueError(
            f"gradckpt: {label} is already {how}, so its layers would be recomputed twice; {undo}, or do without "
            "gradckpt.enable"
        )


def seam_in(model: Any) -> Seam | None:
    """The seam of the transformers model that this is or wraps."""
    return seam_of(_unwrap(model))
