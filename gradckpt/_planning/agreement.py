"""One plan for all data-parallel ranks: :func:`agreed`.

Each rank leaves what it needs and what it may use in the store of the default process group. The
rank whose step needs most plans for the smallest limit; the others take its plan. Ranks that train
other models (stages of a pipeline) plan by themselves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from typing import Any

import torch.distributed as dist

from gradckpt._engine import torch_private as private
from gradckpt._planning.budget import Budget
from gradckpt._planning.no_plan import NoPlan
from gradckpt._planning.profile import Profile
from gradckpt._planning.region_plan import Plan, digest_of
from gradckpt._planning.sharded import parameters_before

__all__ = ["agreed"]

logger = logging.getLogger("gradckpt")

#: All ranks make plans in the same order, so that each has a number, also those of two models.
_rounds = itertools.count(1)


def agreed(profile: Profile, budget: Budget) -> Plan:
    """Return the first plan of a budget; in a process group, the one for all ranks with this model.

    Raises:
        NoPlan: No plan stays within the budget; the same on all ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return profile.plan(budget)
    return _among_ranks(profile, budget)


def _among_ranks(profile: Profile, budget: Budget) -> Plan:
    rank, world = dist.get_rank(), dist.get_world_size()
    digest = digest_of(profile.model, parameters_before(profile.model))
    store: Any = dist.distributed_c10d.PrefixStore(f"gradckpt/budget/{next(_rounds)}", private.default_store())
    fixed = 0 if budget.step_only else profile.held
    note = {"digest": digest, "limit": budget.size - fixed, "need": profile.smallest_peak(), "text": budget.text}
    store.set(f"{rank}", json.dumps(note))
    notes = [json.loads(store.get(f"{each}")) for each in range(world)]
    peers = [each for each in range(world) if notes[each]["digest"] == digest]
    leader = max(peers, key=lambda each: (notes[each]["need"], -each))
    if rank != leader:
        return _taken(store.get(f"plan/{leader}").decode())
    tightest = min((notes[each] for each in peers), key=lambda each: each["limit"])
    answer: dict[str, Any] = {
        "refused": f"gradckpt: the rank that plans for all failed; see the error of rank {leader}"
    }
    try:
        limit = Budget(tightest["limit"] + fixed, budget.step_only, tightest["text"])
        made = profile.plan(limit)
        answer = {"plan": made.to_dict()}
    except NoPlan as error:
        answer = {"refused": str(error), "smallest": error.smallest_budget, "choice": error.choice}
        raise
    except ValueError as error:
        answer = {"refused": str(error)}
        raise
    finally:
        store.set(f"plan/{leader}", json.dumps(answer))
    return made


def _taken(text: str) -> Plan:
    """Return the plan that another rank made, or raise its error."""
    answer = json.loads(text)
    if "smallest" in answer:
        raise NoPlan(answer["refused"], answer["smallest"], tuple(answer["choice"]))
    if "refused" in answer:
        raise ValueError(answer["refused"])
    logger.info("gradckpt: the plan %s of another rank is used", hashlib.sha256(text.encode()).hexdigest()[:8])
    return Plan.from_dict(answer["plan"])
