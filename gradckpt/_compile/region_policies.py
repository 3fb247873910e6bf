"""Policies of the regions in one of Dynamo's graphs: what they keep beside what the user named, and
what they must not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule

from gradckpt import policies
from gradckpt._compile import graph
from gradckpt._engine.discrete import KEPT, ROUNDING
from gradckpt._engine.selective import contexts_of, create_selective_checkpoint_contexts, discrete_of, unmixed_in_graph

_CONTEXT = "_checkpoint_context_fn"
#: torch functions that call discrete operators; Dynamo's graph has their names.
_DISCRETE_WITHIN = (
    *("greater", "greater_equal", "less", "less_equal", "not_equal", "isclose", "msort", "quantile", "nanquantile"),
    *("unique", "where", "argwhere", "masked_select"),
)
_DISCRETE = frozenset(name.partition(".")[0] for name in (*KEPT, *ROUNDING, *_DISCRETE_WITHIN))
#: Those that may make integers or bools of floats.
_CASTING = frozenset(("to", "type", "type_as", "bool", "byte", "char", "short", "int", "long", "_to_copy"))


def regions(module: GraphModule) -> Any:
    return module.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)


def keep_discrete(module: GraphModule, replay_discrete: bool | str, around: bool | str = False) -> bool:
    """Keep discrete outputs in regions that may run again on restored values.

    Return whether any is kept.

    Such are marked regions (``replay_discrete``: their config's), those whose policy keeps outputs
    lossily, and every region inside one of these (``around``), whichever checkpoint made it.
    """
    kept = False
    for node in regions(module):
        region = getattr(module, node.args[0].target)
        marked = any(x.target is graph.region_input for x in node.all_input_nodes)
        made = _contexts_in(region)
        policy = made.args[0] if getattr(made, "func", None) is create_selective_checkpoint_contexts else None
        policy = policy if isinstance(policy, policies.Policy) else None
        levels = (around, replay_discrete if marked else False, policy.replay_discrete if policy is not None else False)
        level = "casts" if "casts" in levels else any(levels)
        names = _DISCRETE | _CASTING if level == "casts" else _DISCRETE
        if level and (made is None or policy is not None) and _has_any(region, names):
            discrete = discrete_of(level)
            region.meta[_CONTEXT] = contexts_of(discrete if policy is None else discrete | policy)
            kept = True
        kept |= keep_discrete(region, replay_discrete, level)
    return kept


def keep_products(module: GraphModule, restored: bool, around: bool = False) -> None:
    """Restrict policies to what mixes with no restored value, in regions whose inputs are restored
    (marked ones, where ``restored``), and in every region inside one of these (``around``).
    """
    for node in regions(module):
        region = getattr(module, node.args[0].target)
        inside = around or (restored and any(x.target is graph.region_input for x in node.all_input_nodes))
        made = _contexts_in(region)
        if getattr(made, "func", None) is create_selective_checkpoint_contexts:
            policy, *rest = made.args
            region.meta[_CONTEXT] = contexts_of(unmixed_in_graph(policy, inside)) if not rest else made
        keep_products(region, restored, inside)


def _contexts_in(region: GraphModule) -> Any:
    """Return a region's ``context_fn``; that of ``policy=`` becomes one
    that torch can cache graphs with."""
    made: Any = region.meta.get(_CONTEXT)
    by_policy = getattr(made, "func", None) is create_selective_checkpoint_contexts and not made.keywords
    if by_policy and not callable(made.args[0]):
        made = region.meta[_CONTEXT] = contexts_of(made.args[0])
    return made


def _has_any(region: GraphModule, discrete: frozenset[str]) -> bool:
    nodes = (node for m in region.modules() if isinstance(m, GraphModule) for node in m.graph.nodes)
    names = (str(getattr(node.target, "__name__", node.target)) for node in nodes)
    return any(name.partition(".")[0].rstrip("_") in discrete for name in names)
