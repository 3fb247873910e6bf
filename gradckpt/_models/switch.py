"""One switch for whole models: :func:`enable`, :func:`disable`, and the :class:`Handle` that undoes
it.

A transformers model checkpoints its own layers, by its own functions
(integrations/transformers/models). In any other model, or if modules are chosen, each chosen
module's ``forward`` becomes a region (regions.py).
"""

from __future__ import annotations

import enum
import functools
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict, Unpack

from torch.nn import Module

from gradckpt import _C
from gradckpt._compression import Compress
from gradckpt._engine.arguments import check_bool, check_int
from gradckpt._engine.places import place_of
from gradckpt._models.kinds import KINDS, has_relu_and_batch_norm, repeated_blocks, width_of
from gradckpt._models.regions import choose, region_of, regions_in
from gradckpt._models.rules import OF_MODULES, Settings, is_saved, parse_options, summary
from gradckpt._models.transformers_method import ADAPTERS
from gradckpt._models.weak import WeakModule
from gradckpt._models.working_set import inner_in
from gradckpt._offload import OffloadLike, parse_offload
from gradckpt.integrations.transformers import models
from gradckpt.policies import PolicyLike
from gradckpt.selectors import Selector, Subset, describe

logger = logging.getLogger("gradckpt")


#: The tables of a module's forward hooks.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class Unset(enum.Enum):
    UNSET = "<unset>"

    def __repr__(self) -> str:
        return self.value


UNSET: Final = Unset.UNSET

#: The attribute of a model that a budget plans: an object with ``remove(model)``.
BUDGET: Final = "_gradckpt_budget"


class NothingToDo:
    """What stands for a budget where a plan leaves a model as it is."""

    def remove(self, model: Module) -> None:
        pass


#: One selector, a list of them, or a mapping of selectors to the settings of their modules.
Modules = None | Selector | list[Any] | Mapping[Any, Any]


class CheckpointKeywords(TypedDict, total=False):
    """Keywords of :func:`gradckpt.checkpoint`, which passes them to torch."""

    context_fn: Callable[[], tuple[Any, Any]]
    preserve_rng_state: bool
    determinism_check: str
    debug: bool
    early_stop: bool
    respect_saved_tensors_hooks: bool | None
    buffers: str


def enable(
    model: Module,
    compress: Compress | Unset = UNSET,
    *,
    modules: Modules = None,
    every_n_layers: int = 1,
    policy: PolicyLike = None,
    recompute: bool = True,
    offload: OffloadLike = False,
    parts: str | None = None,
    tiles: int | None = None,
    **keywords: Unpack[CheckpointKeywords],
) -> Handle:
    """Do what :func:`gradckpt.enable` does without a budget and a plan, which describes it."""
    check_model(model, "enable")
    others = {"policy": policy, "parts": parts, "tiles": tiles}
    given: dict[str, Any] = {**keywords, **{key: value for key, value in others.items() if value is not None}}
    if not check_bool("recompute", recompute):
        given["recompute"] = False
    if recompute or not isinstance(compress, Mapping):
        _check_compress(compress)
    if compress is UNSET:
        compress = None if {"policy", "context_fn"} & given.keys() else "int8"
    place = parse_offload(offload)
    if place is not None and not recompute and compress in (None, False):
        compress = "raw"  # saved tensors move as they are
    options = parse_options({"compress": compress, **given}, {}, ("modules", "every_n_layers", *OF_MODULES))
    check_int("every_n_layers", every_n_layers, 1)
    place_of(place)  # its errors are said now
    whole = models.inner_model(model)
    if modules is None and not recompute:
        if every_n_layers > 1:
            raise ValueError(
                "gradckpt: recompute=False and every_n_layers= exclude each other without modules=, since the model is "
                "compressed as a whole; pass modules="
            )
        modules = whole
    if modules is None and models.is_model(whole):
        turn_on: Callable[[], None] = functools.partial(models.turn_on, whole, options, every_n_layers, place)
        same = models.is_enabled(whole, options, every_n_layers, place)
        same = same and len(models.adapters_in(model)) == 1 and not regions_in(model)
    else:
        chosen = choose(model, _block_of(model) if modules is None else modules, options, every_n_layers, place)
        turn_on = chosen.install
        same = chosen.is_installed() and not models.adapters_in(model)
    if not same:
        put_back = snapshot(model)
        try:
            take_off(model)
            turn_on()
        except BaseException:
            put_back()
            raise
        logger.info("gradckpt: %r", Handle(model))
        log_larger_errors(model)
    return Handle(model)


def disable(model: Module) -> None:
    """Undo :func:`enable` and the Trainer's flag, also on a copy or an unpickled model.

    Do nothing if nothing in the model is enabled.

    Raises:
        TypeError: ``model`` is not a module.
    """
    check_model(model, "disable")
    take_off(model)


def check_model(model: Any, name: str) -> None:
    if isinstance(model, type):
        raise TypeError(
            f"gradckpt: {name}() takes a model, not its class {model.__name__}; make one first: "
            f"model = {model.__name__}(...)"
        )
    if not isinstance(model, Module):
        raise TypeError(f"gradckpt: {name}() takes a torch.nn.Module, not {type(model).__name__}")


def _mixes_rows(codec: str, width: int) -> bool:
    """Return whether rows of this width share the steps of a codec."""
    by_group = bool(_C.codec_info(codec)["stochastic"]) and not codec.startswith("fp8")
    return by_group and width < _C.LEAST_ROW and width % _C.GROUP != 0


def log_larger_errors(model: Module) -> None:
    """Log the chosen modules to which the usual gradient errors of docs/numerics.md do not apply.

    There is one line per reason. These are properties of the model and not mistakes, so the level
    is INFO; a warning would fail every test of a tiny model.
    """
    modules = dict(model.named_modules())
    widths: set[int] = set()
    kinked: set[str] = set()
    for name, settings in Handle(model).modules.items():
        config = settings["compress"]
        if config is None or not config.lossy or is_saved(settings):  # each save is judged by itself
            continue
        width = width_of(modules[name])
        if width is not None and _mixes_rows(config.codec, width):
            widths.add(width)
        if has_relu_and_batch_norm(modules[name]):
            kinked.add(type(modules[name]).__name__)
    compare = 'compare gradients with compress=None (docs/numerics.md), or use "lossless"'
    if widths:
        logger.info(
            "gradckpt: width %s is less than 64, so groups span tokens and gradient errors are larger; %s",
            ", ".join(map(str, sorted(widths))),
            compare,
        )
    if kinked:
        logger.info(
            "gradckpt: %s has ReLU and BatchNorm, so small errors flip signs and gradient errors are larger; %s",
            ", ".join(sorted(kinked)),
            compare,
        )


def _check_compress(compress: Any) -> None:
    """Check that the second argument is not a value for ``modules=``."""
    if not _selects(compress):
        return
    listed = compress if isinstance(compress, (tuple, list, Mapping)) else [compress]
    if any(isinstance(each, Module) for each in listed):
        raise TypeError(
            "gradckpt: the second argument is compress, and this selects modules; name it: enable(model, modules=...)"
        )
    error = ValueError if isinstance(compress, (str, Mapping)) else TypeError
    raise error(f"gradckpt: {describe(compress)} selects modules; pass modules={describe(compress)}")


def _selects(value: Any) -> bool:
    if isinstance(value, str):
        return value in KINDS or "*" in value or "." in value
    if isinstance(value, (tuple, list, Mapping)):
        return bool(value) and all(map(_selects, value))
    return isinstance(value, (type, Module, re.Pattern, Subset))


def is_enabled(model: Module) -> bool:
    """Return whether anything in a model is enabled."""
    return bool(regions_in(model) or models.adapters_in(model))


def take_off(model: Module) -> None:
    """Undo everything that is enabled in a model."""
    for module in model.modules():
        budget = vars(module).pop(BUDGET, None)
        if budget is not None:
            budget.remove(module)
    for region in regions_in(model):
        region.remove()
    for inner in inner_in(model):
        inner.remove()
    for whole, adapter in models.adapters_in(model):
        adapter.remove(whole)


def snapshot(model: Module) -> Callable[[], None]:
    """Return a function that restores the attributes of all modules, their forward hooks and our
    objects.
    """
    modules = list(model.modules())
    adapters = models.adapters_in(model)
    ours = [*regions_in(model), *inner_in(model), *(adapter for _, adapter in adapters)]
    places: list[dict[Any, Any]] = [vars(each) for each in (*modules, *ours)]
    places += [vars(module)[name] for module in modules for name in _HOOKS]
    before = [dict(place) for place in places]

    def put_back() -> None:
        for place, content in zip(places, before, strict=True):
            place.clear()
            place.update(content)
        ADAPTERS.update(adapter for _, adapter in adapters)

    return put_back


def _block_of(model: Module) -> type[Module]:
    """Return the class of a model's repeated block.

    Raises:
        ValueError: The model has none, or several; the message lists them with the line to write.
    """
    name = type(model).__name__
    models.check_holds_none(model)
    found = repeated_blocks(model)
    if not found:
        classes = sorted({type(module).__name__ for module in model.modules() if module is not model})
        if not classes:
            raise ValueError(f"gradckpt: {name} holds no modules, so no block repeats; use gradckpt.checkpoint")
        raise ValueError(
            f"gradckpt: {name} has no repeated block of layers; call enable(model, modules=Block) with one of its "
            f"classes: {', '.join(classes)}"
        )
    if len(found) > 1 and callable(getattr(model, "enable_gradient_checkpointing", None)):
        raise ValueError(f"gradckpt: {name} is {models.OF_DIFFUSERS}")
    if len(found) > 1:
        written = f"modules=[{', '.join(blocks.kind.__name__ for blocks in found)}]"
        listed = ", ".join(f"{blocks.kind.__name__} ({len(blocks.names)})" for blocks in found)
        raise ValueError(
            f"gradckpt: {name} repeats several blocks; name those to checkpoint, for all of them "
            f"enable(model, {written}): {listed}"
        )
    return found[0].kind


class Handle:
    """The result of :func:`enable`: ``remove()`` it, or use it in a ``with`` statement.

    It keeps no model alive. A copy or pickle of a model that holds its handle has a handle of its
    own.
    """

    def __init__(self, model: Module) -> None:
        self._model = WeakModule(model)
        self._name = type(model).__name__

    @property
    def modules(self) -> dict[str, Settings]:
        """The modules that are checkpointed now, by name, in the model's order.

        Each has the keywords that :func:`gradckpt.checkpoint` gets for it, and ``offload``. A
        module with several names is listed under its first.
        """
        model = self._model()
        if model is None:
            return {}
        of_layers: dict[Any, Settings] = {}
        for whole, _ in models.adapters_in(model):
            of_layers |= models.settings_of(whole)
        found = {}
        for name, module in model.named_modules():
            region = region_of(module)
            if region is not None:
                place = {} if region.offload is None else {"offload": region.offload}
                found[name] = region.settings | region.working_set | place
            elif module in of_layers:
                found[name] = of_layers[module]
        return found

    def remove(self) -> None:
        """Restore the model; do nothing if it is not enabled or no longer exists."""
        model = self._model()
        if model is not None:
            take_off(model)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        chosen, model = self.modules, self._model()
        if not chosen:
            state = "is not enabled"
            if model is not None and BUDGET in vars(model):
                state = "has nothing to do within the budget"
            elif model is not None and is_enabled(model):
                state = "checkpoints nothing now"
            return f"<gradckpt handle: {self._name} {state}>"
        modules = dict(model.named_modules())
        rows = Counter(
            (re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(itself)", type(modules[name]).__name__, summary(settings))
            for name, settings in chosen.items()
        )
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [
            f"  {name:{widths[0]}}  {count:4} x {kind:{widths[1]}}  {how}" for (name, kind, how), count in rows.items()
        ]
        return "\n".join([f"<gradckpt handle: {len(chosen)} modules of {self._name}", *lines]) + ">"
