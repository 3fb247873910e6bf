"""A budget that is planned while a model trains: :class:`LiveBudget`.

The first training call runs with exact recomputing. Before it, the step is simulated in each
option; in it, each distinct region is measured. The second call runs as planned. The plan is made
again when more is alive than it knew: larger inputs, gradients that exist when the forward begins,
states of the optimizer. Inputs of which each is larger in a dimension (few long sequences, many
short ones) have a plan each.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradckpt._engine import torch_private as private
from gradckpt._engine.places import place_of
from gradckpt._models.rules import check_tiles
from gradckpt._models.switch import BUDGET, enable, take_off
from gradckpt._models.weak import WeakModule
from gradckpt._offload import OffloadLike, parse_offload
from gradckpt._planning.comparison import unwrapped
from gradckpt._planning.device_memory import (
    Found,
    ParameterWalk,
    device_of,
    is_sharded,
    parse_budget,
    refuse_compiled,
    refuse_shards,
    trained_parts,
)
from gradckpt._planning.devices import Placement, placement_of
from gradckpt._planning.options import KEEP, RECOMPUTE, RegionCosts, allowed, measure_regions, regions_to_plan
from gradckpt._planning.plan import agreed
from gradckpt._planning.profile import Profile
from gradckpt._planning.region_plan import Plan
from gradckpt._planning.simulated_tensors import NotSimulated
from gradckpt._planning.step_trace import state_bytes, torch_optimizer
from gradckpt._settings import quiet
from gradckpt._stats import Stats, continue_from, stats
from gradckpt._training_step import alone, autocast_on, loss_of

logger = logging.getLogger("gradckpt")


class LiveBudget:
    """The plan of a model for a budget, from its first training call on.

    ``budget``, ``compress``, ``optimizer``, ``offload``, ``tiles``: as for :func:`gradckpt.plan`.
    ``modules``: as for :func:`gradckpt.enable`. ``plan``: the present one; None until the first
    call.
    """

    _first = True  # no plan was made yet
    _busy = False  # a plan is being made

    def __init__(
        self,
        model: Module,
        budget: Any,
        compress: Any,
        modules: Any,
        optimizer: Any,
        offload: OffloadLike = None,
        tiles: int | None = None,
    ) -> None:
        self.budget, self.compress, self.offload, self.tiles = budget, compress, parse_offload(offload), tiles
        if tiles is not None:
            check_tiles(tiles)
        place_of(self.offload)  # its errors are said now
        self._step_only = parse_budget(budget, device_of(model)).step_only
        refuse_compiled(model)
        refuse_shards(model)
        allowed(compress, False)  # or the first training call would raise
        with quiet():
            self._blocks = [WeakModule(block) for block in regions_to_plan(model, modules)]
        self._optimizer = None if optimizer is None else weakref.ref(torch_optimizer(optimizer))
        self._counts_optimizer = optimizer is not None  # from the first plan on
        self.plan: Plan | None = None
        self._parameters = ParameterWalk()
        self._forget()

    def _forget(self) -> None:
        self._profile: Profile | None = None
        self._shapes: Shapes | None = None  # of the inputs that the present or pending plan is for
        #: Of shapes of which none covers another; with what each plan knows.
        self._plans: dict[Shapes, tuple[Plan, Profile, dict[str, int]]] = {}
        self._costs: RegionCosts = {}
        self._placement: Placement | None = None  # its link is measured once
        self._pending: Plan | None = None  # for the next call
        self._measuring: contextlib.ExitStack | None = None
        self._counted: Stats | None = None  # before the call that measures
        self._setup: Any = None  # what is trained and where, and autocast, that plans are for
        self._holds_outputs = 0  # 1: the loop has them in the backward
        #: What the present plan knows: bytes of gradients and of optimizer states, and whether
        #: gradients are reduced and outputs held.
        self._known = {"gradients": 0, "reductions": 0, "states": 0, "outputs": 0}

    def __getstate__(self) -> dict[str, Any]:
        kept = ("budget", "compress", "offload", "tiles", "_blocks", "_counts_optimizer", "_step_only", "plan")
        return {key: vars(self)[key] for key in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._optimizer = None
        self._parameters = ParameterWalk()
        self._forget()

    @property
    def modules(self) -> list[Module]:
        return [block() for block in self._blocks]

    def is_same(self, other: LiveBudget) -> bool:
        """Return whether both plan the same modules for the same budget."""
        mine, others = ((x.budget, x.compress, x.offload, x.tiles, x.modules) for x in (self, other))
        return mine == others

    # ---- on the model

    def install(self, model: Module) -> None:
        """Let the model's training calls be planned; until then its regions are recomputed."""
        self._set(model, dict.fromkeys(self.modules, RECOMPUTE.rule))

    def _set(self, model: Module, rules: dict[Module, Any]) -> None:
        if (present := vars(model).get(BUDGET)) is not None:  # equal rules would leave its hooks
            present.remove(model)
        if all(rule == KEEP.rule for rule in rules.values()):
            take_off(model)
        else:
            with quiet():
                enable(model, None, modules=rules)
        vars(model)[BUDGET] = self
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)
        model.register_forward_hook(self._failed, always_call=True)

    def remove(self, model: Module) -> None:
        """Take the hooks off the model."""
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                del hooks[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)
                model._forward_hooks_always_called.pop(key, None)

    # ---- training calls

    def _before(self, model: Module, args: Any, kwargs: Any) -> None:
        if self._busy or not (model.training and torch.is_grad_enabled()) or private.graph_task_id() != -1:
            return
        refuse_compiled(model)
        with self._planning():
            self._prepare(model, args, kwargs)

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        """Let steps in a ``with`` block be the plan's own, not the loop's; if one fails, the next
        call plans again.
        """
        self._busy = True
        try:
            yield
        except BaseException:
            self._start_over()
            raise
        finally:
            self._busy = False

    def _prepare(self, model: Module, args: Any, kwargs: Any) -> None:
        """Plan for this call if need be, and set the plan that it runs with."""
        found = self._parameters.read(model)
        device = device_of(model)
        setup = found.parameters, found.changes, device, autocast_on(device.type)
        if self._setup not in (None, setup):
            self._start_over()
        self._setup = setup
        shapes = tuple(tuple(x.shape) for x in private.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        is_known = self._knows(shapes)
        grown = self._grown(model, found)
        if "states" in grown:
            self._plans.clear()
        if not is_known:
            self._begin(model, args, kwargs, shapes)
        elif grown:
            self._trace(model, args, kwargs, shapes)
            self._make_plan(model)
            logger.info("gradckpt: planned again, since %s: %s", " and ".join(grown.values()), self._pending)
        if self._pending is not None and self._measuring is None:
            self.plan, self._pending = self._pending, None
            if self._counted is not None and self._counted._epoch == stats.epoch:
                continue_from(self._counted)  # the figures of a step are those of the plan's
            self._counted = None
            self._set(model, self.plan.rules_for(model))

    def _start_over(self) -> None:
        """Forget all that is planned, so that the next training call measures."""
        if self._measuring is not None:
            self._measuring.close()
        self._forget()

    def _failed(self, model: Module, args: Any, output: Any) -> None:
        """Stop measuring in a call that raised."""
        if self._measuring is not None and not self._busy:
            self._start_over()

    def _after(self, model: Module, args: Any, output: Any) -> None:
        if self._measuring is None or self._busy:
            return
        self._measuring.close()
        self._measuring = None
        self._see_outputs(output)
        with self._planning():
            self._make_plan(model)
        logger.info("gradckpt: from the next training call on: %s", self._pending)

    def _see_outputs(self, output: Any) -> None:
        """Note, when the backward begins, whether the loop still has outputs beside the loss."""
        loss = loss_of(output)
        if loss is None or not loss.requires_grad:
            return
        others = [weakref.ref(x) for x in private.tree_leaves(output) if isinstance(x, Tensor) and x is not loss]
        live = weakref.ref(self)

        def begins(gradient: Tensor) -> None:
            if (found := live()) is not None and any(x() is not None for x in others):
                found._holds_outputs = 1

        loss.register_hook(begins)

    def _knows(self, shapes: Shapes) -> bool:
        """Return whether a plan is for inputs that are as large. It is then the present or the
        pending one, and else one that knows no gradients is to be made.
        """
        if self._shapes is not None and _covers(self._shapes, shapes):
            return True
        found = next((known for known in self._plans if _covers(known, shapes)), None)
        if found is None:
            self._know_no_gradients()
            return False
        self._shapes = found
        self._pending, self._profile, known = self._plans[found]
        self._known = {**known, "states": self._known["states"]}
        return True

    def _know_no_gradients(self) -> None:
        self._known = {**self._known, "gradients": 0, "reductions": 0}

    def _grown(self, model: Module, found: Found) -> dict[str, str]:
        """Return what is more than the plan knows, each with a sentence about it; know it now."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        if optimizer is not None:
            _watching.pop(self, None)
        elif self._optimizer is not None:  # another one may take its place
            self._optimizer, self._counts_optimizer = None, False
            _watch_optimizers(self, model)
        uncounted = self._counts_optimizer or self._step_only
        sizes = {
            "gradients": found.gradients,
            "reductions": int(found.reduces),
            "states": 0 if optimizer is None or uncounted else state_bytes(optimizer),
            "outputs": self._holds_outputs,
        }
        grown = {key: _SENTENCES[key] for key, size in sizes.items() if size > self._known[key]}
        if "states" in grown:  # plans for gradients, too, will have to count these
            self._know_no_gradients()
        self._known = {key: max(size, self._known[key]) for key, size in sizes.items()}
        return grown

    def _begin(self, model: Module, args: Any, kwargs: Any, shapes: Shapes) -> None:
        """Trace the step, and measure regions in the call that now begins, with exact
        recomputing.
        """
        self._check_regions(model)
        is_larger = self._profile is not None
        options = self._trace(model, args, kwargs, shapes).options
        logger.info(
            "gradckpt: planning %s for %s%s: this call measures each distinct region in %d options",
            type(model).__name__,
            self.budget,
            ", since the input is larger" if is_larger else "",
            len(options),
        )
        self._pending = None
        if self.plan is not None:
            self.install(model)
        self._measuring, self._counted = contextlib.ExitStack(), stats()
        self._costs = self._measuring.enter_context(measure_regions(self.modules, options))
        if self._optimizer is None:
            _watch_optimizers(self, model)

    def _check_regions(self, model: Module) -> None:
        present = set(map(id, model.modules()))
        if missing := sum(id(block) not in present for block in self.modules):
            raise ValueError(
                f"gradckpt: {missing} regions of the budget are not in {type(model).__name__} any more; call "
                "gradckpt.enable(model, budget=...) again"
            )

    def _trace(self, model: Module, args: Any, kwargs: Any, shapes: Shapes) -> Profile:
        """Set the profile to that of a step with these arguments, and note what else is there."""
        step = _Step(model, bool(self._holds_outputs))
        optimizer = self._optimizer() if self._optimizer is not None else None
        if self._placement is None:
            self._placement = placement_of(self.offload, device_of(model))
        try:
            with alone(model):
                profile = Profile(
                    model,
                    step,
                    (args, kwargs),
                    modules=self.modules,
                    compress=self.compress,
                    optimizer=optimizer,
                    placement=self._placement,
                    tiles=self.tiles,
                )
        except NotSimulated as reason:
            raise ValueError(
                f"gradckpt: the step cannot be simulated ({reason}), so there is no plan; leave budget= out and "
                "compare settings with gradckpt.plan(model, batch)"
            ) from None
        if remark := profile.traces[KEEP].remark:
            profile.notes.append(remark)
        self._profile, self._shapes = profile, shapes
        return profile

    def _make_plan(self, model: Module) -> None:
        """Make the plan of the next call; keep it for the present shapes, in place of those for
        smaller inputs.
        """
        shapes, profile = self._shapes, self._profile
        assert shapes is not None
        assert profile is not None
        profile.costs = self._costs
        budget = parse_budget(self.budget, device_of(model))
        with alone(model):
            self._pending = agreed(profile, budget) if self._first else profile.plan(budget)
        self._first = False  # all ranks make the first one
        self._plans = {known: made for known, made in self._plans.items() if not _covers(shapes, known)}
        self._plans[shapes] = self._pending, profile, self._known

    def note_optimizer(self, model: Module, optimizer: Any) -> None:
        """Count the states of an optimizer that has stepped, if it trains the model."""
        own = trained_parts(model)
        if self._optimizer is None and any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._optimizer = weakref.ref(optimizer)


_SENTENCES = {
    "gradients": "gradients exist before the forward",
    "reductions": "gradients are reduced",
    "states": "the optimizer has states now",
    "outputs": "the loop has the model's outputs in the backward",
}

Shapes = tuple[tuple[int, ...], ...]


def _covers(large: Shapes, small: Shapes) -> bool:
    """Return whether no tensor is larger in any dimension."""
    return [len(shape) for shape in large] == [len(shape) for shape in small] and all(
        m <= n for a, b in zip(large, small, strict=True) for n, m in zip(a, b, strict=True)
    )


class _Step:
    """Forward and backward of a model's arguments. ``holds_outputs``: these live until the end, as
    in a loop that has a name for them. If the result has no loss, they do, too: cross entropy of
    each output stands for what is computed outside of the model, as the call then returns.
    """

    def __init__(self, model: Module, holds_outputs: bool) -> None:
        self._model = unwrapped(model)  # DistributedDataParallel's forward would communicate
        self._holds_outputs = holds_outputs

    def __call__(self, batch: Any) -> str:
        args, kwargs = batch
        call = self._model if is_sharded(self._model) else self._model.forward  # FSDP's hooks gather weights
        result = call(*args, **kwargs)
        loss: Any = loss_of(result)
        remark = ""
        if loss is not None and not self._holds_outputs:
            del result
        elif loss is None:
            leaves = [x for x in private.tree_leaves(result) if isinstance(x, Tensor)]
            loss = sum(_cross_entropy(x) for x in leaves if x.requires_grad and x.numel())
            remark = "A loss outside of the model counts as cross entropy of the model's outputs."
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.backward()
        return remark


def _cross_entropy(x: Tensor) -> Tensor:
    """Return the cross entropy of numbers over their last dimension, computed in float32."""
    rows = (x.abs() if x.is_complex() else x).float().reshape(-1, x.shape[-1] if x.dim() else 1)
    return torch.nn.functional.cross_entropy(rows, rows.new_zeros(len(rows), dtype=torch.long))


#: Budgets that wait for the first step of an optimizer, with their models.
_watching: weakref.WeakKeyDictionary[LiveBudget, weakref.ref[Module]] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []  # one on all optimizers, from the first budget on


def _watch_optimizers(live: LiveBudget, model: Module) -> None:
    """Tell a budget of the first optimizer that trains its model."""
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))
    _watching[live] = weakref.ref(model)


def _after_step(optimizer: Any, *_: object) -> None:
    for live, whole in list(_watching.items()):
        model = whole()
        if model is not None and vars(model).get(BUDGET) is live:
            live.note_optimizer(model, optimizer)
