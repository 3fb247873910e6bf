"""What can be done with regions, keep, compress or recompute what their backward needs, and what
each costs: :func:`allowed`, :func:`measure_regions`.

Blocks are measured one at a time, where the step calls them, with the arguments that they get
there. So at most one block more than in the step is alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from gradckpt import _C
from gradckpt._apart import apart
from gradckpt._codec_names import resolve_codec
from gradckpt._compression import CompressionConfig, parse_compress
from gradckpt._engine import parameter_hooks
from gradckpt._engine import torch_private as private
from gradckpt._engine.saved_tensors import compress_saved
from gradckpt._models import activity
from gradckpt._models.caches import is_cache
from gradckpt._models.caches import snapshot as cache_snapshot
from gradckpt._models.kinds import Tree
from gradckpt._models.ranks import RankCheck
from gradckpt._models.regions import Region, region_of
from gradckpt._models.rules import OF_MODULES, Settings, parse_options
from gradckpt._models.switch import Handle, Modules, snapshot, take_off
from gradckpt._models.working_set import Inner, have_parts, working_sets
from gradckpt._offload import Offload, parse_offload, plain_data
from gradckpt._planning.device_memory import weights_in
from gradckpt._settings import EXACT
from gradckpt._stats import uncounted
from gradckpt._training_state import TrainingState, host_random

logger = logging.getLogger("gradckpt")

#: Of policies: those that keep least first.
_POLICIES = ("save_attention", "every_other_matmul", "save_matmuls", "save_attention|save_matmuls")

#: The end of the names of options whose payloads get a place.
_OFFLOADED = ", offload"

#: Codecs that ``error=`` permits where ``compress=`` says nothing.
_LOSSY = ("int8", "int6", "int4")


@dataclasses.dataclass(frozen=True)
class Option:
    """One way to treat a region. ``name``: as tables print it. ``rule``: the value for the region
    in ``modules=`` of :func:`gradckpt.enable`. ``codec``: the lossy codec, or None.
    """

    name: str
    rule: Any = dataclasses.field(compare=False)
    codec: str | None = None

    def settings(self) -> Settings | None:
        """Return the keywords of :func:`gradckpt.checkpoint`; None: the region stays as it is."""
        if self.rule == "skip":
            return None
        return parse_options(self.rule, {}, OF_MODULES)

    @property
    def _rule(self) -> Mapping[str, Any]:
        return {} if self.rule == "skip" else self.rule

    @property
    def place(self) -> Offload | None:
        """Where the payloads live; None: on their device."""
        return parse_offload(self._rule.get("offload"))

    def beside(self, options: Iterable[Option]) -> Option | None:
        """Return the option that does the same without a place, if it is among these."""
        name = self.name.removesuffix(_OFFLOADED)
        return next((each for each in options if each.name == name), None) if self.place is not None else None

    @property
    def recomputes(self) -> bool:
        """False: what autograd saves is kept."""
        return self.rule != "skip" and bool(self._rule.get("recompute", True))

    @property
    def in_parts(self) -> bool:
        """True if regions are recomputed in parts."""
        return "parts" in self._rule

    @property
    def encodes(self) -> bool:
        """True if payloads are compressed."""
        return self._rule.get("compress") not in (None, False, "raw")

    def without_policy(self) -> str:
        """Return what the option does beside its policy, as text."""
        return str(sorted((key, value) for key, value in self._rule.items() if key != "policy"))


#: As autograd does it.
KEEP = Option("keep", "skip")

#: Checkpointing with the uncompressed input.
RECOMPUTE = Option("recompute", {"compress": None})


def _compress(codec: str) -> Option:
    return Option(f"compress {codec}", {"compress": codec, "recompute": False}, _lossy(codec))


def _recompute(codec: str | None, policy: str | None = None) -> Option:
    words = ["recompute", *([codec] if codec else [])]
    rule: dict[str, Any] = {"compress": codec}
    if policy is not None:
        rule["policy"] = policy
        words.append(f"({policy})")
    return Option(" ".join(words), rule, _lossy(codec) if codec else None)


def _lossy(codec: str) -> str | None:
    return codec if _C.codec_info(codec)["max_error"] else None


def _offloaded(option: Option, place: Mapping[str, Any]) -> Option:
    """Return the same with payloads in a place; what is kept as it is becomes ``raw`` payloads."""
    rule = {"compress": "raw", "recompute": False} if option == KEEP else option.rule
    return Option(f"{option.name}{_OFFLOADED}", {**rule, "offload": dict(place)}, option.codec)


def _in_parts(option: Option, form: str = "sequential") -> Option:
    name = f"{option.name} in parts" if form == "sequential" else f"{option.name} (parts {form})"
    return Option(name, {**option.rule, "parts": form}, option.codec)


def in_tiles(option: Option, tiles: int) -> Option:
    """Return the same with MLPs in so many tiles."""
    return Option(f"{option.name}, {tiles} tiles", {**option.rule, "tiles": tiles}, option.codec)


def allowed(
    compress: Any,
    error: bool,
    offload: Offload | None = None,
    blocks: Sequence[Module] = (),
    tiles: int | None = None,
) -> list[Option]:
    """Return the options that a plan may choose from, in a fixed order.

    ``compress``: the codec or codecs that the user permits; ``None``: exact options alone, or with
    an ``error`` budget the codecs int8, int6 and int4. ``offload``: the place that payloads may
    have. ``blocks``: the regions, which may be recomputed in parts if all of them have some.
    ``tiles``: in how many tiles their MLPs may run.

    Raises:
        ValueError, TypeError: A codec is unknown or not for activations.
    """
    codecs = _codecs(compress, error)
    found = [KEEP, RECOMPUTE, _recompute("lossless"), _compress("lossless")]
    found += [_recompute(None, policy) for policy in _POLICIES]
    for codec in codecs:
        found += [_compress(codec), _recompute(codec), _recompute(codec, f"save_matmuls:{codec}")]
    whole = [RECOMPUTE, _recompute("lossless"), *map(_recompute, codecs)]
    has_parts = have_parts(blocks)
    in_parts = [_in_parts(option) for option in whole] if has_parts else []
    found += in_parts + ([_in_parts(RECOMPUTE, "kept")] if has_parts else [])
    if tiles is not None:
        found += [in_tiles(option, tiles) for option in (*whole, *in_parts)]
    if offload is not None:
        plain = [KEEP, RECOMPUTE, _compress("lossless")]
        plain += [make(codec) for codec in codecs for make in (_compress, _recompute)]
        found += [_offloaded(option, plain_data(offload)) for option in plain]
    return found


def _codecs(compress: Any, error: bool) -> list[str]:
    if compress is None or compress is False:
        return list(_LOSSY) if error else []
    listed: Iterable[Any] = compress if isinstance(compress, (tuple, list)) else [compress]
    names = []
    for each in listed:
        config = parse_compress(each)
        if config is None:
            continue
        if config != CompressionConfig(config.codec):
            raise ValueError(
                "gradckpt: with budget=, compress= names the permitted codecs alone; pass a name or a list of names"
            )
        compress_saved(config.codec)  # raises for a codec that is not for activations
        name = resolve_codec(config.codec)
        if name not in ("raw", "lossless") and name not in names:
            names.append(name)
    return names


def find_option(name: str, rule: Mapping[str, Any] | str) -> Option:
    """Return the option of a plan file, which has its name and rule.

    Raises:
        ValueError: The rule is not one of :func:`gradckpt.enable`.
    """
    option = Option(name, rule if isinstance(rule, str) else dict(rule))
    settings = option.settings()
    config = settings["compress"] if settings is not None else None
    return dataclasses.replace(option, codec=_lossy(config.codec) if config is not None else None)


#: Attributes that only number a block.
_NUMBERS = {"layer_idx", "layer_id", "layer_number", "block_idx", "idx", "index"}


def find_blocks(model: Module, modules: Modules = None) -> list[Module]:
    """Return the modules that ``gradckpt.enable`` would checkpoint, in the model's order.

    Raises:
        ValueError, TypeError: As :func:`gradckpt.enable`.
    """
    with EXACT.active(model, modules):
        names = set(Handle(model).modules)
    return [module for name, module in model.named_modules() if name in names]


def regions_to_plan(model: Module, modules: Modules = None) -> list[Module]:
    """Return the same of a model in which nothing is enabled, whatever is enabled now."""
    put_back = snapshot(model)
    take_off(model)
    try:
        return find_blocks(model, modules)
    finally:
        put_back()


def likeness(block: Module) -> list[Any]:
    """Return what two blocks have in common that need the same memory."""
    return [
        (
            name,
            type(module),
            module.training,
            [
                (key, x if x is None else (x.shape, x.dtype, x.requires_grad))
                for key, x in (*module._parameters.items(), *module._buffers.items())
            ],
            {
                key: value
                for key, value in vars(module).items()
                if isinstance(value, (bool, int, float, str, type(None))) and key not in _NUMBERS
            },
        )
        for name, module in block.named_modules()
    ]


#: Options are measured for about so many seconds each, and so often at least and at most.
_SECONDS, _LEAST, _MOST = 0.2, 3, 15


@dataclasses.dataclass(frozen=True)
class Cost:
    """``seconds``: of forward and backward. ``error``: the relative L2 error of the region's
    gradients, of its inputs and parameters together.
    """

    seconds: float
    error: float


#: By the id of a region and the option: of a call.
RegionCosts = dict[tuple[int, Option], Cost]


@contextlib.contextmanager
def measure_regions(blocks: Sequence[Module], options: Sequence[Option]) -> Iterator[RegionCosts]:
    """Measure each distinct block when the step in this ``with`` block calls it first."""
    costs: RegionCosts = {}
    kinds: list[tuple[Any, dict[Option, Cost]]] = []  # regions that are alike share theirs
    busy = False

    def hook(block: Module, args: Any, kwargs: Any) -> None:
        nonlocal busy
        if busy or private.graph_task_id() != -1 or not torch.is_grad_enabled():
            return
        kind = [likeness(block), _shapes((args, kwargs))]
        found = next((costs for each, costs in kinds if each == kind), None)
        if found is None:
            busy = True
            try:
                with uncounted(), activity.unobserved():
                    trial = functools.partial(_measure, block, options, args, kwargs)
                    found = apart(trial, lambda: TrainingState(block, args, kwargs))
            finally:
                busy = False
            kinds.append((kind, found))
            logger.info("gradckpt: measured %s in %d options", type(block).__name__, len(options))
        for option, cost in found.items():
            costs.setdefault((id(block), option), cost)

    with contextlib.ExitStack() as stack:
        for block in blocks:
            stack.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield costs


def _shapes(tree: Any) -> list[Any]:
    leaves = private.tree_leaves(tree)
    return [(x.shape, x.dtype, x.requires_grad) if isinstance(x, Tensor) else type(x) for x in leaves]


def _measure(block: Module, options: Sequence[Option], args: Any, kwargs: Any) -> dict[Option, Cost]:
    """Run a block in all options in turn, several times; the fastest of each counts.

    In turn, so that what else the machine does meets all options alike.
    """
    forward = _own_forward(block)
    ordered = [KEEP, *(each for each in options if each != KEEP)]
    calls = {option: _caller(block, option, forward) for option in ordered}
    seconds = dict.fromkeys(ordered, math.inf)
    errors = dict.fromkeys(ordered, 0.0)
    exact: list[Tensor | None] = []
    upstream: list[Tensor] = []
    began = time.perf_counter()
    rewind = _rewinding(block)
    for turn in range(1 + _MOST):
        for option in ordered:
            rewind()
            call, inner = calls[option]
            with contextlib.ExitStack() as stack:
                for each in inner:
                    each.install()
                    stack.callback(each.remove)
                gradients, elapsed = _timed(block, call, args, kwargs, upstream)
            if turn:  # the first one warms up
                seconds[option] = min(seconds[option], elapsed)
            elif option == KEEP:
                exact = gradients
            elif option.codec:
                errors[option] = _error(exact, gradients)
        if turn >= _LEAST and time.perf_counter() - began > _SECONDS * len(ordered):
            break
    # Each option runs what KEEP runs, and more, and with a place what it does without: less time is
    # noise.
    found = {option: max(seconds[option], seconds[KEEP]) for option in ordered}
    for option in ordered:
        if (same := option.beside(ordered)) is not None:
            found[option] = max(found[option], found[same])
    return {option: Cost(found[option], errors[option]) for option in ordered}


def _own_forward(block: Module) -> Callable[..., Any]:
    region = region_of(block)
    if region is not None:
        return region.own or type(block).forward.__get__(block)  # type: ignore[no-any-return]
    return vars(block).get("forward") or type(block).forward.__get__(block)  # type: ignore[no-any-return]


def _caller(block: Module, option: Option, forward: Callable[..., Any]) -> tuple[Callable[..., Any], list[Inner]]:
    """Return the block in an option, and what has to be installed in it while it runs so."""
    settings = option.settings()
    if settings is None:
        return forward, []
    place = settings.pop("offload", None)
    region = Region(block, settings, RankCheck("", {}), place)
    inner = working_sets(Tree(block), {block: settings})
    return lambda *args, **kwargs: region.run(block, forward, args, kwargs), inner


def _timed(
    block: Module, call: Callable[..., Any], args: Any, kwargs: Any, upstream: list[Tensor]
) -> tuple[list[Tensor | None], float]:
    """Return the gradients of a block's inputs and parameters, and the seconds; the parameters'
    hooks are not called.

    ``upstream``: the gradients of its outputs, which the first call of all draws.
    """
    inputs: list[Tensor] = []

    def fresh(x: Any) -> Any:
        if is_cache(x):
            return cache_snapshot(x)
        if not isinstance(x, Tensor) or not x.requires_grad:
            return x
        leaf = x.detach().requires_grad_()
        inputs.append(leaf)
        return leaf * 1  # no leaf, as in the step

    args, kwargs = private.tree_map(fresh, (args, kwargs))
    trained = weights_in(block)
    device = next((x.device for x in (*inputs, *trained)), torch.device("cpu"))
    wait(device)
    began = time.perf_counter()
    result = call(*args, **kwargs)
    outputs = [x for x in private.tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    gradients: tuple[Tensor | None, ...] = ()
    if outputs and (inputs or trained):
        upstream.extend(_noise_like(x) for x in outputs[len(upstream) :])
        wanted = (*inputs, *trained)
        gradients = parameter_hooks.capture(private.run_backward, outputs, tuple(upstream), wanted, trained)
    wait(device)
    return list(gradients), time.perf_counter() - began


def _noise_like(x: Tensor) -> Tensor:
    """Return a gradient for an output: the same at each call, and like no constant, which
    normalizations ignore.
    """
    generator = torch.Generator(x.device).manual_seed(0) if x.device.type != "meta" else None
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)


def wait(device: torch.device) -> None:
    """Let a device finish what it was given."""
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device.type).synchronize(device)


def _error(exact: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """Return the relative L2 error over all gradients."""
    wrong = whole = 0.0
    for e, f in zip(exact, found, strict=True):
        if e is not None and f is not None:
            wrong += float((f.float() - e.float()).square().sum())
            whole += float(e.float().square().sum())
    return (wrong / whole) ** 0.5 if whole else 0.0


def _rewinding(block: Module) -> Callable[[], None]:
    """Return a function that restores generators and the block's buffers."""
    rewind_host = host_random()
    devices = {p.device for p in block.parameters() if p.device.type not in ("cpu", "meta")}
    states = [(device, torch.get_device_module(device.type).get_rng_state(device)) for device in devices]
    buffers = [(buffer, buffer.detach().clone()) for buffer in block.buffers()]
    tables = [(module._buffers, dict(module._buffers)) for module in block.modules()]

    def rewind() -> None:
        rewind_host()
        for device, state in states:
            torch.get_device_module(device.type).set_rng_state(state, device)
        for table, old in tables:  # a forward may assign them
            table.update(old)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.data.copy_(value)

    return rewind
