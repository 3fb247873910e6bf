"""Two hooks of an enabled model: a warning, with the reason, if its training compresses nothing."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from gradckpt._engine.arguments import without_partials
from gradckpt._models import inactivity_warning
from gradckpt._models.ranks import RankCheck, spell
from gradckpt._stats import Stats, stats

#: The method in which every way of turning checkpointing on ends; on an instance, its replacement.
ADAPTER = "_set_gradient_checkpointing"

#: On an enabled instance, its adapter, also if other code has wrapped the method since.
HELD = "_gradckpt_adapter"

#: The number of model calls without a compressed tensor before the warning.
PATIENCE = 2


#: What transformers' layers do there, and the ways out: the second leaves the model in eval mode.
_IN_EVAL_MODE = (
    "eval mode, where transformers does not checkpoint; call model.train(), or to stay in eval mode "
    'gradckpt.enable(model, modules="layer")'
)


@dataclasses.dataclass
class InactivityMonitor:
    """Counters of calls that should have compressed and did not; see :func:`after_forward`."""

    calls: int = 0
    eval_backwards: int = 0
    settled: bool = False
    before: Stats | None = None
    rank_check: RankCheck | None = None  # None: no training call yet


# The hooks are functions of the module, so that pickles and copies of the model carry them by name.
# Their state is in the adapter of the calling model. The replicas of DataParallel call them at the
# same time.


def before_forward(model: Any, args: Any) -> None:
    if model.training and not torch.compiler.is_compiling() and torch.is_grad_enabled():
        _check(model)
    monitor = _monitor_of(model)
    if monitor is not None:
        monitor.before = stats() if model.training and torch.is_grad_enabled() else None


def _check(model: Any) -> None:
    """Check in the first training calls for mistakes that would affect all of them."""
    adapter: Any = getattr(model, "__dict__", {}).get(HELD)
    monitor = getattr(adapter, "monitor", None)
    if not isinstance(monitor, InactivityMonitor) or (monitor.rank_check is not None and monitor.rank_check.settled()):
        return
    if adapter.function is None or not is_on(model):
        return
    if monitor.rank_check is None:
        adapter.check_alone(model)
        inactivity_warning.check_alone(f"this {type(model).__name__}")
        label = f"{type(model).__name__} in gradckpt.enable"
        monitor.rank_check = RankCheck(label, {label: [spell(adapter.active)]})
    monitor.rank_check.compare()


def after_forward(model: Any, args: Any, output: Any) -> None:
    monitor = _monitor_of(model)
    if monitor is None:
        return
    if not model.training:
        _follow(model, output)
        return
    before, monitor.before = monitor.before, None
    if before is None:
        return
    inactivity_warning.note_output(model, output)
    new = stats().since(before)
    if (
        new["compressed"]
        or new["compiled_tensors"]
        or (not new["regions"] and is_on(model) and inactivity_warning.is_compiled(model))
    ):
        monitor.settled = True
        return
    monitor.calls += 1
    if monitor.calls >= PATIENCE:
        monitor.settled = True
        inactivity_warning.say(*_why_inactive(model, vars(model)[HELD], new))


def _monitor_of(model: Any) -> InactivityMonitor | None:
    """Return the monitor, or None if nothing has to be proved any more."""
    if torch.compiler.is_compiling():
        return None
    adapter: Any = getattr(model, "__dict__", {}).get(HELD)
    monitor = getattr(adapter, "monitor", None)
    if not isinstance(monitor, InactivityMonitor) or monitor.settled or adapter.active is None:
        return None
    return monitor


def _follow(model: Any, output: Any) -> None:
    """Count a backward through the output of a model in eval mode as training.

    A forward alone is an evaluation.
    """
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else (output,)
    found = next((x for x in values if isinstance(x, torch.Tensor) and x.grad_fn is not None), None)
    if found is not None:
        found.register_hook(functools.partial(_on_eval_backward, weakref.ref(model)))


def _on_eval_backward(ref: weakref.ref[Any], grad: torch.Tensor) -> None:
    model = ref()
    monitor = _monitor_of(model)
    if model is None or monitor is None:
        return
    monitor.eval_backwards += 1
    if monitor.eval_backwards >= PATIENCE:
        monitor.settled = True
        name, codec = type(model).__name__, vars(model)[HELD].active.codec
        inactivity_warning.say(
            f"compress={codec!r} had no effect in {PATIENCE} backward passes: {name} is in {_IN_EVAL_MODE}",
        )


def _why_inactive(model: Any, adapter: Any, new: Stats) -> tuple[str, bool]:
    """Return the sentence, and whether the user can mend it."""
    reason, mend = _reason(model, adapter, new)
    name, codec = type(model).__name__, adapter.active.codec
    return f"compress={codec!r} had no effect in {PATIENCE} training calls of {name}: {reason}", mend


def _reason(model: Any, adapter: Any, new: Stats) -> tuple[str, bool]:
    if not is_on(model):
        return "checkpointing was turned off since enable(); call model.activation_checkpointing_enable()", True
    ours = list(adapter.modules(model))
    again = "call model.activation_checkpointing_enable() again"
    held = {id(m) for m in ours}
    others = (m for m in model.modules() if id(m) not in held and getattr(m, "gradient_checkpointing", False))
    other = next((f for m in others if (f := vars(m).get("_gradient_checkpointing_func")) is not None), None)
    if other is not None and (not ours or not new["regions"]):
        return f"the layers call {describe(other)}, which they got after enable(); {again}", True
    if ours and not any(m.training for m in ours if m.gradient_checkpointing):
        return f"its layers are in {_IN_EVAL_MODE}", True
    if not new["regions"]:
        instead = f"if they were replaced, {again}, else wrap them with gradckpt.checkpoint"
        return f"its layers never called checkpoint; {instead}", True
    if inactivity_warning.is_one_leaf(new):
        return "its one input is a leaf, which autograd keeps anyway", False
    if not new["eligible"] and inactivity_warning.are_frozen(adapter.layers(model)):
        return f"its layers {inactivity_warning.FROZEN}", False
    if not new["eligible"]:
        return "no input of a layer requires grad (frozen embeddings?); call model.enable_input_require_grads()", True
    reasons = [f"{reason} ({n})" if n < new["eligible"] else reason for reason, n in new["uncompressed"].items()]
    why = f"{', '.join(reasons) or 'unknown'} (min_numel={adapter.active.min_numel})"
    return f"all {new['eligible']} inputs stayed uncompressed: {why}", not inactivity_warning.are_small(new)


def is_on(model: Any) -> bool:
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def describe(thing: Any) -> str:
    thing = without_partials(thing)
    name = getattr(thing, "__qualname__", None)
    return f"{getattr(thing, '__module__', '?')}.{name}" if name else repr(thing)
