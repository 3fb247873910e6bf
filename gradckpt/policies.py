"""Policies ready to use, for :func:`gradckpt.compat.create_selective_checkpoint_contexts` and ``policy=``.

They combine with ``|``, and ``policy.compressed("int8")`` keeps the same outputs compressed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Union

from gradckpt import packing
from gradckpt._C import is_recomputing
from gradckpt._decisions import FORMS, ROUNDING_FORMS, overloads
from gradckpt._forms import Compared
from gradckpt.selective import (
    CHOOSE,
    DECIDE,
    DECIDE_CAST,
    NAMED,
    Policy,
    PolicyOrOps,
    Rule,
    as_policy,
    create_selective_checkpoint_contexts,
    name,
    save,
)

__all__ = [
    "Policy",
    "by_name",
    "decisions",
    "every_other_matmul",
    "is_recomputing",
    "name",
    "save",
    "save_attention",
    "save_matmuls",
    "save_named",
]


def _overloads(*names: str) -> list[Any]:
    return [op for name in names for op in overloads(name)]


MATMULS = ("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "_scaled_mm.default", "_grouped_mm.default")
ATTENTION = (
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
    "_flash_attention_forward.default",
    "_efficient_attention_forward.default",
)
CONVOLUTIONS = ("convolution.default", "_convolution.default")
CASTS = ("_to_copy.default",)


def _policy(names: Iterable[str], **rule: Any) -> Policy:
    return Policy(Rule(op, **rule) for op in _overloads(*names))


#: Outputs of matrix products are kept.
save_matmuls = _policy(MATMULS)

#: Outputs of fused attention are kept, its log-sum-exp and random state with them (those exactly).
save_attention = _policy(ATTENTION)

#: Of a region's matrix products, the second, the fourth and so on are kept (as torchtitan does).
every_other_matmul = _policy(MATMULS, every=2, phase=1, group="matmul")

decisions_but_casts = Policy(Rule(op, CHOOSE if isinstance(form, Compared) else DECIDE) for op, form in FORMS.items())

#: What operators decide is kept, exactly. On by default, but for what rounds: see ``CompressionConfig.decisions``.
decisions = decisions_but_casts | Policy(Rule(op, DECIDE) for op in ROUNDING_FORMS) | _policy(CASTS, keep=DECIDE_CAST)


def save_named(*names: str) -> Policy:
    """What :func:`gradckpt.policies.name` gives one of these names inside the region is kept.

    Raises:
        ValueError: no name.
        TypeError: a name that is no string.
    """
    if not names:
        raise ValueError('gradckpt: save_named("q", "k") takes the names to keep')
    for each in names:
        if not isinstance(each, str):
            raise TypeError(f"gradckpt: a name is a string, not {each!r}")
    rules = (Rule(op, NAMED) for op in _overloads(*MATMULS, *ATTENTION, *CONVOLUTIONS))
    return Policy(rules, names)


_BY_NAME = {
    "save_matmuls": save_matmuls,
    "save_attention": save_attention,
    "every_other_matmul": every_other_matmul,
    "decisions": decisions,
}


@functools.lru_cache(maxsize=64)
def by_name(name: str) -> Policy:
    """``"save_attention"``, ``"save_matmuls:int8"`` (compressed), ``"save_attention|save_matmuls:int8"``.

    Raises:
        ValueError: there is no such policy or codec; the message lists the names.
    """
    combined: Policy | None = None
    for part in name.split("|"):
        plain, _, codec = part.strip().partition(":")
        if plain not in _BY_NAME:
            raise ValueError(f"gradckpt: unknown policy {plain!r}; choose one of: {', '.join(_BY_NAME)}")
        policy = _BY_NAME[plain].compressed(codec) if codec else _BY_NAME[plain]
        combined = policy if combined is None else combined | policy
    assert combined is not None
    return combined


def is_known(policy: Any) -> bool:
    """True for a :class:`Policy`, and for a text in which :func:`by_name` finds policies of ours."""
    if isinstance(policy, str):
        return all(part.strip().partition(":")[0] in _BY_NAME for part in policy.split("|"))
    return isinstance(policy, Policy)


#: What every ``policy=`` accepts: nothing, or what makes a pair of contexts.
PolicyLike = Union[None, PolicyOrOps]


def contexts_of(policy: PolicyLike) -> Callable[[], Any] | None:
    """The ``context_fn`` of a policy, which pickles if the policy does; None for None."""
    if policy is None:
        return None
    known = as_policy(policy)
    if known is None:
        return functools.partial(create_selective_checkpoint_contexts, policy)
    text = f"gradckpt {packing.version()} {known.describe()}"
    if text not in _by_text:
        if len(_by_text) >= 64:
            _by_text.clear()
        made: Any = functools.partial(create_selective_checkpoint_contexts, known)
        made.cache_hash = text  # so that torch may cache graphs with it
        _by_text[text] = made
    return _by_text[text]


#: Equal policies get one object: Dynamo guards on it, and ``patched()`` may be made anew in each step.
_by_text: dict[str, Callable[[], Any]] = {}


def contexts_key(context_fn: Any) -> Any:
    """Return what two ``context_fn`` have in common if they do the same."""
    if isinstance(context_fn, functools.partial):
        return getattr(context_fn, "cache_hash", None) or (context_fn.func, context_fn.args, context_fn.keywords)
    return context_fn
