"""Chosen modules of any model as regions: the work of ``enable(model, modules=...)``.

A chosen module gets a :class:`Region` in place of its ``forward``, on that one instance; no class
is changed. With ``recompute=False`` its forward is no region of :func:`gradckpt.checkpoint`, but a
function under :class:`gradckpt.compress_saved`.

A failure leaves the model unchanged: everything is checked before the first module is modified.
"""

from __future__ import annotations

import functools
import inspect
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from gradckpt._C import eligible
from gradckpt._compression import CompressionConfig
from gradckpt._engine.arguments import need_grad, own_keywords
from gradckpt._engine.decorator import Decorated, check_runs_at_call
from gradckpt._engine.saved_tensors import call_saved, compress_saved
from gradckpt._models import inactivity_warning, working_set
from gradckpt._models.caches import with_caches
from gradckpt._models.dtensors import localized
from gradckpt._models.kinds import Tree, has_forward
from gradckpt._models.offload import region_at
from gradckpt._models.overlap import check_around, is_wrapper
from gradckpt._models.ranks import RankCheck, spell
from gradckpt._models.replaced_forward import ReplacedForward, replacements_of, unbound
from gradckpt._models.rules import (
    Rules,
    Settings,
    comparable,
    is_saved,
    parse_rules,
    resolve,
    summary,
    without_working_set,
)
from gradckpt._offload import Offload
from gradckpt._stats import compiled, stats
from gradckpt.selectors import every


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
        self.settings = {
            name: {key: value for key, value in chosen.items() if key != "offload"} for name, chosen in settings.items()
        }

    def is_installed(self) -> bool:
        """Return whether exactly these modules are regions, with these settings, and still call
        them.
        """
        regions = {name: region for name, module in self.tree.names if (region := region_of(module)) is not None}
        first = {id(region): name for name, region in reversed(regions.items())}
        now = {name: comparable(regions[name].settings | regions[name].working_set) for name in first.values()}
        chosen = {name: comparable(settings) for name, settings in self.settings.items()}
        same = now == chosen and all(regions[name].offload == place for name, place in self.places.items())
        same = same and all(region.is_called() for region in regions.values())
        return same and working_set.are_called(self.tree.model)

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
        working_set.install(self.tree, {modules[name]: chosen for name, chosen in self.settings.items()})
        for region in regions:
            region.install()
        inactivity_warning.register(self.tree.model)
        inactivity_warning.expect(self.tree.model, _why_inactive)
        why_replaced = functools.partial(_why_replaced, list(map(weakref.ref, regions)))
        inactivity_warning.expect(self.tree.model, why_replaced, always=True)


# ---- the wrapper ----


class Region(ReplacedForward):
    """The replacement of ``module.forward`` on one instance: a checkpoint region, or with
    ``recompute=False`` the forward under ``compress_saved``.
    """

    def __init__(
        self, module: Module, settings: Settings, rank_check: RankCheck, offload: Offload | None, is_whole: bool = False
    ) -> None:
        super().__init__(module)
        self.settings, self.working_set = without_working_set(settings)
        self.rank_check = rank_check
        self.offload = offload
        self.is_whole = is_whole  # the model itself, whose last operators make the loss
        saved = is_saved(settings)
        self.saves = compress_saved(settings["compress"], offload=offload) if saved else None  # None: recomputed
        self.region = region_at(None if saved else offload)
        self.ran = False  # uncompiled, since the optimizer's last step
        self.traced = False  # by torch.compile

    # ---- calls ----

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        args, forward = unbound(module, args), self.forward_of(module)
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
            inactivity_warning.check_alone(f"this {self.kind}, checkpointed by gradckpt.enable,")
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
        if compiled and torch.compiler.is_exporting():
            return forward(*args, **kwargs)
        if compiled:
            self.traced = True  # never read here: Dynamo would guard on it
        if compiled or not self.is_whole:
            return call_saved(saves, forward, args, kwargs)
        # A block, not a decorated function: the backward reads first what the last operators
        # save, and compressing that would raise the peak by its payloads.
        with saves:
            return forward(*args, **kwargs)

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
    where = inactivity_warning.inside_torchs_checkpoint()
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
    if any(region.traced or (compiled.ever and region.saves is None) for region in regions):
        return None  # a graph's regions are not counted
    if any(region.rank_check.called for region in regions):
        chosen = f"the {len(regions)} chosen modules of {type(model).__name__}"
        counted = stats()  # without regions they began anew, which tells nothing
        unused = counted["regions"] and not counted["recomputes"]
        unused = unused and inactivity_warning.are_frozen(region.module for region in regions)
        return (f"{chosen} {inactivity_warning.FROZEN}", False) if unused else None
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


def region_of(module: Module) -> Region | None:
    """Return the region of a module, also if other code has replaced its forward since."""
    return next((each for each in replacements_of(module) if isinstance(each, Region)), None)


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
