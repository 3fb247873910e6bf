"""torch's ``CheckpointWrapper`` around modules, with gradckpt inside.

:func:`checkpoint_wrapper` wraps one module, and :func:`apply_activation_checkpointing` many. FSDP,
accelerate, Lightning and torchtitan know that class and its ``_checkpoint_wrapped_module.`` prefix.
State dicts do not contain the prefix; the names of a model's parameters do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.nn import Module

from gradckpt._C import checkpoint
from gradckpt._compression import Compress
from gradckpt._engine.arguments import check_bool
from gradckpt._models.kinds import Tree
from gradckpt._models.overlap import block_of, check_around, is_wrapper
from gradckpt._models.ranks import RankCheck, spell
from gradckpt._models.regions import checkpointed_by, prepare
from gradckpt._models.rules import parse_options, summary

__all__ = ["CheckpointWrapper", "apply_activation_checkpointing", "checkpoint_wrapper"]

logger = logging.getLogger("gradckpt")

_HELD = "_checkpoint_wrapped_module"


class CheckpointWrapper(torchs.CheckpointWrapper):
    """A module whose training calls are each one region of :func:`gradckpt.checkpoint`."""

    def __init__(self, module: Module, settings: dict[str, Any], nested: bool = False) -> None:
        super().__init__(module, torchs.CheckpointImpl.NO_REENTRANT, checkpoint, **settings)
        # These names must differ from the module's own attributes, which are read through this one.
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
        """Check in the first training calls for mistakes that would affect all of them."""
        if not self._nested:
            _check(self._checkpoint_wrapped_module, nested=False)
            check_around(_innermost(self), "gradckpt.compat.checkpoint_wrapper", ", or pass nested=True")
        self.rank_check.compare()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but do not wrap the same block twice.

        Code that wraps modules of a model one by one assigns the wrapped module here.
        """
        if name == _HELD:
            _check(value, nested=True)
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return f"gradckpt: {summary(self._settings)}"


def checkpoint_wrapper(
    module: Module, compress: Compress = None, *, nested: bool = False, **options: Any
) -> CheckpointWrapper:
    """Wrap a module for activation checkpointing; with ``compress``, its inputs are compressed.

    It replaces torch's function of this name, also if a framework calls it:
    ``checkpoint_wrapper_fn=functools.partial(gradckpt.compat.checkpoint_wrapper,
    compress="int8")``.

    Args:
        module: Any module.
        compress: ``None`` (torch's checkpointing, bit for bit), ``True``, a codec's name, a
            :class:`gradckpt.CompressionConfig` or its dict.
        nested: Allow the module to hold checkpointed ones, or to lie inside one. The inner ones
            then run once more in each recompute of the outer.
        **options: ``policy`` or ``context_fn``, ``offload``, ``preserve_rng_state``,
            ``early_stop``, ``determinism_check``, ``debug``, ``respect_saved_tensors_hooks`` and
            ``buffers``, as for :func:`gradckpt.checkpoint`;
            torch's ``checkpoint_impl=CheckpointImpl.NO_REENTRANT``, which is the default anyway.

    Raises:
        ValueError: A codec or option is unknown, or the module is checkpointed already, or holds
            one that is.
        TypeError: ``module`` is not a module.
    """
    if not isinstance(module, Module):
        raise TypeError(f"gradckpt: checkpoint_wrapper() takes a torch.nn.Module, not {type(module).__name__}")
    settings = _settings_of(compress, options, nested)
    _check(module, nested)
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
    """Wrap modules inside a model with :func:`checkpoint_wrapper`, in place, as torch's function
    does.

    Args:
        model: Any module, also one that FSDP has wrapped; it is not wrapped itself.
        compress: As for :func:`checkpoint_wrapper`.
        check_fn: A function of a module that returns whether to wrap it.
        auto_wrap_policy: Or a policy of FSDP: ``ModuleWrapPolicy({Block})``, ``CustomPolicy``
            (whose dicts are options for the module),
            ``functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})``.
            Without either, the model's layers are wrapped, as found by ``gradckpt.enable(model,
            modules="layer")``.
        nested: Let chosen modules lie inside each other.
        **options: As for :func:`checkpoint_wrapper`.

    Returns:
        The number of modules that were wrapped; a module with several names counts once.

    Raises:
        ValueError: Nothing would be wrapped; a module is checkpointed already or lies inside
            another that is; a codec or option is unknown. The model is then unchanged.
        TypeError: ``model`` is not a module, or the policy is not one.
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
        _check(parent if is_wrapper(parent) else child, nested)
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
    logger.info("gradckpt: wrapped %d modules of %s: %s", len(wrappers), type(model).__name__, ", ".join(kinds))
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
            "gradckpt: checkpoint_wrapper() does not call checkpoint_fn=; leave it out, or use torch's "
            "checkpoint_wrapper"
        )
    check_bool("nested", nested)
    return parse_options({"compress": compress, **options}, {}, ("offload",))


# ---- which modules ----


def _chosen(model: Module, check_fn: Any, policy: Any) -> dict[int, tuple[Module, dict[str, Any]]]:
    """Return the modules by their ids, each with its own options from the policy."""
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
        kinds = Tree(model).kinds
        chosen = {id(x): (x, {}) for x in model.modules() if kinds.get(id(x)) == "layer" and x is not model}
        what = "no layer was recognised"
    else:

        def note(module: Module, **extra: Any) -> Module:
            chosen[id(module)] = (module, extra)
            return module

        # torch's function visits the modules and replaces each by itself.
        how = {"check_fn": check_fn} if policy is None else {"auto_wrap_policy": policy}
        torchs.apply_activation_checkpointing(model, checkpoint_wrapper_fn=note, **how)
        what = f"{'check_fn' if policy is None else 'auto_wrap_policy'} chose none"
    if not chosen:
        classes = sorted({type(module).__name__ for module in model.modules() if module is not model})
        raise ValueError(
            f"gradckpt: no module of this {type(model).__name__} would be wrapped: {what}; pass "
            "check_fn=lambda module: isinstance(module, Block) "
            f"with the class of its blocks, one of: {', '.join(classes) or 'none'}"
        )
    return chosen


def _name(model: Module, wrappers: dict[int, CheckpointWrapper]) -> None:
    """Give each wrapper the name of its module, by which the ranks compare formats."""
    label = type(model).__name__
    uses = {
        _clean(name): [spell(wrappers[id(module)]._settings["compress"])]
        for name, module in model.named_modules()
        if id(module) in wrappers
    }
    for wrapper in wrappers.values():
        wrapper.rank_check = RankCheck(label, uses)


def _clean(name: str) -> str:
    """Return a name without the parts that FSDP and other wrappers add."""
    hidden = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
    return ".".join(part for part in name.split(".") if part not in hidden)


#: By class of module: all formats of its wrappers so far; a single wrapper has no name.
_made: dict[str, list[str]] = {}


def _check_of_class(kind: str, use: str) -> RankCheck:
    uses = _made.setdefault(kind, [])
    if use not in uses:
        uses.append(use)
    label = f"{kind} in gradckpt.compat.checkpoint_wrapper"
    return RankCheck(label, {label: uses}, of_class=True)


# ---- checks ----


def _innermost(module: Module) -> Module:
    *_, block = block_of(module)
    return block


def _check(module: Any, nested: bool) -> None:
    """Check that the block is not checkpointed by other means, nor a module inside, unless
    ``nested``; also after it was wrapped.
    """
    blocks = list(block_of(module)) if isinstance(module, Module) else []
    for each in blocks if nested else module.modules():
        why = checkpointed_by(each)
        if why is None:
            continue
        kind = type(_innermost(each)).__name__
        if any(each is block for block in blocks):
            raise ValueError(f"gradckpt: this {kind} is checkpointed already: {why}")
        raise ValueError(
            f"gradckpt: a {kind} inside this {type(blocks[-1]).__name__} is checkpointed already, so it would run "
            f"three times without nested=True: {why}"
        )


def _check_apart(chosen: dict[int, tuple[Module, dict[str, Any]]]) -> None:
    for outer, _ in chosen.values():
        for inner in outer.modules():
            if inner is not outer and id(inner) in chosen:
                raise ValueError(
                    f"gradckpt: a {type(inner).__name__} is inside a {type(outer).__name__}, and both are chosen, so "
                    "it would run three times; leave one out, or pass nested=True"
                )
