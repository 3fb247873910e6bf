"""Operators whose backward reads their own results beside their arguments.

The node of such an operator computes with both: that of ``amax`` looks for its result among the
values, that of attention compares exponentials with the log-sum-exp of the forward. An exact result
beside arguments that a codec restored, or the reverse, is then no small error: what should cancel
does not. Torch's node types tell which of its operators these are.
"""

from __future__ import annotations

import functools
from typing import Any

from gradckpt import _C
from gradckpt._config import warn_inactive
from gradckpt._engine import torch_private as private

#: csrc/engine/selective/op_policy.h says what each means.
SEPARATE: int = _C.OP_SEPARATE
JOINT: int = _C.OP_JOINT
UNKNOWN: int = _C.OP_UNKNOWN

_SAVED = "_raw_saved_"


@functools.cache
def _by_operator() -> dict[str, list[set[str]]]:
    """Return what the nodes of each operator save, by the operator's name as nodes spell it."""
    found: dict[str, list[set[str]]] = {}
    for name in dir(private.node_types):
        operator, is_node, _ = name.partition("Backward")
        if is_node:
            attributes = dir(getattr(private.node_types, name))
            saved = {a.removeprefix(_SAVED) for a in attributes if a.startswith(_SAVED)}
            found.setdefault(operator.lower(), []).append(saved)
    return found


@functools.lru_cache(maxsize=1024)
def joint_saves(op: Any) -> int:
    """Return whether a node of this operator saves a result beside a tensor argument.

    Of operators that are not torch's own, and of higher-order ones, it is unknown.
    """
    namespace, _, rest = str(op).partition(".")
    if namespace != "aten" or private.node_types is None:
        return UNKNOWN
    arguments = {each.name for each in op._schema.arguments}
    key = rest.partition(".")[0].removesuffix("_forward").replace("_", "")
    found = any(saved & arguments and saved - arguments for saved in _by_operator().get(key, ()))
    return JOINT if found else SEPARATE


@functools.lru_cache(maxsize=256)
def warn_joint(op: Any) -> None:
    """Warn that results of the operator, which a policy keeps, are made again."""
    warn_inactive(
        f"{op} runs again: its backward would mix kept results with restored arguments; "
        "pass compress=None or fake_quantize=True to keep them"
    )


def raise_joint(op: Any) -> None:
    raise RuntimeError(
        f"gradckpt: {op} saves its result beside its arguments, so a codec may round neither; keep it with "
        "compress=None, or leave it out of the policy"
    )
