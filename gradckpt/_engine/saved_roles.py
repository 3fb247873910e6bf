"""Which of the tensors that compress_saved() may encode need values to be looked at; and attention,
whose results are made again.

The table of all of them is in C (csrc/engine/saved/saved_node.c), which calls these functions.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gradckpt import _C
from gradckpt._engine import torch_private as private
from gradckpt._stats import columns

#: False while a simulated step stands for one on a GPU, where reading values would synchronize.
are_rows_read = True


def table() -> str:
    """Return the table of what a lossy codec encodes: node, argument, operators, and how; then
    that of autograd Functions of libraries: package, node, and what is encoded.
    """
    rows = [(node, argument, family or "any", how) for node, argument, family, how in _C.saved_roles()]
    functions = [
        (package, node, f"exact: {why}" if why else f"places {', '.join(places)}")
        for package, node, places, why in _C.saved_functions()
    ]
    return "\n".join([*columns(rows), "", *columns(functions)])


def check_functions(rules: tuple[tuple[str, str | None], ...]) -> None:
    """Check that the autograd Functions which these rules name exist, and that what they save may
    be encoded.

    Raises:
        ValueError: No class of that name is loaded, or those of libraries' need it exactly.
    """
    named = [rule for rule, _ in rules if re.search(r"Backward(\.|$)", rule)]
    if not named:
        return
    loaded: dict[str, list[type[Any]]] = {}
    for function in _subclasses(torch.autograd.Function):
        loaded.setdefault(function.__name__, []).append(function)
    spelled = {name.lower(): name for name in loaded}
    for rule in named:
        node, _, argument = rule.partition(".")
        name = node.removesuffix("Backward")
        if name not in loaded:
            close = [spelled[each] for each in difflib.get_close_matches(name.lower(), spelled, 1, 0.7)]
            instead = f"did you mean '{close[0]}Backward'?" if close else "import what has it first, or leave it out"
            raise ValueError(f"gradckpt: operators= names {node!r}, but no autograd Function {name} exists; {instead}")
        known = [_rows_of(function) for function in loaded[name]]
        if not all(known):
            continue  # one that the table does not have
        places = sorted({place for rows in known for places, _ in rows for place in places})
        if not places:
            why = known[0][0][1]
            raise ValueError(f"gradckpt: {node} saves {why}, which stays exact; leave it out of operators=")
        if argument and argument not in places:
            raise ValueError(
                f"gradckpt: operators= cannot encode {argument!r} of {node}; choose one of: {', '.join(places)}"
            )


def _rows_of(function: Any) -> list[tuple[tuple[str, ...], str | None]]:
    """Return the places and reasons of the table's rows for an autograd Function."""
    node, module = f"{function.__name__}Backward", f"{function.__module__}."
    return [
        (places, why)
        for package, known, places, why in _C.saved_functions()
        if known == node and module.startswith(f"{package}.")
    ]


def is_known(node: Any) -> bool:
    """Return whether it is a node of torch's, or of an autograd Function that the table has."""
    function = getattr(node, "_forward_cls", None)
    module = f"{getattr(function, '__module__', 'torch')}."
    if module.startswith(("gradckpt.", "torch.")) and not module.startswith("torch._library."):
        return True  # not one that users choose codecs for
    return bool(_rows_of(function))


def _subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    for each in cls.__subclasses__():
        yield each
        yield from _subclasses(each)


def rows_are_alike(node: Any, x: torch.Tensor, values: int) -> bool:
    """Return whether groups of 128 values can hold several rows of ``x`` without one vanishing
    beside another.

    ``node`` is the norm that saves it, and a row is ``values`` values under one mean and scale.
    """
    if _kept(node) is None:
        return False
    rows = x.detach().reshape(-1, values)
    touching = min(127 // rows.shape[1] + 2, rows.shape[0])  # rows that share a group
    variance, mean = torch.var_mean(rows.float(), 1, correction=0)
    largest = torch.nn.functional.max_pool1d((variance + mean.square())[None], touching, 1)
    least = -torch.nn.functional.max_pool1d(-variance[None], touching, 1)
    alike = largest < 16 * least  # false for rows that are not finite or have no spread
    return are_rows_read and _holds(alike)


def _kept(norm: Any) -> torch.Tensor | None:
    """Return the uncompressed statistics that a norm's node saves through ``compress_saved()``.

    It returns None where outer hooks hold the tensor. Unpacking it there may recompute a region,
    which gets other values than its forward but must make the same choice.
    """
    data = getattr(getattr(norm, "_raw_saved_result1", None), "data", None)
    value = getattr(getattr(data, "packed", data), "value", None)  # other hooks may hold it in an object of theirs
    return value if isinstance(value, torch.Tensor) else None


def _holds(condition: torch.Tensor) -> bool:
    """Return whether it holds everywhere; in a simulated step, whose values are assumed to be
    ordinary, it does.
    """
    everywhere = condition.all()
    return _C.is_simulated() or bool(everywhere)


def nodes_behind(result: Any) -> list[Any]:
    """Return the nodes that made a function's results."""
    tensors = (leaf for leaf in private.tree_leaves(result) if isinstance(leaf, torch.Tensor))
    return [x.grad_fn for x in tensors if x.grad_fn is not None]


# ---- attention: its result and its log-sum-exp are made again in the backward ----

# The backward of attention takes differences that vanish where a softmax is sharp (Dao et al. 2022,
# arXiv:2205.14135, algorithm 4: ``dS = P * (dP - D)``). They do so only if all five tensors that it
# reads fit together, not if each was rounded by itself. So query, key and value are kept as any
# factors are, and the other two are made from what is restored of them.

Tensor = torch.Tensor
Call = Callable[[Tensor, Tensor, Tensor, Any, bool, Any], Any]
_aten = torch.ops.aten


#: By the node: a call of the operator, and the node's names for the mask and the log-sum-exp.
_CALLS: dict[str, tuple[Call, str | None, str]] = {
    "ScaledDotProductFlashAttentionForCpuBackward0": (
        lambda q, k, v, mask, causal, scale: _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        ),
        "attn_mask",
        "logsumexp",
    ),
    "ScaledDotProductFlashAttentionBackward0": (
        lambda q, k, v, mask, causal, scale: _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        ),
        None,
        "logsumexp",
    ),
    "ScaledDotProductEfficientAttentionBackward0": (
        lambda q, k, v, mask, causal, scale: _aten._scaled_dot_product_efficient_attention(
            q, k, v, mask, True, 0.0, causal, scale=scale
        ),
        "attn_bias",
        "log_sumexp",
    ),
    "ScaledDotProductCudnnAttentionBackward0": (
        lambda q, k, v, mask, causal, scale: _aten._scaled_dot_product_cudnn_attention(
            q, k, v, mask, True, 0.0, causal, False, scale=scale
        ),
        "attn_bias",
        "logsumexp",
    ),
}


class Again:
    """One call of attention, without its results. ``part(0)`` makes its result, ``part(1)`` its
    log-sum-exp; the one that was not asked for waits until it is.
    """

    __slots__ = ("call", "causal", "kept", "mask", "scale", "waiting")

    def __init__(self, call: Call, kept: list[Any], mask: Any, causal: bool, scale: Any) -> None:
        self.call, self.kept, self.mask, self.causal, self.scale = call, kept, mask, causal, scale
        self.waiting: dict[int, Tensor] = {}

    def part(self, index: int) -> Tensor:
        found = self.waiting.pop(index, None)
        if found is None:
            q, k, v = (each.restore() for each in self.kept)
            mask = None if self.mask is None else self.mask.restore()
            with torch.no_grad():
                results = self.call(q, k, v, mask, self.causal, self.scale)
            found = results[index]
            self.waiting = {1 - index: results[1 - index]}
        return found


def attention_again(node: Any) -> tuple[Any, Any, Any] | None:
    """Return what makes the result of this node again, its saved log-sum-exp, and what makes that.

    The node is about to save its result, the last that it saves. None where results must be kept:
    the call drops probabilities at random, or other hooks hold what the node saves.
    """
    known = _CALLS.get(type(node).__name__)
    if known is None or node._saved_dropout_p != 0:
        return None
    call, mask, log_sum = known
    q, k, v, sums = (_payload_of(node, name) for name in ("query", "key", "value", log_sum))
    bias = _payload_of(node, mask)
    if not all(isinstance(x, _C.SavedTensor) for x in (q, k, v, sums)) or not isinstance(bias, _C.SavedTensor | None):
        return None
    again = Again(call, [q, k, v], bias, node._saved_is_causal, node._saved_scale)
    return functools.partial(again.part, 0), sums, functools.partial(again.part, 1)


def _payload_of(node: Any, name: str | None) -> Any:
    return None if name is None else getattr(node, f"_raw_saved_{name}").data
