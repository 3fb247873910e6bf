"""Measure what compression does to the gradients of a training step: :func:`gradient_error`."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, Union

import torch
from torch import Tensor
from torch.nn import Module

from gradckpt import codecs
from gradckpt._compression import CompressionConfig
from gradckpt._engine import ill_conditioned
from gradckpt._exact_gradients import Comparison, ExactGradients
from gradckpt._gradient_report import BF16, FLOORS, SAMPLES, Floor, GradientError, GradientErrors
from gradckpt._models import inactivity_warning
from gradckpt._models.switch import Modules, is_enabled
from gradckpt._patching import patched
from gradckpt._settings import EXACT, Candidate, Setting, setting_of
from gradckpt._stats import Stats, stats, uncounted
from gradckpt._training_state import TrainingState
from gradckpt._training_step import (
    autocast_on,
    halves_of,
    refuse_writes,
    run_alone,
    step_of_batch,
    step_of_function,
    tensors_of_batch,
)
from gradckpt._trial_process import apart

T = TypeVar("T")

#: One candidate, a list of them, or a mapping of names to them.
Candidates = Union[None, Candidate, Iterable[Candidate], Mapping[str, Candidate]]

DEFAULT = ("int8", "fp8", "int6", "int4")

#: A smaller change under autocast is no change of precision.
_SAME = 1e-6


def gradient_error(
    model: Module, batch_or_step: Any, candidates: Candidates = None, *, modules: Modules = None
) -> GradientErrors:
    """Measure what compression does to the gradients of one training step of a model.

    The step runs once with exact recomputing and once for each candidate, always from the same
    state of the random generators and buffers. Within ``torch.autocast`` all of these run under
    it, as in training. To compare with, it also runs once under bf16 autocast (within autocast:
    without it) and once in two halves: what precision and the choice of samples change. Afterwards
    gradients, buffers, generators, counters and the model's checkpointing are as before.

    Args:
        model: A module in training mode, enabled or not; one whose forward calls torch's checkpoint
            itself is measured under :class:`gradckpt.patched`, unless ``modules`` is given.
            Compiled code runs eagerly.
        batch_or_step: A dict, tuple or tensor, for ``model(**batch)``, ``model(*batch)`` or
            ``model(batch)``; the result is or has a scalar loss. Or a function without arguments
            that runs forward and backward (autocast, ``GradScaler`` and several batches are its
            own), without an optimizer's step; a loss that it returns before any backward is
            differentiated.
        candidates: What to try, or several, or a mapping from names to them: a codec's name, a
            :class:`gradckpt.CompressionConfig`, a dict of keywords of :func:`gradckpt.enable`,
            ``"torch"``, ``"selective int8"`` or ``"compress_saved int8"``. ``None``: int8, fp8,
            int6 and int4.
        modules: As for :func:`gradckpt.enable`. ``None``: the modules that are enabled now, or
            those that ``enable`` chooses.

    Returns:
        An object to ``print``: for each candidate ``.total``, the relative L2 error over all
        parameters, ``.cosine``, ``.worst`` parameters and ``.loss_difference``; ``.floors``;
        ``.precision``, in which all of them are computed; ``.verdict``, one sentence;
        ``.to_dict()``.

    Raises:
        ValueError: There is no scalar loss, gradient or candidate; the model is in eval mode; the
            forward compresses by itself; the step changes parameters or its batch; as
            :func:`gradckpt.enable`.
        TypeError: An argument has another type.
    """
    if not isinstance(model, Module):
        raise TypeError(f"gradckpt: gradient_error() takes a torch.nn.Module, not {type(model).__name__}")
    chosen = _settings_of(candidates)
    _check(model, chosen)
    return run_alone(model, lambda: _measure(Trial(model, batch_or_step, modules), chosen))


def _settings_of(candidates: Any) -> dict[str, Setting]:
    if candidates is None:
        candidates = DEFAULT
    elif isinstance(candidates, (str, Setting, CompressionConfig)):
        candidates = (candidates,)
    if isinstance(candidates, Mapping):
        found = {str(name): setting_of(each) for name, each in candidates.items()}
    else:
        found = {setting.name: setting for setting in map(setting_of, candidates)}
    if not found:
        raise ValueError("gradckpt: gradient_error() got no candidates; leave the argument out for the usual ones")
    return found


def _check(model: Module, chosen: Mapping[str, Setting]) -> None:
    name = type(model).__name__
    if any(torch.nn.parameter.is_lazy(p) for p in model.parameters()):
        raise ValueError(f"gradckpt: parameters of {name} have no values yet; run the model once")
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"gradckpt: no parameter of {name} requires grad; call requires_grad_() on some")
    if not model.training and any(setting.way == "enable" for setting in chosen.values()):
        raise ValueError(f"gradckpt: {name} is in eval mode, where nothing is checkpointed; call model.train()")


# ---- runs ----


class Trial:
    """A step of a model that can be repeated in other settings."""

    def __init__(self, model: Module, batch_or_step: Any, modules: Modules) -> None:
        self.model = model
        self.modules = modules
        self.batch = batch_or_step
        self.has_batch = isinstance(batch_or_step, (Mapping, tuple, list, Tensor))
        if not self.has_batch and not callable(batch_or_step):
            raise TypeError(
                "gradckpt: gradient_error() takes a batch (dict, tuple or tensor) or a function without arguments, not "
                f"{type(batch_or_step).__name__}"
            )
        self.step = step_of_batch(model, batch_or_step) if self.has_batch else step_of_function(model, batch_or_step)
        self.by_patch = False  # the forward calls torch's checkpoint itself
        self.exact = EXACT  # how the step runs without an error
        self.precision = ""  # of the exact run
        self.amplified: list[str] = []  # what was found to amplify the error of the last run
        inputs = tensors_of_batch(batch_or_step) if self.has_batch else ()
        self._inputs = [(x, x._version) for x in inputs if not x.is_inference()]
        self._leaves = [x for x in (*model.parameters(), *inputs) if x.is_leaf]

    def apart(self, function: Callable[[], T]) -> T:
        """Return what a function does with runs of which no trace remains."""
        with uncounted():
            return apart(function, lambda: self._before)

    @functools.cached_property
    def _before(self) -> TrainingState:
        return TrainingState(self.model, self.batch)

    def run(
        self, setting: Setting, step: Callable[[], torch.Tensor | None] | None = None
    ) -> tuple[float | None, Stats, patched]:
        """Run a step, whose gradients then are in the parameters.

        Return the loss, the counters and the patch of torch's checkpoint.
        """
        for leaf in self._leaves:
            leaf.grad = None
        torch.clear_autocast_cache()  # of an earlier run within the same autocast
        codec, policy = None, None
        if self.by_patch and setting.way == "enable":
            codec, policy = self._for_patch(setting)
            setting = AS_IT_IS
        patch = patched(codec, policy=policy)
        before = stats()
        active = contextlib.nullcontext() if setting == AS_IT_IS else setting.active(self.model, self.modules)
        with (
            ill_conditioned.reported() as self.amplified,
            refuse_writes(self.model.parameters()),
            inactivity_warning.unobserved(),
            patch,
            active,
        ):
            loss = (step or self.step)()
        if any(x._version != version for x, version in self._inputs):
            raise ValueError(
                "gradckpt: the step changed its batch in place, so no run is like another; let forward copy it first"
            )
        return None if loss is None else float(loss), stats().since(before), patch

    def _for_patch(self, setting: Setting) -> tuple[Any, Any]:
        others = setting.options.keys() - {"compress", "policy"}
        if others:
            raise ValueError(
                f"gradckpt: {sorted(others)[0]} needs enable(), and the forward calls torch's checkpoint itself; pass "
                "modules="
            )
        return setting.options.get("compress", "int8" if setting.compresses else None), setting.options.get("policy")

    def run_exactly(self, chosen: Mapping[str, Setting]) -> float | None:
        """Run the step with exact recomputing, and find out how candidates are applied.

        Where ``enable`` cannot be used, the model runs as it is, also with torch's own checkpoint.
        """
        unusable = None
        try:
            with EXACT.active(self.model, self.modules):
                pass
        except ValueError as error:
            if self.modules is not None:
                raise
            self.exact, unusable = AS_IT_IS, error
        with self._noting_precision():
            loss, counted, patch = self.run(self.exact)
        if self.modules is None and not is_enabled(self.model):
            self.by_patch = patch.stats()["calls"] > 0
        if unusable is not None and not self.by_patch and any(each.recomputes for each in chosen.values()):
            raise unusable
        lossy = [name for name in counted["codecs"] if codecs.info(name)["max_error"]]
        if lossy:
            raise ValueError(
                f"gradckpt: the forward compresses in {lossy[0]} by itself, so no run is exact; pass compress=None "
                "there"
            )
        return loss

    @property
    def trained(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @contextlib.contextmanager
    def _noting_precision(self) -> Iterator[None]:
        """Note the dtypes of the parameters, and the autocast of the model's first call."""
        dtypes = _dtypes(self.trained)
        kind = self.trained[0].device.type
        casts: list[torch.dtype | None] = []
        handle = self.model.register_forward_pre_hook(lambda *_: casts.append(autocast_on(kind)))
        try:
            yield
        finally:
            handle.remove()
            to = (casts or [autocast_on(kind)])[0]
            autocast = "no autocast" if to is None else f"autocast to {str(to).removeprefix('torch.')}"
            self.precision = f"parameters in {' and '.join(dtypes)}, {autocast}"


def _dtypes(tensors: Iterable[Tensor]) -> list[str]:
    return sorted({str(x.dtype).removeprefix("torch.") for x in tensors})


#: The model as it is.
AS_IT_IS = Setting("as it is", "", "none")


def _measure(trial: Trial, chosen: Mapping[str, Setting]) -> GradientErrors:
    name = type(trial.model).__name__
    loss, trial.exact, trial.by_patch, trial.precision, exact = trial.apart(
        lambda: (trial.run_exactly(chosen), trial.exact, trial.by_patch, trial.precision, ExactGradients(trial.model))
    )
    if exact.not_finite:
        problem = (
            f"The exact gradient of {exact.not_finite} is infinite or NaN, so nothing was compared; use another batch "
            "or a lower loss scale."
        )
        return GradientErrors(name, loss, (), (), problem, trial.precision)
    floors = (trial.apart(lambda: _bf16_floor(trial, exact)), _halves_floor(trial, exact, loss))
    errors = tuple(
        trial.apart(functools.partial(_error, trial, exact, loss, name, setting)) for name, setting in chosen.items()
    )
    return GradientErrors(name, loss, errors, floors, precision=trial.precision)


def _error(trial: Trial, exact: ExactGradients, exact_loss: float | None, name: str, setting: Setting) -> GradientError:
    loss, counted, patch = trial.run(setting)
    difference = None if loss is None or exact_loss is None else loss - exact_loss
    found, amplified = exact.compare(trial.model), tuple(trial.amplified)
    note = _inactive(trial, setting, counted, patch)
    if note:
        return GradientError(name, setting.line, None, None, (), difference, note)
    if found.not_finite:
        note = f"makes the gradient of {found.not_finite} infinite or NaN"
        return GradientError(name, setting.line, None, None, (), difference, note, amplified)
    if setting.options.get("policy") is not None and not counted["policy_outputs"]:
        note = "(the policy kept nothing)"
    return GradientError(name, setting.line, found.total, found.cosine, found.worst, difference, note, amplified)


def _inactive(trial: Trial, setting: Setting, counted: Stats, patch: patched) -> str:
    """Return why a setting that should compress did not; "" if it did."""
    if not setting.compresses or counted["encoded"]:
        return ""
    if trial.by_patch and setting.way == "enable":
        reason = patch.inactive_reason or "unknown"
    elif setting.recomputes and not counted["regions"]:
        reason = "none of the checkpointed modules was called"
    else:
        reason = inactivity_warning.inactive_reason(counted)
    return f"compressed nothing: {reason}"


class StepErrors:
    """The error of a step's gradients in one setting after another, beside exact recomputing of
    ``modules``, as for :func:`gradckpt.enable`.

    Raises:
        ValueError: As :func:`gradient_error`.
    """

    def __init__(self, model: Module, batch_or_step: Any, modules: Modules) -> None:
        self._trial = Trial(model, batch_or_step, modules)
        self._exact: ExactGradients | None = None

    def _run_exactly(self) -> ExactGradients:
        self._trial.run(EXACT)
        return ExactGradients(self._trial.model)

    def of(self, setting: Setting) -> float:
        """Return the relative L2 error over all parameters, to six digits.

        It is infinite where a gradient is not finite.
        """
        trial = self._trial
        if self._exact is None:
            self._exact = trial.apart(self._run_exactly)
        exact = self._exact

        def run() -> Comparison:
            trial.run(setting)
            return exact.compare(trial.model)

        found = trial.apart(run)
        return math.inf if found.not_finite else float(f"{found.total:.6g}")  # threads sum in other orders


# ---- floors ----


def _bf16_floor(trial: Trial, exact: ExactGradients) -> Floor:
    """Return what bf16 autocast changes, if the step does not compute in 16 bits already; within an
    autocast, what that changes.
    """
    what, already = FLOORS[BF16], "the step computes in 16 bits already"
    dtypes, kind = _dtypes(trial.trained), trial.trained[0].device.type
    if "float32" not in dtypes:
        return Floor(BF16, what, None, f"the parameters are {dtypes[0]}")
    if not torch.amp.is_autocast_available(kind):
        return Floor(BF16, what, None, f"{kind} has no autocast")
    to = autocast_on(kind)
    if to is not None:
        what = f"computing in {str(to).removeprefix('torch.').replace('bfloat16', 'bf16').replace('float16', 'fp16')}"
    try:
        # The cache would keep a copy of each parameter until the end of the block.
        with torch.autocast(kind, to or torch.bfloat16, enabled=to is None, cache_enabled=False):
            trial.run(trial.exact)
    except Exception as error:
        return Floor(BF16, what, None, _first_line(error))
    found = exact.compare(trial.model)
    if found.not_finite:
        return Floor(BF16, what, None, f"it makes the gradient of {found.not_finite} infinite or NaN")
    return Floor(BF16, what, found.total) if found.total > _SAME else Floor(BF16, what, None, already)


def _halves_floor(trial: Trial, exact: ExactGradients, loss: float | None) -> Floor:
    """Return how far the gradients of each half of the batch are from those of the whole."""
    if not trial.has_batch:
        return Floor(SAMPLES, FLOORS[SAMPLES], None, "a function has no batch to halve")
    halves = halves_of(trial.batch)
    if isinstance(halves, str):
        return Floor(SAMPLES, FLOORS[SAMPLES], None, halves)
    name, parts = halves
    losses, found = [], []
    for part in parts:
        try:
            value, difference = trial.apart(functools.partial(_run_half, trial, exact, part))
        except Exception as error:
            return Floor(name, FLOORS[name], None, f"half of the batch: {_first_line(error)}")
        losses.append(value)
        found.append(difference)
    if any(each.not_finite for each in found):
        return Floor(name, FLOORS[name], None, "half of the batch makes gradients infinite or NaN")
    total = sum(value or 0.0 for value in losses)
    whole = loss or 0.0
    factor = 2.0 if abs(total - whole) < abs(total / 2 - whole) else 1.0  # the loss is a sum, or a mean
    return Floor(name, FLOORS[name], sum(each.scaled(factor) for each in found) / len(found))


def _run_half(trial: Trial, exact: ExactGradients, part: Any) -> tuple[float | None, Comparison]:
    loss, _, _ = trial.run(trial.exact, step_of_batch(trial.model, part))
    return loss, exact.compare(trial.model)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
