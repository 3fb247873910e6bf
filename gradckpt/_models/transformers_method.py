"""The replacement of ``_set_gradient_checkpointing`` on an enabled model: :class:`Adapter`.

Rules:
    1. A key in the kwargs that transformers passes on wins over the arguments of ``enable``, which
       win over the defaults. A codec's name as ``compress`` there changes the codec only; a whole
       config or its dict changes all of it.
    2. The adapter refers to its model weakly, and strongly only inside a pickle or a deep copy.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import ModuleList
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gradckpt import _C
from gradckpt._engine.arguments import HOOKS_SEE_KEPT, check_int
from gradckpt._engine.places import place_of
from gradckpt._engine.torch_private import hooks_see_kept
from gradckpt._engine.user_lines import outwards
from gradckpt._models import activity
from gradckpt._models.inactivity import ADAPTER, HELD, InactivityMonitor, after_forward, before_forward, describe
from gradckpt._models.keywords import (
    Settings,
    check_together,
    check_torchs,
    is_old_default,
    means_ours,
    pop_our_keys,
)
from gradckpt._models.offload import of_layer
from gradckpt._models.overlap import is_wrapper
from gradckpt._models.regions import checkpointed_by, region_of
from gradckpt._models.weak import WeakModule
from gradckpt._offload import parse_offload

#: torch's checkpoint, and the functions that may replace it without a difference.
_KNOWN = (torch_checkpoint, _C.checkpoint, _C.compat_checkpoint, of_layer)

#: The attribute of a function of ours that holds torch's, with the same keywords.
_STOCK = "gradckpt_stock"

#: The attribute of transformers' function that holds the value of ``offload=`` it was made for.
_PLACE = "gradckpt_offload"


#: All adapters, made by :func:`gradckpt.enable` or by a Trainer's flag. While it is empty, a
#: Trainer without our keys has nothing to check.
ADAPTERS: weakref.WeakSet[Adapter] = weakref.WeakSet()


class _Replacement:
    """The replacement of ``model._set_gradient_checkpointing`` on one instance, with the same
    parameters.
    """

    def __init__(self, model: Any) -> None:
        self._model = WeakModule(model)

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


class Adapter(_Replacement):
    """The adapter of an enabled model."""

    def __init__(self, model: Any, settings: Settings, by_flag: bool = False) -> None:
        super().__init__(model)
        self.settings = settings  # from enable() or the Trainer's flag
        self.by_flag = by_flag
        self.active = settings.config  # chosen by the last call
        self.function: Callable[..., Any] | None = None  # ours, which the last call gave the layers; None: not ours
        self.undo_on_remove = False
        self.undo_input_grads = False
        self.removed = False
        self.monitor = InactivityMonitor()

    def install(self, model: Any) -> None:
        ADAPTERS.add(self)
        setattr(model, ADAPTER, self)
        setattr(model, HELD, self)
        for module in model.modules():
            if hasattr(type(module), ADAPTER) and replacement_of(module) is None and not has_old_form(module):
                setattr(module, ADAPTER, InnerAdapter(self, module))
        activity.register(model)
        model.register_forward_pre_hook(before_forward)
        model.register_forward_hook(after_forward)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not self.removed:
            ADAPTERS.add(self)

    def turn(
        self, model: Any, enable: bool, gradient_checkpointing_func: Callable[..., Any], every_n_layers: int
    ) -> None:
        """Turn checkpointing on or off, for the model or one inside it."""
        every = {"every_n_layers": every_n_layers} if has_every_n_layers(model) else {}
        if self.removed or not enable:
            original(model)(enable=enable, gradient_checkpointing_func=gradient_checkpointing_func, **every)
            return
        function, ours, settings = self.choose(gradient_checkpointing_func, every_n_layers)
        if every:
            every["every_n_layers"] = settings.every_n_layers
        elif settings.every_n_layers > 1:
            raise ValueError("gradckpt: every_n_layers above 1 needs transformers >= 5.17")
        original(model)(enable=True, gradient_checkpointing_func=function, **every)
        # The state is set last: a rejected call leaves the adapter unchanged.
        if settings.config != self.active:
            self.monitor = InactivityMonitor()
        self.active = settings.config
        self.function = function if ours else None
        if self.by_flag and ours:
            self.settings = settings
        self.undo_on_remove = False

    def choose(self, func: Callable[..., Any], every_n_layers: int) -> tuple[Callable[..., Any], bool, Settings]:
        """Return the function that the layers get in place of ``func``, whether it is ours, and the
        settings.
        """
        given = func if isinstance(func, functools.partial) else functools.partial(func)
        base, keywords = given.func, dict(given.keywords)
        named = means_ours(keywords)
        if self.by_flag and not named and not _says_nothing(keywords):
            return func, False, Settings(every_n_layers=every_n_layers)
        written = "offload" in keywords
        keywords = {**self.settings.keywords, **keywords}
        buffers = {"buffers": keywords.pop("buffers")} if "buffers" in self.settings.keywords else {}
        settings = pop_our_keys(keywords, Settings() if self.by_flag and named else self.settings)
        if "every_n_layers" not in given.keywords and every_n_layers != 1:
            settings = dataclasses.replace(settings, every_n_layers=check_int("every_n_layers", every_n_layers, 1))
        offloads = _offloads(base)
        where = _where(base) if offloads and not written else True
        if given.args or not (base in _KNOWN or offloads):
            return _foreign(func, base, settings), False, settings
        check_torchs(keywords)
        replaced = not settings.recompute or settings.planned
        if replaced and self.by_flag:  # the next Trainer's flag takes this adapter off
            return func, False, Settings(every_n_layers=every_n_layers)
        if replaced:
            key = "budget=" if settings.planned else "recompute=False"
            raise ValueError(
                f"gradckpt: {key} among the checkpointing kwargs cannot change a model that checkpoints; pass it to "
                "gradckpt.enable(model)"
            )
        if keywords.get("use_reentrant") is None or is_old_default(
            {k: v for k, v in given.keywords.items() if k != "compress"}
        ):
            keywords.pop("use_reentrant", None)
        if offloads and not written:
            if where is True and settings.config is None and settings.context_fn is None:
                return functools.partial(base, **keywords), False, settings
            settings = dataclasses.replace(settings, offload=parse_offload(where))
        check_together(settings, keywords)
        if keywords.get("use_reentrant"):
            return functools.partial(torch_checkpoint, **keywords), False, settings
        keywords["use_reentrant"] = False
        selective: dict[str, Any] = {"context_fn": settings.context_fn} if settings.context_fn is not None else {}
        place = {"offload": place_of(settings.offload)} if settings.offload is not None else {}
        function = functools.partial(of_layer, compress=settings.config, **place, **selective, **buffers, **keywords)
        torchs = {key: value for key, value in keywords.items() if key != HOOKS_SEE_KEPT or hooks_see_kept}
        vars(function)[_STOCK] = functools.partial(base if offloads else torch_checkpoint, **torchs)
        return function, True, settings

    def modules(self, model: Any) -> Iterator[Any]:
        """Yield the modules that hold a function of ours."""
        return (module for module in model.modules() if _stock_of(module) is not None)

    def layers(self, model: Any) -> list[Any]:
        """Return the layers that checkpoint through gradckpt now, or the modules that do it for
        them.
        """
        on = {id(module): module for module in self.modules(model) if module.gradient_checkpointing}
        return [layer for holder, layer in layers_of(model) if id(holder) in on] or list(on.values())

    @staticmethod
    def check_alone(model: Any) -> None:
        """Check that no layer, part of a layer or module around one is checkpointed by other means.

        FSDP's own flag wraps layers when the model is prepared for training, after enable().
        """
        layers = {id(layer) for _, layer in layers_of(model)} or set(map(id, model.modules()))
        within = {id(inner) for module in model.modules() if id(module) in layers for inner in module.modules()}
        for label, module in model.named_modules():
            if not is_wrapper(module) and region_of(module) is None:
                continue  # a flag is the layers' own
            if id(module) in within or any(id(inner) in layers for inner in module.modules()):
                what = label or repr(type(model).__name__)
                raise ValueError(f"gradckpt: {what} is checkpointed already: {checkpointed_by(module)}")

    def remove(self, model: Any) -> None:
        if self.removed:
            return
        self.removed = True
        ADAPTERS.discard(self)
        vars(model).pop(HELD, None)
        for module in model.modules():
            held = vars(module).get(ADAPTER)
            if held is self or (isinstance(held, InnerAdapter) and held.adapter is self):
                delattr(module, ADAPTER)
        for hooks in (model._forward_hooks, model._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if hook is before_forward or hook is after_forward]:
                del hooks[key]
        if self.undo_on_remove and self.function is not None:
            original(model)(enable=False)
        for module in list(self.modules(model)):
            module._gradient_checkpointing_func = _stock_of(module)
        # transformers before 5.0 makes no hook without PEFT, and cannot remove a hook that it did
        # not make.
        if self.undo_input_grads and self.undo_on_remove and input_grad_hooks(model):
            model.disable_input_require_grads()
        self.active = None


class InnerAdapter(_Replacement):
    """The adapter of a transformers model inside the enabled one, such as a BertModel in its
    classifier.

    Code that turns checkpointing on there (sentence-transformers does, in each) means the enabled
    model.
    """

    def __init__(self, adapter: Adapter, model: Any) -> None:
        super().__init__(model)
        self.adapter = adapter

    def turn(
        self, model: Any, enable: bool, gradient_checkpointing_func: Callable[..., Any], every_n_layers: int
    ) -> None:
        self.adapter.turn(model, enable, gradient_checkpointing_func, every_n_layers)

    @property
    def orphaned(self) -> bool:
        """True if the enclosing model was disabled, freed or changed."""
        model, whole = self._model(), self.adapter.model
        return self.adapter.removed or whole is None or all(module is not model for module in whole.modules())


def held_function(model: Any) -> Any:
    """Return the checkpointing function that the layers of this model were given, or None."""
    held = (vars(module).get("_gradient_checkpointing_func") for module in model.modules())
    return next(filter(None, held), None)


def _says_nothing(keywords: dict[str, Any]) -> bool:
    """Return whether kwargs only turn checkpointing on, as TRL does after generation."""
    return keywords in ({}, {"use_reentrant": False}, {"use_reentrant": None}) or is_old_default(keywords)


def _stock_of(module: Any) -> Any:
    """Return torch's function that ours replaces in this module, or None if it holds none of
    ours.
    """
    return getattr(vars(module).get("_gradient_checkpointing_func"), _STOCK, None)


def _offloads(base: Any) -> bool:
    """Return whether this is transformers' own ``offload=True``.

    That is a function made when checkpointing is turned on, around torch's checkpoint.
    """
    name = getattr(base, "__qualname__", "")
    return "checkpointing_enable.<locals>" in name and getattr(base, "__module__", "").startswith("transformers.")


def _where(base: Any) -> Any:
    """Return the value of ``offload=`` that transformers' function was made for: that knows only
    whether it is true.
    """
    if _PLACE not in vars(base):
        for frame in outwards(sys._getframe()):
            names = frame.f_code.co_name, frame.f_globals.get("__name__", "")
            if names[0].endswith("checkpointing_enable") and names[1].startswith("transformers."):
                vars(base)[_PLACE] = frame.f_locals.get("offload", True)
                break
    where = vars(base).get(_PLACE, True)
    return bool(where) if isinstance(where, int) else where


def _foreign(func: Callable[..., Any], base: Any, settings: Settings) -> Callable[..., Any]:
    """Return a checkpoint of another library unchanged, unless the settings need ours."""
    if settings.context_fn is not None:
        raise ValueError(
            "gradckpt: policy= needs torch's checkpoint or gradckpt's, with use_reentrant=False; leave "
            f"{describe(base)} out of the checkpointing kwargs"
        )
    if settings.config is not None or settings.offload:
        raise ValueError(
            f"gradckpt: checkpointing was turned on with {describe(base)} and not with torch's checkpoint, so "
            "nothing would be compressed; leave that out, or pass compress=None"
        )
    return func


def original(model: Any) -> Any:
    """Return the class's own method, bound to this instance, also if the instance has a
    replacement.
    """
    return getattr(type(model), ADAPTER).__get__(model)


def layers_of(model: Any) -> list[tuple[Any, Any]]:
    """Return the layers that transformers checkpoints, each after the module that holds its
    function.

    This is the layer itself; before transformers 4.53 it is the stack whose list holds the layer.
    """
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


def has_old_form(model: Any) -> bool:
    """Return whether the method has the form of transformers < 4.35, ``(module, value)``."""
    return "value" in inspect.signature(original(model)).parameters


def has_every_n_layers(model: Any) -> bool:
    return "every_n_layers" in inspect.signature(original(model)).parameters


def replacement_of(model: Any) -> Any:
    """Return the replacement of the class's own method on this instance, or None if none counts."""
    held = vars(model).get(ADAPTER)
    return None if isinstance(held, InnerAdapter) and held.orphaned else held


def input_grad_hooks(model: Any) -> list[Any]:
    """Return the hooks of enable_input_require_grads on the model: a list, before 5.0 a single
    one.
    """
    own = vars(model)
    return list(own.get("_require_grads_hooks") or filter(None, [own.get("_require_grads_hook")]))


def adapter_over(model: Any) -> Adapter | None:
    """Return the adapter of the model, or of the enabled one that it is part of."""
    held = replacement_of(model)
    return held.adapter if isinstance(held, InnerAdapter) else held if isinstance(held, Adapter) else None


def adapter_of(model: Any) -> Adapter | None:
    adapter = getattr(model, "__dict__", {}).get(HELD)
    return adapter if isinstance(adapter, Adapter) else None
