"""Which kept results of operators would be mixed with restored values.

The node of ``amax`` looks for its result among its arguments, that of attention compares
exponentials with the log-sum-exp of the forward; and what follows a kept ``sum`` may divide
restored exponentials by it. An exact result beside values that a codec restored is then no small
error: what should cancel does not. Torch's node types tell what each of its operators saves.
"""

from __future__ import annotations

from typing import Any

import torch

from gradckpt import _C
from gradckpt._C import OP_JOINT, OP_PRODUCT, OP_SEPARATE, OP_UNKNOWN  # op_policy.h says what each means
from gradckpt._compression import warn_inactive
from gradckpt._engine import torch_private as private

_SAVED = "_raw_saved_"
_PRODUCTS = ("linear", "matmul", "convolution")


def _operator(node: str) -> str:
    """Return the operator of a node type, as nodes spell it."""
    return node.rpartition("Backward")[0].lower()


def _read_saves() -> dict[str, list[set[str]]]:
    """Return the names of the tensors that the nodes of each operator save."""
    found: dict[str, list[set[str]]] = {}
    for node in dir(private.node_types):
        if "Backward" in node:
            attributes = dir(getattr(private.node_types, node))
            saved = {a.removeprefix(_SAVED) for a in attributes if a.startswith(_SAVED)}
            found.setdefault(_operator(node), []).append(saved)
    return found


def _read(op: Any) -> int:
    if isinstance(op, private.HigherOrderOperator):  # its node saves what it likes
        return OP_JOINT
    namespace, _, rest = str(op).partition(".")
    if has_effect(op):  # twice is worse
        return OP_PRODUCT
    if namespace != "aten" or private.node_types is None:
        return OP_UNKNOWN
    if not _saves:
        _saves.update(_read_saves())
        _products.update(_operator(node) for node, _, family, _ in _C.saved_roles() if family in _PRODUCTS)
    operator = rest.partition(".")[0].removesuffix("_forward").replace("_", "")
    if operator in _products or operator not in _saves:
        return OP_PRODUCT
    arguments = {each.name for each in op._schema.arguments}
    joint = any(saved & arguments and saved - arguments for saved in _saves[operator])
    return OP_JOINT if joint else OP_SEPARATE


#: Read once: what each operator's nodes save, which are products, and the operators asked for.
#: Dynamo, which traces policies, warns of functools.cache.
_saves: dict[str, list[set[str]]] = {}
_products: set[str] = set()
_known: dict[Any, int] = {}


def mixing_of(op: Any) -> int:
    """Return what a kept result of this operator does beside restored values."""
    found = _known.get(op)
    if found is None:
        if len(_known) >= 1024:
            _known.clear()
        found = _known[op] = _read(op)
    return found


#: Those that a warning has named, views included.
ran_again: set[Any] = set()


def warn_mixing(op: Any) -> None:
    """Warn once that kept results of the operator are made again; of views not."""
    if op in ran_again:
        return
    returns = () if isinstance(op, private.HigherOrderOperator) else op._schema.returns
    if all(returned.alias_info is None for returned in returns):
        warn_inactive(
            f"{op} runs again: a backward could mix its kept results with restored values; "
            "pass compress=None or a CompressionConfig with fake_quantize=True to keep them"
        )
    ran_again.add(op)


def raise_mixing(op: Any) -> None:
    raise RuntimeError(
        f"gradckpt: {op} saves its result beside its arguments, so a codec may round neither; keep it with "
        "compress=None, or leave it out of the policy"
    )


# ---- operators with an ordered effect (a print, a counter, a callback) ----

# Torch's selective checkpoints keep what they return, unless a policy says MUST_RECOMPUTE, so that
# no effect comes twice (2.15).

#: All effects and the operators that have one, as torch was last read.
_effects: tuple[list[Any], frozenset[Any]] = ([], frozenset())


def with_effect() -> frozenset[Any]:
    """Return the operators of which :func:`has_effect` says yes.

    It is read again when torch knows others: an effect may be registered at any time.
    """
    global _effects
    effects = private.operator_effects()
    if effects != _effects[0]:
        known = map(_overload, private.names_with_effect())
        _effects = effects, frozenset(op for op in known if op is not None and has_effect(op))
    return _effects[1]


def has_effect(op: Any) -> bool:
    """Return whether a selective region keeps the operator's outputs without being asked.

    Raw collectives of c10d, which return a handle, are not among them, as in torch.
    """
    if not private.has_effect(getattr(op, "_name", "")) or op.namespace == "c10d":
        return False
    return not any(arg.alias_info is not None for arg in op._schema.arguments)


def _overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    if namespace == "higher_order":
        return None
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload or "default", None)
