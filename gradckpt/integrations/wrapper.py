"""torch's ``CheckpointWrapper`` around modules, with gradckpt inside: :func:`checkpoint_wrapper`, and
:func:`apply_activation_checkpointing` for many at once.

FSDP, accelerate, Lightning and torchtitan know that class and its ``_checkpoint_wrapped_module.`` prefix. State dicts
do not show it; the names of a model's parameters do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.nn import Module

import gradckpt
from gradckpt.apply import other_checkpointing, parse_options, prepare, region_of, summary
from gradckpt.config import Compress
from gradckpt.integrations.overlap import block_of, check_around, is_wrapper
from gradckpt.integrations.ranks import RankCheck, spell
from gradckpt.kinds import Tree

__all__ = ["CheckpointWrapper", "apply_activation_checkpointing", "checkpoint_wrapper"]

logger = logging.getLogger("gradckpt")

_HELD = "_checkpoint_wrapped_module"


class CheckpointWrapper(torchs.CheckpointWrapper):
    """A module, each training call of which is one region of :func:`gradckpt.checkpoint`."""

    def __init__(self, module: Module, settings: dict[str, Any], nested: bool = False) -> None:
        super().__init__(module, torchs.CheckpointImpl.NO_REENTRANT, gradckpt.checkpoint, **settings)
        # Of other names than a module's own attributes, which are read through this one.
        self._settings = settings
        self._nested = nested
        self.rank_check = _check_of_class(type(_innermost(module)).__name__, spell(settings["compress"]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        checkpoint: Callable[..., Any] = self.checkpoint_fn
        function: Callable[..., Any] = self._checkpoint_wrapped_module
        compiled = torch.compiler.is_compiling()
        if not compiled and not self.rank_check.settled() and torch.is_grad_enabled():
            self._check()
        function, args, kwargs = prepare(function, args, kwargs, self._settings["compress"], compiled)
        return checkpoint(function, *args, **kwargs)

    def _check(self) -> None:
        """In the first training calls: what would be wrong with all of them."""
        if not self._nested:
            _check_inside(self._checkpoint_wrapped_module)
            check_around(_innermost(self), "gradckpt.compat.checkpoint_wrapper", ", or pass nested=True to ours")
        self.rank_check.compare()

    def __setattr__(self, name: str, value: Any) -> None:
        """What wraps modules of a model one by one puts the wrapped one here; the same block is not wrapped twice."""
        if name == _HELD:
            _check_block(value)
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"gradckpt: {summary(self._settings)}"


def checkpoint_wrapper(
    module: Module, compress: Compress = None, *, nested: bool = False, **options: Any
) -> CheckpointWrapper:
    """Wrap a module for activation checkpointing; with ``compress``, its inputs are kept compressed.

    It takes the place of torch's function of this name, also where a framework calls it:
    ``checkpoint_wrapper_fn=functools.partial(gradckpt.compat.checkpoint_wrapper, compress="int8")``.

    Args:
        module: Any module.
        compress: ``None`` (torch's checkpointing, bit for bit), ``True``, a codec's name, a
            :class:`gradckpt.CompressionConfig` or its dict.
        nested: The module may hold checkpointed ones, or lie inside one. The inner ones then run once more in each
            recompute of the outer.
        **options: ``policy`` or ``context_fn``, ``preserve_rng_state``, ``early_stop``, ``determinism_check``,
            ``debug`` and ``buffers``, as for :func:`gradckpt.checkpoint`; torch's
            ``checkpoint_impl=CheckpointImpl.NO_REENTRANT``, which is what it does anyway.

    Raises:
        ValueError: unknown codec or option; a module that is checkpointed already, or holds one that is.
        TypeError: not a module.
    """
    if not isinstance(module, Module):
        raise TypeError(f"gradckpt: checkpoint_wrapper() takes a torch.nn.Module, not {type(module).__name__}")
    settings = _settings_of(compress, options, nested)
    _check_block(module)
    if not nested:
        _check_inside(module)
    return CheckpointWrapper(module, settings, nested)


def apply_activation_checkpointing(
    model: Module,
    compress: Compress = None,
    *,
    check_fn: Callable[[Module], bool] | None = None,
    auto_wrap_policy: Any = None,
    nested: bool = False,
    **options: Any,
) -> int:
    """Wrap modules inside a model with :func:`checkpoint_wrapper`, in place: torch's function of this name.

    Args:
        model: Any module; it is not wrapped itself. One that FSDP has wrapped, too.
        compress: As for :func:`checkpoint_wrapper`.
        check_fn: Which modules: a function of a module.
        auto_wrap_policy: Or this, which FSDP takes: ``ModuleWrapPolicy({Block})``, ``CustomPolicy`` (whose dicts are
            options for the module), ``functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})``.
            Without either: the model's layers, as ``gradckpt.enable(model, modules="layer")`` finds them.
        nested: Let chosen modules lie inside each other.
        **options: As for :func:`checkpoint_wrapper`.

    Returns:
        The number of modules that were wrapped; a module with several names is one.

    Raises:
        ValueError: nothing would be wrapped; a module that is checkpointed already, or that lies inside another that
            is; an unknown codec or option. The model is as it was then.
        TypeError: not a module, or a policy that is none.
    """
    if not isinstance(model, Module):
        raise TypeError(
            f"gradckpt: apply_activation_checkpointing() takes a torch.nn.Module, not {type(model).__name__}"
        )
    _settings_of(compress, options, nested)
    chosen = _chosen(model, check_fn, auto_wrap_policy)
    places = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None and id(child) in chosen
    ]
    for parent, _, child in places:
        if any(is_wrapper(module) for module in (*block_of(parent), *block_of(child))):
            raise ValueError(_twice(child))
        if not nested:
            _check_inside(child)
    if not nested:
        _check_apart(chosen)
    wrappers = {
        key: CheckpointWrapper(module, _settings_of(compress, {**options, **extra}, nested), nested)
        for key, (module, extra) in chosen.items()
    }
    _name(model, wrappers)
    for parent, name, child in places:
        setattr(parent, name, wrappers[id(child)])
    kinds = sorted({type(module).__name__ for module, _ in chosen.values()})
    logger.info("wrapped %d modules of %s: %s", len(wrappers), type(model).__name__, ", ".join(kinds))
    return len(wrappers)


def _settings_of(compress: Compress, options: Mapping[str, Any], nested: bool) -> dict[str, Any]:
    options = dict(options)
    if options.pop("checkpoint_impl", torchs.CheckpointImpl.NO_REENTRANT) is not torchs.CheckpointImpl.NO_REENTRANT:
        raise ValueError(
            "gradckpt: checkpoint_wrapper() cannot compress with CheckpointImpl.REENTRANT; leave checkpoint_impl out, "
            "or use torch's checkpoint_wrapper"
        )
    if options.pop("checkpoint_fn", None) is not None:
        raise ValueError(
            "gradckpt: checkpoint_wrapper() calls gradckpt.checkpoint, so checkpoint_fn= would not be called; leave it "
            "out, or use torch's checkpoint_wrapper"
        )
    if not isinstance(nested, bool):
        raise TypeError(f"gradckpt: nested is True or False, not {nested!r}")
    return parse_options({"compress": compress, **options}, {})


# ---- which modules ----


def _chosen(model: Module, check_fn: Any, policy: Any) -> dict[int, tuple[Module, dict[str, Any]]]:
    """The modules by their ids, each with options that the policy gives it alone."""
    if check_fn is not None and policy is not None:
        raise ValueError("gradckpt: check_fn= and auto_wrap_policy= exclude each other; give one of them")
    if policy is not None and not callable(policy) and not hasattr(policy, "_run_policy"):
        raise TypeError(
            "gradckpt: auto_wrap_policy= takes one of torch's policies, such as ModuleWrapPolicy({Block}); not "
            f"{type(policy).__name__}"
        )
    if check_fn is not None and (isinstance(check_fn, type) or not callable(check_fn)):
        raise TypeError(
            "gradckpt: check_fn= takes a function of a module, such as lambda module: isinstance(module, Block); not "
            f"{check_fn!r}"
        )
    chosen: dict[int, tuple[Module, dict[str, Any]]] = {}
    if check_fn is None and policy is None:
        modules = dict(model.named_modules())
        layers = {id(modules[name]): modules[name] for name in Tree(model).of_kind("layer") if name in modules}
        chosen = {key: (module, {}) for key, module in layers.items() if module is not model}
        what = "no layer was recognised"
    else:

        def note(module: Module, **extra: Any) -> Module:
            chosen[id(module)] = (module, extra)
            return module

        # torch's function goes over the modules and puts each in the place of itself.
        how = {"check_fn": check_fn} if policy is None else {"auto_wrap_policy": policy}
        torchs.apply_activation_checkpointing(model, checkpoint_wrapper_fn=note, **how)
        what = f"{'check_fn' if policy is None else 'auto_wrap_policy'} chose none"
    if not chosen:
        classes = sorted({type(module).__name__ for module in model.modules() if module is not model})
        raise ValueError(
            f"gradckpt: no module of this {type(model).__name__} would be wrapped: {what}; pass "
            "check_fn=lambda module: isinstance(module, Block) "
            f"with the class of its blocks, one of {', '.join(classes) or 'none'}"
        )
    return chosen


def _name(model: Module, wrappers: dict[int, CheckpointWrapper]) -> None:
    """The ranks compare what each module has, by its name."""
    label = type(model).__name__
    uses = {
        _clean(name): [spell(wrappers[id(module)]._settings["compress"])]
        for name, module in model.named_modules()
        if id(module) in wrappers
    }
    for wrapper in wrappers.values():
        wrapper.rank_check = RankCheck(label, uses)


def _clean(name: str) -> str:
    """Without the parts that FSDP and other wrappers add."""
    hidden = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in hidden)


#: By class of module: what wrappers of it were ever made for; one of them alone has no name.
_made: dict[str, list[str]] = {}


def _check_of_class(kind: str, use: str) -> RankCheck:
    uses = _made.setdefault(kind, [])
    if use not in uses:
        uses.append(use)
    return RankCheck(
        f"{kind} in gradckpt.compat.checkpoint_wrapper", {f"{kind} in gradckpt.compat.checkpoint_wrapper": uses}
    )


# ---- checks ----


def _innermost(module: Module) -> Module:
    *_, block = block_of(module)
    return block


def _twice(module: Module) -> str:
    return (
        f"gradckpt: this {type(_innermost(module)).__name__} is wrapped for checkpointing already, and would be twice; "
        "wrap it once, and turn off FSDP's own activation_checkpointing flag (in accelerate's plugin, the Trainer's "
        "fsdp_config or Lightning's strategy) where gradckpt does it"
    )


def _check_block(module: Any) -> None:
    """The block is not checkpointed by other means."""
    for each in block_of(module) if isinstance(module, Module) else ():
        if is_wrapper(each):
            raise ValueError(_twice(each))
        why = _checkpointed(each)
        if why is not None:
            raise ValueError(f"gradckpt: this {type(each).__name__} is checkpointed already: {why}")


def _checkpointed(module: Module) -> str | None:
    if region_of(module) is not None:
        return "by gradckpt.enable; call gradckpt.disable(model) first, or do without the wrapper"
    return other_checkpointing(module)


def _check_inside(module: Module) -> None:
    """Nothing inside is checkpointed, by us or others, which can also happen after it was wrapped."""
    blocks = set(map(id, block_of(module)))
    for inner in module.modules():
        if is_wrapper(inner) and id(inner) in blocks:
            raise ValueError(_twice(inner))
        why = "it is wrapped; leave it out" if is_wrapper(inner) else _checkpointed(inner)
        if why is not None:
            what = type(_innermost(inner)).__name__
            if id(inner) in blocks:
                raise ValueError(f"gradckpt: this {what} is checkpointed already: {why}")
            raise ValueError(
                f"gradckpt: a {what} inside this {type(_innermost(module)).__name__} is checkpointed already, so it "
                f"would run three times: {why}; or pass nested=True"
            )


def _check_apart(chosen: dict[int, tuple[Module, dict[str, Any]]]) -> None:
    for outer, _ in chosen.values():
        for inner in outer.modules():
            if inner is not outer and id(inner) in chosen:
                raise ValueError(
                    f"gradckpt: a {type(inner).__name__} is inside a {type(outer).__name__}, and both are to be "
                    "wrapped, so that the inner one would run three times; choose one of them, or pass nested=True"
                )
