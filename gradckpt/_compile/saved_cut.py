"""Which tensors cross from a forward graph into its backward as payloads, under
``compress_saved()``.

The partitioner has chosen what crosses: tensors that autograd's nodes save, and others from which
it makes these again. A tensor becomes a payload if everything that the backward graph reads of it
tolerates that. From the tensor's place in the backward graph the walk follows views, casts, and
operators of the forward that run again, if the error of what they make is bounded by that of what
they read, up to each operator of the backward. There, :data:`SAVED` has to name its number.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node

from gradckpt import _C
from gradckpt._compile.graph import CODEC, FORM, MARKS, dtypes, may_overflow
from gradckpt._compile.saved_forms import CASTS, hint
from gradckpt._compile.saved_roles_traced import ACTIVATION, BLOCK, KIND, SAVED, How, Settings, is_same, whole_of

#: Reasons for staying exact: those of ``stats()["uncompressed"]``.
EXACT, SMALL, LEAF = "backward needs it exactly", "smaller than min_numel", "leaf"
GRAD, RETURNED = "does not require grad", "returned by the graph"
DTYPE, OVERFLOW, REGION = "dtype the codec does not take", "values the codec cannot hold", "read by a region"

_ROUNDED = ("rounded", "probabilities")
_SIDE, _NUMBER, _REGION = "partitioner_tag", "seq_nr", "ac_graph_id"


def decide(forward: Graph, backward: Graph) -> dict[str, int]:
    """Mark what crosses as a payload. Return how many tensors stay exact, by reason."""
    reasons: dict[str, int] = {}
    made = {node.name: node for node in forward.nodes}
    outputs: Any = forward.output_node().args[0]
    returned = {node for node, times in collections.Counter(outputs).items() if times > 1}
    for place in backward.find_nodes(op="placeholder"):
        node = made.get(place.name)
        value = node.meta.get("val") if node is not None else None
        if node is None or not isinstance(value, torch.Tensor):
            continue
        chain = tuple(_chain(node))
        settings = next((each.meta[BLOCK] for each in chain if BLOCK in each.meta), None)
        if settings is None or CODEC in node.meta or node.target in MARKS:
            continue
        how = _how_it_crosses(node, place, settings, made) if returned.isdisjoint(chain) else RETURNED
        if isinstance(how, How):
            node.meta[CODEC], node.meta[FORM] = how.codec, how.form
        elif how is not None:
            reasons[how] = reasons.get(how, 0) + 1
    return reasons


def _how_it_crosses(node: Node, place: Node, settings: Settings, made: dict[str, Node]) -> How | str | None:
    """Return how a tensor crosses, or why it stays exact; None for what is no activation."""
    value = node.meta["val"]
    if value.dtype == torch.bool:
        return How("mask") if hint(value.numel()) >= settings.min_numel else SMALL
    if not value.dtype.is_floating_point:
        return None
    *_, root = _chain(node)
    if root.op == "placeholder" and ACTIVATION not in root.meta:
        return LEAF
    if hint(value.numel()) < settings.min_numel:
        return SMALL
    found = _read(place, node, made)
    if found == EXACT and not settings.lossy:
        found = How(settings.codec)
    if found == EXACT and root.op != "placeholder" and KIND not in root.meta:
        return GRAD
    if isinstance(found, How):
        if found.form and found.codec in CASTS:
            return found if value.dtype == torch.float32 else EXACT
        if value.dtype not in dtypes(found.codec):
            return DTYPE
        if may_overflow(found.codec):
            return OVERFLOW
    return found


class _At(NamedTuple):
    """A value of the backward graph that is made from what crosses.

    It may be a step on the way of a decomposed operator: then the number of its node in autograd's
    graph, and how that node has saved what the operator reads.
    """

    node: Node
    number: int | None = None
    how: How | None = None


def _read(place: Node, node: Node, made: dict[str, Node]) -> How | str:
    """Return how the backward graph reads what crosses here, in which form all of it can."""
    hows: set[How] = set()
    start = _At(place, *_normed(node))
    again = start.number is not None
    waiting, seen = [start], {start}
    while waiting:
        at = waiting.pop()
        for user in at.node.users:
            if user.op == "output":
                return EXACT
            if _REGION in user.meta:
                return REGION
            how = at.how if at.number is not None and user.meta.get(_NUMBER) == at.number else None
            if is_same(user):
                to = at._replace(node=user)
            elif user.meta.get(_SIDE) == "is_backward":
                how = _kept_as(how or _how(at.node, user, made), user)
                if how is None:
                    return EXACT
                hows.add(how)
                continue
            else:
                how = how or _how(at.node, user, made)
                if not _is_bounded(user, how):
                    return EXACT
                to = _At(user, None if how is None else user.meta[_NUMBER], how)
                again = True
            if to not in seen:
                seen.add(to)
                waiting.append(to)
    if not hows:
        return EXACT
    if len(hows) == 1 and not (again and next(iter(hows)).form):
        return next(iter(hows))
    forms = [how for how in hows if how.form]
    if forms:  # 16 bits also suffice for what takes the codec, where they hold all values
        if forms[0].form == "rounded":
            return EXACT
        return forms[0] if len(forms) == 1 and forms[0].form.startswith(_ROUNDED) and not again else EXACT
    return min(hows, key=lambda how: _C.codec_info(how.codec)["max_error"])


def _kept_as(how: How | None, user: Node) -> How | None:
    """Return how attention's arguments are kept: only where its backward gets results that were
    made again of them.
    """
    if how is None or how.form != "attention":
        return how
    sources = [x.args[0] for x in user.all_input_nodes if x.target is operator.getitem]
    again = any(getattr(getattr(x, "target", None), "namespace", "") == "gradckpt" for x in sources)
    return how._replace(form="") if again else None


def _normed(node: Node) -> tuple[int | None, How | None]:
    """Return the number of the norm whose rows, moved and scaled, these are, and how it has saved
    them.
    """
    number = node.meta.get(_NUMBER)
    while node.meta.get(KIND, ("", ""))[1] == "norm" and node.meta.get(_NUMBER) == number:
        if not is_same(node) and node.target not in _MOVES:
            break
        node = node.args[0]  # type: ignore[assignment]
        for each in whole_of(node):
            how = each.meta.get(SAVED, {}).get(number)
            if how is not None:
                return number, how
    return None, None


def _how(at: Node, user: Node, made: dict[str, Node]) -> How | None:
    """Return how the node of autograd whose backward, or forward, is ``user`` has saved this
    value.
    """
    number = user.meta.get(_NUMBER)
    for node in whole_of(at):
        for each in whole_of(made[node.name]) if node.op == "placeholder" and node.name in made else (node,):
            how: How | None = each.meta.get(SAVED, {}).get(number)
            if how is not None:
                return how
    return None


def _chain(node: Node) -> Iterator[Node]:
    """Yield a node and those that it is a view, part or cast of."""
    yield node
    while is_same(node):
        node = node.args[0]  # type: ignore[assignment]
        yield node


def _is_bounded(user: Node, how: How | None) -> bool:
    """Return whether the error of a result is bounded by that of the argument that autograd's node
    has saved like this.
    """
    name, kind = user.meta.get(KIND, (None, None))
    if kind in ("activation", "product", "norm", "attention") and how is not None:
        return True
    if (
        kind == "product"
        and len(user.all_input_nodes) == 1
        and str(user.target) in ("aten.mul.Tensor", "aten.mul.Scalar")
    ):
        return True  # by a number
    floating = all(x.dtype.is_floating_point for x in _tensors(user.meta.get("val")))
    return floating and (kind in ("view", "sign") or (kind in ("plain", "sum") and name in _CONTINUOUS))


_MOVES = (torch.ops.aten.sub.Tensor, torch.ops.aten.mul.Tensor)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(x, torch.Tensor)]


#: Of the plain ones, those whose result changes no more than what it is made of, by a factor. A
#: difference does not, either, but can be small where that is large (saved_joint.MAY_CANCEL).
_CONTINUOUS = frozenset(
    f"{name}Backward{index}"
    for name in (
        *("Abs", "Neg", "Mul", "Div", "Cat", "Stack", "Where", "MaskedFill", "NativeDropout"),
        *("Maximum", "Minimum", "ConstantPadNd", "Roll", "Flip", "IndexSelect", "Index", "Gather", "Repeat"),
        *("Cos", "Sin", "Tril", "Triu", "PixelShuffle", "PixelUnshuffle", "Glu", "Hardswish", "Fmax", "Fmin"),
        *("Sum", "Mean"),
    )
    for index in range(4)
)
