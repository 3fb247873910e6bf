"""Selective recompute: keep the outputs of some operators of a region, run the others again.

C kernels catch named operators on a dispatch key of torch's that passes all others on cheaply. A
policy that is a function must be asked about every operator, which takes a dispatch mode, as in
torch.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from gradckpt import _C, policies
from gradckpt._C import OP_LABEL, OP_PRODUCT, OP_RECOMPUTE, OP_REPLAY_CAST, OP_REPLAY_CHOICE
from gradckpt._compile.graph import keep_packed, version
from gradckpt._compression import CompressionConfig, warn_inactive
from gradckpt._engine import torch_private as private
from gradckpt._engine.catching import catch
from gradckpt._engine.discrete_forms import OfFloats
from gradckpt._engine.op_mixing import mixing_of, warn_mixing
from gradckpt._engine.op_policy import (
    ALL_FORMS,
    Policy,
    PolicyOrOps,
    Save,
    is_overload,
    keeping_effects,
    read_policy,
    unmixed,
)
from gradckpt.policies import PolicyLike, as_policy

# ---- the two contexts ----


class ForwardContext(_C.Context, private.CachingMode):  # type: ignore[misc]
    """The forward's context, which keeps outputs.

    It uses the dispatch key where that is possible, else the mode (selective_mode.c).
    """

    supports_higher_order_operators = True

    def __init__(self, policy_fn: Any, store: Any, by_key: bool):
        _C.Context.__init__(self, store, by_key, False)
        private.CachingMode.__init__(self, policy_fn, store.storage)

    enter_mode, exit_mode = private.CachingMode.__enter__, private.CachingMode.__exit__


class RecomputeContext(_C.Context, private.CachedMode):  # type: ignore[misc]
    """The recompute's context, which returns the kept outputs."""

    supports_higher_order_operators = True

    def __init__(self, store: Any, by_key: bool, mutation: bool):
        _C.Context.__init__(self, store, by_key, True)
        private.CachedMode.__init__(self, None, store.storage, mutation)

    enter_mode, exit_mode = private.CachedMode.__enter__, private.CachedMode.__exit__


def create_selective_checkpoint_contexts(
    policy_fn_or_list: PolicyOrOps, allow_cache_entry_mutation: bool = False, *, reusable: bool = False
) -> tuple[ForwardContext, RecomputeContext]:
    """Return the two contexts of ``context_fn=``, for :func:`gradckpt.checkpoint` or torch's.

    A drop-in for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Args:
        policy_fn_or_list: A list of ``OpOverload``: their outputs are kept. A mapping of them to
            ``gradckpt.policies.save("int8")``, a codec's name, a ``CheckpointPolicy`` or a bool. A
            :class:`Policy` (see ``gradckpt.policies``) or its name, ``"save_matmuls:int8"``. Or a
            function ``policy(ctx, op, *args, **kwargs)`` that answers
            ``gradckpt.policies.save(...)``, a ``CheckpointPolicy`` or a bool for each operator as
            it runs. The function is called in the forward only, and costs host time for every
            operator, where named operators do not.
        allow_cache_entry_mutation: Do not check whether kept tensors were changed in place
            since.
        reusable: Kept outputs serve any number of backwards and are freed with the graph.
            False: they serve one backward, as in torch.

    Returns:
        (for the forward, for the recompute): each of torch's mode classes, with its ``storage`` and
        ``policy_fn``.

    Raises:
        ValueError: unknown name; or an entry of the list is not an ``OpOverload``, or writes
            into its arguments.
        TypeError: neither a function nor operators nor a policy. In the forward: a policy's
            answer has another type.

    Source: torch.utils.checkpoint; Korthikanti et al. 2022, arXiv:2205.05198.
    """
    policy = as_policy(policy_fn_or_list)
    traced = private.is_tracing_checkpoint()
    if policy is None and traced:
        policy_fn_or_list = _policy_for_graph(policy_fn_or_list)
    if not _TRACES_OURS and traced:
        policy_fn = policy_fn_or_list if policy is None else asker(_with_discrete(policy))
        made: Any = private.imported_contexts(policy_fn, allow_cache_entry_mutation)
        return made  # type: ignore[no-any-return]
    global latest
    latest = latest if traced else policy_fn_or_list if policy is None else policy
    if policy is not None and not traced:
        policy = keeping_effects(policy)
    by_key = policy is not None and policy.catchable
    settings = allow_cache_entry_mutation, reusable, _C.hooks_are_lossy()
    if policy is None:
        store, policy_fn = _C.make_op_storage(NO_NAMES, *settings), policy_fn_or_list
    else:
        store = _C.make_op_storage(policy.names, *settings)
        policy_fn = asker(_with_discrete(policy))
        if by_key:
            catch(policy)
    if _observer is not None:
        _observer(store, latest)
    return ForwardContext(policy_fn, store, by_key), RecomputeContext(store, by_key, allow_cache_entry_mutation)


#: Torch before 2.12 traces with another kind of storage than ours.
_TRACES_OURS = private.consumed is not None

#: The policy of the region that ran last. The first steps check whether policies keep anything.
latest: Any = None

#: This observer is called with each region's store and policy.
_observer: Callable[[Any, Any], None] | None = None


@contextlib.contextmanager
def observed(observer: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``observer(store, policy)`` for each region with a policy."""
    global _observer
    around, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = around


#: Names for a policy that is a function: none.
NO_NAMES = _C.make_op_policy(None, frozenset())


def discrete_of(level: bool | str) -> Policy:
    """Return the operators whose results a ``replay_discrete`` keeps."""
    return policies.discrete if level == "casts" else policies.discrete_but_casts


def _with_discrete(policy: Policy) -> Policy:
    """Return the policy to trace.

    Outside of tracing, csrc/engine adds discrete operators by itself.
    """
    if not policy.replay_discrete:
        return policy
    if policy.with_discrete is None:
        policy.with_discrete = discrete_of(policy.replay_discrete) | policy
    return policy.with_discrete


def _policy_for_graph(policy_fn: Any) -> Callable[..., Any]:
    """Return the caller's function with answers that torch knows.

    A graph cannot hold a :class:`Save`. After an output that is restored approximately,
    discrete outputs are kept, as csrc/engine does outside of tracing.
    """
    discrete: Callable[..., Any] | None = None

    def answer_for_graph(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal discrete
        answer = policy_fn(ctx, op, *args, **kwargs)
        keep, config, _ = read_policy(answer, op)
        if not keep and discrete is not None and discrete(ctx, op, *args, **kwargs) is CheckpointPolicy.MUST_SAVE:
            return CheckpointPolicy.MUST_SAVE
        if not keep or config is None:
            said = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
            return answer if isinstance(answer, CheckpointPolicy) else said
        if config.lossy and config.replay_discrete and discrete is None:
            discrete = asker(discrete_of(config.replay_discrete))
        return _save_in_graph(op, config)

    return answer_for_graph


def unmixed_in_graph(policy_fn_or_list: PolicyOrOps, restored: bool) -> PolicyOrOps:
    """Return the policy of a graph, without the results that would be mixed with restored values.

    ``restored``: those of the region's inputs. See csrc/engine/selective/op_mixing.h.
    """
    policy = as_policy(policy_fn_or_list)
    if policy is not None:
        return unmixed(policy, restored)
    return functools.partial(_ask_for_products, policy_fn_or_list) if restored else policy_fn_or_list


def _ask_for_products(policy_fn: Any, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    answer = policy_fn(ctx, op, *args, **kwargs)
    if read_policy(answer, op)[0] and mixing_of(op) != OP_PRODUCT:
        warn_mixing(op)
        return CheckpointPolicy.PREFER_RECOMPUTE
    return answer


def _save_in_graph(op: Any, config: CompressionConfig) -> CheckpointPolicy:
    if private.asks_policies_after:
        keep_packed(op, config)
    else:  # asked before the operator runs, when its node does not exist yet
        _warn_exact_saves()
    return CheckpointPolicy.MUST_SAVE


def asker(policy: Policy) -> Callable[..., Any]:
    """Return the policy as a function, for the mode: under tracing, or where the key is missing."""
    counts: dict[str, int] = {}

    def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        rule = policy.rules.get(op)
        if op in policy.mixed:
            warn_mixing(op)
        # A graph keeps whole outputs. It cannot keep those of operators that write, nor results
        # that backward compares with the input: the restored input does not contain them.
        if (
            rule is None
            or rule.keep in (OP_RECOMPUTE, OP_LABEL, OP_REPLAY_CHOICE)
            or (is_overload(op) and op._schema.is_mutable)
        ):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(ALL_FORMS.get(op), OfFloats) and not OfFloats.is_discrete(args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        call = counts[rule.group] = counts.get(rule.group, -1) + 1
        if call % rule.every != rule.phase:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if rule.keep == OP_REPLAY_CAST and not _is_rounding_cast(args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if rule.config is None and rule.offload is None:
            return CheckpointPolicy.MUST_SAVE
        if private.is_tracing_checkpoint():
            return _save_in_graph(op, rule.config) if rule.config is not None else CheckpointPolicy.MUST_CPU_OFFLOAD
        return Save(rule.config, rule.offload)

    return policy_fn


@functools.cache
def _warn_exact_saves() -> None:
    warn_inactive(
        f"torch.compile: with torch {torch.__version__}, what a policy keeps stays uncompressed; install torch 2.12"
    )


def _is_rounding_cast(args: Any, kwargs: Any) -> bool:
    """Return whether a cast makes integers or bools of floats, as op_storage.c does.

    The output is not asked: torch before 2.12 asks a policy before there is one.
    """
    to = kwargs.get("dtype")
    return to is not None and args[0].dtype.is_floating_point and not to.is_floating_point


# ---- policy= ----


def contexts_of(policy: PolicyLike) -> Callable[[], Any] | None:
    """Return the ``context_fn`` of a policy, which pickles if the policy does; None for None."""
    if policy is None:
        return None
    known = as_policy(policy)
    if known is None:
        return functools.partial(create_selective_checkpoint_contexts, policy)
    return _contexts_of_known(known, version())


@functools.lru_cache(maxsize=64)
def _contexts_of_known(known: Policy, version: str) -> Callable[[], Any]:
    """Remember the latest policies: describing one takes longer than a region without one."""
    made: Any = functools.partial(create_selective_checkpoint_contexts, known)
    made.cache_hash = f"gradckpt {version} {known.describe()}"  # torch may then cache graphs with it
    return _by_text.setdefault(made.cache_hash, made)


#: Equal policies get one object: Dynamo guards on it, and ``patched()`` may be called anew in each
#: step.
_by_text: weakref.WeakValueDictionary[str, Callable[[], Any]] = weakref.WeakValueDictionary()


def contexts_key(context_fn: Any) -> Any:
    """Return a key that is equal for two ``context_fn`` that do the same."""
    if isinstance(context_fn, functools.partial):
        return getattr(context_fn, "cache_hash", None) or (context_fn.func, context_fn.args, context_fn.keywords)
    return context_fn
