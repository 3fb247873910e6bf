"""What autograd saves in a graph that AOTAutograd traces, and the role of each tensor.

When the forward of a joint graph has been traced, autograd's nodes are there as without the
compiler: by their names, the table of :func:`gradckpt._C.saved_nodes` says what their backward
needs of each tensor that they save. This is noted in the ``meta`` of the tensor's node in the
traced graph, where the cut (:mod:`gradckpt._compile.saved_cut`) finds it: decompositions, passes
and the partitioner carry it along.
"""

from __future__ import annotations

import functools
import graphlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from gradckpt import _C
from gradckpt._compile.saved_forms import hint
from gradckpt._engine import torch_private as private
from gradckpt._engine.trial_calls import graph_behind

#: Keys of a traced node's ``meta``: how autograd's nodes save it, by their numbers; what autograd's
#: node of its operator is; the settings of its block.
SAVED, KIND, BLOCK = "gradckpt_saved", "gradckpt_kind", "gradckpt_block"
#: Of an input of the graph that is no leaf.
ACTIVATION = "gradckpt_activation"
#: Of an attention: the number of its node. Its results are made again.
AGAIN = "gradckpt_again"

_STEPS = 16  # after so many it is taken for harmless
_MANY = 32  # of fewer values than this their sum may be small because one of them is
_USED, _DOUBTED, _AMPLIFIED = range(3)


class Settings(NamedTuple):
    """The settings of a block."""

    codec: str
    min_numel: int
    formats: dict[str, str | None]

    @classmethod
    def read(cls, text: str) -> Settings:
        codec, min_numel, formats, _ = json.loads(text)
        return cls(codec, min_numel, {"softmax": "bf16", "log_softmax": "fp16", **formats})

    @property
    def lossy(self) -> bool:
        return bool(_C.codec_info(self.codec)["max_error"])

    def codec_of(self, node: str, argument: str, family: str | None) -> str | None:
        if family is None:
            return self.codec
        keys = (f"{node}.{argument}", node, family)
        return next((self.formats[key] for key in keys if key in self.formats), self.codec)


class How(NamedTuple):
    """How a saved tensor is kept, as far as one node's backward reads it."""

    codec: str
    form: str = ""  # what is done with it besides


@functools.cache
def _kinds() -> dict[str, Any]:
    return _C.saved_nodes()


def kind_of(node: Any) -> Any:
    """Return the rows of autograd's node, or the name of its kind; None if it is not known."""
    if hasattr(node, "variable"):
        return "leaf"
    return _kinds().get(node.name())


# ---- the walk ----


def note(
    results: Sequence[torch.Tensor], activations: Sequence[torch.Tensor], blocks: Sequence[Any], tracer: Any
) -> bool:
    """Note in a traced graph what autograd's nodes in the blocks save, and which of its inputs are
    activations. Return whether anything is saved.
    """
    nodes = _nodes(results)
    if not nodes or not blocks:
        return False
    uses, near = _uses(nodes), _near_results(nodes, results)
    numbers = {node._sequence_nr(): node for node in nodes}
    operators = [fx for fx in tracer.graph.nodes if fx.op == "call_function" and "seq_nr" in fx.meta]
    # What regions keep is theirs to say.
    regions = {fx.meta["seq_nr"] for fx in operators if "ac_graph_id" in fx.meta}
    outside = [x.grad_fn for x in activations if x.is_floating_point()]
    found = False
    for number, node in numbers.items():
        settings = _settings_at(blocks, number)
        rows = kind_of(node)
        if settings is None or not isinstance(rows, list) or number in regions:
            continue
        exactly = (uses[node] != _USED or node in near) and _matters(node, rows)
        if exactly or _made_steeply(node, rows, outside):
            continue
        found = _note_rows(node, number, rows, settings, tracer) or found
    for x in activations:
        fx = node_of(x, tracer)
        numbers_of = fx.meta.get(SAVED) if fx is not None else None
        if fx is not None and numbers_of:
            fx.meta[ACTIVATION] = True
            fx.meta[BLOCK] = _settings_at(blocks, min(numbers_of))
    for fx in operators:
        number = fx.meta["seq_nr"]
        settings = _settings_at(blocks, number)
        if settings is None and SAVED in fx.meta:  # made outside of blocks, and saved in one
            settings = _settings_at(blocks, min(fx.meta[SAVED]))
        if settings is not None:
            fx.meta[BLOCK] = settings
        node = numbers.get(number)
        if node is not None and _is_of(fx, node):
            kind = kind_of(node)
            fx.meta[KIND] = (node.name(), (kind[0][2] or "sign") if isinstance(kind, list) else kind)
            found = found or settings is not None
    return found


def _settings_at(blocks: Sequence[Any], number: int) -> Settings | None:
    inside = [block for block in blocks if block.begin <= number < block.end]
    return max(inside, key=lambda block: block.begin).settings if inside else None  # the innermost


def _nodes(results: Sequence[torch.Tensor]) -> list[Any]:
    """Return the nodes behind the results, each after all that use it."""
    order: graphlib.TopologicalSorter[Any] = graphlib.TopologicalSorter()
    for node in graph_behind(results):
        order.add(node)
        for behind, _ in node.next_functions:
            if behind is not None:
                order.add(behind, node)
    return list(order.static_order())


def _note_rows(node: Any, number: int, rows: list[Any], settings: Settings, tracer: Any) -> bool:
    found = False
    for argument, role, family in rows:
        x = _held(node, argument)
        if x is None:
            continue
        how = _how(node, x, role, settings.codec_of(node.name(), argument, family))
        fx = node_of(x, tracer)
        if how is None or fx is None:
            continue
        if how.form == "again":
            fx.args[0].meta[AGAIN] = number  # type: ignore[union-attr]
            continue
        for same in whole_of(fx):
            same.meta.setdefault(SAVED, {})[number] = how
        found = True
    return found


def _held(node: Any, argument: str) -> torch.Tensor | None:
    """Return a tensor that autograd's node saves; None: it saves none, or a write has spoilt it."""
    try:
        x = getattr(node, f"_saved_{argument}", None)
    except RuntimeError:
        return None
    return x if isinstance(x, torch.Tensor) else None


def whole_of(node: Node) -> Iterator[Node]:
    """Yield a node and those that have the same values in another shape or floating dtype, up to
    the one that makes them. Of such views and casts, AOTAutograd merges equal ones.
    """
    yield node
    while is_same(node) and node.target not in _PARTS:
        node = node.args[0]  # type: ignore[assignment]
        yield node


def is_same(node: Node) -> bool:
    """Return whether a node has the values of its first argument, at other places or in another
    floating dtype.
    """
    if node.op != "call_function" or not isinstance(node.args[0], Node):
        return False
    value = node.meta.get("val")
    if node.target in _CASTS:
        return isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    return node.target in _VIEWS or node.target in _PARTS


_aten = torch.ops.aten
_CASTS = (_aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_VIEWS = frozenset(
    getattr(getattr(_aten, name), overload)
    for name, overload in (
        *((name, "default") for name in ("t", "view", "permute", "alias", "unsqueeze", "detach", "_unsafe_view")),
        *((name, "default") for name in ("clone", "expand", "reshape", "_reshape_alias", "squeeze")),
        ("transpose", "int"),
        ("squeeze", "dim"),
        ("squeeze", "dims"),
    )
)
_PARTS = (_aten.slice.Tensor, _aten.select.int, _aten.as_strided.default)


def node_of(x: torch.Tensor, tracer: Any) -> Node | None:
    """Return the node that makes a tensor in a traced graph."""
    inner = private.dynamo.from_functional_tensor(x.elem) if isinstance(x, private.dynamo.FunctionalTensor) else x
    slot = private.dynamo.get_proxy_slot(inner, tracer, None)
    node = getattr(getattr(slot, "proxy", slot), "node", None)
    while node is not None and node.target in _SAME:
        node = node.args[0]
    return node


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def _is_of(fx: Node, node: Any) -> bool:
    """Return whether a traced operator is that of autograd's node and not another one of the same
    number, which autograd did not see."""
    op = fx.meta.get("original_aten") or fx.target
    name = str(getattr(getattr(op, "overloadpacket", op), "__name__", ""))
    camel = "".join(part.capitalize() for part in name.strip("_").split("_"))
    return re.sub(r"Backward\d*$", "", node.name()).lower() == camel.lower()


# ---- roles ----


def _how(node: Any, x: torch.Tensor, role: str, codec: str | None) -> How | None:
    """Return how a tensor with this role is kept, or None: exactly."""
    if not x.requires_grad or codec is None:
        return None
    exact = not _C.codec_info(codec)["max_error"]
    if role == "values" or exact:
        return How(codec)
    if role == "factor":
        return How(codec) if _is_known(_distinct(x) >= _numel(node, 0)) else None
    if role == "power":
        return How(codec) if _exponent(node) in (2, 3, 4) else None
    if role in ("cut", "cut of one"):
        alone = role == "cut" or _scale(node) == 1
        return None if not alone else How(codec, "" if _is_whole(_row(x)) else "clamp")
    if role == "rows":
        return How(codec) if _is_whole(_norm_row(node)) else None
    if role == "planes":
        return How(codec) if x.dim() > 1 and _is_known(x.numel() >= _C.GROUP * x.shape[1]) else None
    if role in ("attention", "again"):
        return How(codec, role) if not getattr(node, "_saved_dropout_p", 0.0) else None
    if role in ("rounded", "probabilities"):
        dim = f":{_signed(node._saved_dim)}" if role == "probabilities" else ""
        return How(codec, role + dim)
    return How("mask", role)


def _signed(dim: int) -> int:
    return dim - 2**64 if dim >= 2**63 else dim


def _is_known(condition: Any) -> bool:
    """Return whether this is true for all sizes that the graph may get, without a guard."""
    return condition if isinstance(condition, bool) else bool(private.dynamo.statically_known_true(condition))


def _distinct(x: torch.Tensor) -> Any:
    """Return how many values lie in memory: those of an expanded dimension are one."""
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if hint(stride) != 0)


def _row(x: torch.Tensor) -> Any:
    """Return the values of a row: those of the last dimension, of images those of one image."""
    return math.prod(x.shape[1:]) if x.dim() > 3 else x.shape[-1] if x.dim() else 1


def _is_whole(values: Any) -> bool:
    """Return whether groups of the codec hold values of one row only, for all sizes."""
    return isinstance(values, int) and values % _C.GROUP == 0


def _norm_row(node: Any) -> Any:
    shape = getattr(node, "_saved_normalized_shape", None)
    if shape is not None:
        return math.prod(shape)
    channels, plane, groups = node._saved_C, node._saved_HxW, node._saved_group
    return channels * plane // groups


def _exponent(node: Any) -> float | None:
    value = getattr(node, "_saved_exponent", None)
    return float(value) if isinstance(value, (int, float)) else None


def _scale(node: Any) -> Any:
    return node._saved_alpha if hasattr(node, "_saved_alpha") else getattr(node, "_saved_beta", None)


# ---- uses: as csrc/engine/saved/node_use.c ----


def _numel(node: Any, result: int) -> Any:
    return math.prod(node._input_metadata[result].shape)


def _uses(nodes: Sequence[Any]) -> dict[Any, int]:
    """Return the use of each node's result in this graph."""
    uses = dict.fromkeys(nodes, _USED)
    for node in nodes:
        kind = kind_of(node)
        for index, edge in enumerate(node.next_functions):
            if edge[0] is not None:
                uses[edge[0]] = max(uses[edge[0]], _behind(node, kind, edge, index, uses[node]))
    return uses


def _near_results(nodes: Sequence[Any], results: Sequence[torch.Tensor]) -> dict[Any, int]:
    """Return the nodes of which the graph returns what is made value by value, in at most 16 steps:
    what uses that is not known.
    """
    near = {x.grad_fn: 1 for x in results if x.grad_fn is not None and not _is_known(x.numel() <= 1)}
    for node in nodes:
        steps = near.get(node, _STEPS)
        for index, edge in enumerate(node.next_functions if steps < _STEPS else ()):
            if edge[0] is not None and _behind(node, kind_of(node), edge, index, _DOUBTED) != _USED:
                near[edge[0]] = min(near.get(edge[0], _STEPS), steps + 1)
    return near


def _behind(node: Any, kind: Any, edge: Any, index: int, above: int) -> int:
    if kind is None:
        return _DOUBTED
    if isinstance(kind, list):
        return _behind_row(node, kind, edge, index, above)
    if kind in ("view", "plain"):
        return above
    if kind == "peak":
        return max(above, _DOUBTED)
    if kind in ("sum", "norm"):
        many = (kind == "sum" and above == _USED) or _comes_from_many(node, edge)
        return _USED if many else _AMPLIFIED if kind == "norm" else above
    if kind.startswith("pole"):
        which = kind[5:]
        return _AMPLIFIED if not which or index == int(which) else above
    return _USED


def _behind_row(node: Any, rows: list[Any], edge: Any, index: int, above: int) -> int:
    _, role, family = rows[0]
    if family == "product":
        exponent = _exponent(node) if role == "power" else 1.0
        return _DOUBTED if exponent is None else _AMPLIFIED if exponent < 1 else above
    if family in ("linear", "matmul", "convolution"):
        passes = above != _USED and (_is_added(node, index) or _is_narrow(node, rows))
        return above if passes else _USED
    if family == "norm":
        return above if _is_added(node, index) else _USED
    if family == "pooling":
        return _USED if above == _USED or _comes_from_many(node, edge) else above
    return above if family in ("activation", None) else _USED


def _is_added(node: Any, index: int) -> bool:
    return index == (0 if node.name().startswith(("Add", "Badd")) else 2)


def _comes_from_many(node: Any, edge: Any) -> bool:
    values = edge[0].variable.numel() if hasattr(edge[0], "variable") else _numel(edge[0], edge[1])
    return _is_known(values >= _MANY * _numel(node, 0))


def _is_narrow(node: Any, rows: list[Any]) -> bool:
    """Return whether each value of a product of matrices, or convolution, comes from a few."""
    sizes = []
    for argument, _, family in rows:
        x = _held(node, argument)
        if x is None or x.dim() < 2:
            continue
        if family == "convolution":
            sizes += [math.prod(x.shape[1:])] if argument == "weight" else []
        else:
            sizes.append(x.shape[-2 if argument.endswith("2") else -1])
    return not all(_is_known(size >= _MANY) for size in sizes)


def _matters(node: Any, rows: list[Any]) -> bool:
    family = rows[0][2]
    if family == "norm":
        return len(node.next_functions) > 1 and node.next_functions[1][0] is not None
    return family == "product" or (family in ("linear", "matmul", "convolution") and _is_narrow(node, rows))


def _made_steeply(node: Any, rows: list[Any], outside: Sequence[Any]) -> bool:
    """Return whether something steep made a factor of this product; or may have, of inputs of the
    graph, where code outside may have made one of the other.
    """
    if rows[0][1] != "factor":
        return False
    reached = dict.fromkeys(outside, False)
    return _is_steep(node, _numel(node, 0), [32], reached) or sum(reached.values()) > 1


def _is_steep(node: Any, numel: Any, left: list[int], reached: dict[Any, bool]) -> bool:
    kind = kind_of(node)
    family = (kind[0][2] or "sign") if isinstance(kind, list) else None
    passes = family in ("product", "activation", "sign") or (
        isinstance(kind, str) and (kind in ("view", "plain", "peak") or kind.startswith("pole"))
    )
    for index, (behind, result) in enumerate(node.next_functions if passes else ()):
        if behind in reached:
            reached[behind] = True
        if left[0] <= 0 or behind is None or kind_of(behind) == "leaf":
            continue
        if _is_steep_by(node, kind, index) and not _is_known(_numel(behind, result) * _MANY <= numel):
            return True
        left[0] -= 1
        if _is_steep(behind, numel, left, reached):
            return True
    return False


def _is_steep_by(node: Any, kind: Any, index: int) -> bool:
    if isinstance(kind, list):
        exponent = _exponent(node) if kind[0][1] == "power" else None
        return exponent is not None and exponent < 1
    return isinstance(kind, str) and kind.startswith("pole") and (not kind[5:] or int(kind[5:]) == index)
