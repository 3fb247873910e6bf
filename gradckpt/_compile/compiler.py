"""The backend of Dynamo's graphs with regions or blocks, and what is done around it."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradckpt._compile import graph, joint_graph, saved_blocks, saved_cut
from gradckpt._compile.region_policies import keep_discrete, keep_products, regions
from gradckpt._compression import warn_inactive
from gradckpt._engine import torch_private as private
from gradckpt._engine.custom_ops import payload_nbytes
from gradckpt._stats import compiled as compiled_stats
from gradckpt._stats import format_bytes

logger = logging.getLogger("gradckpt")


class Backend:
    """The backend of one of Dynamo's graphs, with the requests of the marks in it."""

    def __init__(self, backend: Any) -> None:
        functools.update_wrapper(self, backend)
        self.backend = backend
        self.replay_discrete: bool | str = False
        self.restored = False  # regions of the graph get inputs that a codec has rounded

    def __call__(self, module: GraphModule, inputs: Any, **options: Any) -> Any:
        modules = [m for m in module.modules() if isinstance(m, GraphModule)]
        _guard_leaves(module)
        _leave_written(modules)
        blocks = saved_blocks.add_results(module)
        kept = keep_discrete(module, self.replay_discrete)
        keep_products(module, self.restored)
        cached = _cache_hits()
        advice = _without_advice() if kept else contextlib.nullcontext()
        at_cut = self._decide if blocks else None
        with advice, joint_graph.hooks(blocks > 0), graph.hooks(at_cut) as packed:
            compiled = self.backend(module, inputs, **options)
        compiled_stats.add(regions=sum(len(regions(m)) for m in modules))
        if not packed and _cache_hits() > cached:  # it was packed when it was first compiled
            packed = _marked(modules)
        if packed:
            _announce(packed)
        elif type(getattr(self.backend, "__self__", None)).__name__ == "DDPOptimizer" and _marked(modules):
            _warn_cut()
        return compiled

    def _decide(self, forward: Graph, backward: Graph) -> None:
        compiled_stats.add_exact(saved_cut.decide(forward, backward))


def install(compiler: Any) -> Any:
    """Return a backend as one of ours."""
    return compiler if isinstance(compiler, Backend) else Backend(compiler)


@functools.cache
def _warn_cut() -> None:
    warn_inactive(
        "torch.compile: nothing is compressed where DistributedDataParallel cuts the graph at every region; set "
        "torch._dynamo.config.optimize_ddp = False",
    )


def _guard_leaves(module: GraphModule) -> None:
    """Guard on ``is_leaf`` of a graph's inputs.

    Dynamo reads it without a guard, but the rule of :func:`_mark` depends on it.
    """
    names = private.dynamo
    for node in module.graph.find_nodes(op="placeholder"):
        x, source = node.meta.get("example_value"), getattr(node.meta.get("grapharg"), "source", None)
        if source is not None and type(x) is not torch.nn.Parameter and getattr(x, "requires_grad", False):
            names.install_guard(names.AttrSource(source, "is_leaf").make_guard(names.GuardBuilder.CONSTANT_MATCH))


def _leave_written(modules: list[GraphModule]) -> None:
    """Leave inputs uncompressed where a mark, which is a copy until it is packed, would be visible.

    A write to the region's input, or to a result of the region that shares its memory, would show
    it.
    """
    outputs = {_storage(x) for x in modules[0].graph.output_node().all_input_nodes}  # other code may write to these
    written: set[Any] = set()  # storages that are written to and whose marks were removed
    while sum(_leave_written_in(module, outputs, written) for module in modules):
        pass


def _leave_written_in(module: GraphModule, outputs: set[Any], written: set[Any]) -> bool:
    left = False
    for region in regions(module):
        inputs = {x: x.args[0] if x.target is graph.region_input else x for x in region.all_input_nodes}
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
    """Return whether the node's value was written to since it was made."""
    x = node.meta.get("example_value")
    return isinstance(x, torch.Tensor) and x._version > 0


def _storage(x: Any) -> Any:
    """Return the storage of a fake tensor or of a node's value: equal for those that share
    memory.
    """
    if isinstance(x, Node):
        x = x.meta.get("example_value")
    return private.StorageWeakRef(x.untyped_storage()) if type(x) is private.FakeTensor else None


def _cache_hits() -> int:
    return int(private.dynamo.counters["aot_autograd"]["autograd_cache_hit"])


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress torch's advice that operators in place do not go with a ``context_fn``.

    The user passed no ``context_fn``, and discrete operators have no such form.
    """
    log = logging.getLogger("torch._higher_order_ops.wrap")
    log.addFilter(_is_other_advice)
    try:
        yield
    finally:
        log.removeFilter(_is_other_advice)


def _is_other_advice(record: logging.LogRecord) -> bool:
    return "Detected that context_fn is passed" not in str(record.msg)


def _marked(modules: list[GraphModule]) -> list[graph.Packed]:
    """Return what the marks in Dynamo's graphs request."""
    nodes = (
        node
        for module in modules
        for mark in graph.MARKS
        for node in module.graph.find_nodes(op="call_function", target=mark)
    )
    return [graph.Packed.of(node.meta["example_value"], node.args[1]) for node in nodes]


def _announce(packed: list[graph.Packed]) -> None:
    """Log what the graph keeps compressed, and count it."""
    bytes_in = sum(math.prod(p.shape) * p.dtype.itemsize for p in packed)
    bytes_out = sum(int(payload_nbytes(p.shape, p.dtype, p.codec)) for p in packed)
    compiled_stats.add(graphs=1, tensors=len(packed), bytes_in=bytes_in, bytes_out=bytes_out)
    sizes = format_bytes(bytes_in), format_bytes(bytes_out)
    logger.info("gradckpt: torch.compile: a graph keeps %d tensors compressed, %s -> %s", len(packed), *sizes)
