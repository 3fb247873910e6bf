"""What stands in for ``_set_gradient_checkpointing`` on an enabled model: :class:`Seam`.

Rules:
    1. ``compress`` in the kwargs that transformers passes on > what ``enable`` said > off.
       A codec's name there changes the codec only; a whole config or its dict changes all of it.
    2. The seam refers to its model weakly, and strongly only inside a pickle or a deep copy.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt
from gradckpt.config import CompressionConfig, parse_compress
from gradckpt.integrations.watch import SEAM, Watch, after_forward, before_forward, describe
from gradckpt.policies import contexts_of

_OFFLOAD = (
    "gradckpt: offload=True makes transformers call torch's checkpoint from a function of its own, so nothing would be "
    "compressed; leave offload out and run the forward under torch.autograd.graph.save_on_cpu(): compressed payloads "
    "follow outer saved-tensor hooks"
)


class Seam:
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
        self.watch = Watch()

    def __call__(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = torch_checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        model = self._model()
        if model is None:
            raise ReferenceError("gradckpt: the model of this _set_gradient_checkpointing is gone")
        every = {"every_n_layers": every_n_layers} if has_every_n_layers(model) else {}
        if self.removed or not enable:
            original(model)(enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, **every)
            return
        function, stock, config, asked = self.choose(gradient_checkpointing_func)
        if every:
            every["every_n_layers"] = next((n for n in (asked, every_n_layers) if n != 1), self.every_n_layers)
        original(model)(enable=True, gradient_checkpointing_func=function, **every)
        # Published last: a refused call leaves the seam as it was.
        if config != self.active:
            self.watch = Watch()
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
                f"{describe(base)} and use_reentrant=True out of the checkpointing kwargs"
            )
        if not known or given.args:
            if config is None:
                return functools.partial(base, **keywords) if offloads else func, None, None, asked
            if offloads:
                raise ValueError(_OFFLOAD)
            raise ValueError(
                f"gradckpt: checkpointing was turned on with {describe(base)} and not with torch's checkpoint, so "
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
            for key in [key for key, hook in hooks.items() if hook is before_forward or hook is after_forward]:
                del hooks[key]
        if self.undo_on_remove and self.function is not None:
            original(model)(enable=False)
        for module in list(self.modules(model)):
            module._gradient_checkpointing_func = self.stock
        if self.undo_input_grads and self.undo_on_remove and hasattr(model, "disable_input_require_grads"):
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


def original(model: Any) -> Any:
    """The class's own method, bound to this instance, whatever stands before it on the instance."""
    return getattr(type(model), SEAM).__get__(model)


def has_every_n_layers(model: Any) -> bool:
    return "every_n_layers" in inspect.signature(original(model)).parameters


def seam_of(model: Any) -> Seam | None:
    seam = getattr(model, "__dict__", {}).get(SEAM)
    return seam if isinstance(seam, Seam) else None


def _is_old_default(keywords: Mapping[str, Any]) -> bool:
    """transformers 4 passes this when it was given no kwargs at all."""
    version = getattr(sys.modules.get("transformers"), "__version__", "5")
    return version.startswith("4.") and {k: keywords[k] for k in keywords if k != "compress"} == {"use_reentrant": True}
