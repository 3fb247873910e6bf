"""Will a training step fit, and what fits a budget? :func:`plan`; one answer for all data-parallel
ranks: :func:`agreed`.

Each rank leaves what it needs and what it may use in the store of the default process group. The
rank whose step needs most plans for the smallest limit; the others take its plan. Ranks that train
other models (stages of a pipeline) plan by themselves.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from typing import TYPE_CHECKING, Any, overload

import torch.distributed as dist
from torch.nn import Module

from gradckpt._engine import torch_private as private
from gradckpt._models.rules import check_tiles
from gradckpt._models.switch import UNSET, Modules, Unset, check_model
from gradckpt._offload import OffloadLike, parse_offload
from gradckpt._planning.comparison import compare, step_of, unwrapped
from gradckpt._planning.device_memory import (
    Budget,
    device_of,
    is_sharded,
    parameters_before,
    parse_budget,
    parse_error,
    refuse_compiled,
    refuse_shards,
    state_of,
)
from gradckpt._planning.devices import parse_link, placement_of
from gradckpt._planning.profile import Profile
from gradckpt._planning.region_plan import NoPlan, Plan, digest_of, plan_of
from gradckpt._planning.report import Comparison
from gradckpt._planning.simulated_tensors import NotSimulated
from gradckpt._training_step import alone

logger = logging.getLogger("gradckpt")

if TYPE_CHECKING:  # typing keeps overloads that it meets at run time; each repeats the keywords, as a checker wants

    @overload
    def plan(
        model: Module,
        batch: Any,
        *,
        modules: Modules = None,
        memory: int | str | None = None,
        measure: bool = False,
        tiles: int | None = None,
    ) -> Comparison: ...

    @overload
    def plan(
        model: Module,
        batch: Any,
        *,
        budget: int | str | None,
        modules: Modules = None,
        compress: Any = None,
        error: float | str | None = None,
        optimizer: Any = None,
        profile: Plan | str | os.PathLike[str] | None = None,
        offload: OffloadLike = None,
        link: float | str | None = None,
        tiles: int | None = None,
    ) -> Plan: ...


def plan(
    model: Module,
    batch: Any,
    *,
    modules: Modules = None,
    memory: int | str | None = None,
    measure: bool = False,
    budget: int | str | Unset | None = UNSET,
    compress: Any = None,
    error: float | str | None = None,
    optimizer: Any = None,
    profile: Plan | str | os.PathLike[str] | None = None,
    offload: OffloadLike = None,
    link: float | str | None = None,
    tiles: int | None = None,
) -> Comparison | Plan:
    """Compute the memory that a training step of a model needs in each ready setting; or with
    ``budget``, choose an option for each region so that the step stays within it.

    The step is simulated: with the model's shapes and without values, memory or a device's time.
    The figures are those of torch's CPU allocator, to about 0.1 %. Parameters, buffers, gradients,
    random generators and counters are afterwards as before.

    Without ``budget``, a step that asks for values (a branch on an activation, an operator without
    a shape function) runs for real instead, once in each setting; the result says so. With
    ``budget``, three real steps with exact recomputing measure times, and each distinct region in
    each option, one at a time. Two more try the plan, and the one of the smallest budget: what they
    need beyond the simulated one (scratch of an operator) counts.

    Args:
        model: A module in training mode, enabled or not.
        batch: A dict, tuple or tensor, for ``model(**batch)``, ``model(*batch)`` or
            ``model(batch)``; the result is or has a scalar loss. Or a function without arguments
            that runs forward and backward.
        modules: The modules to checkpoint, as for :func:`gradckpt.enable`.
        memory: What the step may use, parameters and optimizer included: bytes, ``"24GiB"`` or
            ``"24GB"``. The table then says which settings fit. Not with ``budget``.
        measure: Run real steps, and simulate none. Not with ``budget``.
        budget: The bytes that tensors on the device may need (on the CPU: their largest sum):
            weights, gradients, optimizer states, activations, also of other models. ``"60GiB"``,
            ``"60GB"`` or bytes; ``"90%"`` of the device, on the CPU of what the control group
            leaves; ``None``: what is free now. ``"activations:6GiB"`` limits what the step adds.
        compress: The codec, or a list of codecs, that the plan may use. ``None``: options that
            change no gradient.
        error: The largest relative L2 error of the gradients, ``"1%"`` or 0.01. It permits int8,
            int6 and int4 unless ``compress`` names others, and is measured at the end.
        optimizer: Its states, and its step, count in the budget. ``None``: no optimizer counts.
        profile: An earlier plan of this step, or the path of its file: what was measured for it
            counts instead of new times, and all plans that it knew are considered, too. So a larger
            budget, or error, never gives a slower plan.
        offload: The place that payloads may have, ``"cpu"``, ``"disk"`` or an
            :class:`gradckpt.Offload`: the plan decides which do. Its ring on the device, or the
            host memory of tensors that are on the CPU, counts in the budget.
        link: The rate of the link to that place in GB/s, or ``"pcie4"``, ``"pcie5"``,
            ``"nvlink-c2c"`` or ``"nvme"``. ``None``: it is measured.
        tiles: Permits that MLPs run in so many tiles of the sequence, as for
            :func:`gradckpt.enable`.

    Returns:
        Without ``budget``, a table of settings to be printed. With it, a :class:`gradckpt.Plan`:
        ``print`` it, ``.apply(model)``, ``.save(path)``, ``.pareto()``, ``.smallest_budget``.

    Raises:
        ValueError: As :func:`gradckpt.enable`; a size is none; the model is in eval mode; its
            result has no scalar loss; the step changes parameters. With ``budget``: no plan stays
            within it (the message has the smallest that one does), or the step asks for values.
    """
    check_model(model, "plan")
    if not model.training:
        raise ValueError("gradckpt: plan() needs a model in training mode; call model.train() first")
    refuse_shards(model)
    if tiles is not None:
        check_tiles(tiles)
    if isinstance(budget, Unset):
        others = {"compress": compress, "error": error, "optimizer": optimizer, "profile": profile}
        others |= {"offload": offload, "link": link}
        for name, value in others.items():
            if value is not None:
                raise ValueError(f'gradckpt: {name}= needs budget=; pass one, as in budget="60GiB"')
        whole = unwrapped(model) if modules is None else model
        return compare(whole, batch, modules, memory, measure, tiles)
    if memory is not None or measure:
        name = "memory" if memory is not None else "measure"
        raise ValueError(f"gradckpt: budget= and {name}= exclude each other; leave {name}= out")
    model = unwrapped(model)
    refuse_compiled(model)
    limit = parse_budget(budget, device_of(model))
    allowed_error = None if error is None else parse_error(error)
    place = parse_offload(offload)
    if place is None and link is not None:
        raise ValueError('gradckpt: link= needs offload=; pass a place, as in offload="cpu"')
    given_link = None if link is None else parse_link(link)
    run, given = step_of(model, batch)
    earlier = None if profile is None else plan_of(profile, "profile")
    if is_sharded(model):
        _check_sharded(model, allowed_error)
    if given_link is None and earlier is not None and earlier.offloaded is not None:
        given_link = earlier.offloaded.link
    placement = placement_of(place, device_of(model), given_link)
    with alone(model):
        try:
            found = Profile(
                model,
                run,
                given,
                modules=modules,
                compress=compress,
                limits_error=error is not None,
                optimizer=optimizer,
                placement=placement,
                tiles=tiles,
            )
        except NotSimulated as reason:
            raise ValueError(
                f"gradckpt: the step cannot be simulated ({reason}), so there is no plan; compare settings with "
                "plan(model, batch) instead"
            ) from None
        found.check_optimizer(limit)  # before steps that take long
        if earlier is None:
            found.measure(batch)
        else:
            found.load(earlier)
        if is_sharded(model):
            return agreed(found, limit)
        return found.plan(limit, error=allowed_error, batch=batch)


def _check_sharded(model: Module, error: float | None) -> None:
    if error is not None:
        raise ValueError("gradckpt: error= cannot be measured on a sharded model; call plan() before FSDP shards it")
    if not state_of(model).reduces():
        raise ValueError(
            "gradckpt: this sharded model does not reduce its gradients now; call set_requires_gradient_sync(True) "
            "before plan(), or leave no_sync()"
        )


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
        answer = {"refused": str(error), "smallest_budget": error.smallest_budget}
        raise
    except ValueError as error:  # also the step's own, which may have any attributes
        answer = {"refused": str(error)}
        raise
    finally:
        store.set(f"plan/{leader}", json.dumps(answer))
    return made


def _taken(text: str) -> Plan:
    """Return the plan that another rank made, or raise its error."""
    answer = json.loads(text)
    if "smallest_budget" in answer:
        raise NoPlan(answer["refused"], answer["smallest_budget"])
    if "refused" in answer:
        raise ValueError(answer["refused"])
    logger.info("gradckpt: the plan %s of another rank is used", hashlib.sha256(text.encode()).hexdigest()[:8])
    return Plan.from_dict(answer["plan"])
