"""``compress_saved()`` in compiled code: which part of a graph it covers, with which settings.

In Dynamo's graph a block is what lies between the operators ``gradckpt::saved_begin(settings)`` and
``gradckpt::saved_end()``. The last node, ``gradckpt::saved_results(xs, activations)``, takes the
graph's results, and those of its inputs that require grad and are no leaves. None of them computes
anything: they run while AOTAutograd traces the graph, note the numbers of autograd's nodes, and are
in no graph that runs. As part of Dynamo's graph they are part of every cache's key.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from gradckpt._compile import graph, saved_roles_traced
from gradckpt._compression import CompressionConfig, warn_inactive
from gradckpt._engine import torch_private as private
from gradckpt._engine.region_callbacks import tracing_mode_active

#: So many views and casts of a weight are looked through, as without the compiler.
_VIEWS = 16


class Block(NamedTuple):
    """Nodes of autograd's graph, by their numbers, and how what they save is kept."""

    begin: int
    end: int
    settings: saved_roles_traced.Settings


class _Tracing(threading.local):
    """The blocks of the graph that runs in this thread."""

    def __init__(self) -> None:
        self.open: list[tuple[int, str]] = []
        self.blocks: list[Block] = []


_tracing = _Tracing()


# ---- the operators ----


def _begin(settings: str) -> None:
    _tracing.open.append((private.next_node_number(), settings))
    if not graph.is_compiling() and not tracing_mode_active():
        _warn_uncompiled()


def _end() -> None:
    if _tracing.open:
        begin, text = _tracing.open.pop()
        settings = saved_roles_traced.Settings.read(text)
        _tracing.blocks.append(Block(begin, private.next_node_number(), settings))


def _results(xs: Sequence[torch.Tensor], activations: Sequence[torch.Tensor]) -> None:
    blocks, _tracing.blocks, _tracing.open = _tracing.blocks, [], []
    mode = private.dynamo.get_proxy_mode()
    if mode is None or not graph.is_compiling():
        return
    if saved_roles_traced.note(xs, activations, blocks, mode.tracer):
        graph.claim()


#: Operators that no pass may remove.
KEPT = tuple(
    graph.define(name, signature, kernel, "CompositeImplicitAutograd")
    for name, signature, kernel in (
        ("saved_begin", "(str settings) -> ()", _begin),
        ("saved_end", "() -> ()", _end),
        ("saved_results", "(Tensor[] xs, Tensor[] activations) -> ()", _results),
    )
)


@functools.cache
def _warn_uncompiled() -> None:
    warn_inactive(
        "torch.compile: nothing is compressed in this graph; choose a backend with AOTAutograd, as "
        '"inductor" or "aot_eager"',
    )


def add_results(module: GraphModule) -> int:
    """Let a graph with blocks tell its results. Return how many blocks it has."""
    modules = [m for m in module.modules() if isinstance(m, GraphModule)]
    begins = [
        node
        for m in modules
        for node in m.graph.nodes
        if node.op == "call_function" and getattr(node.target, "_qualified_op_name", "") == "gradckpt::saved_begin"
    ]
    if not begins:
        return 0
    output = module.graph.output_node()
    results = [x for x in output.all_input_nodes if isinstance(x.meta.get("example_value"), torch.Tensor)]
    inputs = [x for x in module.graph.find_nodes(op="placeholder") if _is_activation(x)]
    with module.graph.inserting_before(output):
        module.graph.call_function(torch.ops.gradckpt.saved_results.default, (results, inputs))
    module.recompile()
    return len(begins)


def _is_activation(node: Node) -> bool:
    """Return whether an input requires grad and is no leaf, nor a view of one."""
    x = node.meta.get("example_value")
    if not isinstance(x, torch.Tensor) or not x.requires_grad or x.is_leaf:
        return False
    behind: Any = getattr(getattr(node.meta.get("grapharg"), "example", None), "grad_fn", None)
    for _ in range(_VIEWS):
        if not _is_view(behind):
            break
        behind = behind.next_functions[0][0]
    return behind is None or saved_roles_traced.kind_of(behind) != "leaf"


def _is_view(node: Any) -> bool:
    """Return whether autograd's node is that of a view or a cast."""
    return node is not None and (saved_roles_traced.kind_of(node) == "view" or node.name().startswith("ToCopyBackward"))


def settings_text(config: CompressionConfig, formats: tuple[tuple[str, str | None], ...]) -> str:
    """Return the settings of a block as an argument of an operator."""
    return json.dumps([config.codec, config.min_numel, dict(formats), graph.version()], sort_keys=True)
