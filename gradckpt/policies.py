"""Ready policies, for :func:`gradckpt.compat.create_selective_checkpoint_contexts` and ``policy=``.

``|`` combines them, and ``policy.compressed("int8")`` keeps the same outputs compressed.
"""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Union

from gradckpt._C import OP_LABEL, OP_REPLAY, OP_REPLAY_CAST, OP_REPLAY_CHOICE, is_recomputing
from gradckpt._codec_names import ALIASES, for_activations
from gradckpt._engine import torch_private as private
from gradckpt._engine.discrete import FORMS, ROUNDING_FORMS, overloads
from gradckpt._engine.discrete_forms import Compared
from gradckpt._engine.kept_calls import region
from gradckpt._engine.op_policy import (
    OpOverload,
    OpOverloadPacket,
    Policy,
    PolicyOrOps,
    Rule,
    check_op,
    name,
    rule_of,
    save,
)

__all__ = [
    "Policy",
    "by_name",
    "discrete",
    "every_other_matmul",
    "is_recomputing",
    "name",
    "region",
    "save",
    "save_attention",
    "save_matmuls",
    "save_named",
]


def _overloads(*names: str) -> list[Any]:
    return [op for name in names for op in overloads(name)]


MATMULS = ("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "_scaled_mm.default", "_grouped_mm.default")
_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
    "_flash_attention_forward.default",
    "_efficient_attention_forward.default",
)
ATTENTION = [*_overloads(*_FUSED_ATTENTION), *([private.flex_attention] if private.flex_attention else [])]
CONVOLUTIONS = ("convolution.default", "_convolution.default")
CASTS = ("_to_copy.default",)


def _policy(name: str, operators: Iterable[Any], **rule: Any) -> Policy:
    return Policy((Rule(op, **rule) for op in operators), parts=[(name, "")])


#: Keep the outputs of matrix products.
save_matmuls = _policy("save_matmuls", _overloads(*MATMULS))

#: Keep the outputs of fused attention and flex attention, with its log-sum-exp and random state
#: (those exactly).
save_attention = _policy("save_attention", ATTENTION)

#: Keep the second, the fourth and so on of a region's matrix products (as torchtitan does).
every_other_matmul = _policy("every_other_matmul", _overloads(*MATMULS), every=2, phase=1, group="matmul")

discrete_but_casts = Policy(
    Rule(op, OP_REPLAY_CHOICE if isinstance(form, Compared) else OP_REPLAY) for op, form in FORMS.items()
)

#: Keep the outputs of discrete operators, exactly. On by default, except for operators that round:
#: see ``CompressionConfig.replay_discrete``.
discrete = Policy(
    [
        *discrete_but_casts.rules.values(),
        *(Rule(op, OP_REPLAY) for op in ROUNDING_FORMS),
        *(Rule(op, OP_REPLAY_CAST) for op in _overloads(*CASTS)),
    ],
    parts=[("discrete", "")],
)


def save_named(*names: str) -> Policy:
    """Return a policy that keeps the tensors marked with these names inside the region.

    :func:`gradckpt.policies.name` marks a tensor.

    Raises:
        ValueError: No name is given.
        TypeError: A name is not a string.
    """
    if not names:
        raise ValueError('gradckpt: save_named() got no names; pass those to keep, as save_named("q", "k")')
    for each in names:
        if not isinstance(each, str):
            raise TypeError(f"gradckpt: a name is a string, not {each!r}")
    rules = (Rule(op, OP_LABEL) for op in _overloads(*MATMULS, *CONVOLUTIONS) + ATTENTION)
    return Policy(rules, names, [(f"save_named({', '.join(map(repr, names))})", "")])


_BY_NAME = {
    "save_matmuls": save_matmuls,
    "save_attention": save_attention,
    "every_other_matmul": every_other_matmul,
    "discrete": discrete,
}


@functools.lru_cache(maxsize=64)
def by_name(name: str) -> Policy:
    """Return the policy that a text names.

    ``"save_attention"``, ``"save_matmuls:int8"`` (compressed),
    ``"save_attention|save_matmuls"``.

    Raises:
        ValueError: The policy or the codec is unknown; the message lists the names.
    """
    policies = []
    for part in name.split("|"):
        plain, _, codec = part.strip().partition(":")
        if plain not in _BY_NAME:
            raise ValueError(f"gradckpt: unknown policy {plain!r}; {_instead(plain)}")
        policies.append(_BY_NAME[plain].compressed(codec) if codec else _BY_NAME[plain])
    return functools.reduce(operator.or_, policies)


def _instead(name: str) -> str:
    if name in (*for_activations(), *ALIASES):
        return f"it is a codec: pass compress={name!r}, or a policy with it, 'save_matmuls:{name}'"
    near = difflib.get_close_matches(name, _BY_NAME, 1, 0.75)
    return f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(_BY_NAME)}"


def is_known(policy: Any) -> bool:
    """Return whether it is a :class:`Policy`, or a text whose policies :func:`by_name` knows, or
    that looks like such a one.
    """
    if isinstance(policy, str):
        names = (part.strip().partition(":")[0] for part in policy.split("|"))
        return all(difflib.get_close_matches(name, _BY_NAME, 1, 0.75) for name in names)
    return isinstance(policy, Policy)


def as_policy(policy_fn_or_list: PolicyOrOps) -> Policy | None:
    """Return the policy that a name, list or mapping means, or None for a function.

    Raises:
        ValueError: The name is unknown, or an element is not an operator or writes into its
            arguments.
        TypeError: It is neither a function, nor operators, nor a policy.
    """
    if isinstance(policy_fn_or_list, Policy):
        return policy_fn_or_list
    if isinstance(policy_fn_or_list, str):
        return by_name(policy_fn_or_list)
    if isinstance(policy_fn_or_list, Mapping):
        for op in policy_fn_or_list:
            check_op(op)
        return Policy(rule_of(op, answer) for op, answer in policy_fn_or_list.items())
    if isinstance(policy_fn_or_list, (list, tuple, set, frozenset)):
        return _of_list(tuple(policy_fn_or_list))
    if callable(policy_fn_or_list) and not isinstance(policy_fn_or_list, (OpOverload, OpOverloadPacket)):
        return None
    raise TypeError(
        "gradckpt: a policy is a function or a list of ops (OpOverload), a mapping of them, a name "
        f'("save_matmuls:int8"), or one of gradckpt.policies; not {type(policy_fn_or_list).__name__}'
    )


_lists: dict[tuple[Any, ...], Policy] = {}


def _of_list(ops: tuple[Any, ...]) -> Policy:
    """Return the policy of a list, cached: the same list comes with every region of every step."""
    try:
        policy = _lists.get(ops)
    except TypeError:  # an element without a hash is not an operator
        policy = None
    if policy is None:
        policy = Policy(Rule(op) for op in ops)
        if len(_lists) >= 64:
            _lists.clear()
        _lists[ops] = policy
    return policy


#: What every ``policy=`` accepts: None, or what makes a pair of contexts.
PolicyLike = Union[None, PolicyOrOps]
