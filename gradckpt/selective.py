"""Selective recompute: keep what some operators of a region returned, run the others again.

Named operators are caught by C kernels on a dispatch key of torch's that passes all others on for little;
a policy that is a function must be asked about every operator, which takes a dispatch mode, as in torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from gradckpt import _C
from gradckpt import _torch_private as private
from gradckpt._decisions import FORMS, ROUNDING_FORMS
from gradckpt._forms import OfFloats
from gradckpt.config import Compress, CompressionConfig, parse_compress, warn_inactive
from gradckpt.packing import keep_packed

_OpOverloadPacket, _OpOverload = type(torch.ops.aten.mm), type(torch.ops.aten.mm.default)

#: What is done with the outputs of an operator; csrc/engine/store.h has the same numbers.
RECOMPUTE, SAVE, DECIDE, DECIDE_CAST, NAMED, CHOOSE = range(6)
_DECISIONS = (DECIDE, DECIDE_CAST, CHOOSE)
_FORMS = FORMS | ROUNDING_FORMS


@dataclass(frozen=True)
class Save:
    """Answer of a policy: keep these outputs; ``config`` says how they are compressed, None: not at all."""

    config: CompressionConfig | None = None


def save(compress: Compress = None) -> Save:
    """What a policy answers to keep an operator's outputs, compressed or as they are.

    Args:
        compress: As in :func:`gradckpt.checkpoint`. Outputs the codec does not take (integers, fewer than
            ``min_numel`` values, subclasses) are kept as they are.

    Raises:
        ValueError: unknown codec; ``replay``, ``include`` or ``leaves``, which say something of a region's inputs.
    """
    config = parse_compress(compress)
    if config is not None and (config.replay or config.leaves or config.include != "activations"):
        raise ValueError(
            "gradckpt.policies.save: replay, include and leaves are about the inputs of a region, not about outputs"
        )
    return Save(config)


class Rule(NamedTuple):
    """What is done with one operator: of the calls of its group, those with ``call % every == phase`` are kept."""

    op: Any
    keep: int = SAVE
    config: CompressionConfig | None = None
    every: int = 1
    phase: int = 0
    group: str = ""


class Policy:
    """Which operators' outputs a region keeps. Combine two with ``|``: where both name an operator, the second counts,
    but :func:`gradckpt.policies.save_named` takes nothing away from the other."""

    def __init__(self, rules: Iterable[Rule], wanted: Iterable[str] = ()):
        self.rules: dict[Any, Rule] = {}
        for rule in rules:
            if rule.keep not in _DECISIONS or rule.op not in _FORMS:
                _check_op(rule.op)
            if rule.op in private.ignored_ops:  # never caught: torch makes tensors by detaching
                continue
            if rule.keep != NAMED or rule.op not in self.rules:
                self.rules[rule.op] = rule
        self.wanted = frozenset(wanted)
        groups = {group: i for i, group in enumerate(dict.fromkeys(rule.group for rule in self.rules.values()))}
        rows = tuple((r.op, r.keep, r.config, r.every, r.phase, groups[r.group], _form(r)) for r in self.rules.values())
        self.names = _C.make_names(rows, self.wanted)
        self.deciding: Policy | None = None  # with decisions, once it was asked for
        self.catchable = all(_is_catchable(op) for op in self.rules)

    def compressed(self, compress: Compress) -> Policy:
        """The same, with what is kept compressed; decisions stay exact."""
        config = save(compress).config
        return Policy(
            (r if r.keep in _DECISIONS else r._replace(config=config) for r in self.rules.values()), self.wanted
        )

    @property
    def decisions(self) -> bool | str:
        """What of decisions is kept after an output that came back approximate, as in a config; False: none does."""
        lossy = [r.config.decisions for r in self.rules.values() if r.config is not None and r.config.lossy]
        return "casts" if "casts" in lossy else any(lossy)

    def __or__(self, other: Any) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return Policy([*self.rules.values(), *other.rules.values()], self.wanted | other.wanted)

    def __reduce__(self) -> Any:
        rows = [(str(r.op), *r[1:]) for r in self.rules.values()]
        return _policy_of, (rows, self.wanted)

    def describe(self) -> str:
        """All that it says; two policies with the same text act the same."""
        return f"{[tuple(map(str, rule)) for rule in self.rules.values()]} {sorted(self.wanted)}"

    def __repr__(self) -> str:
        return f"<gradckpt policy: {', '.join(str(op) for op in self.rules)}>"


def _form(rule: Rule) -> Any:
    return _FORMS.get(rule.op) if rule.keep in _DECISIONS else None


def _policy_of(rows: list[Any], wanted: frozenset[str]) -> Policy:
    """What a pickled policy becomes."""
    rules = []
    for name, *rest in rows:
        namespace, packet, overload = name.split(".")
        rules.append(Rule(getattr(getattr(getattr(torch.ops, namespace), packet), overload), *rest))
    return Policy(rules, wanted)


def name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Name a tensor inside a region, for :func:`gradckpt.policies.save_named`. Returns ``x`` itself.

    Args:
        x: The output of a matrix product, a convolution or fused attention, or a view of one.
        name: Any string. Does nothing in regions whose policy does not want it, and outside of regions.

    Raises:
        ValueError: the name is wanted, and ``x`` comes from another operator, whose output would spare no work.
    """
    if not torch.compiler.is_compiling():
        modes = private.dispatch_modes() if private.dispatch_stack_len() else []
        _C.selective_name(x, name, modes)
    return x


Answer = Union[bool, CheckpointPolicy, Save, str, CompressionConfig]
PolicyOrOps = Union[Policy, str, list[Any], tuple[Any, ...], set[Any], Mapping[Any, Any], Callable[..., Any]]


# ---- what the caller names ----


def _is_overload(op: Any) -> bool:
    return isinstance(op, _OpOverload)


def _check_op(op: Any) -> None:
    if isinstance(op, private.HigherOrderOperator):
        return
    if not _is_overload(op):
        hint = (
            "Please update the OpOverloadPacket to a specific OpOverload."
            "For example, if you have `torch.ops.aten.mm`, change it to `torch.ops.aten.mm.default`."
            if isinstance(op, _OpOverloadPacket)
            else ""
        )
        raise ValueError(f"Expected op in `op_list` to be an OpOverload but got: {op} of type {type(op)}. {hint}")
    if op._schema.is_mutable:
        raise ValueError(
            f"gradckpt: {op} writes into its arguments, so its output cannot be kept in place of running it; name the "
            f"operator without the underscore, or the one that made its argument"
        )


def _rule(op: Any, answer: Any) -> Rule:
    keep, config = read_policy(answer, op)
    return Rule(op, SAVE if keep else RECOMPUTE, config)


def read_policy(answer: Any, op: Any) -> tuple[int, CompressionConfig | None]:
    """What a policy says of an operator: to be kept, and how.

    Raises:
        TypeError: it says nothing that can be understood.
    """
    if isinstance(answer, Save):
        keep, config = True, answer.config
    elif isinstance(answer, (str, CompressionConfig)):
        keep, config = True, save(answer).config
    elif isinstance(answer, bool):
        keep, config = answer, None
    elif isinstance(answer, CheckpointPolicy):
        keep, config = answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE), None
    else:
        raise TypeError(
            f"gradckpt: the policy says {answer!r} of {op}; it must say a CheckpointPolicy, True or False, "
            'gradckpt.policies.save("int8"), or the name of a codec'
        )
    mutates = _is_overload(op) and op._schema.is_mutable
    return int(keep and not mutates), config  # what writes into its arguments has to run again


def as_policy(policy_or_ops: PolicyOrOps) -> Policy | None:
    """The policy that a name, list or mapping means; None: it is a function.

    Raises:
        ValueError: there is no such name; something in it is no operator, or writes into its arguments.
        TypeError: neither a function, nor operators, nor a policy.
    """
    if isinstance(policy_or_ops, Policy):
        return policy_or_ops
    if isinstance(policy_or_ops, str):
        from gradckpt import policies

        return policies.by_name(policy_or_ops)
    if isinstance(policy_or_ops, Mapping):
        for op in policy_or_ops:
            _check_op(op)
        return Policy(_rule(op, answer) for op, answer in policy_or_ops.items())
    if isinstance(policy_or_ops, (list, tuple, set, frozenset)):
        return _of_list(tuple(policy_or_ops))
    if callable(policy_or_ops) and not isinstance(policy_or_ops, (_OpOverload, _OpOverloadPacket)):
        return None
    raise TypeError(
        'gradckpt: a policy is a name ("save_matmuls:int8"), one of gradckpt.policies, a list or mapping of '
        f"OpOverload, or a function; not {type(policy_or_ops).__name__}"
    )


_lists: dict[tuple[Any, ...], Policy] = {}


def _of_list(ops: tuple[Any, ...]) -> Policy:
    """Remembered: the same list comes with every region of every step."""
    try:
        policy = _lists.get(ops)
    except TypeError:  # something in it has no hash: no operator
        policy = None
    if policy is None:
        policy = Policy(Rule(op) for op in ops)
        if len(_lists) >= 64:
            _lists.clear()
        _lists[ops] = policy
    return policy


# ---- catching them ----

_KEY = "Negative"
_lock = threading.Lock()
_caught: set[Any] = set()
_libraries: dict[str, torch.library.Library] = {}  # by namespace


def _is_catchable(op: Any) -> bool:
    """Views, and operators with a kernel of torch's on the key, need a mode."""
    if not _is_overload(op) or any(arg.alias_info is not None for arg in op._schema.arguments):
        return False
    name = op.name()
    known = private.has_kernel(name)  # not so TorchScript's own, which nothing can call
    return op in _caught or not (known and private.has_kernel_for_key(name, _KEY))


#: Operators whose kernels call others and write into what these return, unseen by version counters: a kept output would
#: change. Ours stand in for them, so that what they call is seen by no region, as under torch's modes. Not listed are
#: those that only write into new memory that they asked for.
WRITING_KERNELS = (
    *("_embedding_bag", "_euclidean_dist", "_linalg_det", "_linalg_slogdet", "allclose", "logsumexp", "mvlgamma"),
    *("binary_cross_entropy_with_logits", "renorm", "rot90"),
)


def catch(policy: Policy) -> None:
    """Register the kernels, once in a process. They do nothing while no region names their operator.

    At interpreter exit torch takes them off again; its own fallback then runs the operators of threads that still run.
    """
    if _C.selective_key() is None:
        return _say_modes_only()
    with _lock:
        first = () if _caught else (getattr(torch.ops.aten, name).default for name in WRITING_KERNELS)
        for op in (*first, *policy.rules):
            if op not in _caught:
                if op.namespace not in _libraries:
                    _libraries[op.namespace] = torch.library.Library(op.namespace, "IMPL")
                _libraries[op.namespace].impl(op, _C.catcher(op), _KEY)
                _caught.add(op)


@functools.cache
def _say_modes_only() -> None:
    logging.getLogger("gradckpt").info(
        "gradckpt: the dispatch key Negative has no fallback in this torch; named operators take a dispatch mode, "
        "which costs more host time"
    )


# ---- the two contexts ----


class ForwardContext(_C.Context, private.CachingMode):  # type: ignore[misc]
    """Of the forward: keeps outputs. Enters the key where that is possible, else the mode (csrc/engine/mode.c)."""

    def __init__(self, policy_fn: Any, store: Any, by_key: bool):
        _C.Context.__init__(self, store, by_key, False)
        private.CachingMode.__init__(self, policy_fn, store.storage)

    def enter_mode(self) -> Any:
        return private.CachingMode.__enter__(self)

    def exit_mode(self, *error: Any) -> Any:
        return private.CachingMode.__exit__(self, *error)


class RecomputeContext(_C.Context, private.CachedMode):  # type: ignore[misc]
    """Of the recompute: gives them back."""

    def __init__(self, store: Any, by_key: bool, mutation: bool):
        _C.Context.__init__(self, store, by_key, True)
        private.CachedMode.__init__(self, None, store.storage, mutation)

    def enter_mode(self) -> Any:
        return private.CachedMode.__enter__(self)

    def exit_mode(self, *error: Any) -> Any:
        return private.CachedMode.__exit__(self, *error)


def create_selective_checkpoint_contexts(
    policy_or_ops: PolicyOrOps, allow_cache_entry_mutation: bool = False, *, reusable: bool = False
) -> tuple[ForwardContext, RecomputeContext]:
    """The two contexts of ``context_fn=``, for :func:`gradckpt.checkpoint` or torch's.

    A drop-in for ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.

    Args:
        policy_or_ops: A list of ``OpOverload``: their outputs are kept. A mapping of them to
            ``gradckpt.policies.save("int8")``, a codec's name, a ``CheckpointPolicy`` or a bool. A :class:`Policy` (see
            ``gradckpt.policies``) or the name of one, ``"save_matmuls:int8"``. Or a function
            ``policy(ctx, op, *args, **kwargs)`` that answers ``gradckpt.policies.save(...)``, a ``CheckpointPolicy`` or
            a bool for each operator as it runs; it is asked in the forward only, and costs host time for every
            operator, where named ones do not.
        allow_cache_entry_mutation: Do not check whether kept tensors were changed in place since.
        reusable: Kept outputs serve any number of backwards and go with the graph; False: one backward, as in torch.

    Returns:
        (for the forward, for the recompute): each of torch's mode classes, with its ``storage`` and ``policy_fn``.

    Raises:
        ValueError: unknown name; something in the list is no ``OpOverload``, or writes into its arguments.
        TypeError: neither a function nor operators nor a policy; in the forward: a policy that answers something else.

    Source: torch.utils.checkpoint; Korthikanti et al. 2022, arXiv:2205.05198.
    """
    policy = as_policy(policy_or_ops)
    traced = private.is_tracing_checkpoint(None, None, None)
    if policy is None and traced:
        policy_or_ops = _asked_for_graph(policy_or_ops)
    if not _TRACES_OURS and traced:
        asked = policy_or_ops if policy is None else asker(_with_decisions(policy))
        made: Any = torch_checkpoint.create_selective_checkpoint_contexts(asked, allow_cache_entry_mutation)
        return made  # type: ignore[no-any-return]
    global latest
    latest = latest if traced else policy_or_ops if policy is None else policy
    by_key = policy is not None and policy.catchable
    if policy is None:
        store, policy_fn = _C.make_store(ASKED, allow_cache_entry_mutation, reusable), policy_or_ops
    else:
        store = _C.make_store(policy.names, allow_cache_entry_mutation, reusable)
        policy_fn = asker(_with_decisions(policy))
        if by_key:
            catch(policy)
    if _observer is not None:
        _observer(store, latest)
    return ForwardContext(policy_fn, store, by_key), RecomputeContext(store, by_key, allow_cache_entry_mutation)


#: torch before 2.12 traces with a storage of another make than ours has.
_TRACES_OURS = private.consumed is not None

#: The policy of the region that ran last: whether policies keep anything is looked at in the first steps.
latest: Any = None

#: Told of each region's store and policy.
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


#: No names: a function is asked.
ASKED = _C.make_names(None, frozenset())


def _decisions(level: bool | str) -> Policy:
    from gradckpt import policies

    return policies.decisions if level == "casts" else policies.decisions_but_casts


def _with_decisions(policy: Policy) -> Policy:
    """What is traced for a policy: csrc/engine adds decisions by itself."""
    if not policy.decisions:
        return policy
    if policy.deciding is None:
        policy.deciding = _decisions(policy.decisions) | policy
    return policy.deciding


def _asked_for_graph(policy_fn: Any) -> Callable[..., Any]:
    """The caller's function with answers that torch knows: a graph cannot hold a :class:`Save`. After an output that
    comes back approximate, decisions are kept, as csrc/engine does where nothing is traced."""
    deciding: Callable[..., Any] | None = None

    def asked(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal deciding
        answer = policy_fn(ctx, op, *args, **kwargs)
        keep, config = read_policy(answer, op)
        if not keep and deciding is not None and deciding(ctx, op, *args) is CheckpointPolicy.MUST_SAVE:
            return CheckpointPolicy.MUST_SAVE
        if not keep or config is None:
            said = CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
            return answer if isinstance(answer, CheckpointPolicy) else said
        if config.lossy and config.decisions and deciding is None:
            deciding = asker(_decisions(config.decisions))
        return _save_in_graph(op, config)

    return asked


def _save_in_graph(op: Any, config: CompressionConfig) -> CheckpointPolicy:
    if _TRACES_OURS:
        keep_packed(op, config)
    else:  # asked before the operator runs, of which there is no node yet
        _warn_exact_saves()
    return CheckpointPolicy.MUST_SAVE


def asker(policy: Policy) -> Callable[..., Any]:
    """The policy as a function, for the mode: under tracing, or where there is no key."""
    counts: dict[str, int] = {}

    def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        rule = policy.rules.get(op)
        # A graph keeps whole outputs: not those of operators that write, nor results that backward compares with the
        # input, which would be found in it no more.
        if rule is None or rule.keep in (RECOMPUTE, NAMED, CHOOSE) or (_is_overload(op) and op._schema.is_mutable):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if isinstance(_FORMS.get(op), OfFloats) and not OfFloats.decides(args):
            return CheckpointPolicy.PREFER_RECOMPUTE
        call = counts[rule.group] = counts.get(rule.group, -1) + 1
        if call % rule.every != rule.phase:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if rule.keep == DECIDE_CAST and not _is_decision(ctx.op_output):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if rule.config is None:
            return CheckpointPolicy.MUST_SAVE
        if private.is_tracing_checkpoint(None, None, None):
            return _save_in_graph(op, rule.config)
        return Save(rule.config)

    return policy_fn


@functools.cache
def _warn_exact_saves() -> None:
    warn_inactive(
        f"torch.compile: with torch {torch.__version__}, what a policy keeps stays uncompressed; 2.12 has what it takes"
    )


def _is_decision(out: Any) -> bool:
    leaves = private.tree_leaves(out)
    return any(isinstance(x, torch.Tensor) and not (x.is_floating_point() or x.is_complex()) for x in leaves)
