"""Proof of activity: two hooks of an enabled model that warn when its training calls compress nothing."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from gradckpt import _activity
from gradckpt.integrations.ranks import RankCheck, spell
from gradckpt.stats import Stats, stats

#: The method that every way of turning checkpointing on ends in; on an instance: what stands in for it.
SEAM = "_set_gradient_checkpointing"

#: On an enabled instance, its seam: also where something else has wrapped the method since.
HELD = "_gradckpt_seam"

#: Model calls without a single compressed tensor before the warning.
PATIENCE = 2


@dataclasses.dataclass
class Watch:
    """Counts what should have compressed something and did not; see :func:`after_forward`."""

    calls: int = 0
    eval_backwards: int = 0
    settled: bool = False
    before: Stats | None = None
    rank_check: RankCheck | None = None  # None: no training call yet


# The hooks are functions of the module, so that pickles and copies of the model carry them by name;
# all they know is in the seam of the model that calls them. The replicas of DataParallel call them at the same time.


def before_forward(model: Any, args: Any) -> None:
    if model.training and not torch.compiler.is_compiling() and torch.is_grad_enabled():
        _check(model)
    watch = _watch_of(model)
    if watch is not None:
        watch.before = stats() if model.training and torch.is_grad_enabled() else None


def _check(model: Any) -> None:
    """In the first training calls: what would be wrong with all of them."""
    seam: Any = getattr(model, "__dict__", {}).get(HELD)
    watch = getattr(seam, "watch", None)
    if not isinstance(watch, Watch) or (watch.rank_check is not None and watch.rank_check.settled()):
        return
    if seam.function is None or not is_on(model):
        return
    if watch.rank_check is None:
        seam.check_alone(model)
        _activity.check_alone(f"this {type(model).__name__}")
        label = f"{type(model).__name__} in gradckpt.enable"
        watch.rank_check = RankCheck(label, {label: [spell(seam.active)]})
    watch.rank_check.compare()


def after_forward(model: Any, args: Any, output: Any) -> None:
    watch = _watch_of(model)
    if watch is None:
        return
    if not model.training:
        _follow(model, output)
        return
    before, watch.before = watch.before, None
    if before is None:
        return
    _activity.note_output(model, output)
    new = stats().since(before)
    if (
        new["compressed"]
        or new["compiled_tensors"]
        or (not new["regions"] and is_on(model) and _activity.is_compiled(model))
    ):
        watch.settled = True
        return
    watch.calls += 1
    if watch.calls >= PATIENCE:
        watch.settled = True
        _activity.say(_why_inactive(model, vars(model)[HELD], new), mend=not _activity.are_small(new))


def _watch_of(model: Any) -> Watch | None:
    """None: nothing to prove, or proven already."""
    if torch.compiler.is_compiling():
        return None
    seam: Any = getattr(model, "__dict__", {}).get(HELD)
    watch = getattr(seam, "watch", None)
    if not isinstance(watch, Watch) or watch.settled or seam.active is None:
        return None
    return watch


def _follow(model: Any, output: Any) -> None:
    """A backward through what a model in eval mode returned is training; a forward alone is an evaluation."""
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
    found = next((x for x in values if isinstance(x, torch.Tensor) and x.grad_fn is not None), None)
    if found is not None:
        found.register_hook(functools.partial(_on_eval_backward, weakref.ref(model)))


def _on_eval_backward(ref: weakref.ref[Any], grad: torch.Tensor) -> None:
    model = ref()
    watch = _watch_of(model)
    if model is None or watch is None:
        return
    watch.eval_backwards += 1
    if watch.eval_backwards >= PATIENCE:
        watch.settled = True
        name, codec = type(model).__name__, vars(model)[HELD].active.codec
        _activity.say(
            f"compress={codec!r} was asked for, but {PATIENCE} backward passes went through {name} in eval mode, where "
            "transformers does not checkpoint; call model.train()",
        )


def _why_inactive(model: Any, seam: Any, new: Stats) -> str:
    assert seam.active is not None
    name, codec = type(model).__name__, seam.active.codec
    asked = f"compress={codec!r} was asked for, but {PATIENCE} training calls of {name} compressed nothing: "
    if not is_on(model):
        return asked + "checkpointing was turned off since enable(); call model.activation_checkpointing_enable()"
    ours = list(seam.modules(model))
    again = "call model.activation_checkpointing_enable() again"
    held = {id(m) for m in ours}
    others = (m for m in model.modules() if id(m) not in held and getattr(m, "gradient_checkpointing", False))
    other = next((f for m in others if (f := vars(m).get("_gradient_checkpointing_func")) is not None), None)
    if other is not None and (not ours or not new["regions"]):
        return asked + f"the layers call {describe(other)}, which they got after enable(); {again}"
    if ours and not any(m.training for m in ours if m.gradient_checkpointing):
        return asked + "its layers are in eval mode, where transformers does not checkpoint; call model.train()"
    if not new["regions"]:
        return asked + (
            f"its layers never called checkpoint; if they were replaced since enable(), {again}, "
            "else wrap them with gradckpt.checkpoint"
        )
    if not new["asked"]:
        return asked + (
            "no input of a layer requires grad (frozen embeddings?); call model.enable_input_require_grads()"
        )
    reasons = ", ".join(f"{reason} ({n})" for reason, n in new["kept"].items()) or "unknown"
    return asked + f"all {new['asked']} inputs were kept as they are: {reasons} (min_numel={seam.active.min_numel})"


def is_on(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def describe(thing: Any) -> str:
    if isinstance(thing, functools.partial):
        thing = thing.func
    name = getattr(thing, "__qualname__", None)
    return f"{getattr(thing, '__module__', '?')}.{name}" if name else repr(thing)
