"""Chosen modules of any model as regions: the work of ``enable(model, modules=...)``.

A chosen module gets a :class:`Region` in place of its ``forward``, on that one instance; no class
is changed.

Rules:
    1. A failure leaves the model unchanged: everything is checked before the first module is
       modified.
    2. A region refers to its module weakly, and strongly only inside a pickle or a deep copy.
    3. Copies, pickles and DataParallel's replicas have regions of their own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Union

import torch
from torch.nn import Module

from gradckpt._C import checkpoint as region_checkpoint
from gradckpt._C import eligible
from gradckpt._config import Compress, CompressionConfig, advise, parse_compress
from gradckpt._engine.arguments import OPTIONS, check_option, own_keywords
from gradckpt._engine.decorator import Decorated
from gradckpt._engine.selective import contexts_key, contexts_of
from gradckpt._models import activity
from gradckpt._models.caches import with_caches
from gradckpt._models.dtensors import localized
from gradckpt._models.kinds import Tree, has_forward
from gradckpt._models.offload import offloaded
from gradckpt._models.overlap import check_around, is_wrapper
from gradckpt._models.ranks import RankCheck, spell
from gradckpt._models.weak import WeakModule
from gradckpt._stats import stats
from gradckpt.selectors import Selector, describe, every, select

__all__ = ["Chosen", "Region", "checkpointed_by", "choose", "region_of", "regions_in"]

#: A module's own method that DataParallel calls; it binds the region of a replica to the replica.
_REPLICATE = "_replicate_for_data_parallel"

_CONFIG_FIELDS = tuple(field.name for field in dataclasses.fields(CompressionConfig))

#: The keywords of gradckpt.checkpoint for one module.
Settings = dict[str, Any]

#: The value of a rule: whatever ``compress`` takes, a dict of keywords of gradckpt.checkpoint, or
#: "skip".
Value = Union[Compress, Mapping[str, Any]]

Rules = Union[Mapping[Any, Value], Selector, list[Any]]


def choose(model: Module, rules: Rules, defaults: Settings, every_n: int, offload: bool) -> Chosen:
    """Return which modules the rules choose, and how; :func:`gradckpt.enable` describes rules.

    Raises:
        ValueError: A selector matches nothing, or only modules that an earlier rule has taken; a
            module has two names with different settings; an option or codec is unknown.
        TypeError: A selector or an option has another type.
    """
    tree = Tree(model)
    pairs = _parse_rules(rules, defaults)
    if every_n > 1:
        pairs = [
            (every(every_n, selector) if settings is not None else selector, settings) for selector, settings in pairs
        ]
    return Chosen(tree, _resolve(pairs, tree), offload)


class Chosen:
    """The modules that rules chose in a model, by name, with their keywords of
    :func:`gradckpt.checkpoint`.
    """

    def __init__(self, tree: Tree, settings: dict[str, Settings], offload: bool) -> None:
        self.tree = tree
        self.settings = settings
        self.offload = offload

    def is_installed(self) -> bool:
        """Return whether exactly these modules are regions, with these settings."""
        regions = {name: region for name, module in self.tree.names if (region := region_of(module)) is not None}
        first = {id(region): name for name, region in reversed(regions.items())}
        now = {name: _comparable(regions[name].settings) for name in first.values()}
        chosen = {name: _comparable(settings) for name, settings in self.settings.items()}
        return now == chosen and all(region.offload == self.offload for region in regions.values())

    def install(self) -> None:
        """Make the modules regions.

        Raises:
            ValueError: A module is checkpointed by other means, lies in another chosen one, or has
                no forward.
        """
        modules = dict(self.tree.names)
        _check_modules(self.settings, modules)
        _check_nesting(self.settings, self.tree)
        label = type(self.tree.model).__name__
        uses = {name: [spell(chosen["compress"])] for name, chosen in self.settings.items()}
        for name, chosen in self.settings.items():
            Region(modules[name], chosen, RankCheck(label, uses), self.offload).install()
        activity.register(self.tree.model)
        activity.expect(self.tree.model, _why_inactive)


def _comparable(settings: Settings | None) -> Settings | None:
    if settings is None or "context_fn" not in settings:
        return settings
    return {**settings, "context_fn": contexts_key(settings["context_fn"])}


def summary(settings: Settings) -> str:
    config = settings["compress"]
    changed = []
    if config is not None:
        default = CompressionConfig(config.codec)
        changed = [f"{key}={value!r}" for key, value in vars(config).items() if value != getattr(default, key)]
    for key, value in settings.items():
        if key == "context_fn" and isinstance(value, functools.partial):  # of a policy
            key, value = "policy", value.args[0]
        if key != "compress":
            changed.append(f"{key}={describe(value)}")
    return ", ".join(["uncompressed" if config is None else config.codec, *changed])


# ---- the wrapper ----


class Region:
    """The replacement of ``module.forward`` on one instance."""

    def __init__(self, module: Module, settings: Settings, rank_check: RankCheck, offload: bool) -> None:
        self._module = WeakModule(module)
        self.settings = settings
        self.rank_check = rank_check
        self.offload = offload
        self.kind = type(module).__name__
        self.own: Any = None  # the earlier replacement of forward on the instance; None: the class's method
        self.active = False

    def install(self) -> None:
        attributes = vars(self.module)
        self.own = attributes.get("forward")
        self.active = True
        attributes["forward"] = self
        attributes[_REPLICATE] = self.replicate

    def remove(self) -> None:
        """Restore the module's forward.

        If other code has replaced ours since, it may still call us; the region then only calls the
        forward.
        """
        module = self._module()
        if not self.active or module is None:
            self.active = False
            return
        self.active = False
        attributes = vars(module)
        if attributes.get("forward") is self:
            if self.own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = self.own
        if getattr(attributes.get(_REPLICATE), "__self__", None) is self:
            del attributes[_REPLICATE]

    @property
    def module(self) -> Module:
        module: Module | None = self._module()
        if module is None:
            raise ReferenceError(f"gradckpt: the {self.kind} of this checkpointed forward is gone")
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, which inspect.signature() reads."""
        module = self.module
        return type(module).forward.__get__(module) if self.own is None else self.own  # type: ignore[no-any-return]

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        forward = self.own or _forward_of(module)
        if not (self.active and module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        if vars(module).get("gradient_checkpointing"):
            raise ValueError(
                f"gradckpt: gradient_checkpointing of this {self.kind} was turned on since gradckpt.enable, which "
                "checkpoints it too; call model.gradient_checkpointing_disable(), or gradckpt.disable(model)"
            )
        compiled = torch.compiler.is_compiling()
        if not compiled and not self.rank_check.settled():
            check_around(module, "gradckpt.enable", "")
            activity.check_alone(f"this {self.kind}, checkpointed by gradckpt.enable,")
            self.rank_check.compare()
        forward, args, kwargs = prepare(forward, args, kwargs, self.settings["compress"], compiled)
        checkpoint = offloaded if self.offload else region_checkpoint
        return checkpoint(forward, *args, **{"buffers": module, **self.settings}, **kwargs)

    def replicate(self) -> Module:
        """Make a replica for DataParallel, which copies attributes and so would share our
        forward.
        """
        module = self.module
        replica: Module = getattr(type(module), _REPLICATE).__get__(module)()
        if vars(replica).get("forward") is self:
            region = copy.copy(self)
            region._module = WeakModule(replica)
            vars(replica)["forward"] = region
            vars(replica)[_REPLICATE] = region.replicate
        return replica

    def __repr__(self) -> str:
        return f"<checkpointed forward of {self.kind}: {summary(self.settings)}>"


def _why_inactive(model: Module) -> tuple[str, bool] | None:
    """Return why no region of a trained model kept anything, and whether the user can mend it; None
    if one did, or if none is left.
    """
    regions = [region for module in model.modules() if (region := region_of(module)) is not None]
    if not regions:
        return None
    if any(region.rank_check.called for region in regions):
        chosen = f"the {len(regions)} chosen modules of {type(model).__name__}"
        counted = stats()  # without regions they began anew, which tells nothing
        unused = counted["regions"] and not counted["recomputes"]
        unused = unused and activity.are_frozen(region.module for region in regions)
        return (f"{chosen} {activity.FROZEN}", False) if unused else None
    never = f"none of the {len(regions)} chosen modules of {type(model).__name__} checkpointed"
    if not any(region.module.training for region in regions):
        return f"{never}: they are in eval mode; call model.train()", True
    return (
        f"{never}: their forward was never called with grad on; look for torch.no_grad(), or code that calls their "
        "parts",
        True,
    )


def prepare(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    config: CompressionConfig | None,
    compiled: bool,
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of gradckpt.checkpoint for a call of any module."""
    function, args, kwargs = with_caches(function, args, kwargs)
    function = own_keywords(function, kwargs)
    if config is not None and not compiled:
        leaves_too = eligible(True, True, config.include == "floating", config.fake_quantize)
        return localized(function, args, kwargs, leaves_too)
    return function, args, kwargs


def _forward_of(module: Module) -> Callable[..., Any]:
    """Return the class's forward, bound to the instance."""
    if torch.compiler.is_compiling():
        # At a graph break, a method is looked up by its name, under which the module has its
        # region.
        return functools.partial(type(module).forward, module)
    bound: Callable[..., Any] = type(module).forward.__get__(module)
    return bound


def region_of(module: Module) -> Region | None:
    """Return the region of a module, also if other code has replaced its forward since."""
    region = getattr(vars(module).get(_REPLICATE), "__self__", None)
    return region if isinstance(region, Region) and region.active else None


def regions_in(model: Module) -> list[Region]:
    return [region for module in model.modules() if (region := region_of(module)) is not None]


# ---- rules and settings ----


def _parse_rules(rules: Any, defaults: Settings) -> list[tuple[Any, Settings | None]]:
    """Return the selectors and the settings of each; None means skip."""
    if isinstance(rules, Mapping):
        pairs = [(selector, _parse_value(value, defaults)) for selector, value in rules.items()]
    else:
        pairs = [(selector, defaults) for selector in (rules if isinstance(rules, list) else [rules])]
    if not pairs:
        raise ValueError('gradckpt: modules= is empty; pass a selector such as "layer", or leave it out')
    return pairs


def _parse_value(value: Any, defaults: Settings) -> Settings | None:
    if isinstance(value, str) and value == "skip":
        return None
    if not isinstance(value, Mapping):
        return {**defaults, "compress": parse_compress(value)}
    if value and all(key in _CONFIG_FIELDS for key in value):
        return {**defaults, "compress": CompressionConfig.from_dict(value)}
    return parse_options(value, defaults)


def parse_options(given: Mapping[str, Any], defaults: Settings, others: tuple[str, ...] = ()) -> Settings:
    """Return the keywords of :func:`gradckpt.checkpoint` that options mean; ``others`` are the
    caller's.
    """
    for key, value in given.items():
        if key in _CONFIG_FIELDS and key != "codec":
            raise ValueError(f'gradckpt: {key!r} is a field of compress=; pass compress={{"{key}": {value!r}}}')
        if key not in OPTIONS:
            where = "gradckpt.enable" if others else "gradckpt.checkpoint"
            raise ValueError(f"gradckpt: unknown option {key!r}; {advise(str(key), value, (*OPTIONS, *others), where)}")
        check_option(key, value)
    settings = {"compress": None, **defaults, **given}
    settings["compress"] = parse_compress(settings["compress"])
    if "policy" in given:
        if "context_fn" in given:
            raise ValueError("gradckpt: policy= and context_fn= exclude each other; a policy is a context_fn")
        context_fn = contexts_of(settings.pop("policy"))
        settings.pop("context_fn", None)  # of the defaults
        if context_fn is not None:
            settings["context_fn"] = context_fn
    if settings.get("debug") and "context_fn" in settings:
        raise ValueError("gradckpt: debug=True and policy= or context_fn= exclude each other; leave one of them out")
    return settings


def _resolve(pairs: list[tuple[Any, Settings | None]], tree: Tree) -> dict[str, Settings]:
    """Return the settings by name, in the model's order; a module with several names occurs
    once.
    """
    by_name: dict[str, Settings | None] = {}
    for selector, settings in pairs:
        free = [name for name in select(selector, tree) if name not in by_name]
        if not free:
            raise ValueError(
                f"gradckpt: every module that {describe(selector)} matches is taken by a rule before it; put the "
                "narrower rule first"
            )
        by_name.update(dict.fromkeys(free, settings))
    first: dict[int, str] = {}
    for name, module in tree.names:
        if name not in by_name:
            continue
        other = first.setdefault(id(module), name)
        if _comparable(by_name[other]) != _comparable(by_name[name]):
            raise ValueError(
                f"gradckpt: {other!r} and {name!r} are one {type(module).__name__}, and the rules give it different "
                "settings; give both names the same"
            )
    settled = {name: by_name[name] for name in first.values()}
    wrapped = {name: settings for name, settings in settled.items() if settings is not None}
    if not wrapped:
        raise ValueError('gradckpt: every rule says "skip", so nothing would be checkpointed')
    return wrapped


# ---- checks ----


def _check_modules(settings: dict[str, Settings], modules: dict[str, Module]) -> None:
    for name in settings:
        module = modules[name]
        if not has_forward(module):
            held = {type(child).__name__ for child in module.children()}
            hint = f"; select the modules in it by class, modules={min(held)}" if held else ""
            raise ValueError(f"gradckpt: {_label(name, module)} has no forward of its own to checkpoint{hint}")
        why = checkpointed_by(module)
        if why is not None:
            raise ValueError(f"gradckpt: {_label(name, module)} is checkpointed already: {why}")


def checkpointed_by(module: Module) -> str | None:
    """Return what checkpoints this module already and how to end that, or None."""
    if region_of(module) is not None:
        return "by gradckpt.enable; call gradckpt.disable on it first"
    if is_wrapper(module):
        return (
            "by torch's CheckpointWrapper; leave out apply_activation_checkpointing or FSDP's "
            "activation_checkpointing flag"
        )
    if vars(module).get("gradient_checkpointing") is True:
        return (
            "its gradient_checkpointing is on; call model.gradient_checkpointing_disable(), or in diffusers, "
            "model.disable_gradient_checkpointing()"
        )
    if vars(module).get("grad_checkpointing") is True:
        return "its grad_checkpointing is on (timm); call model.set_grad_checkpointing(False)"
    if isinstance(inspect.getattr_static(type(module), "forward", None), Decorated):
        return "its forward is decorated with gradckpt.checkpoint; leave it out"
    return None


def _check_nesting(settings: dict[str, Settings], tree: Tree) -> None:
    by_id = {id(module): name for name, module in tree.names if name in settings}
    for outer_name, outer in tree.names:
        chosen = id(outer) in by_id
        why = checkpointed_by(outer)
        for inner in outer.modules() if chosen or why else ():
            if inner is outer:
                continue
            inner_name = by_id.get(id(inner))
            inner_why = checkpointed_by(inner) if chosen else None
            if inner_name is None and inner_why is None:
                continue
            outer_label = _label(outer_name, outer)
            if inner_name is None or not chosen:
                inner_label = _label(inner_name or next(n for n, m in tree.names if m is inner), inner)
                which, reason = (outer_label, why) if not chosen else (inner_label, inner_why)
                raise ValueError(
                    f"gradckpt: {inner_label} is inside {outer_label}, and {which} is checkpointed already: {reason}"
                )
            raise ValueError(
                f"gradckpt: {_label(inner_name, inner)} is inside {outer_label}, and both are chosen, so it would run "
                f"three times; choose the outer ones alone: {_outer_alone(by_id, tree)}"
            )


def _outer_alone(by_id: dict[int, str], tree: Tree) -> str:
    """Return ``modules=`` for the chosen modules that lie in no other chosen one."""
    chosen = [module for _, module in tree.names if id(module) in by_id]
    inside = {id(part) for module in chosen for part in module.modules() if part is not module}
    outer = {id(module): module for module in chosen if id(module) not in inside}
    classes = tuple({type(module): None for module in outer.values()})
    if {id(module) for _, module in tree.names if isinstance(module, classes)} == outer.keys():
        written = ", ".join(each.__name__ for each in classes)
        return f"modules={written}" if len(classes) == 1 else f"modules=[{written}]"
    names = [by_id[each] for each in outer]
    pattern = "|".join(dict.fromkeys(re.sub(r"\b\d+\b", r"\\d+", name.replace(".", r"\.")) for name in names))
    if {id(module) for name, module in tree.names if re.fullmatch(pattern, name)} == outer.keys():
        return f"modules=re.compile(r{pattern!r})".replace(r"\\", "\\")
    return f"modules={names}"


def _label(name: str, module: Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the model itself ({type(module).__name__})"
