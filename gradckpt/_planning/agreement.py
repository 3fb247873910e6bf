"""One plan for all data-parallel ranks: :func:`agreed`.

Each rank leaves what it needs and what it may use in the store of the default process group. The
rank whose step needs most plans for the smallest limit; the others take its plan. Ranks that train
other models (stages of a pipeline) plan by themselves.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import torch.distributed as dist

from gradckpt._engine import torch_private as private
from gradckpt._planning.budget import Budget
from gradckpt._planning.profile import Profile
from gradckpt._planning.region_plan import Plan, digest_of

__all__ = ["agreed"]

logger = logging.getLogger("gradckpt")

_rounds: dict[str, int] = {}


def agreed(profile: Profile, budget: Budget, optimizer: Any) -> Plan:
    """Return the plan of a profile; in a process group, the one for all ranks with this model.

    Raises:
        ValueError: No plan stays within the budget; the same on all ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return profile.plan(budget, optimizer=optimizer)
    return _among_ranks(profile, budget, optimizer)


def _among_ranks(profile: Profile, budget: Budget, optimizer: Any) -> Plan:
    rank, world = dist.get_rank(), dist.get_world_size()
    digest = digest_of(profile.model)
    number = _rounds[digest] = _rounds.get(digest, 0) + 1
    store: Any = dist.distributed_c10d.PrefixStore("gradckpt/budget", private.default_store())
    if number > 1:
        return profile.plan(budget, optimizer=optimizer)  # for what this rank alone has met
    fixed = 0 if budget.step_only else profile.held(optimizer)
    note = {"digest": digest, "limit": budget.size - fixed, "need": profile.smallest_peak()}
    store.set(f"{rank}", json.dumps(note))
    notes = [json.loads(store.get(f"{each}")) for each in range(world)]
    peers = [each for each, note in enumerate(notes) if note["digest"] == digest]
    leader = max(peers, key=lambda each: (notes[each]["need"], -each))
    limit = min(notes[each]["limit"] for each in peers)
    if rank != leader:
        return _taken(store.get(f"plan/{leader}").decode(), profile)
    text = ""
    try:
        made = profile.plan(Budget(limit + fixed, budget.step_only, budget.text), optimizer=optimizer)
        text = json.dumps(made.to_dict())
    except ValueError as error:
        text = json.dumps({"error": str(error)})
        raise
    finally:
        store.set(f"plan/{leader}", text or json.dumps({"error": "gradckpt: the planning rank failed; see its error"}))
    return made


def _taken(text: str, profile: Profile) -> Plan:
    given = json.loads(text)
    if "error" in given:
        raise ValueError(given["error"])
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    logger.info("gradckpt: the plan %s of another rank is used", digest)
    return Plan.from_dict(given)
