"""What ``torch.compile`` traces in place of ``gradckpt.checkpoint``: torch's checkpoint, its inputs marked for packing.

Dynamo knows ``torch.utils.checkpoint.checkpoint`` and makes one operator of it, which AOTAutograd recomputes in the
backward graph. A C function it cannot trace; so it is given :func:`checkpoint`, below. Nothing of torch is changed:
``torch.compiler.substitute_in_graph`` is its own way to say that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.fx import GraphModule, Node

from gradckpt import _C, compat, packing, policies
from gradckpt import _torch_private as private
from gradckpt._decisions import KEPT, ROUNDING
from gradckpt._ops import payload_nbytes
from gradckpt.config import CompressionConfig, parse_compress, warn_inactive
from gradckpt.imports import after_import
from gradckpt.selective import create_selective_checkpoint_contexts
from gradckpt.stats import compiled as compiled_stats
from gradckpt.stats import format_bytes

__all__ = ["Standing", "stand_in", "watch"]

logger = logging.getLogger("gradckpt")


class Marking(NamedTuple):
    """What is marked, and how. Dynamo reads it as a constant."""

    replay: bool
    codec: str
    dtypes: tuple[torch.dtype, ...]
    min_numel: int
    leaves: bool
    everything: bool
    version: str


_FIELDS = tuple(field.name for field in dataclasses.fields(CompressionConfig))


def checkpoint(
    function: Any,
    *args: Any,
    compress: Any = None,
    use_reentrant: bool | None = False,
    preserve_rng_state: bool = True,
    context_fn: Any = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    buffers: Any = None,
    **kwargs: Any,
) -> Any:
    """``gradckpt.checkpoint``, as Dynamo sees it."""
    # Guards on what it says, keys and numbers included, and not on what it is.
    if isinstance(compress, CompressionConfig):
        compress = {field: _constant(getattr(compress, field)) for field in _FIELDS}
    elif isinstance(compress, dict):
        compress = {key: _constant(compress[key]) for key in compress}
    marking = _marking(compress, use_reentrant, debug, context_fn is not None)
    if marking is not None and torch.is_grad_enabled():
        args, kwargs = private.tree_map(functools.partial(_mark, marking), (args, kwargs))
    if context_fn is not None:
        kwargs["context_fn"] = context_fn
    return torch.ops.higher_order.tag_activation_checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        early_stop=early_stop,
        **kwargs,
    )


def _constant(value: Any) -> Any:
    """Dynamo makes a symbol of a number that changes."""
    if type(value) is not int:
        return value
    return private.dynamo.guard_scalar(value)


def _is_or_may_be(condition: Any) -> Any:
    """Of a size that only the run will tell, too."""
    return private.dynamo.guard_or_true(condition)


def _mark(marking: Marking, x: Any) -> Any:
    """The rule of csrc/engine: what is compressed, and what is kept as it is."""
    if (
        isinstance(x, torch.Tensor)
        and type(x) is torch.Tensor
        and x.dtype in marking.dtypes
        and _is_or_may_be(x.numel() >= marking.min_numel)
        and (marking.everything or (x.requires_grad and (marking.leaves or not x.is_leaf)))
    ):
        mark = packing.rounded if marking.replay else packing.region_input
        return mark(x, marking.codec, marking.version)
    return x


def _marking(compress: Any, use_reentrant: bool | None, debug: bool, selective: bool) -> Marking | None:
    """Runs while Dynamo traces, for every call of checkpoint that it comes by; what it returns is a constant there."""
    try:
        config = parse_compress(compress)
    except (TypeError, ValueError) as error:
        raise _refusal(str(error)) from error
    if debug:
        raise _refusal("gradckpt: debug=True cannot be compiled; call the function without torch.compile to debug")
    if config is None and not selective:
        return None
    if config is not None and use_reentrant:
        raise _refusal("gradckpt: compress= needs use_reentrant=False")
    if config is not None and config.stochastic:
        raise _refusal("gradckpt: stochastic=True cannot be compiled: a graph does not count its calls, to seed from")
    if not packing.available():
        _warn_unavailable()
        return None
    output = private.dynamo.InstructionTranslator.current_tx().output
    if output.export:
        return None
    if not isinstance(output.compiler_fn, Backend):
        output.compiler_fn = Backend(output.compiler_fn)
    if config is None or packing.may_refuse(config.codec):
        return None
    if config.lossy and not config.replay and output.compiler_fn.decisions != "casts":
        output.compiler_fn.decisions = config.decisions or output.compiler_fn.decisions
    return Marking(
        config.replay,
        config.codec,
        packing.dtypes(config.codec),
        config.min_numel,
        config.leaves,
        config.include == "floating",
        packing.version(),
    )


def _refusal(message: str) -> Exception:
    """Breaks the graph, so that the call runs uncompiled, and may fail there; with ``fullgraph=True``, an error."""
    kind = private.dynamo.UserErrorType.INVALID_INPUT
    refusal: Exception = private.dynamo.UserError(kind, message)
    return refusal


@functools.cache
def _warn_unavailable() -> None:
    warn_inactive(
        f"torch.compile: torch {torch.__version__} does not tell hooks what they save, so the region inputs of "
        "compiled code stay uncompressed",
    )


def compat_checkpoint(function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """``gradckpt.compat.checkpoint``, as Dynamo sees it."""
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)


# ---- around the backend ----

_CONTEXT = "_checkpoint_context_fn"
#: Those of torch's functions that call others that decide; Dynamo's graph has their names.
_DECIDE_WITHIN = (
    *("greater", "greater_equal", "less", "less_equal", "not_equal", "isclose", "msort", "quantile", "nanquantile"),
    *("unique", "where", "argwhere", "masked_select"),
)
_DECIDING = frozenset(name.partition(".")[0] for name in (*KEPT, *ROUNDING, *_DECIDE_WITHIN))


class Backend:
    """The backend of one graph of Dynamo's, with what the marks in it ask for."""

    def __init__(self, backend: Any) -> None:
        functools.update_wrapper(self, backend)
        self.backend = backend
        self.decisions: bool | str = False

    def __call__(self, module: GraphModule, inputs: Any, **options: Any) -> Any:
        modules = [m for m in module.modules() if isinstance(m, GraphModule)]
        _guard_leaves(module)
        _leave_written(modules)
        kept = _keep_decisions(module, self.decisions)
        cached = _cache_hits()
        with _without_advice() if kept else contextlib.nullcontext(), packing.hooks() as packed:
            compiled = self.backend(module, inputs, **options)
        if not packed and _cache_hits() > cached:  # packed when it was made
            packed = _marked(modules)
        if packed:
            _announce(packed)
        elif type(getattr(self.backend, "__self__", None)).__name__ == "DDPOptimizer" and _marked(modules):
            _warn_cut()
        return compiled


@functools.cache
def _warn_cut() -> None:
    warn_inactive(
        "torch.compile: nothing is compressed where DistributedDataParallel's optimizer cuts the graph at all regions; "
        "set torch._dynamo.config.optimize_ddp = False",
    )


def _guard_leaves(module: GraphModule) -> None:
    """Dynamo reads ``is_leaf`` of a graph's inputs and does not guard on it; but the rule of :func:`_mark` does."""
    names = private.dynamo
    for node in module.graph.find_nodes(op="placeholder"):
        x, source = node.meta.get("example_value"), getattr(node.meta.get("grapharg"), "source", None)
        if source is not None and type(x) is not torch.nn.Parameter and getattr(x, "requires_grad", False):
            names.install_guard(names.AttrSource(source, "is_leaf").make_guard(names.GuardBuilder.CONSTANT_MATCH))


def _leave_written(modules: list[GraphModule]) -> None:
    """A mark is a copy until it is packed. Where that could be told, by a write to the region's input or to what the
    region returns of it, the input is left as it is."""
    outputs = {_storage(x) for x in modules[0].graph.output_node().all_input_nodes}  # others may write to these
    written: set[Any] = set()  # storages that are, now that marks of them are gone
    while sum(_leave_written_in(module, outputs, written) for module in modules):
        pass


def _leave_written_in(module: GraphModule, outputs: set[Any], written: set[Any]) -> bool:
    left = False
    for region in _regions(module):
        inputs = {x: x.args[0] if x.target is packing.region_input else x for x in region.all_input_nodes}
        dirty = {_storage(inputs[x]) for x in inputs if _is_written(x) or _storage(x) in written} - {None}
        returned = {_storage(x) for x in private.tree_leaves(region.meta["example_value"])}
        for mark, x in inputs.items():
            if mark is x:
                continue
            shared = _storage(mark) in returned and (_is_written(x) or _storage(mark) in outputs)
            if shared or _storage(x) in dirty:
                written |= {_storage(x)} & dirty
                mark.replace_all_uses_with(x)
                module.graph.erase_node(mark)
                left = True
    if left:
        module.recompile()
    return left


def _is_written(node: Node) -> bool:
    """Since it was made."""
    x = node.meta.get("example_value")
    return isinstance(x, torch.Tensor) and x._version > 0


def _storage(x: Any) -> Any:
    """Of a fake tensor, or of a node's: equal for those that share memory."""
    if isinstance(x, Node):
        x = x.meta.get("example_value")
    return private.StorageWeakRef(x.untyped_storage()) if type(x) is private.FakeTensor else None


def _cache_hits() -> int:
    return int(private.dynamo.counters["aot_autograd"]["autograd_cache_hit"])


def _regions(module: GraphModule) -> Any:
    return module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)


def _keep_decisions(module: GraphModule, decisions: bool | str, around: bool | str = False) -> bool:
    """Keep what is decided in regions that may run again on restored values; False: nothing is.

    Such are marked regions (by ``decisions``, their :attr:`CompressionConfig.decisions`), those whose policy keeps
    outputs lossily, and all inside one of these (``around``), whoever's checkpoint made them.
    """
    kept = False
    for node in _regions(module):
        region = getattr(module, node.args[0].target)
        marked = any(x.target is packing.region_input for x in node.all_input_nodes)
        made = region.meta.get(_CONTEXT)
        policy = made.args[0] if getattr(made, "func", None) is create_selective_checkpoint_contexts else None
        policy = policy if isinstance(policy, policies.Policy) else None
        levels = (around, decisions if marked else False, policy.decisions if policy is not None else False)
        level = "casts" if "casts" in levels else any(levels)
        if level and (made is None or policy is not None) and _decides(region):
            deciding = policies.decisions if level == "casts" else policies.decisions_but_casts
            region.meta[_CONTEXT] = policies.contexts_of(deciding if policy is None else deciding | policy)
            kept = True
        kept |= _keep_decisions(region, decisions, level)
    return kept


def _decides(region: GraphModule) -> bool:
    nodes = (node for m in region.modules() if isinstance(m, GraphModule) for node in m.graph.nodes)
    names = (str(getattr(node.target, "__name__", node.target)) for node in nodes)
    return any(name.partition(".")[0].rstrip("_") in _DECIDING for name in names)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """torch says once that operators in place do not go with a ``context_fn``. Nobody passed one, and operators that
    decide have no such form: it is not said of these."""
    log = logging.getLogger("torch._higher_order_ops.wrap")
    log.addFilter(_is_other_advice)
    try:
        yield
    finally:
        log.removeFilter(_is_other_advice)


def _is_other_advice(record: logging.LogRecord) -> bool:
    return "Detected that context_fn is passed" not in str(record.msg)


def _marked(modules: list[GraphModule]) -> list[packing.Packed]:
    """What the marks in Dynamo's graphs ask for."""
    nodes = (
        node
        for module in modules
        for mark in packing.MARKS
        for node in module.graph.find_nodes(op="call_function", target=mark)
    )
    return [packing.Packed.of(node.meta["example_value"], node.args[1]) for node in nodes]


def _announce(packed: list[packing.Packed]) -> None:
    """The line that says what the graph keeps compressed, and its counters."""
    bytes_in = sum(p.numel * p.dtype.itemsize for p in packed)
    bytes_out = sum(int(payload_nbytes(p.numel, p.dtype, p.codec)) for p in packed)
    compiled_stats.add(graphs=1, tensors=len(packed), bytes_in=bytes_in, bytes_out=bytes_out)
    sizes = format_bytes(bytes_in), format_bytes(bytes_out)
    logger.info("torch.compile: a graph keeps %d tensors compressed, %s -> %s", len(packed), *sizes)


# ---- in torch's place ----


class Standing(NamedTuple):
    """What the innermost ``patched()`` asks for."""

    config: CompressionConfig | None
    context_fn: Any


#: None: torch's checkpoint is torch's. Dynamo guards on it: what was compiled under one ``patched()`` is compiled again
#: under another, or under none.
_standing: Standing | None = None


def torchs_checkpoint(function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint`` under ``patched()``, as Dynamo sees it."""
    if _standing is None or use_reentrant:
        return torch.ops.higher_order.tag_activation_checkpoint(function, *args, use_reentrant=False, **kwargs)
    if _standing.context_fn is not None and kwargs.get("context_fn") is None:
        kwargs["context_fn"] = _standing.context_fn
    return checkpoint(function, *args, compress=_standing.config, **kwargs)


def stand_in(standing: Standing | None) -> None:
    """Dynamo is given :func:`torchs_checkpoint` for torch's function from the first time on.

    With None it does what Dynamo does by itself; it is not taken back, since a graph that was made without its guard
    would serve the next ``patched()``, too.
    """
    global _standing
    _standing = standing
    packing.patched = standing is not None
    if standing is not None and _told:
        _dispatch_torchs()


def _dispatch_torchs() -> None:
    _substitute(torch_checkpoint.checkpoint, torchs_checkpoint)


def _substitute(original: Any, traceable: Any) -> None:
    """Once in a process, also when this module is loaded again."""
    if original not in private.dynamo.PolyfilledFunctionVariable._get_polyfill_handlers():
        torch.compiler.substitute_in_graph(original, skip_signature_check=True)(traceable)


# ---- telling Dynamo ----

#: Dynamo is there, with all that is needed of it.
_told = False


def _tell(dynamo: ModuleType) -> None:
    global _told
    missing = private.load_dynamo()
    if missing:
        logger.warning("torch %s has no %s, so regions break compiled graphs", torch.__version__, ", ".join(missing))
        return
    _told = True
    for original, traceable in ((_C.checkpoint, checkpoint), (compat.checkpoint, compat_checkpoint)):
        _substitute(original, traceable)
    torch.compiler.assume_constant_result(_marking)
    if _standing is not None:
        _dispatch_torchs()


def watch() -> None:
    """Tells Dynamo, once something imports it."""
    after_import("torch._dynamo", _tell)
