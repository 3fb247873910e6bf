"""What stands in for ``_set_gradient_checkpointing`` on an enabled model: :class:`Seam`.

Rules:
    1. A key in the kwargs that transformers passes on > what ``enable`` said > off.
       A codec's name as ``compress`` there changes the codec only; a whole config or its dict changes all of it.
    2. The seam refers to its model weakly, and strongly only inside a pickle or a deep copy.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import ModuleList
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt
from gradckpt import _activity
from gradckpt.apply import region_of
from gradckpt.integrations.kwargs import (
    Settings,
    check_every_n_layers,
    check_together,
    check_torchs,
    is_old_default,
    means_ours,
    take,
)
from gradckpt.integrations.offload import of_layer, offloaded, offloaded_stock
from gradckpt.integrations.overlap import is_wrapper
from gradckpt.integrations.watch import HELD, SEAM, Watch, after_forward, before_forward, describe

logger = logging.getLogger("gradckpt")

#: torch's checkpoint, and what may stand in its place without a difference.
_KNOWN = (torch_checkpoint, gradckpt.checkpoint, gradckpt.compat.checkpoint, of_layer)

#: On a function of ours: torch's, with the same keywords.
_STOCK = "gradckpt_stock"


#: Those of all models, by :func:`gradckpt.enable` or by a Trainer's flag. While there are none, a Trainer that does not
#: ask for us has nothing to look at.
SEAMS: weakref.WeakSet[Seam] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class _Choice:
    function: Callable[..., Any]  # for the layers
    ours: bool
    settings: Settings


class _StandIn:
    """Stands for ``model._set_gradient_checkpointing`` on one instance, with the same parameters."""

    def __init__(self, model: Any) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)

    @property
    def model(self) -> Any:
        return self._model()

    def __call__(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = torch_checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        model = self._model()
        if model is None:
            raise ReferenceError("gradckpt: the model of this _set_gradient_checkpointing is gone")
        self.turn(model, enable, gradient_checkpointing_func, every_n_layers)

    def turn(
        self, model: Any, enable: bool, gradient_checkpointing_func: Callable[..., Any], every_n_layers: int
    ) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        model = state["_model"]
        self._model = weakref.ref(model) if model is not None else _nothing


class Seam(_StandIn):
    """That of an enabled model."""

    def __init__(self, model: Any, settings: Settings, by_flag: bool = False) -> None:
        super().__init__(model)
        self.settings = settings  # what enable() said, or the Trainer's flag
        self.by_flag = by_flag
        self.active = settings.config  # what the last call settled on
        self.function: Callable[..., Any] | None = None  # ours, that the last call gave the layers; None: not ours
        self.undo_on_remove = False
        self.undo_input_grads = False
        self.removed = False
        self.watch = Watch()

    def install(self, model: Any) -> None:
        SEAMS.add(self)
        setattr(model, SEAM, self)
        setattr(model, HELD, self)
        for module in model.modules():
            if hasattr(type(module), SEAM) and stands_in(module) is None and not has_old_form(module):
                setattr(module, SEAM, InnerSeam(self, module))
        _activity.register(model)
        model.register_forward_pre_hook(before_forward)
        model.register_forward_hook(after_forward)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not self.removed:
            SEAMS.add(self)

    def turn(
        self, model: Any, enable: bool, gradient_checkpointing_func: Callable[..., Any], every_n_layers: int
    ) -> None:
        """On or off: the model, or one inside it."""
        every = {"every_n_layers": every_n_layers} if has_every_n_layers(model) else {}
        if self.removed or not enable:
            original(model)(enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, **every)
            return
        choice = self.choose(gradient_checkpointing_func, every_n_layers)
        if every:
            every["every_n_layers"] = choice.settings.every_n_layers
        elif choice.settings.every_n_layers > 1:
            raise ValueError("gradckpt: every_n_layers above 1 needs transformers >= 5.17")
        original(model)(enable=True, gradient_checkpointing_func=choice.function, **every)
        # Published last: a refused call leaves the seam as it was.
        active = choice.settings.config
        if active != self.active:
            self.watch = Watch()
        if choice.settings.offload and not torch.accelerator.is_available():
            logger.info("offload=True: there is no device here, so checkpoints are in host memory anyway")
        self.active = active
        self.function = choice.function if choice.ours else None
        if self.by_flag and choice.ours:
            self.settings = choice.settings
        self.undo_on_remove = False

    def choose(self, func: Callable[..., Any], every_n_layers: int) -> _Choice:
        """What the layers get in the place of ``func``."""
        given = func if isinstance(func, functools.partial) else functools.partial(func)
        base, keywords = given.func, dict(given.keywords)
        named = means_ours(keywords)
        if self.by_flag and not named and not _says_nothing(keywords):
            return _Choice(func, False, Settings(every_n_layers=every_n_layers))
        keywords = {**self.settings.keywords, **keywords}
        buffers = {"buffers": keywords.pop("buffers")} if "buffers" in self.settings.keywords else {}
        settings = take(keywords, Settings() if self.by_flag and named else self.settings)
        if "every_n_layers" not in given.keywords and every_n_layers != 1:
            settings = dataclasses.replace(settings, every_n_layers=check_every_n_layers(every_n_layers))
        to_host = _offloads(base)
        if given.args or not (base in _KNOWN or to_host):
            return _Choice(_foreign(func, base, settings), False, settings)
        check_torchs(keywords)
        if keywords.get("use_reentrant") is None or is_old_default(
            {k: v for k, v in given.keywords.items() if k != "compress"}
        ):
            keywords.pop("use_reentrant", None)
        if to_host and settings.config is None and settings.context_fn is None:
            return _Choice(functools.partial(base, **keywords), False, settings)
        if to_host:
            settings = dataclasses.replace(settings, offload=True)
        check_together(settings, keywords)
        if keywords.get("use_reentrant"):
            return _Choice(functools.partial(torch_checkpoint, **keywords), False, settings)
        keywords["use_reentrant"] = False
        # In a model, the one leaf that reaches a layer is what enable_input_require_grads made.
        config = dataclasses.replace(settings.config, leaves=True) if settings.config is not None else None
        selective: dict[str, Any] = {"context_fn": settings.context_fn} if settings.context_fn is not None else {}
        ours, stock = (offloaded, offloaded_stock) if settings.offload else (of_layer, torch_checkpoint)
        function = functools.partial(ours, compress=config, **selective, **buffers, **keywords)
        vars(function)[_STOCK] = functools.partial(stock, **keywords)
        return _Choice(function, True, settings)

    def modules(self, model: Any) -> Iterator[Any]:
        """The modules that hold a function of ours."""
        return (module for module in model.modules() if _stock_of(module) is not None)

    def layers(self, model: Any) -> list[Any]:
        """Return the layers that checkpoint through gradckpt now, or the modules that do it for them."""
        on = {id(module): module for module in self.modules(model) if module.gradient_checkpointing}
        return [layer for holder, layer in layers_of(model) if id(holder) in on] or list(on.values())

    def check_alone(self, model: Any) -> None:
        """FSDP's own flag puts wrappers around layers when the model is prepared for training, after enable()."""
        overlap = overlap_in(model)
        if overlap is not None:
            label, how, undo = overlap
            raise ValueError(
                f"gradckpt: {label} is {how} since gradckpt.enable, so its layers would run three times; {undo} "
                "(FSDP's own activation_checkpointing flag makes such wrappers), or do without gradckpt.enable"
            )

    def remove(self, model: Any) -> None:
        if self.removed:
            return
        self.removed = True
        SEAMS.discard(self)
        vars(model).pop(HELD, None)
        for module in model.modules():
            held = vars(module).get(SEAM)
            if held is self or (isinstance(held, InnerSeam) and held.seam is self):
                delattr(module, SEAM)
        for hooks in (model._forward_hooks, model._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is before_forward or hook is after_forward]:
                del hooks[key]
        if self.undo_on_remove and self.function is not None:
            original(model)(enable=False)
        for module in list(self.modules(model)):
            module._gradient_checkpointing_func = _stock_of(module)
        # transformers before 5.0 makes no hook unless PEFT is in use, and cannot take away one that it did not make.
        if self.undo_input_grads and self.undo_on_remove and input_grad_hooks(model):
            model.disable_input_require_grads()
        self.active = None


class InnerSeam(_StandIn):
    """The same on a transformers model inside the enabled one, as a BertModel in its classifier: whoever turns
    checkpointing on there (sentence-transformers does, in each) means the enabled one."""

    def __init__(self, seam: Seam, model: Any) -> None:
        super().__init__(model)
        self.seam = seam

    def turn(
        self, model: Any, enable: bool, gradient_checkpointing_func: Callable[..., Any], every_n_layers: int
    ) -> None:
        self.seam.turn(model, enable, gradient_checkpointing_func, every_n_layers)

    @property
    def orphaned(self) -> bool:
        """What it was part of is enabled no more, or is gone, or has another in its place."""
        model, whole = self._model(), self.seam.model
        return self.seam.removed or whole is None or all(module is not model for module in whole.modules())


def held_function(model: Any) -> Any:
    """The checkpointing function that the layers of this model were given; None: none."""
    held = (vars(module).get("_gradient_checkpointing_func") for module in model.modules())
    return next(filter(None, held), None)


def _says_nothing(keywords: dict[str, Any]) -> bool:
    """True for kwargs that only turn checkpointing on, as TRL does after generation."""
    return keywords in ({}, {"use_reentrant": False}, {"use_reentrant": None}) or is_old_default(keywords)


def _stock_of(module: Any) -> Any:
    """torch's function that ours stands for in this module; None: it holds none of ours."""
    return getattr(vars(module).get("_gradient_checkpointing_func"), _STOCK, None)


def _nothing() -> None:
    """The weak reference of a seam that was pickled after its model died."""


def _offloads(base: Any) -> bool:
    """transformers' own offload=True: a function made when checkpointing is turned on, around torch's checkpoint."""
    name = getattr(base, "__qualname__", "")
    return "checkpointing_enable.<locals>" in name and getattr(base, "__module__", "").startswith("transformers.")


def _foreign(func: Callable[..., Any], base: Any, settings: Settings) -> Callable[..., Any]:
    """Somebody's own checkpoint: left alone where nothing is asked of us."""
    if settings.context_fn is not None:
        raise ValueError(
            "gradckpt: policy= needs torch's checkpoint or gradckpt's, with use_reentrant=False; leave "
            f"{describe(base)} out of the checkpointing kwargs"
        )
    if settings.config is not None or settings.offload:
        raise ValueError(
            f"gradckpt: checkpointing was turned on with {describe(base)} and not with torch's checkpoint, so "
            "nothing would be compressed; leave that function out, or pass compress=None to keep it"
        )
    return func


def original(model: Any) -> Any:
    """The class's own method, bound to this instance, whatever stands before it on the instance."""
    return getattr(type(model), SEAM).__get__(model)


def layers_of(model: Any) -> list[tuple[Any, Any]]:
    """The layers that transformers checkpoints, each after the module that holds the function for it: itself, before
    transformers 4.53 the stack whose list it is in."""
    layer = getattr(sys.modules.get("transformers.modeling_layers"), "GradientCheckpointingLayer", ())
    found = [(module, module) for module in model.modules() if isinstance(module, layer)]
    stacks = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    return found or [
        (stack, each)
        for stack in stacks
        for child in stack.children()
        if isinstance(child, ModuleList)
        for each in child
    ]


def overlap_in(model: Any) -> tuple[str, str, str] | None:
    """Layers, what is in them or what they are in, checkpointed by other means: they would run three times.
    The name of the module, how it is checkpointed, and how to end that."""
    layers = {id(layer) for _, layer in layers_of(model)} or set(map(id, model.modules()))
    within = {id(inner) for module in model.modules() if id(module) in layers for inner in module.modules()}
    for label, module in model.named_modules():
        if is_wrapper(module):
            how, undo = "inside torch's CheckpointWrapper", "leave that wrapper out"
        elif region_of(module) is not None:
            how, undo = "enabled by itself", "call gradckpt.disable on it first"
        else:
            continue
        if id(module) in within or any(id(inner) in layers for inner in module.modules()):
            return label or repr(type(model).__name__), how, undo
    return None


def has_old_form(model: Any) -> bool:
    """Of transformers < 4.35: ``_set_gradient_checkpointing(module, value)``."""
    return "value" in inspect.signature(original(model)).parameters


def has_every_n_layers(model: Any) -> bool:
    return "every_n_layers" in inspect.signature(original(model)).parameters


def stands_in(model: Any) -> Any:
    """What stands before the class's own method on this instance; None: nothing that counts."""
    held = vars(model).get(SEAM)
    return None if isinstance(held, InnerSeam) and held.orphaned else held


def input_grad_hooks(model: Any) -> list[Any]:
    """What enable_input_require_grads left on the model: a list, before 5.0 a single one."""
    own = vars(model)
    return list(own.get("_require_grads_hooks") or filter(None, [own.get("_require_grads_hook")]))


def seam_over(model: Any) -> Seam | None:
    """That of the model, or of the enabled one that it is part of."""
    held = stands_in(model)
    return held.seam if isinstance(held, InnerSeam) else held if isinstance(held, Seam) else None


def seam_of(model: Any) -> Seam | None:
    seam = getattr(model, "__dict__", {}).get(HELD)
    return seam if isinstance(seam, Seam) else None
