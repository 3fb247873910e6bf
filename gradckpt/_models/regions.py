"""Chosen modules of any model as regions: the work of ``enable(model, modules=...)``.

A chosen module gets a :class:`Region` in place of its ``forward``, on that one instance; no class
is changed. With ``recompute=False`` its forward is no region of :func:`gradckpt.checkpoint`, but a
function under :class:`gradckpt.compress_saved`.

Rules:
    1. A failure leaves the model unchanged: everything is checked before the first module is
       modified.
    2. A region refers to its module weakly, and strongly only inside a pickle or a deep copy.
    3. Copies, pickles and DataParallel's replicas have regions of their own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from gradckpt._C import eligible
from gradckpt._config import CompressionConfig
from gradckpt._engine.arguments import need_grad, own_keywords
from gradckpt._engine.decorator import Decorated, check_runs_at_call
from gradckpt._engine.saved_tensors import call_saved, compress_saved
from gradckpt._models import activity
from gradckpt._models.caches import with_caches
from gradckpt._models.dtensors import localized
from gradckpt._models.kinds import Tree, has_forward
from gradckpt._models.offload import region_at
from gradckpt._models.overlap import check_around, is_wrapper
from gradckpt._models.ranks import RankCheck, spell
from gradckpt._models.rules import Rules, Settings, comparable, is_saved, parse_rules, resolve, summary
from gradckpt._models.weak import WeakModule
from gradckpt._offload import Offload
from gradckpt._stats import compiled, stats
from gradckpt.selectors import every

__all__ = ["Chosen", "Region", "checkpointed_by", "choose", "region_of", "regions_in"]

#: Copies and pickles ask an object for these: functions have none.
_NOT_OF_FUNCTIONS = ("__wrapped__", "__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__setstate__")

#: A module's own method that DataParallel calls; it binds the region of a replica to the replica.
_REPLICATE = "_replicate_for_data_parallel"


def choose(model: Module, rules: Rules, defaults: Settings, every_n: int, offload: Offload | None) -> Chosen:
    """Return which modules the rules choose, and how; :func:`gradckpt.enable` describes rules.

    Raises:
        ValueError: A selector matches nothing, or only modules that an earlier rule has taken; a
            module has two names with different settings; an option or codec is unknown.
        TypeError: A selector or an option has another type.
    """
    tree = Tree(model)
    pairs = parse_rules(rules, defaults)
    if every_n > 1:
        pairs = [
            (every(every_n, selector) if settings is not None else selector, settings) for selector, settings in pairs
        ]
    return Chosen(tree, resolve(pairs, tree), offload)


class Chosen:
    """The modules that rules chose in a model, by name, with their keywords of
    :func:`gradckpt.checkpoint`.
    """

    def __init__(self, tree: Tree, settings: dict[str, Settings], offload: Offload | None) -> None:
        self.tree = tree
        self.places = {name: chosen.get("offload", offload) for name, chosen in settings.items()}
        self.settings = {name: _without_place(chosen) for name, chosen in settings.items()}

    def is_installed(self) -> bool:
        """Return whether exactly these modules are regions, with these settings, and still call
        them.
        """
        regions = {name: region for name, module in self.tree.names if (region := region_of(module)) is not None}
        first = {id(region): name for name, region in reversed(regions.items())}
        now = {name: comparable(regions[name].settings) for name in first.values()}
        chosen = {name: comparable(settings) for name, settings in self.settings.items()}
        same = now == chosen and all(regions[name].offload == place for name, place in self.places.items())
        return same and all(region.is_called() for region in regions.values())

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
        regions = [
            Region(modules[name], chosen, RankCheck(label, uses), self.places[name], not name)
            for name, chosen in self.settings.items()
        ]
        for region in regions:
            region.install()
        activity.register(self.tree.model)
        activity.expect(self.tree.model, _why_inactive)
        activity.watch(self.tree.model, functools.partial(_why_replaced, list(map(weakref.ref, regions))))


def _without_place(settings: Settings) -> Settings:
    return {key: value for key, value in settings.items() if key != "offload"}


# ---- the wrapper ----


class Region:
    """The replacement of ``module.forward`` on one instance: a checkpoint region, or with
    ``recompute=False`` the forward under ``compress_saved``.
    """

    def __init__(
        self, module: Module, settings: Settings, rank_check: RankCheck, offload: Offload | None, is_whole: bool = False
    ) -> None:
        self._module = WeakModule(module)
        self.settings = settings
        self.rank_check = rank_check
        self.offload = offload
        self.is_whole = is_whole  # the model itself, whose last operators make the loss
        saved = is_saved(settings)
        self.saves = compress_saved(settings["compress"], offload=offload) if saved else None  # None: recomputed
        self.region = region_at(None if saved else offload)
        self.traced = False  # by torch.compile
        self.ran = False  # uncompiled, since the optimizer's last step
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

    def is_called(self) -> bool:
        """Return whether the module's forward still leads here, as far as its wrappers tell."""
        module = self._module()
        forward = vars(module).get("forward") if module is not None else None
        if forward is None or forward is self.own or getattr(forward, "__func__", None) is type(module).forward:
            return forward is self
        seen: set[int] = set()
        waiting: list[Any] = [forward, *vars(module).values()]  # accelerate keeps the old one as an attribute
        while waiting:
            x = waiting.pop()
            if x is self:
                return True
            if id(x) not in seen and isinstance(x, (types.FunctionType, types.MethodType, functools.partial)):
                seen.add(id(x))
                if isinstance(x, functools.partial):
                    waiting += (x.func, *x.args, *x.keywords.values())
                else:
                    waiting += (getattr(x, "__wrapped__", None), getattr(x, "__func__", None))
                    waiting += (
                        cell.cell_contents for cell in getattr(x, "__closure__", None) or () if cell != types.CellType()
                    )
        return False

    # ---- as the function that it replaces ----

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The module's own forward, which inspect.signature() reads."""
        return _own_forward(self.module) if self.own is None else self.own

    @property
    def __func__(self) -> Region:
        """What other code binds again: that of the forward would lose us."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Return ``__code__``, ``__self__`` and the other attributes of the module's forward."""
        if name == "__get__":  # not of the class: Dynamo before 2.12 takes such an object for the class's attribute
            return lambda instance, owner=None: self
        module = self._module() if "_module" in vars(self) else None  # a copy in the making has none
        if module is None or name in _NOT_OF_FUNCTIONS:
            raise AttributeError(name)
        return getattr(_own_forward(module) if self.own is None else self.own, name)

    # ---- calls ----

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        if args and args[0] is module:  # bound to it again, as accelerate does
            args = args[1:]
        forward = self.own or _forward_of(module)
        if not (self.active and torch.is_grad_enabled() and (module.training or _is_passed(args, kwargs))):
            return forward(*args, **kwargs)
        if self.saves is None and vars(module).get("gradient_checkpointing"):
            raise ValueError(
                f"gradckpt: gradient_checkpointing of this {self.kind} was turned on since gradckpt.enable, which "
                "checkpoints it too; call model.activation_checkpointing_disable(), or gradckpt.disable(model)"
            )
        if not torch.compiler.is_compiling():
            self.ran = True
            if not self.rank_check.settled():
                self._check_first(module)
        return self.run(module, forward, args, kwargs)

    def _check_first(self, module: Module) -> None:
        """Check what a module's first training call can tell: who else recomputes it, and ranks."""
        if self.saves is not None:
            _check_not_recomputed(module)
        else:
            check_around(module, "gradckpt.enable", "")
            activity.check_alone(f"this {self.kind}, checkpointed by gradckpt.enable,")
        self.rank_check.compare()

    def run(self, module: Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Call the module's own forward as a region."""
        compiled = torch.compiler.is_compiling()
        if self.saves is not None:
            return self._save(self.saves, forward, args, kwargs, compiled)
        forward, args, kwargs = prepare(forward, args, kwargs, self.settings["compress"], compiled)
        return self.region(forward, *args, **{"buffers": module, **self.settings}, **kwargs)

    def _save(
        self, saves: compress_saved, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any], compiled: bool
    ) -> Any:
        if compiled:
            self.traced = True
            return forward(*args, **kwargs)
        if not self.is_whole:
            return call_saved(saves, forward, args, kwargs)
        # A block, not a decorated function: the backward reads first what the last operators
        # save, and compressing that would raise the peak by its payloads.
        with saves:
            return forward(*args, **kwargs)

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
        how = "checkpointed" if self.saves is None else "compressed"
        return f"<{how} forward of {self.kind}: {summary(self.settings)}>"


def _check_not_recomputed(module: Module) -> None:
    """Check in the first training call that other code does not recompute the module after all.

    Raises:
        ValueError: It does.
    """
    for part in module.modules():
        why = checkpointed_by(part) if part is not module else None
        if why is not None and region_of(part) is None:
            raise ValueError(
                f"gradckpt: {type(part).__name__} in this {type(module).__name__} with recompute=False is checkpointed "
                f"already: {why}"
            )
    where = activity.inside_torchs_checkpoint()
    if where is not None:
        raise ValueError(
            f"gradckpt: this {type(module).__name__} has recompute=False and runs inside torch's own checkpoint "
            f"({where}), which recomputes it; turn one off"
        )


def _why_inactive(model: Module) -> tuple[str, bool] | None:
    """Return why no region of a trained model kept anything, and whether the user can mend it; None
    if one did, or if none is left.
    """
    regions = [region for module in model.modules() if (region := region_of(module)) is not None]
    if not regions:
        return None
    if any(region.traced and not region.rank_check.called for region in regions):
        name = type(model).__name__
        return f"recompute=False compresses nothing of {name} in torch.compile's graphs; leave one of them out", True
    if compiled.ever and any(region.saves is None for region in regions):
        return None  # a graph's regions are not counted
    if any(region.rank_check.called for region in regions):
        chosen = f"the {len(regions)} chosen modules of {type(model).__name__}"
        counted = stats()  # without regions they began anew, which tells nothing
        unused = counted["regions"] and not counted["recomputes"]
        unused = unused and activity.are_frozen(region.module for region in regions)
        return (f"{chosen} {activity.FROZEN}", False) if unused else None
    never = f"none of the {len(regions)} chosen modules of {type(model).__name__} checkpointed"
    if _are_replaced(regions):
        return None  # _why_replaced says so
    if not any(region.module.training for region in regions):
        return f"{never}: they are in eval mode, and got no input that requires grad; call model.train()", True
    return (
        f"{never}: their forward was never called with grad on; look for torch.no_grad(), or code that calls their "
        "parts",
        True,
    )


def _why_replaced(refs: list[weakref.ref[Region]], model: Module) -> tuple[str, bool] | None:
    """Return why no region of a model ran since the last step, if other code has replaced their
    forwards; None if one ran or may have run.
    """
    regions = [region for ref in refs if (region := ref()) is not None and region.active]
    ran = any(region.ran for region in regions)
    for region in regions:
        region.ran = False
    if ran or not regions or compiled.ever or not _are_replaced(regions):
        return None
    name = type(model).__name__
    return (
        f"none of the {len(regions)} chosen modules of {name} ran as enabled: other code has replaced their forward "
        "since; call gradckpt.enable again",
        True,
    )


def _are_replaced(regions: list[Region]) -> bool:
    return not any(region.is_called() for region in regions)


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


def _is_passed(*arguments: Any) -> bool:
    """Return whether gradients pass through a call in eval mode, of which no graph is exported."""
    return need_grad(*arguments) and not torch.compiler.is_exporting()


def _forward_of(module: Module) -> Callable[..., Any]:
    """Return the class's forward, bound to the instance."""
    if torch.compiler.is_compiling():
        # At a graph break, a method is looked up by its name, under which the module has its
        # region.
        return functools.partial(type(module).forward, module)
    return _own_forward(module)


def _own_forward(module: Module) -> Callable[..., Any]:
    bound: Callable[..., Any] = type(module).forward.__get__(module)
    return bound


def region_of(module: Module) -> Region | None:
    """Return the region of a module, also if other code has replaced its forward since."""
    region = getattr(vars(module).get(_REPLICATE), "__self__", None)
    return region if isinstance(region, Region) and region.active else None


def regions_in(model: Module) -> list[Region]:
    return [region for module in model.modules() if (region := region_of(module)) is not None]


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
        if is_saved(settings[name]):
            check_runs_at_call(type(module).forward, "recompute=False", "`with compress_saved(...)` inside it")


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
            "its gradient_checkpointing is on; call model.activation_checkpointing_disable(), or in diffusers, "
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
            saved = is_saved(settings[by_id[id(outer)]])
            result = "the outer one would find payloads" if saved else "it would run three times"
            raise ValueError(
                f"gradckpt: {_label(inner_name, inner)} is inside {outer_label}, and both are chosen, so {result}; "
                f"choose the outer ones alone: {_outer_alone(by_id, tree)}"
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
