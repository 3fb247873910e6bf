"""One switch for whole models: :func:`enable`, :func:`disable`, and the :class:`Handle` that undoes it.

A transformers model checkpoints its own layers, by its own functions (gradckpt.integrations.huggingface). In any other
model, or where modules are chosen, each chosen module's ``forward`` becomes a region (the module gradckpt.apply).
"""

from __future__ import annotations

import enum
import functools
import logging
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict, Unpack

from torch.nn import Module

from gradckpt.apply import Settings, choose, parse_options, region_of, regions_in, summary
from gradckpt.config import Compress
from gradckpt.integrations import huggingface
from gradckpt.integrations.kwargs import check_bool, check_every_n_layers
from gradckpt.integrations.seam import SEAMS
from gradckpt.kinds import KINDS, repeated_blocks
from gradckpt.policies import PolicyLike
from gradckpt.selectors import Selector, Subset, describe

__all__ = ["Handle", "disable", "enable"]

logger = logging.getLogger("gradckpt")


class _Unset(enum.Enum):
    UNSET = "<unset>"

    def __repr__(self) -> str:
        return self.value


UNSET: Final = _Unset.UNSET

#: One selector, a list of them, or a mapping of selectors to how their modules are checkpointed.
Modules = None | Selector | list[Any] | Mapping[Any, Any]


class CheckpointKeywords(TypedDict, total=False):
    """Of :func:`gradckpt.checkpoint`, which hands them to torch."""

    context_fn: Callable[[], tuple[Any, Any]]
    preserve_rng_state: bool
    determinism_check: str
    debug: bool
    early_stop: bool
    buffers: str


def enable(
    model: Module,
    compress: Compress | _Unset = UNSET,
    *,
    modules: Modules = None,
    every_n_layers: int = 1,
    policy: PolicyLike = None,
    offload: bool = False,
    **keywords: Unpack[CheckpointKeywords],
) -> Handle:
    """Turn on activation checkpointing of a model, with compressed checkpoints.

    In training, with grad enabled, each call of a chosen module is one region of :func:`gradckpt.checkpoint`. In eval
    mode and under ``no_grad`` it runs as it is. Only this instance changes; no class is patched.

    Called again with equal arguments it does nothing; with others, it changes what it did before.

    Args:
        model: Any module; of transformers, also inside PEFT, DDP or ``torch.compile``.
        compress: How the inputs of the modules are kept: ``None`` (torch's checkpointing, bit for bit), ``True``, a
            codec's name, a :class:`gradckpt.CompressionConfig` or its dict. Unset: int8; beside ``policy`` or
            ``context_fn``, ``None``.
        modules: What is checkpointed. ``None``: the layers that a transformers model checkpoints itself; in any other
            model the repeated block that holds most parameters, whose class is logged.

            A selector, or a list of them: a module class or a tuple of them; a pattern for the whole dotted name,
            ``"*.layers.*.mlp"`` (fnmatch; ``*`` also matches dots) or a compiled regular expression (fullmatch); a
            kind, ``"layer"``, ``"attention"``, ``"mlp"``, ``"moe"`` or ``"norm"``; a module; a function of (name,
            module); :func:`gradckpt.selectors.every`, :func:`gradckpt.selectors.m_of_n`.

            Or a mapping from selectors to how: what ``compress`` takes, a dict of ``compress``, ``policy`` and the
            keywords below, or ``"skip"``. A module takes the first selector that matches it, so narrow ones come
            first; the other arguments hold where a value does not say otherwise.
        every_n_layers: Of each selector's modules, in the model's order, numbers 1, 1 + n, ...; for the layers of
            transformers, from 5.17 on.
        policy: Which outputs inside a module are kept instead of computed again: a name (``"save_attention"``,
            ``"save_attention|save_matmuls:int8"``), a :class:`gradckpt.policies.Policy`, or what
            :func:`gradckpt.compat.create_selective_checkpoint_contexts` takes. Costs memory, saves time.
        offload: Keep the inputs in host memory, compressed first; pinned where there is a device.
        **keywords: ``context_fn``, ``preserve_rng_state``, ``determinism_check``, ``debug``, ``early_stop`` and
            ``buffers``, as for :func:`gradckpt.checkpoint`.

    Returns:
        A :class:`Handle`, whose ``remove()`` undoes all of it. It may be dropped; :func:`disable` does the same.

    Raises:
        ValueError: unknown codec, policy or keyword; a selector that matches nothing; no block, or several, where no
            modules are named; a module that is checkpointed already, lies in another chosen one or has no forward.
            The model is as it was then, and the message says what to write instead.
        TypeError: not a module; a selector or an option of another type.
    """
    if not isinstance(model, Module):
        raise TypeError(f"gradckpt: enable() takes a torch.nn.Module, not {type(model).__name__}")
    given: dict[str, Any] = {**keywords} if policy is None else {**keywords, "policy": policy}
    _check_compress(compress)
    if compress is UNSET:
        compress = None if {"policy", "context_fn"} & given.keys() else "int8"
    options = parse_options({"compress": compress, **given}, {}, ("modules", "every_n_layers", "offload"))
    check_every_n_layers(every_n_layers)
    check_bool("offload", offload)
    whole = huggingface.inner_model(model)
    if modules is None and huggingface.is_model(whole):
        turn_on: Callable[[], None] = functools.partial(huggingface.turn_on, whole, options, every_n_layers, offload)
        same = huggingface.is_enabled(whole, options, every_n_layers, offload)
        same = same and len(huggingface.seams_in(model)) == 1 and not regions_in(model)
    else:
        chosen = choose(model, _block_of(model) if modules is None else modules, options, every_n_layers, offload)
        turn_on = chosen.install
        same = chosen.is_installed() and not huggingface.seams_in(model)
    if not same:
        put_back = _snapshot(model)
        try:
            _take_off(model)
            turn_on()
        except BaseException:
            put_back()
            raise
        logger.info("%r", Handle(model))
    return Handle(model)


def disable(model: Module) -> None:
    """Undo :func:`enable`, and what the Trainer's flag turned on; of a copy or an unpickled model, too.

    Raises:
        ValueError: nothing of the model is enabled.
    """
    if not is_enabled(model):
        raise ValueError(f"gradckpt: this {type(model).__name__} is not enabled; gradckpt.enable(model) comes first")
    _take_off(model)


def _check_compress(compress: Any) -> None:
    """Say so where the second argument is what ``modules=`` takes."""
    if not _selects(compress):
        return
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
    return bool(regions_in(model) or huggingface.seams_in(model))


def _take_off(model: Module) -> None:
    for region in regions_in(model):
        region.remove()
    for whole, seam in huggingface.seams_in(model):
        seam.remove(whole)


def _snapshot(model: Module) -> Callable[[], None]:
    """Return what puts the attributes of all modules, their forward hooks and what is ours on them back."""
    modules = list(model.modules())
    seams = huggingface.seams_in(model)
    ours = [*regions_in(model), *(seam for _, seam in seams)]
    places: list[dict[Any, Any]] = [vars(each) for each in (*modules, *ours)]
    places += [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    before = [dict(place) for place in places]

    def put_back() -> None:
        for place, content in zip(places, before, strict=True):
            place.clear()
            place.update(content)
        SEAMS.update(seam for _, seam in seams)

    return put_back


def _block_of(model: Module) -> type[Module]:
    """Return the class of a model's repeated block.

    Raises:
        ValueError: the model has none, or several; the message lists them with the line to write.
    """
    name = type(model).__name__
    huggingface.check_holds_none(model)
    found = repeated_blocks(model)
    if not found:
        classes = sorted({type(module).__name__ for module in model.modules() if module is not model})
        held = f"it holds: {', '.join(classes)}" if classes else "it holds no modules"
        raise ValueError(
            f"gradckpt: {name} has no repeated block of layers; name what to checkpoint, enable(model, modules=Block); "
            f"{held}"
        )
    if len(found) > 1 and callable(getattr(model, "enable_gradient_checkpointing", None)):
        line = 'gradient_checkpointing_func=functools.partial(gradckpt.checkpoint, compress="int8")'
        raise ValueError(
            f"gradckpt: {name} is a model of diffusers, which knows its blocks; call "
            f"model.enable_gradient_checkpointing({line})"
        )
    if len(found) > 1:
        listed = ", ".join(f"{blocks.kind.__name__} ({len(blocks.names)})" for blocks in found)
        written = f"modules=[{', '.join(blocks.kind.__name__ for blocks in found)}]"
        raise ValueError(
            f"gradckpt: {name} repeats several blocks: {listed}; name those to checkpoint, for all of them "
            f"enable(model, {written})"
        )
    return found[0].kind


class Handle:
    """What :func:`enable` returns: ``remove()`` it, or use it in a ``with`` statement.

    It keeps no model alive. A copy or pickle of a model that holds its handle has a handle of its own.
    """

    def __init__(self, model: Module) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        self._name = type(model).__name__

    @property
    def modules(self) -> dict[str, Settings]:
        """The names of the modules that are checkpointed now, in the model's order, each with the keywords that
        :func:`gradckpt.checkpoint` gets for it and ``offload``. A module with several names is under its first."""
        model = self._model()
        if model is None:
            return {}
        of_layers: dict[Any, Settings] = {}
        for whole, _ in huggingface.seams_in(model):
            of_layers |= huggingface.settings_of(whole)
        found = {}
        for name, module in model.named_modules():
            region = region_of(module)
            if region is not None:
                found[name] = region.settings | ({"offload": True} if region.offload else {})
            elif module in of_layers:
                found[name] = of_layers[module]
        return found

    def remove(self) -> None:
        """Put the model back as it was. Does nothing when it is not enabled, or is gone."""
        model = self._model()
        if model is not None:
            _take_off(model)

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __getstate__(self) -> dict[str, Any]:
        return {"_model": self._model(), "_name": self._name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        model = state["_model"]
        self._model = weakref.ref(model) if model is not None else _nothing
        self._name = state["_name"]

    def __repr__(self) -> str:
        chosen, model = self.modules, self._model()
        if not chosen:
            off = model is not None and is_enabled(model)
            return f"<gradckpt handle: {self._name} {'checkpoints nothing now' if off else 'is not enabled'}>"
        modules = dict(model.named_modules())
        rows: dict[tuple[str, str, str], int] = {}
        for name, settings in chosen.items():
            pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(itself)"
            row = (pattern, type(modules[name]).__name__, summary(settings))
            rows[row] = rows.get(row, 0) + 1
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [
            f"  {name:{widths[0]}}  {count:4} x {kind:{widths[1]}}  {how}" for (name, kind, how), count in rows.items()
        ]
        return "\n".join([f"<gradckpt handle: {len(chosen)} modules of {self._name}", *lines]) + ">"


def _nothing() -> None:
    """The weak reference of a handle that was pickled after its model died."""
