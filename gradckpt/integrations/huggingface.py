"""Hugging Face transformers: :func:`enable`, :func:`disable` and the :class:`Handle` between them.

Every way of turning checkpointing on in transformers (the old and the new method names, the
Trainer, PEFT, TRL's off-and-on around generation) ends in one method of the model,
``_set_gradient_checkpointing``. :func:`enable` puts a :class:`Seam` in its place on that one
instance; no class and no module of transformers or torch is changed.

A failed ``enable`` leaves the model as it was.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from typing import Any

import torch

from gradckpt.config import Compress, CompressionConfig, parse_compress
from gradckpt.integrations.seam import Seam, has_every_n_layers, original, seam_of
from gradckpt.integrations.watch import SEAM, after_forward, before_forward, describe, is_on
from gradckpt.policies import PolicyLike, contexts_of

__all__ = ["Handle", "disable", "enable"]


def enable(
    model: Any,
    compress: Compress = "int8",
    every_n_layers: int = 1,
    *,
    replay: bool = False,
    policy: PolicyLike = None,
) -> Handle:
    """Turns on activation checkpointing of a transformers model, with compressed checkpoints.

    From then on ``gradient_checkpointing_kwargs={"compress": ...}`` (and the new name,
    ``activation_checkpointing_kwargs``) of ``TrainingArguments`` is understood too, and wins over
    what is said here; it may also carry ``replay``, ``min_numel`` and ``policy``. Leave ``use_reentrant`` out
    of that dict, or ``False``.

    Args:
        model: A ``PreTrainedModel``, or a wrapper of one (PEFT, DDP, ``torch.compile``).
        compress: ``None`` (torch's checkpointing, bit for bit), ``True``, a codec's name, a
            :class:`gradckpt.CompressionConfig` or its dict.
        every_n_layers: Checkpoint the layers 1, 1 + n, ...; transformers >= 5.17. A value above 1
            that transformers passes later wins over this one.
        replay: Let the forward run on the restored values; see :class:`gradckpt.CompressionConfig`.
        policy: Which outputs inside a layer are kept instead of computed again: a name
            (``"save_attention"``, ``"save_attention|save_matmuls:int8"``), a :class:`gradckpt.policies.Policy`, or
            what :func:`gradckpt.create_selective_checkpoint_contexts` takes. Costs memory, saves time.

    Returns:
        A :class:`Handle`, whose ``remove()`` undoes all of it. It may be dropped; :func:`disable` does the same.

    Raises:
        ValueError: unknown codec or policy; a model that transformers cannot checkpoint; enabled twice;
            something else in our place. The message says what to do instead.
    """
    config = parse_compress(compress)
    if not isinstance(replay, bool):
        raise TypeError(f"gradckpt: replay is True or False, not {replay!r}")
    if config is not None and replay:
        config = dataclasses.replace(config, replay=True)
    if isinstance(every_n_layers, bool) or not isinstance(every_n_layers, int):
        raise TypeError(f"gradckpt: every_n_layers is an int, not {every_n_layers!r}")
    if every_n_layers < 1:
        raise ValueError(f"gradckpt: every_n_layers is 1 or more, not {every_n_layers}")
    context_fn = contexts_of(policy)
    model = _unwrap(model)
    _check_model(model, every_n_layers)

    was_on = is_on(model)
    had_input_grads = bool(_input_grad_hooks(model))
    seam = Seam(model, config, replay, every_n_layers, context_fn)
    setattr(model, SEAM, seam)
    model.register_forward_pre_hook(before_forward)
    model.register_forward_hook(after_forward)
    turned_on = False
    try:
        _turn_on(model, every_n_layers)
        if not seam.layers(model):
            raise ValueError(
                f"gradckpt: {type(model).__name__} did not give its layers the checkpointing function it was called "
                "with; wrap its layers with gradckpt.checkpoint instead"
            )
        turned_on = True
    finally:
        # Set after the call: the seam takes every call for somebody else's.
        seam.undo_on_remove, seam.undo_input_grads = not was_on, not had_input_grads
        if not turned_on:
            seam.remove(model)
    return Handle(model, seam)


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
    # transformers has just hooked a local function onto the embeddings (enable_input_require_grads),
    # which no pickle can carry; the same as a function of this module can be carried.
    for handle in _input_grad_hooks(model):
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = _require_grad


def _require_grad(module: Any, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def _input_grad_hooks(model: Any) -> list[Any]:
    """What enable_input_require_grads left on the model: a list, before 5.0 a single one."""
    own = vars(model)
    return list(own.get("_require_grads_hooks") or filter(None, [own.get("_require_grads_hook")]))


def _unwrap(model: Any) -> Any:
    """The transformers model inside PEFT, DataParallel, DDP, ``torch.compile``."""
    for _ in range(8):
        if hasattr(type(model), SEAM):
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


def _check_model(model: Any, every_n_layers: int) -> None:
    name = type(model).__name__
    if not hasattr(type(model), SEAM) or not hasattr(model, "supports_gradient_checkpointing"):
        raise ValueError(
            f"gradckpt: {name} is not a transformers model; wrap its layers with gradckpt.checkpoint instead"
        )
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f"gradckpt: {name} does not support checkpointing in transformers; wrap its layers with "
            "gradckpt.checkpoint instead"
        )
    if not any(hasattr(module, "gradient_checkpointing") for module in model.modules()):
        raise ValueError(
            f"gradckpt: no module of this {name} can be checkpointed; wrap its layers with gradckpt.checkpoint instead"
        )
    if seam_of(model) is not None:
        raise ValueError(f"gradckpt: this {name} is already enabled; call .remove() or gradckpt.disable(model) first")
    if SEAM in vars(model):
        raise ValueError(
            f"gradckpt: {describe(vars(model)[SEAM])} already stands in for {name}.{SEAM} on this instance; "
            "remove it before gradckpt.enable(model)"
        )
    if "value" in inspect.signature(original(model)).parameters:
        raise ValueError(
            f"gradckpt: {name} defines {SEAM} in the form of transformers < 4.35, which takes no checkpointing "
            "function; wrap its layers with gradckpt.checkpoint instead"
        )
    if every_n_layers > 1 and not has_every_n_layers(model):
        raise ValueError("gradckpt: every_n_layers above 1 needs transformers >= 5.17")


def is_enabled(model: Any) -> bool:
    """:func:`enable` prepared this model, or the one that it wraps (PEFT, DataParallel, compile)."""
    return any(seam_of(module) is not None for module in model.modules()) if model is not None else False
