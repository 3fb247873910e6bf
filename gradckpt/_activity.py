"""Notice compression that saves nothing, in the first two steps, and say why at the user's line.

Nothing is looked at per call: the engine tells each backward (:func:`note_step`), of which two are looked at, and an
optimizer tells its steps, likewise (:func:`expect`). What the user can mend is a warning; the rest is one line at INFO.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradckpt import selective
from gradckpt._frames import outside
from gradckpt.config import CompressionConfig, warn_inactive
from gradckpt.policies import ATTENTION
from gradckpt.stats import Stats, compiled, stats

logger = logging.getLogger("gradckpt")

#: Steps that are looked at: in the first something may still be made.
PATIENCE = 2

#: As many originals alive are no accident: local variables of the user's hold one or two.
_MANY = 3

SMALL = "smaller than min_numel"

#: A tensor of as many bytes is not small, whatever min_numel says.
_LARGE = 8 * CompressionConfig().min_numel


class _Looks:
    """What was seen since the last ``stats.reset()``."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.steps = 0
        self.saved_steps: int | None = None  # of optimizers, since compress_saved() began; None: it did not
        self.said = False  # that nothing is compressed, or that it saves nothing


_looks = _Looks(stats.epoch)
_models: dict[int, weakref.ref[torch.nn.Module]] = {}  # that are checkpointed by us; a module need not be hashable
_collected: set[int] = set()  # those of them that returned the inputs of their layers


def _now() -> _Looks:
    global _looks
    if _looks.epoch != stats.epoch:
        _looks = _Looks(stats.epoch)
        selective.latest = None
    return _looks


def has_said() -> bool:
    """Return whether :func:`say` was called since the last ``stats.reset()``."""
    return _now().said


def say(reason: str, mend: bool = True) -> None:
    """Warn where the user can mend it; else one line in the log. Not again for the same steps."""
    _now().said = True
    if mend:
        warn_inactive(reason)
    else:
        logger.info("%s", reason)


# ---- what the engine tells ----


def note_step() -> None:
    """Called at each backward that meets a region, before the first of them runs again."""
    looks = _now()
    if looks.steps >= PATIENCE:
        return
    s = stats()
    if not s["regions_asked"] and selective.latest is None:
        return
    looks.steps += 1
    if looks.steps == 1 and s["regions_asked"]:
        logger.info("%s", s.headline())
    elif looks.steps == PATIENCE:
        _look(s, looks)


def _look(s: Stats, looks: _Looks) -> None:
    if s["regions_asked"] and not (s["compressed"] or s["compiled_tensors"] or looks.said):
        reason = inactive_reason(s)
        say(f"nothing was compressed by the second backward: {reason}", not are_small(s))
    if _keeps_nothing(selective.latest, s):
        say(f"a policy kept nothing in {PATIENCE} steps: {_why_nothing_kept(selective.latest)}")
    alive, restored = s["originals_alive"], s["recomputes"]
    if alive >= _MANY and 2 * alive > restored and not looks.said:
        say(
            f"compression costs memory: {alive} of {max(alive, restored)} inputs were still alive in backward; "
            f"{_why_alive()}"
        )


def note_saved() -> None:
    """Called where a block of compress_saved() ends."""
    looks = _now()
    if looks.saved_steps is None:
        looks.saved_steps = 0
        _listen()


def _look_at_saved(looks: _Looks) -> None:
    """An optimizer has stepped."""
    if looks.saved_steps is None or looks.saved_steps >= PATIENCE:
        return
    looks.saved_steps += 1
    s = stats()
    if looks.saved_steps == PATIENCE and s["kept"] and not (s["compressed"] or s["regions"] or looks.said):
        say(f"compress_saved() compressed nothing in {PATIENCE} steps: {inactive_reason(s)}", not are_small(s))


def are_small(s: Mapping[str, Any]) -> bool:
    """Return whether the tensors that were kept are too small to save anything."""
    small: int = s["kept"].get(SMALL, 0)
    bytes_kept: int = s["kept_bytes"]
    return small > 0 and small == max(s["kept"].values()) and bytes_kept < _LARGE * small


def inactive_reason(s: Mapping[str, Any]) -> str:
    """Return the likeliest reason why no tensor was compressed."""
    where = inside_torchs_checkpoint()
    if where is not None:
        return f"the regions run inside torch's own checkpoint ({where}); turn that one off"
    kept = s["kept"]
    if not kept:
        return "the regions got no tensors; pass activations as arguments (in tuples, lists or dicts), not in closures"
    reason, _ = max(kept.items(), key=lambda item: item[1])
    advice = (
        "compressing them would save nothing" if are_small(s) else _ADVICE.get(reason, "see gradckpt.stats()['kept']")
    )
    return f"most inputs were kept because: {reason} ({advice})"


_ADVICE = {
    "does not require grad": "frozen embeddings? call model.enable_input_require_grads()",
    "leaf": "leaves stay alive anyway",
    SMALL: 'lower it with compress={"codec": ..., "min_numel": ...}',
    "float64, which no codec takes": "train in float32 or bfloat16, or pass compress=None",
    "dtype the codec does not take": 'gradckpt.codecs.info(codec)["dtypes"] lists those that it takes',
    "values the codec cannot hold": "choose a codec that rounds, as int8",
    "device without kernels": "`python -m gradckpt` says what this build has",
    "backward needs it exactly": 'a codec that loses nothing, as "lossless", compresses it',
    "tensor subclass": "only plain tensors are compressed",
}


# ---- policies ----


def _keeps_nothing(policy: Any, s: Stats) -> bool:
    if policy is None or s["policy_outputs"]:
        return False
    return not isinstance(policy, selective.Policy) or any(
        rule.keep == selective.SAVE for rule in policy.rules.values()
    )


def _why_nothing_kept(policy: Any) -> str:
    if not isinstance(policy, selective.Policy):
        return "the function answered to save of no operator that ran"
    ops = [rule.op for rule in policy.rules.values() if rule.keep == selective.SAVE]
    if all(str(op).partition(".")[2] in ATTENTION for op in ops):
        kinds = {
            f"{type(m).__name__} has {kind!r}" for m in _alive() if (kind := _attention_of(m)) not in (None, "sdpa")
        }
        how = f" ({', '.join(sorted(kinds))})" if kinds else ""
        return (
            f"attention ran as other operators{how}; use torch's scaled_dot_product_attention "
            "(attn_implementation='sdpa') or save_matmuls"
        )
    names = ", ".join(str(op) for op in ops[:3]) + (", ..." if len(ops) > 3 else "")
    often = " often enough" if any(rule.every > 1 for rule in policy.rules.values()) else ""
    return f"the regions do not call {names}{often}; name operators that they call"


def _attention_of(model: Any) -> str | None:
    kind = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return kind if isinstance(kind, str) else None


# ---- originals that stay alive ----


def _why_alive() -> str:
    held = [each for model in _alive() for each in _holders(model)]
    if held:
        return f"{held[0]} keeps them{f', and {len(held) - 1} more such' if len(held) > 1 else ''}; turn that off"
    return "a list, an attribute or another checkpoint keeps them; let them go before backward"


def _holders(model: torch.nn.Module) -> Iterator[str]:
    config = getattr(model, "config", None)
    if getattr(config, "output_hidden_states", False) or id(model) in _collected:
        yield f"output_hidden_states=True of {type(model).__name__}"
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            function = getattr(hook, "func", hook)
            if str(getattr(function, "__module__", "")).partition(".")[0] not in ("gradckpt", "torch", "transformers"):
                what = getattr(function, "__qualname__", type(function).__name__)
                yield f"the forward hook {what} on {name or type(model).__name__!r}"


def note_output(model: torch.nn.Module, output: Any) -> None:
    """Remember that the model returned the inputs of its layers."""
    if getattr(output, "hidden_states", None) is not None:
        _collected.add(id(model))


# ---- torch's own checkpoint around ours ----


def inside_torchs_checkpoint() -> str | None:
    """Return the user's line that calls torch's checkpoint, inside which this runs; None: not inside it."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == torch_checkpoint.__file__:
            user = outside(frame)
            return f"{user.f_code.co_filename}:{user.f_lineno}" if user is not None else "in autograd"
        frame = frame.f_back
    return None


def check_alone(what: str) -> None:
    """In the first call of a checkpointed module: warn inside torch's own checkpoint."""
    where = inside_torchs_checkpoint()
    if where is not None and not _now().said:
        say(
            f"{what} runs inside torch's own checkpoint ({where}), which keeps its input and runs it a third time; "
            "turn one of the two off"
        )


# ---- what torch.compile made ----


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether torch.compile has the module, or something in it: a graph's regions are not counted."""
    return any(each._compiled_call_impl is not None or "_orig_mod" in each._modules for each in model.modules())


# ---- what an optimizer tells ----


def register(model: torch.nn.Module) -> None:
    """Look at this model when causes are sought."""
    key = id(model)
    _models[key] = weakref.ref(model, lambda _: _forget(key))


def _forget(key: int) -> None:
    _models.pop(key, None)
    _collected.discard(key)


def _alive() -> list[torch.nn.Module]:
    return [model for ref in list(_models.values()) if (model := ref()) is not None]


class _Expectation:
    """Of one model: by the second step of an optimizer of it, a region has run."""

    def __init__(self, model: torch.nn.Module, why_not: Callable[[Any], str | None]) -> None:
        self.model = weakref.ref(model)
        self.why_not = why_not
        self.steps = 0

    def met(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count the step if it is one of this model; True: nothing more is expected."""
        model = self.model()
        if model is None:
            return True
        mine = set(map(id, model.parameters()))
        self.steps += any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        if self.steps < PATIENCE:
            return False
        reason = None if compiled.ever else self.why_not(model)
        if reason is not None:
            say(reason)
        return True


_expectations: list[_Expectation] = []


def _stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    _look_at_saved(_now())
    if _expectations:
        waiting = list(_expectations)
        _expectations.clear()  # before one of them raises
        _expectations.extend(each for each in waiting if not each.met(optimizer))


@functools.cache
def _listen() -> None:
    """Once: a hook that goes away breaks torch's iteration over the others."""
    register_optimizer_step_post_hook(_stepped)


def expect(model: torch.nn.Module, why_not: Callable[[Any], str | None]) -> None:
    """Ask ``why_not(model)``, after the second step of an optimizer of it, why no region ran; None: one did."""
    _listen()
    _expectations.append(_Expectation(model, why_not))
