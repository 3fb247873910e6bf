"""The public :func:`enable`: settings, or a budget that chooses them."""

from __future__ import annotations

import os
from typing import Any, Unpack

from torch.nn import Module

from gradckpt._config import Compress
from gradckpt._models import switch
from gradckpt._models.switch import BUDGET, UNSET, CheckpointKeywords, Handle, Modules, Unset
from gradckpt._planning.live_budget import LiveBudget
from gradckpt._planning.region_plan import Plan
from gradckpt.policies import PolicyLike

__all__ = ["enable"]


def enable(
    model: Module,
    compress: Any = UNSET,
    *,
    modules: Modules = None,
    every_n_layers: int = 1,
    policy: PolicyLike = None,
    recompute: bool = True,
    offload: bool = False,
    budget: int | str | Unset | None = UNSET,
    plan: Plan | str | os.PathLike[str] | None = None,
    optimizer: Any = None,
    **keywords: Unpack[CheckpointKeywords],
) -> Handle:
    """DOC"""
    if isinstance(budget, Unset) and plan is None:
        if optimizer is not None:
            raise ValueError('gradckpt: optimizer= needs budget=; pass one, as in budget="60GiB"')
        return switch.enable(
            model,
            compress,
            modules=modules,
            every_n_layers=every_n_layers,
            policy=policy,
            recompute=recompute,
            offload=offload,
            **keywords,
        )
    switch.check_model(model, "enable")
    given = "plan" if plan is not None else "budget"
    others = {
        "budget": plan is not None and not isinstance(budget, Unset),
        "every_n_layers": every_n_layers != 1,
        "policy": policy is not None,
        "recompute": recompute is not True,
        "offload": offload is not False,
        "modules": plan is not None and modules is not None,
        "compress": plan is not None and compress is not UNSET,
        "optimizer": plan is not None and optimizer is not None,
        **dict.fromkeys(keywords, True),
    }
    for name, is_given in others.items():
        if is_given:
            raise ValueError(
                f"gradckpt: {given}= and {name}= exclude each other, since the {given} decides; leave one of them out"
            )
    if plan is not None:
        return (plan if isinstance(plan, Plan) else Plan.load(plan)).apply(model)
    return _plan_live(model, budget, None if compress is UNSET else compress, modules, optimizer)


def _plan_live(model: Module, budget: Any, compress: Compress, modules: Modules, optimizer: Any) -> Handle:
    live = LiveBudget(model, budget, compress, modules, optimizer)
    present = vars(model).get(BUDGET)
    if not (isinstance(present, LiveBudget) and present.is_same(live)):
        live.install(model)
    return Handle(model)
