"""Joint graphs with blocks of ``compress_saved()``, before they are cut.

Attention's backward reads its result and its log-sum-exp beside ``query``, ``key`` and ``value``:
it gets those of a second attention, which runs in the backward on what is restored of the three.
The backward of a ReLU reads only a sign: it gets ones and zeros, made of a mask that crosses. What
a softmax returns crosses in 16 bits, and not what it could be made again from: that would have to
be exact.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from gradckpt._compile.graph import define, library
from gradckpt._compile.saved_roles_traced import AGAIN, KIND, SAVED, How, is_same

_SIDE, _NUMBER, _RECOMPUTE, _REGION = "partitioner_tag", "seq_nr", "recompute", "ac_graph_id"
_aten = torch.ops.aten


def rewrite(graph: Graph) -> None:
    for node in list(graph.nodes):
        if _REGION in node.meta:  # which runs again as a whole
            continue
        if AGAIN in node.meta:
            _attend_again(graph, node)
        for number, how in node.meta.get(SAVED, {}).items():
            if how.form.startswith("positive"):
                _save_signs(graph, node, number, how.form)
            elif _must_be_saved(node, how) and not is_same(node):
                node.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE


#: Operators whose result can be small where their arguments are large, whose rounding it would get.
MAY_CANCEL = ("Add", "Sub", "Rsub", "Lerp", "Sum", "Mean")


def _must_be_saved(node: Node, how: How) -> bool:
    """Return whether a saved tensor must cross, and not what it could be made again from."""
    kind, _ = node.meta.get(KIND, ("", ""))
    return how.form.startswith(("rounded", "probabilities")) or kind.startswith(MAY_CANCEL)


def _readers(node: Node, number: Any) -> list[Node]:
    """Return the backward of the node of autograd with this number, as far as it reads this."""
    return [user for user in node.users if user.meta.get(_SIDE) == "is_backward" and user.meta.get(_NUMBER) == number]


# ---- attention ----


@functools.cache
def _again(attention: Any) -> Any:
    """Return the same operator, of which torch does not think that it draws random numbers: without
    dropout it draws none, and a partitioner would keep a generator's state for each.
    """
    name = "again" + attention._schema.name.partition("::")[2]
    if not hasattr(torch.ops.gradckpt, name):
        define(name, "(" + str(attention._schema).partition("(")[2], attention)
        torch.library.register_fake(f"gradckpt::{name}", attention, lib=library)
    return getattr(torch.ops.gradckpt, name).default


def _attend_again(graph: Graph, node: Node) -> None:
    number = node.meta[AGAIN]
    results = [user for user in node.users if user.target is operator.getitem and user.args[1] in (0, 1)]
    wanted = {
        result: [(each, reader) for each in _seen(result) for reader in _readers(each, number)] for result in results
    }
    if not any(wanted.values()):
        return
    with graph.inserting_after(max(results, default=node)):
        again = graph.call_function(_again(node.target), node.args, node.kwargs)
    again.meta = {**node.meta, _RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE}
    del again.meta[AGAIN]
    for result, readers in wanted.items():
        with graph.inserting_after(again):
            other = graph.call_function(operator.getitem, (again, result.args[1]))
        other.meta = {**result.meta, _RECOMPUTE: CheckpointPolicy.MUST_RECOMPUTE}
        for each, reader in readers:
            reader.replace_input_with(each, other)


def _seen(result: Node) -> list[Node]:
    """Return a node and its aliases."""
    same = [result]
    for node in same:
        same += [user for user in node.users if user.target in (_aten.detach.default, _aten.alias.default)]
    return same


# ---- signs ----


def _signs(x: torch.Tensor, or_nan: bool) -> torch.Tensor:
    return ((x <= 0).logical_not_() if or_nan else x > 0).contiguous()


def _signs_like(x: torch.Tensor, or_nan: bool) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)


#: It must have a side effect: then the forward computes it, though only the backward needs it.
SIGNS = define("signs", "(Tensor x, bool or_nan) -> Tensor", _signs)
torch.library.register_fake("gradckpt::signs", _signs_like, lib=library)


def _save_signs(graph: Graph, node: Node, number: Any, form: str) -> None:
    readers = [
        (each, reader)
        for each in _seen(node)
        for reader in _readers(each, number)
        if reader.target not in (_aten.detach.default, _aten.alias.default)
    ]
    if not readers:
        return
    value, or_nan = node.meta["val"], form == "positive or nan"
    with graph.inserting_after(node):
        mask = graph.call_function(SIGNS, (node, or_nan))
    _describe(mask, node, _signs_like(value, or_nan), "must_be_in_forward")
    mask.meta[_RECOMPUTE] = CheckpointPolicy.MUST_SAVE
    with graph.inserting_before(min(reader for _, reader in readers)):
        ones = graph.call_function(torch.ops.prims.convert_element_type.default, (mask, value.dtype))
        _describe(ones, node, value, "is_backward")
    for each, reader in readers:
        reader.replace_input_with(each, ones)


def _describe(new: Node, like: Node, value: torch.Tensor, side: str) -> None:
    new.meta = {key: x for key, x in like.meta.items() if key in (_NUMBER, "stack_trace", "gradckpt_block")}
    new.meta |= {"val": value, _SIDE: side}
