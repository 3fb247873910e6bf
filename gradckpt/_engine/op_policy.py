"""Policies: which operators' outputs a region keeps, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Union

import torch
from torch.utils.checkpoint import CheckpointPolicy

from gradckpt import _C
from gradckpt._C import (  # op_policy.h says what each means
    OP_JOINT,
    OP_LABEL,
    OP_PRODUCT,
    OP_RECOMPUTE,
    OP_REPLAY,
    OP_REPLAY_CAST,
    OP_REPLAY_CHOICE,
    OP_SAVE,
    OP_SEPARATE,
    OP_UNKNOWN,
)
from gradckpt._compression import Compress, CompressionConfig, changes, parse_compress
from gradckpt._engine import torch_errors
from gradckpt._engine import torch_private as private
from gradckpt._engine.catching import is_catchable
from gradckpt._engine.discrete import FORMS, ROUNDING_FORMS
from gradckpt._engine.op_mixing import mixing_of, with_effect
from gradckpt._engine.places import place_of
from gradckpt._offload import Offload, OffloadLike, parse_offload

OpOverloadPacket, OpOverload = type(torch.ops.aten.mm), type(torch.ops.aten.mm.default)

_SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOADED = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)
_REPLAYED = (OP_REPLAY, OP_REPLAY_CAST, OP_REPLAY_CHOICE)
ALL_FORMS = FORMS | ROUNDING_FORMS


@dataclass(frozen=True)
class Save:
    """A policy's answer to keep these outputs.

    ``config`` says how they are compressed, ``offload`` where they live; None means not at all.
    """

    config: CompressionConfig | None = None
    offload: Offload | None = None


def save(compress: Compress = None, *, offload: OffloadLike = None) -> Save:
    """Answer for a policy: keep an operator's outputs, compressed or exactly.

    Args:
        compress: As in :func:`gradckpt.checkpoint`. Outputs that the codec does not take
            (integers, fewer than ``min_numel`` values, subclasses) are kept exactly.
        offload: Where they live, as in :func:`gradckpt.checkpoint`. The answers
            ``CheckpointPolicy.MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` mean
            ``save(offload="cpu")``.

    Raises:
        ValueError: unknown codec; or ``fake_quantize`` or ``include``, which apply to a region's
            inputs only.
    """
    config = parse_compress(compress)
    if config is not None and (config.fake_quantize or config.include != "activations"):
        raise ValueError(
            "gradckpt: fake_quantize and include apply to the inputs of a region, not to outputs that save() keeps; "
            "leave them out"
        )
    return Save(config, parse_offload(offload))


def kept(config: CompressionConfig | None, offload: Offload | None) -> Any:
    """Return what C reads: how outputs are kept, and where."""
    return config if offload is None else (config, place_of(offload))


class Rule(NamedTuple):
    """A rule for one operator.

    Of the calls of its group, those with ``call % every == phase`` are kept. ``always``: with
    OP_RECOMPUTE, also where torch keeps what an operator with an effect returns.
    """

    op: Any
    keep: int = OP_SAVE
    config: CompressionConfig | None = None
    every: int = 1
    phase: int = 0
    group: str = ""
    always: bool = False
    offload: Offload | None = None


class Policy:
    """A choice of operators whose outputs a region keeps; ``rules`` has them.

    ``|`` combines two policies. Where both name an operator, the second counts, but
    :func:`gradckpt.policies.save_named` removes nothing from the other.
    """

    def __init__(self, rules: Iterable[Rule], wanted: Iterable[str] = (), parts: Iterable[tuple[str, str]] = ()):
        self.parts = tuple(parts)  # the ready policies in it, each with its codec or ""; empty: made of operators
        self.rules: dict[Any, Rule] = {}
        for rule in rules:
            if rule.keep not in _REPLAYED or rule.op not in ALL_FORMS:
                check_op(rule.op)
            if rule.op in private.ignored_ops:  # never caught: torch detaches to make tensors
                continue
            if rule.keep != OP_LABEL or rule.op not in self.rules:
                self.rules[rule.op] = rule if _mixing(rule) != OP_JOINT else rule._replace(config=_exact(rule.config))
        self.wanted = frozenset(wanted)
        self.patterns = tuple(sorted(self.wanted))  # for Dynamo
        groups = {group: i for i, group in enumerate(dict.fromkeys(rule.group for rule in self.rules.values()))}
        rows = tuple(
            (r.op, r.keep, kept(r.config, r.offload), r.every, r.phase, groups[r.group], _form(r), _mixing(r))
            for r in self.rules.values()
        )
        self.names = _C.make_op_policy(rows, self.wanted)
        self.with_discrete: Policy | None = None  # this policy with discrete operators added; made on demand
        #: Operators with an effect, and this policy with them; made on demand.
        self.with_effects: tuple[frozenset[Any], Policy] | None = None
        self.catchable = all(is_catchable(op) for op in self.rules)
        self.caught = False
        self.mixed: frozenset[Any] = frozenset()  # what unmixed() has taken out
        self.keeps_outputs = any(rule.keep in (OP_SAVE, OP_LABEL) for rule in self.rules.values())  # not copies
        lossy = [r.config.replay_discrete for r in self.rules.values() if r.config is not None and r.config.lossy]
        #: Which discrete outputs are kept after an approximate output, as in a config.
        self.replay_discrete: bool | str = "casts" if "casts" in lossy else any(lossy)

    def compressed(self, compress: Compress) -> Policy:
        """Return this policy with kept outputs compressed. Discrete outputs stay exact."""
        config = save(compress).config
        return Policy(
            (r if r.keep in _REPLAYED else r._replace(config=config) for r in self.rules.values()),
            self.wanted,
            [(name, _short(config)) for name, _ in self.parts],
        )

    def offloaded(self, offload: OffloadLike = "cpu") -> Policy:
        """Return this policy with kept outputs in another place. Discrete outputs stay."""
        place = parse_offload(offload)
        rules = (r if r.keep in _REPLAYED else r._replace(offload=place) for r in self.rules.values())
        return Policy(rules, self.wanted, self.parts)

    def __or__(self, other: Any) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        parts = (*self.parts, *other.parts) if self.parts and other.parts else ()
        policy = Policy([*self.rules.values(), *other.rules.values()], self.wanted | other.wanted, parts)
        policy.mixed = self.mixed | other.mixed
        return policy

    def __reduce__(self) -> Any:
        rows = [(str(r.op), *r[1:]) for r in self.rules.values()]
        return _policy_of, (rows, self.wanted, self.parts)

    def describe(self) -> str:
        """Return the whole content as text. Two policies with the same text act the same."""
        return f"{[tuple(map(str, rule)) for rule in self.rules.values()]} {sorted(self.wanted)}"

    def __repr__(self) -> str:
        short = "|".join(f"{name}:{codec}" if codec else name for name, codec in self.parts)
        return f"<gradckpt policy: {short or ', '.join(str(op) for op in self.rules)}>"


def unmixed(policy: Policy, restored: bool) -> Policy:
    """Return the policy without the results that would be mixed with restored values: inputs
    of the region (``restored``), or outputs that the policy keeps.
    """
    lossy = any(r.config is not None and r.config.lossy for r in policy.rules.values())
    mixed = (OP_SEPARATE, OP_JOINT, OP_UNKNOWN) if restored else (OP_JOINT, OP_UNKNOWN) if lossy else ()
    again = frozenset(op for op, rule in policy.rules.items() if _mixing(rule) in mixed)
    if not again:
        return policy
    rules = (r._replace(keep=OP_RECOMPUTE) if op in again else r for op, r in policy.rules.items())
    rest = Policy(rules, policy.wanted, policy.parts)
    rest.mixed = again
    return rest


def keeping_effects(policy: Policy) -> Policy:
    """Return the policy, which also keeps what operators with an effect return, unless it says
    ``MUST_RECOMPUTE``.
    """
    found, known = with_effect(), policy.rules
    if not found:
        return policy
    if policy.with_effects is None or policy.with_effects[0] != found:
        more = [
            Rule(op) for op in found if op not in known or (known[op].keep == OP_RECOMPUTE and not known[op].always)
        ]
        made = Policy([*known.values(), *more], policy.wanted, policy.parts)
        made.mixed = policy.mixed
        policy.with_effects = found, made
    return policy.with_effects[1]


def _short(config: CompressionConfig | None) -> str:
    if config is None:
        return ""
    changed = changes(config)
    return f"{config.codec}({', '.join(changed)})" if changed else config.codec


def _mixing(rule: Rule) -> int:
    return mixing_of(rule.op) if rule.keep in (OP_SAVE, OP_LABEL) else OP_PRODUCT


def _form(rule: Rule) -> Any:
    return ALL_FORMS.get(rule.op) if rule.keep in _REPLAYED else None


def _policy_of(rows: list[Any], wanted: frozenset[str], parts: Iterable[tuple[str, str]] = ()) -> Policy:
    """Return the policy that was pickled."""
    rules = []
    for name, *rest in rows:
        op: Any = torch.ops
        for part in name.split(".") if "." in name else ("higher_order", name):
            op = getattr(op, part)
        rules.append(Rule(op, *rest))
    return Policy(rules, wanted, parts)


def name(x: torch.Tensor, name: str) -> torch.Tensor:
    """Name a tensor in a region, for :func:`gradckpt.policies.save_named`. Returns ``x`` itself.

    Args:
        x: The output of a matrix product, a convolution or fused attention, or a view of one.
        name: Any string. It has no effect outside of regions and in regions whose policy does
            not use it.

    Raises:
        ValueError: the policy uses the name, and ``x`` comes from another operator, whose
            output would save no work.
    """
    if not torch.compiler.is_compiling():
        modes = private.dispatch_modes() if private.dispatch_stack_len() else []
        _C.selective_name(x, name, modes)
    return x


Answer = Union[bool, CheckpointPolicy, Save, str, CompressionConfig]
PolicyOrOps = Union[Policy, str, list[Any], tuple[Any, ...], set[Any], Mapping[Any, Any], Callable[..., Any]]


# ---- what the caller names ----


def is_overload(op: Any) -> bool:
    return isinstance(op, OpOverload)


def check_op(op: Any) -> None:
    if isinstance(op, private.HigherOrderOperator):
        return
    if not is_overload(op):
        raise torch_errors.no_operator(op)
    if op._schema.is_mutable:
        raise ValueError(
            f"gradckpt: {op} writes to its arguments, so its output cannot be kept; name the operator without the "
            "underscore, or the one that made its argument"
        )


def _exact(config: CompressionConfig | None) -> CompressionConfig | None:
    """Return how results are kept that a backward reads beside the exact arguments."""
    return None if config is not None and config.lossy else config


def rule_of(op: Any, answer: Any) -> Rule:
    keep, config, offload = read_policy(answer, op)
    always = answer is CheckpointPolicy.MUST_RECOMPUTE
    return Rule(op, OP_SAVE if keep else OP_RECOMPUTE, config, always=always, offload=offload)


def read_policy(answer: Any, op: Any) -> tuple[int, CompressionConfig | None, Offload | None]:
    """Return whether the policy keeps an operator's outputs, the codec, and the place.

    Raises:
        TypeError: the answer is not one of the documented types.
    """
    offload = None
    if isinstance(answer, Save):
        keep, config, offload = True, answer.config, answer.offload
    elif isinstance(answer, (str, CompressionConfig)):
        keep, config = True, save(answer).config
    elif isinstance(answer, bool):
        keep, config = answer, None
    elif isinstance(answer, CheckpointPolicy):
        keep, config = answer in _SAVED or answer in _OFFLOADED, None
        offload = Offload() if answer in _OFFLOADED else None
    else:
        raise TypeError(
            f"gradckpt: the policy returned {answer!r} for {op}; return a CheckpointPolicy, a bool, "
            'gradckpt.policies.save("int8") or the name of a codec'
        )
    if mixing_of(op) == OP_JOINT:
        config = _exact(config)
    mutates = is_overload(op) and op._schema.is_mutable
    return int(keep and not mutates), config, offload  # an operator that writes into its arguments has to run again
