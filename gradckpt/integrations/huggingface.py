"""Hugging Face transformers: :func:`enable`, :func:`disable` and the :class:`Handle` between them.

Every way of turning checkpointing on in transformers (the old and the new method names, the
Trainer, PEFT, TRL's off-and-on around generation) ends in one method of the model,
``_set_gradient_checkpointing``. :func:`enable` puts a :class:`_Seam` in its place on that one
instance; no class and no module of transformers or torch is changed.

Rules:
    1. ``compress`` in the kwargs that transformers passes on > what ``enable`` said > off.
       A codec's name there changes the codec only; a whole config or its dict changes all of it.
    2. The seam refers to its model weakly, and strongly only inside a pickle or a deep copy.
    3. A failed ``enable`` leaves the model as it was.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt
from gradckpt.config import Compress, CompressionConfig, parse_compress, warn_inactive
from gradckpt.policies import PolicyLike, contexts_of

__all__ = ["Handle", "disable", "enable"]

logger = logging.getLogger("gradckpt")

SEAM = "_set_gradient_checkpointing"

#: Model calls without a single compressed tensor before the warning.
PATIENCE = 2

_OFFLOAD = (
    "gradckpt: offload=True makes transformers call torch's checkpoint from a function of its own, so nothing would be "
    "compressed; leave offload out and run the forward under torch.autograd.graph.save_on_cpu(): compressed payloads "
    "follow outer saved-tensor hooks"
)

_EVERY_N_LAYERS = "gradckpt: every_n_layers above 1 needs transformers >= 5.17"


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

    was_on = _is_on(model)
    had_input_grads = bool(_input_grad_hooks(model))
    seam = _Seam(model, config, replay, every_n_layers, context_fn)
    setattr(model, SEAM, seam)
    model.register_forward_pre_hook(_before_forward)
    model.register_forward_hook(_after_forward)
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
    seam = _seam_of(model)
    if seam is None:
        raise ValueError(f"gradckpt: this {type(model).__name__} is not enabled; gradckpt.enable(model) comes first")
    seam.remove(model)


class Handle:
    """What :func:`enable` returns: ``remove()`` it, or use it in a ``with`` statement. Keeps no model alive.

    If it was :func:`enable` that turned checkpointing on, and nobody turned it on again since,
    removing turns it off; otherwise the layers get torch's checkpoint back.
    """

    def __init__(self, model: Any, seam: _Seam) -> None:
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


class _Seam:
    """Stands for ``model._set_gradient_checkpointing`` on one instance, with the same parameters."""

    def __init__(
        self,
        model: Any,
        config: CompressionConfig | None,
        replay: bool,
        every_n_layers: int,
        context_fn: Callable[[], Any] | None = None,
    ) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        self.config = config  # what enable() said
        self.active = config  # what the last call settled on
        self.replay = replay
        self.every_n_layers = every_n_layers
        self.context_fn = context_fn  # of the policy that enable() was given
        self.function: Callable[..., Any] | None = None  # ours, as the layers hold it; None: not ours
        self.stock: Callable[..., Any] | None = None  # torch's, with the same keywords
        self.undo_on_remove = False
        self.undo_input_grads = False
        self.removed = False
        self.watch = _Watch()

    def __call__(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = torch_checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        model = self._model()
        if model is None:
            raise ReferenceError("gradckpt: the model of this _set_gradient_checkpointing is gone")
        every = {"every_n_layers": every_n_layers} if _has_every_n_layers(model) else {}
        if self.removed or not enable:
            _original(model)(enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, **every)
            return
        function, stock, config, asked = self.choose(gradient_checkpointing_func)
        if every:
            every["every_n_layers"] = next((n for n in (asked, every_n_layers) if n != 1), self.every_n_layers)
        elif asked != 1:
            raise ValueError(_EVERY_N_LAYERS)
        _original(model)(enable=True, gradient_checkpointing_func=function, **every)
        # Published last: a refused call leaves the seam as it was.
        if config != self.active:
            self.watch = _Watch()
        self.active = config
        self.function, self.stock = (function, stock) if stock is not None else (None, None)
        self.undo_on_remove = False

    def choose(
        self, func: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None, CompressionConfig | None, int]:
        """The function for the layers, torch's equivalent (None: not ours), the config, ``every_n_layers``."""
        given = func if isinstance(func, functools.partial) else functools.partial(func)
        base, keywords = given.func, dict(given.keywords)
        config = self.resolve(keywords)
        asked = keywords.pop("every_n_layers", 1)
        context_fn = contexts_of(keywords.pop("policy")) if "policy" in keywords else self.context_fn
        if context_fn is not None and "context_fn" in keywords:
            raise ValueError("gradckpt: policy= and context_fn= exclude each other; a policy is a context_fn")
        if keywords.pop("offload", False):
            raise ValueError(_OFFLOAD)
        offloads = "checkpointing_enable.<locals>" in getattr(base, "__qualname__", "")
        known = base is torch_checkpoint or base is gradckpt.checkpoint
        if context_fn is not None and (not known or given.args or keywords.get("use_reentrant")):
            raise ValueError(
                "gradckpt: policy= needs torch's checkpoint or gradckpt's, with use_reentrant=False; leave "
                f"{_describe(base)} and use_reentrant=True out of the checkpointing kwargs"
            )
        if not known or given.args:
            if config is None:
                return functools.partial(base, **keywords) if offloads else func, None, None, asked
            if offloads:
                raise ValueError(_OFFLOAD)
            raise ValueError(
                f"gradckpt: checkpointing was turned on with {_describe(base)} and not with torch's checkpoint, so "
                "nothing would be compressed; leave that function out, or pass compress=None to keep it"
            )
        if keywords.get("use_reentrant") is None or _is_old_default(given.keywords):
            keywords.pop("use_reentrant", None)
        if keywords.get("use_reentrant"):
            if config is not None:
                raise ValueError(
                    f"gradckpt: compress={config.codec!r} needs use_reentrant=False; leave use_reentrant=True out of "
                    "the checkpointing kwargs, or pass compress=None"
                )
            return functools.partial(torch_checkpoint, **keywords), None, None, asked
        keywords["use_reentrant"] = False
        # In a model, the one leaf that reaches a layer is what enable_input_require_grads made.
        compress = dataclasses.replace(config, leaves=True) if config is not None else None
        selective: dict[str, Any] = {"context_fn": context_fn} if context_fn is not None else {}
        function = functools.partial(gradckpt.checkpoint, compress=compress, **selective, **keywords)
        return function, functools.partial(torch_checkpoint, **keywords), config, asked

    def resolve(self, keywords: dict[str, Any]) -> CompressionConfig | None:
        """Rule 1. Takes our keys out of ``keywords``."""
        ours = {key: keywords.pop(key) for key in ("replay", "min_numel") if key in keywords}
        compress = keywords.pop("compress", self.config)
        config = parse_compress(compress)
        if config is None:
            return None
        if isinstance(compress, str):
            base = self.config or CompressionConfig(replay=self.replay)
            config = dataclasses.replace(base, codec=config.codec)
        elif compress is True:
            config = self.config or CompressionConfig(replay=self.replay)
        return dataclasses.replace(config, **ours)

    def modules(self, model: Any) -> Iterator[Any]:
        """The modules that hold our function."""
        return (
            module
            for module in model.modules()
            if self.function is not None and vars(module).get("_gradient_checkpointing_func") is self.function
        )

    def layers(self, model: Any) -> int:
        on = [module for module in self.modules(model) if module.gradient_checkpointing]
        layer = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", ())
        return sum(isinstance(module, layer) for module in on) or len(on)

    def remove(self, model: Any) -> None:
        if self.removed:
            return
        self.removed = True
        if vars(model).get(SEAM) is self:
            delattr(model, SEAM)
        for hooks in (model._forward_hooks, model._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is _before_forward or hook is _after_forward]:
                del hooks[key]
        if self.undo_on_remove and self.function is not None:
            _original(model)(enable=False)
        for module in list(self.modules(model)):
            module._gradient_checkpointing_func = self.stock
        # transformers before 5.0 makes no hook unless PEFT is in use, and cannot take away one that it did not make.
        if self.undo_input_grads and self.undo_on_remove and _input_grad_hooks(model):
            model.disable_input_require_grads()
        self.active = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        model = state["_model"]
        self._model = weakref.ref(model) if model is not None else _nothing


def _nothing() -> None:
    """The weak reference of a seam that was pickled after its model died."""


@dataclasses.dataclass
class _Watch:
    """Counts model calls that compressed nothing; see :func:`_after_forward`."""

    calls: int = 0
    settled: bool = False
    before: dict[str, Any] = dataclasses.field(default_factory=dict)


# The hooks are functions of the module, so that pickles and copies of the model carry them by name;
# all they know is in the seam of the model that calls them.


def _before_forward(model: Any, args: Any) -> None:
    seam = _watched(model)
    if seam is not None:
        seam.watch.before = gradckpt.stats()


def _after_forward(model: Any, args: Any, output: Any) -> None:
    seam = _watched(model)
    if seam is None or not seam.watch.before:
        return
    watch, after = seam.watch, gradckpt.stats()
    if after["compressed"] > watch.before["compressed"]:
        watch.settled = True
    elif after["regions"] >= watch.before["regions"]:  # else reset_stats() was called meanwhile
        watch.calls += 1
        if watch.calls >= PATIENCE:
            watch.settled = True
            warn_inactive(_why_inactive(model, seam, watch.before, after), stacklevel=4)
    watch.before = {}


def _watched(model: Any) -> _Seam | None:
    if torch.compiler.is_compiling():
        return None
    seam = _seam_of(model)
    if seam is None or seam.watch.settled or seam.active is None:
        return None
    return seam if model.training and torch.is_grad_enabled() else None


def _why_inactive(model: Any, seam: _Seam, before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    assert seam.active is not None
    name, codec = type(model).__name__, seam.active.codec
    asked = f"compress={codec!r} was asked for, but {PATIENCE} training calls of {name} compressed nothing: "
    if not _is_on(model):
        return asked + "checkpointing was turned off since enable(); call model.activation_checkpointing_enable()"
    ours = list(seam.modules(model))
    if not ours:
        holders = (vars(m).get("_gradient_checkpointing_func") for m in model.modules())
        other = next((f for f in holders if f is not None), None)
        return asked + f"the layers call {_describe(other)}; something replaced gradckpt's function after enable()"
    if not any(m.training for m in ours if m.gradient_checkpointing):
        return asked + "its layers are in eval mode, where transformers does not checkpoint; call model.train()"
    if after["regions"] == before["regions"]:
        return asked + "its layers never called checkpoint in them; wrap them with gradckpt.checkpoint"
    if after["asked"] == before["asked"]:
        return asked + (
            "no input of a layer requires grad (frozen embeddings?); call model.enable_input_require_grads()"
        )
    kept = {k: n - before["kept"].get(k, 0) for k, n in after["kept"].items()}
    reasons = ", ".join(f"{k} ({n})" for k, n in kept.items() if n > 0) or "unknown"
    inputs = after["asked"] - before["asked"]
    return asked + f"all {inputs} inputs were kept as they are: {reasons} (min_numel={seam.active.min_numel})"


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
    if _seam_of(model) is not None:
        raise ValueError(f"gradckpt: this {name} is already enabled; call .remove() or gradckpt.disable(model) first")
    if SEAM in vars(model):
        raise ValueError(
            f"gradckpt: {_describe(vars(model)[SEAM])} already stands in for {name}.{SEAM} on this instance; "
            "remove it before gradckpt.enable(model)"
        )
    if "value" in inspect.signature(_original(model)).parameters:
        raise ValueError(
            f"gradckpt: {name} defines {SEAM} in the form of transformers < 4.35, which takes no checkpointing "
            "function; wrap its layers with gradckpt.checkpoint instead"
        )
    if every_n_layers > 1 and not _has_every_n_layers(model):
        raise ValueError(_EVERY_N_LAYERS)


def _original(model: Any) -> Any:
    """The class's own method, bound to this instance, whatever stands before it on the instance."""
    return getattr(type(model), SEAM).__get__(model)


def _has_every_n_layers(model: Any) -> bool:
    return "every_n_layers" in inspect.signature(_original(model)).parameters


def _seam_of(model: Any) -> _Seam | None:
    seam = getattr(model, "__dict__", {}).get(SEAM)
    return seam if isinstance(seam, _Seam) else None


def is_enabled(model: Any) -> bool:
    """:func:`enable` prepared this model, or the one that it wraps (PEFT, DataParallel, compile)."""
    return any(_seam_of(module) is not None for module in model.modules()) if model is not None else False


def _is_on(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _is_old_default(keywords: Mapping[str, Any]) -> bool:
    """transformers 4 passes this when it was given no kwargs at all."""
    version = getattr(sys.modules.get("transformers"), "__version__", "5")
    return version.startswith("4.") and {k: keywords[k] for k in keywords if k != "compress"} == {"use_reentrant": True}


def _describe(thing: Any) -> str:
    if isinstance(thing, functools.partial):
        thing = thing.func
    name = getattr(thing, "__qualname__", None)
    return f"{getattr(thing, '__module__', '?')}.{name}" if name else repr(thing)
