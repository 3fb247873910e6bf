"""Notice compression that saves nothing, in the first two steps, and give the reason at the user's
line.

Nothing is checked per call. The engine reports each backward (:func:`note_step`), and an optimizer
its steps (:func:`expect`); two of each are checked. A cause that the user can fix is a warning;
anything else is one line at INFO.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradckpt._C import OP_SAVE
from gradckpt._compression import CompressionConfig, warn_inactive
from gradckpt._engine import ill_conditioned, selective
from gradckpt._engine.op_mixing import ran_again
from gradckpt._engine.op_policy import Policy
from gradckpt._engine.user_lines import outside, outwards
from gradckpt._stats import Stats, stats
from gradckpt.policies import ATTENTION

logger = logging.getLogger("gradckpt")

#: The number of steps that are checked: the first one may still be setting up.
PATIENCE = 2

#: This many living originals are not accidental: local variables of the user hold one or two.
_MANY = 3

SMALL = "smaller than min_numel"
LEAF = "leaf"
NO_GRAD = "does not require grad"

#: A tensor of this many bytes is not small, regardless of min_numel.
_LARGE = 8 * CompressionConfig().min_numel


class _Looks:
    """The observations since the last ``stats.reset()``."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.steps = 0
        self.saved_steps: int | None = None  # of optimizers, since compress_saved() began; None: it did not
        self.said = False  # whether a warning was given
        self.muted = False


_looks = _Looks(stats.epoch)
_models: dict[int, weakref.ref[torch.nn.Module]] = {}  # those that we checkpoint, by id: a module need not be hashable
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


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Report nothing about the steps in the block, and do not count them as steps."""
    global _looks
    looks, waiting, latest = _now(), list(_expectations), selective.latest
    _looks = _Looks(stats.epoch)
    _looks.steps, _looks.muted = PATIENCE, True
    try:
        with ill_conditioned.reported():
            yield
    finally:
        _expectations[:] = waiting
        if looks.epoch == stats.epoch:
            _looks, selective.latest = looks, latest


def is_unobserved() -> bool:
    """Return whether the steps now are such."""
    return _now().muted


def say(reason: str, mend: bool = True) -> None:
    """Warn if the user can mend it, else log one line; either way, not again for the same steps."""
    looks = _now()
    looks.said = True
    if looks.muted:
        return
    if mend:
        warn_inactive(reason)
    else:
        logger.info("gradckpt: %s", reason)


# ---- reports of the engine ----


def note_step(eligible: int) -> None:
    """Look at a backward that meets a region, before the first of them runs again;
    ``eligible``: regions so far."""
    if ill_conditioned.pending:
        ill_conditioned.read_pending()
    looks = _now()  # first: it forgets the policy of before a reset
    if looks.steps >= PATIENCE or (not eligible and selective.latest is None):
        return
    s = stats()
    looks.steps += 1
    if looks.steps == 1 and s["regions_eligible"]:
        logger.info("gradckpt: %s", s.headline())
    elif looks.steps == PATIENCE:
        _look(s, looks)


def _look(s: Stats, looks: _Looks) -> None:
    if s["regions_eligible"] and not (s["compressed"] or s["compiled_tensors"] or looks.said):
        reason = inactive_reason(s)
        say(f"nothing was compressed by the second backward: {reason}", not (are_small(s) or is_one_leaf(s)))
    if _keeps_nothing(selective.latest, s):
        say(f"a policy kept nothing in {PATIENCE} steps: {_why_nothing_kept(selective.latest)}")
    _look_at_places(s)
    alive, restored = s["originals_alive"], s["recomputes"]
    if alive >= _MANY and 2 * alive > restored and not looks.said:
        holder, mend = _why_alive()
        say(
            f"compression costs memory: {holder} keeps {alive} of {max(alive, restored)} inputs alive until backward; "
            f"{mend}"
        )


def _look_at_places(s: Stats) -> None:
    places = s["offload"]
    moved = sum(places.get(name, 0) for name in ("puts", "kept", "misses_out"))
    if places.get("small") and not moved:
        say(f"offload= moved nothing in {PATIENCE} steps: all payloads are smaller than its min_bytes; lower that")


def note_saved() -> None:
    """Note the end of a compress_saved() block."""
    looks = _now()
    if looks.saved_steps is None:
        looks.saved_steps = 0
        _listen()


def _look_at_saved(looks: _Looks) -> None:
    """Check an optimizer step under compress_saved()."""
    if looks.saved_steps is None or looks.saved_steps >= PATIENCE:
        return
    looks.saved_steps += 1
    s = stats()
    if looks.saved_steps == PATIENCE and s["uncompressed"] and not (s["compressed"] or s["regions"] or looks.said):
        say(f"compress_saved() compressed nothing in {PATIENCE} steps: {inactive_reason(s)}", not are_small(s))
    if looks.saved_steps == PATIENCE and not s["regions"]:
        _look_at_places(s)


def is_one_leaf(s: Mapping[str, Any]) -> bool:
    """Return whether the only input is a leaf, as of a single layer behind frozen embeddings."""
    return LEAF in s["uncompressed"] and not s["eligible"] and s["regions"] <= PATIENCE


def are_small(s: Mapping[str, Any]) -> bool:
    """Return whether the uncompressed tensors are too small to save anything."""
    small: int = s["uncompressed"].get(SMALL, 0)
    bytes_kept: int = s["uncompressed_bytes"]
    return small > 0 and small == max(s["uncompressed"].values()) and bytes_kept < _LARGE * small


def inactive_reason(s: Mapping[str, Any]) -> str:
    """Return the likeliest reason why no tensor was compressed."""
    where = inside_torchs_checkpoint()
    if where is not None:
        return f"the regions run inside torch's own checkpoint ({where}); turn that off"
    kept = s["uncompressed"]
    if not kept:
        return "the regions got no tensors; pass activations as arguments (in tuples, lists or dicts), not in closures"
    saved = not s["regions"]  # all of them are saved tensors
    reason = LEAF if LEAF in kept and not (saved or s["eligible"]) else max(kept, key=kept.__getitem__)
    advice = (
        "compressing them would save nothing"
        if are_small(s)
        else _ADVICE.get(reason, "see gradckpt.stats()['uncompressed']")
    )
    if saved and reason == NO_GRAD:
        advice += "; code compiled by itself saves only such: compile the block with it"
    return f"most {'tensors' if saved else 'inputs'} were not compressed: {reason} ({advice})"


_ADVICE = {
    NO_GRAD: "frozen embeddings? call requires_grad_() on their output, "
    "in transformers model.enable_input_require_grads()",
    LEAF: "autograd keeps leaves anyway",
    SMALL: 'lower it with compress={"codec": ..., "min_numel": ...}',
    "float64, which no codec takes": "train in float32 or bfloat16, or pass compress=None",
    "dtype the codec does not take": 'gradckpt.codecs.info(codec)["dtypes"] lists those that it takes',
    "values the codec cannot hold": "choose a codec that rounds, as int8",
    "no flag left to report overflow": "capture fewer regions, or choose a codec that rounds, as int8",
    "too few zeros for the codec": 'choose another codec, as "lossless"',
    "not offloaded": "print(gradckpt.stats()['offload']) has the counts; raise host_budget or ring, or lower min_bytes",
    "device without kernels": "`gradckpt doctor` says what this build has",
    "backward needs it exactly": 'a codec that loses nothing, as "lossless", compresses it',
    "tensor subclass": "only plain tensors are compressed",
}


# ---- policies ----


def _keeps_nothing(policy: Any, s: Stats) -> bool:
    if policy is None or s["policy_outputs"]:
        return False
    if not isinstance(policy, Policy):
        return not ran_again  # of which a warning has said why
    return any(rule.keep == OP_SAVE for rule in policy.rules.values()) and ran_again.isdisjoint(policy.rules)


def _why_nothing_kept(policy: Any) -> str:
    if not isinstance(policy, Policy):
        return "the function saved none of the operators that ran; return save() for one of them"
    ops = [rule.op for rule in policy.rules.values() if rule.keep == OP_SAVE]
    if all(op in ATTENTION for op in ops):
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


def _why_alive() -> tuple[str, str]:
    held = [each for model in _alive() for each in _holders(model)]
    if held:
        return held[0], f"turn that off{f', and {len(held) - 1} more such' if len(held) > 1 else ''}"
    return "a list, an attribute or another checkpoint", "free them before backward"


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
    """Note whether the model returned the inputs of its layers."""
    if getattr(output, "hidden_states", None) is not None:
        _collected.add(id(model))


# ---- torch's own checkpoint around ours ----


def are_frozen(modules: Iterable[torch.nn.Module]) -> bool:
    """Return whether a backward needs nothing of these modules for their own parameters."""
    return not any(parameter.requires_grad for module in modules for parameter in module.parameters())


#: What follows from it where their inputs do not require grad either.
FROZEN = "are frozen, and so is all before them, so backward needs nothing of them"


def inside_torchs_checkpoint() -> str | None:
    """Return the user's line that calls torch's checkpoint, if this runs inside it, else None."""
    for frame in outwards(sys._getframe(1)):
        if frame.f_code.co_filename == torch_checkpoint.__file__:
            user = outside(frame)
            return f"{user.f_code.co_filename}:{user.f_lineno}" if user is not None else "in autograd"
    return None


def check_alone(what: str) -> None:
    """Warn if this first call of a checkpointed module runs inside torch's own checkpoint."""
    where = inside_torchs_checkpoint()
    if where is not None and not _now().said:
        say(
            f"{what} runs inside torch's own checkpoint ({where}), which keeps its input and runs it a third time; "
            "turn one off"
        )


# ---- compiled modules ----


def is_compiled(model: torch.nn.Module) -> bool:
    """Return whether torch.compile has the module or a part of it: a graph's regions are not
    counted.
    """
    return any(each._compiled_call_impl is not None or "_orig_mod" in each._modules for each in model.modules())


# ---- reports of an optimizer ----


def register(model: torch.nn.Module) -> None:
    """Include this model in searches for causes."""
    key = id(model)
    _models[key] = weakref.ref(model, lambda _: _forget(key))


def _forget(key: int) -> None:
    _models.pop(key, None)
    _collected.discard(key)


def _alive() -> list[torch.nn.Module]:
    return [model for ref in list(_models.values()) if (model := ref()) is not None]


class _Expectation:
    """The expectation that by the second optimizer step of a model, a region has run. ``always``:
    that one runs in each step; two in a row without are said.
    """

    def __init__(self, model: torch.nn.Module, why_not: Callable[[Any], tuple[str, bool] | None], always: bool) -> None:
        self.model = weakref.ref(model)
        self.why_not = why_not
        self.always = always
        self.steps = 0

    def met(self, optimizer: torch.optim.Optimizer) -> bool:
        """Count the step if it is one of this model; return whether nothing more is expected."""
        model = self.model()
        if model is None:
            return True
        if self.always and self.why_not(model) is None:
            self.steps = 0
            return False
        mine = set(map(id, model.parameters()))
        self.steps += any(id(p) in mine for group in optimizer.param_groups for p in group["params"])
        if self.steps < PATIENCE:
            return False
        reason = self.why_not(model)
        if reason is not None:
            say(*reason)
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
    """Add the hook once: removing it would break torch's iteration over the others."""
    register_optimizer_step_post_hook(_stepped)


def expect(model: torch.nn.Module, why_not: Callable[[Any], tuple[str, bool] | None], *, always: bool = False) -> None:
    """Ask ``why_not(model)`` after the second optimizer step of the model why no region ran.

    It returns the arguments of :func:`say`, or None if one did. ``always``: ask after each step, at
    next to no cost, in place of an earlier such question about the model.
    """
    _listen()
    if always:
        _expectations[:] = [each for each in _expectations if not (each.always and each.model() is model)]
    _expectations.append(_Expectation(model, why_not, always))
