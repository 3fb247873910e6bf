"""Joint graphs, before AOTAutograd cuts them: what keeps the values of a compressing region apart
from all others.

Two rules hold for the graphs that :class:`gradckpt._compile.dynamo.Backend` compiles:

1. Code outside a region reads the region's exact outputs, in the backward too. torch's partitioner
   may compute such an output again, from restored inputs, beside values that it saved: a norm would
   get another input than its statistics are of.
2. A pass over the joint graph moves no node that it leaves in the graph. Inductor replaces
   ``x * 1`` by ``x`` and gives ``x`` the tags of the product. These say "compute again in the
   backward", which no input of a region or of the graph can be.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from gradckpt._compile import saved_joint
from gradckpt._compile.graph import CODEC, region_input, version
from gradckpt._engine import torch_private as private

_RECOMPUTE, _REGION, _SIDE, _NUMBER = "recompute", "ac_graph_id", "partitioner_tag", "seq_nr"
_TAGS = (_RECOMPUTE, _REGION, _SIDE, _NUMBER, CODEC)
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@contextlib.contextmanager
def hooks(blocks: bool = False) -> Iterator[None]:
    """Apply the rules to all joint graphs that are compiled here, beside the user's own passes.

    With ``blocks`` of ``compress_saved()``, the hooks at the cut see inputs of the graphs, too.
    """
    names = private.load_joint_passes()
    if names is None:
        yield
        return
    functorch, inductor, graph_pass = names
    tags: dict[Node, dict[str, Any]] = {}
    before = _each(inductor.joint_custom_pre_pass), functools.partial(_note, tags)
    after = functools.partial(_restore, tags), _each(inductor.joint_custom_post_pass)
    seen = {"saved_tensors_hooks_filtering_mode": "all"} if blocks else {}
    with (
        functorch.patch(joint_custom_pass=_with_outputs(functorch.joint_custom_pass), **seen),
        inductor.patch(
            joint_custom_pre_pass=_pass(graph_pass, *before[0], before[1]),
            joint_custom_post_pass=_pass(graph_pass, after[0], *after[1]),
        ),
    ):
        yield


# ---- outputs of regions ----


def _with_outputs(users: Any) -> Callable[[GraphModule, Any], GraphModule]:
    def joint_pass(module: GraphModule, inputs: Any) -> GraphModule:
        if callable(users):
            module = users(module, inputs)
        saved_joint.rewrite(module.graph)
        _keep_outputs(module.graph)
        return module

    return joint_pass


def _keep_outputs(graph: Graph) -> None:
    """Save what a region computes from restored values as it is, where the backward of code outside
    reads it.
    """
    inside = {node.meta.get(_NUMBER) for node in graph.nodes if _REGION in node.meta}
    read = _read_later(graph)
    restored: set[Node] = set()
    for node in graph.nodes:
        kept = node.target is region_input or CODEC in node.meta
        if kept or (_runs_again(node) and not restored.isdisjoint(node.all_input_nodes)):
            restored.add(node)
            if any(user in read or _is_backward_outside(user, inside) for user in node.users):
                _keep(node, restored)


def _read_later(graph: Graph) -> set[Node]:
    """Return the operators of the forward outside all regions whose results the backward may read,
    or what is computed from them outside.
    """
    read: set[Node] = set()
    for node in reversed(graph.nodes):
        if (
            node.op == "call_function"
            and node.target is not region_input
            and _REGION not in _whole(node).meta
            and node.meta.get(_SIDE) == "is_forward"
            and any(user in read or _is_backward(user) or _runs_again(user) for user in node.users)
        ):
            read.add(node)
    return read


def _is_backward(node: Node) -> bool:
    return node.meta.get(_SIDE) == "is_backward"


def _is_backward_outside(node: Node, inside: set[Any]) -> bool:
    """Return whether it is of the backward of an operator with none of these numbers."""
    number = node.meta.get(_NUMBER)  # a new node of a pass may have none
    return _is_backward(node) and number is not None and number not in inside


def _runs_again(node: Node) -> bool:
    return node.meta.get(_RECOMPUTE) in _AGAIN


def _keep(node: Node, restored: set[Node]) -> None:
    """Save a node. A view or one of several outputs is saved with what it is made of: torch
    computes these again in any case.
    """
    while node in restored and node.target is not region_input:
        node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
        node.meta.pop(CODEC, None)
        whole = _whole(node)
        for part in whole.users:
            if part.target is operator.getitem:
                part.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
        if whole is node and not _is_view(node):
            return
        node = node.all_input_nodes[0]


def _whole(node: Node) -> Node:
    """Return the operator of which the node is one of several outputs, else the node."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


# ---- passes of Inductor ----


def _note(tags: dict[Node, dict[str, Any]], graph: Graph) -> None:
    tags.clear()
    tags.update((node, {key: node.meta[key] for key in _TAGS if key in node.meta}) for node in graph.nodes)


def _restore(tags: dict[Node, dict[str, Any]], graph: Graph) -> None:
    for node in graph.nodes:
        if node in tags:
            for key in _TAGS:
                node.meta.pop(key, None)
            node.meta.update(tags[node])
    tags.clear()
    _keep_outputs(graph)  # a pass may have replaced an output by what it was made of


def _each(passes: Any) -> tuple[Any, ...]:
    if passes is None:
        return ()
    return tuple(passes) if isinstance(passes, (list, tuple)) else (passes,)


def _pass(kind: Any, *steps: Any) -> Any:
    """Return one of Inductor's passes, which does these steps.

    Inductor's cache on disk knows it by the user's passes and our version.
    """
    users = [step for step in steps if not isinstance(step, functools.partial)]
    known = [step.uuid() if isinstance(step, kind) else None for step in users]

    class Steps(kind):  # type: ignore[misc]
        def __call__(self, graph: Graph) -> None:
            for step in steps:
                step(graph)

        def uuid(self) -> Any:
            return None if None in known else (version(), *known)

    return Steps()
