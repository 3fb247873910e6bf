"""The public :func:`enable`: settings, or a budget that chooses them."""

from __future__ import annotations

import os
from typing import Any, Unpack

from torch.nn import Module

from gradckpt._models import switch
from gradckpt._models.keywords import beside_plan
from gradckpt._models.switch import BUDGET, UNSET, CheckpointKeywords, Handle, Modules, Unset
from gradckpt._offload import OffloadLike
from gradckpt._planning.live_budget import LiveBudget
from gradckpt._planning.region_plan import Plan, plan_of
from gradckpt.policies import PolicyLike


def enable(
    model: Module,
    compress: Any = UNSET,
    *,
    modules: Modules = None,
    every_n_layers: int = 1,
    policy: PolicyLike = None,
    recompute: bool = True,
    offload: OffloadLike = False,
    budget: int | str | Unset | None = UNSET,
    plan: Plan | str | os.PathLike[str] | None = None,
    optimizer: Any = None,
    parts: str | None = None,
    tiles: int | None = None,
    **keywords: Unpack[CheckpointKeywords],
) -> Handle:
    """Turn on activation checkpointing of a model, with compressed checkpoints; or with
    ``recompute=False``, the compression of what autograd saves; or within a budget of bytes, which
    decides for each region.

    In training, with grad enabled, each call of a chosen module is one region of
    :func:`gradckpt.checkpoint`, or runs under :class:`gradckpt.compress_saved`. So it is in eval
    mode if an input requires grad, as in a frozen critic; but the layers that a transformers model
    checkpoints itself, without ``modules``, are regions in training alone. Else, and under
    ``no_grad``, it runs unchanged. Only this instance changes; no class is patched. A second call
    with equal arguments does nothing; with others, it changes the settings.

    Args:
        model: Any module; a transformers model also inside PEFT, DDP or ``torch.compile``.
        compress: How the inputs of the modules are stored: ``None`` (torch's checkpointing, bit for
            bit), ``True``, a codec's name, a :class:`gradckpt.CompressionConfig` or its dict. Unset
            means int8; with ``policy`` or ``context_fn`` it means ``None``. With
            ``recompute=False``: how saved activations are stored, as for
            :class:`gradckpt.compress_saved`, also by operator:
            ``{"linear": "int8", "attention": "fp8"}``.
        modules: The modules to checkpoint. ``None``: the layers that a transformers model
            checkpoints itself; in any other model the repeated block with most parameters, whose
            class is logged; with ``recompute=False`` the model as a whole.

            A selector, or a list of them: a module class or a tuple of them; a pattern for the
            whole dotted name, ``"*.layers.*.mlp"`` (fnmatch; ``*`` also matches dots) or a compiled
            regular expression (fullmatch); a kind, ``"layer"``, ``"attention"``, ``"mlp"``,
            ``"moe"`` or ``"norm"``; a module; a ModuleList or a slice of one, for the modules in
            it; a function of (name, module);
            :func:`gradckpt.selectors.every`, :func:`gradckpt.selectors.m_of_n`.

            Or a mapping from selectors to settings: a value for ``compress``, a dict of
            ``compress``, ``policy``, ``recompute`` and the keywords below, or ``"skip"``. The first
            selector that matches a module wins, so narrow ones come first; the other arguments are
            the defaults.
        every_n_layers: Of each selector's modules, in the model's order, checkpoint numbers 1, 1 +
            n, ...; for the layers of transformers, from 5.17 on.
        policy: The outputs inside a module that are kept instead of recomputed: a name
            (``"save_matmuls:int8"``, ``"save_attention|save_matmuls"``), a
            :class:`gradckpt.policies.Policy`, or the argument of
            :func:`gradckpt.compat.create_selective_checkpoint_contexts`. It costs memory and saves
            time.
        recompute: ``False``: nothing but attention is recomputed. The forward is exact, and the
            backward computes with restored values; it takes more memory than checkpoints
            and less time. ``policy`` and the keywords below do not apply.
        offload: Where the inputs (with ``recompute=False`` what autograd saves) live until
            backward, compressed first. ``True`` or ``"cpu"``: in host memory; ``"disk"``: in host
            memory up to a budget, then in a file; or an :class:`Offload`, or a dict of its
            arguments. Without a codec they move as they are.
        budget: The largest sum of bytes of tensors on the device in a step, as for
            :func:`gradckpt.plan`: ``"60GiB"``, bytes, ``"90%"``, ``"activations:6GiB"``, or
            ``None`` for what is free now. The first training call recomputes all regions and
            measures each distinct one in each option; from the second on, each region has the
            option that the plan gives it. ``compress`` then names the codecs that the plan may use
            (unset: options that change no gradient), ``modules`` the regions, ``offload`` the place
            that payloads may have; all other keywords are the plan's to decide. It is planned
            again, and logged, when an input is larger in a dimension, when gradients exist before
            the forward, and when the optimizer has got its states. A loss outside of the model
            counts as cross entropy of the model's outputs.
        plan: A :class:`gradckpt.Plan`, or the path of its file. It decides everything.
        parts: Recompute each region in parts, so that the tensors of one part are alive at a time:
            ``"sequential"``, all parts but the last run once more; ``"kept"``, their outputs are
            kept and none does; ``"nested"``, as ``"sequential"``, and the last part where something
            after it is saved. Exact.
        tiles: Run the MLPs of the regions in so many tiles of the sequence. Weight gradients are
            summed in float32; results may differ in the last bit, and dropout inside draws other
            numbers. With ``budget``: permits it.
        optimizer: With ``budget``: its states and its step count from the first plan on.
        **keywords: ``context_fn``, ``preserve_rng_state``, ``determinism_check``, ``debug``,
            ``early_stop``, ``respect_saved_tensors_hooks`` and ``buffers``, as for
            :func:`gradckpt.checkpoint`.

    Returns:
        A :class:`Handle`, whose ``remove()`` undoes all of it. It need not be kept; :func:`disable`
        does the same.

    Raises:
        ValueError: A codec, policy or keyword is unknown; a selector matches nothing; without
            ``modules``, the model has no repeated block or several; a module is checkpointed
            already, lies in another chosen one or has no forward; ``budget`` or ``plan`` is given
            beside what it decides; the plan is for another model, or its file cannot be read. The
            model is then unchanged, and the message gives the fix. From the first training call: no
            plan stays within the budget (the message has the smallest one that does), or the step
            asks for values.
        TypeError: ``model`` is not a module, or a selector or an option has another type.
    """
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
            parts=parts,
            tiles=tiles,
            **keywords,
        )
    switch.check_model(model, "enable")
    given = "plan" if plan is not None else "budget"
    others = {
        "budget": plan is not None and not isinstance(budget, Unset),
        "every_n_layers": every_n_layers != 1,
        "policy": policy is not None,
        "recompute": recompute is not True,
        "parts": parts is not None,
        "tiles": plan is not None and tiles is not None,
        "offload": plan is not None and offload not in (False, None),
        "modules": plan is not None and modules is not None,
        "compress": plan is not None and compress is not UNSET,
        "optimizer": plan is not None and optimizer is not None,
        **dict.fromkeys(keywords, True),
    }
    for name, is_given in others.items():
        if is_given:
            raise beside_plan(given, name)
    if plan is not None:
        return plan_of(plan, "plan").apply(model)
    live = LiveBudget(model, budget, None if compress is UNSET else compress, modules, optimizer, offload, tiles)
    present = vars(model).get(BUDGET)
    if not (isinstance(present, LiveBudget) and present.is_same(live)):
        live.install(model)
    return Handle(model)
