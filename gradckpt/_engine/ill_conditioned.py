"""Notice operators whose derivative a codec makes much worse: log, 1 / x or sqrt of values near
zero, acos near one.

The error of a codec is relative to the largest values of a group. Beside a pole, or an edge of the
domain, a small value decides, and its error may exceed it. C takes samples in the first region of
each kind (csrc/engine/region/saved_samples.c): of what the forward saves, and of what the recompute
saves in its place. The derivatives at both are compared here, beside those at the same values
rounded to bf16. No code of the user runs for that.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradckpt import _C, codecs
from gradckpt._compression import warn_user
from gradckpt._engine import torch_private as private
from gradckpt._engine.arguments import name_of
from gradckpt._engine.trial_calls import graph_behind, is_capturing
from gradckpt._engine.user_lines import ENGINES, outside

logger = logging.getLogger("gradckpt")

T = TypeVar("T")

#: The number of values in a sample.
_VALUES = 4096

#: Where a sample has the least and the largest value.
_ENDS = 2

#: The number of saved tensors of a region of which samples are taken.
_SLOTS = 1000

#: A pole is reached where the ninth decile of the values' distances from it is so many times the
#: least of them. In tests/helpers/pole_functions.py that is 13 and more where an operator is to be
#: named, and at most 4 for others that begin a region.
REACH = 8.0

#: Of 64 parts of the values, by their distance from the pole, the one with the largest relative
#: errors of distances has so many times those of all but the nearest quarter, or errors as large as
#: the distances. Behind exp, sigmoid or softmax in the same region it has not: they make errors
#: relative to each result, which cancel with their derivatives.
GROWTH = 4.0
_PARTS = 64
_WHOLE = 0.8

#: An operator is named for an error of its derivative above this, above so many times bf16's, and
#: above so many times the ordinary error of the codec: with less, nothing is amplified.
FLOOR = 0.01
TIMES_BF16 = 3.0
TIMES_CODEC = 2.0

#: An error above this is too large whatever bf16's is, and bf16's own is then no help.
FAILS = 0.3

Elementwise = Callable[[Tensor], Tensor]


class Pole(NamedTuple):
    """An operator with a pole or an edge: the tensor that its node saves, and functions of that."""

    name: str
    argument: str
    derivative: Elementwise  # up to a factor
    distance: Elementwise  # from the pole or edge, up to a factor


def _at_zero(name: str, argument: str, derivative: Elementwise = torch.reciprocal) -> Pole:
    return Pole(name, argument, derivative, torch.abs)


def _at_one(name: str, derivative: Elementwise) -> Pole:
    return Pole(name, "self", derivative, lambda x: 1 - x.abs())


def _at_minus_one(name: str, argument: str) -> Pole:
    return Pole(name, argument, lambda x: (1 + x).reciprocal(), lambda x: 1 + x)


def _at_both(name: str) -> Pole:
    return Pole(name, "self", lambda x: (x * (1 - x)).reciprocal(), lambda x: x * (1 - x))


def _arc(x: Tensor) -> Tensor:
    return (1 - x * x).rsqrt()


#: By torch's name of the node. csrc/engine/saved/saved_node.c lists the same nodes ("poles"), and a
#: test compares the two.
POLES: dict[str, Pole] = {
    "LogBackward0": _at_zero("log", "self"),
    "Log2Backward0": _at_zero("log2", "self"),
    "Log10Backward0": _at_zero("log10", "self"),
    "Log1PBackward0": _at_minus_one("log1p", "self"),
    "LogitBackward0": _at_both("logit"),
    "BinaryCrossEntropyBackward0": _at_both("binary_cross_entropy"),
    "SpecialEntrBackward0": _at_zero("entr", "self", lambda x: x.log() + 1),
    "XlogyBackward0": _at_zero("xlogy", "other"),
    "XlogyBackward1": _at_zero("xlogy", "other"),
    "SpecialXlog1PyBackward0": _at_minus_one("xlog1py", "other"),
    "SpecialXlog1PyBackward1": _at_minus_one("xlog1py", "other"),
    "SqrtBackward0": Pole("sqrt", "result", torch.reciprocal, torch.square),
    "RsqrtBackward0": Pole("rsqrt", "result", lambda y: y**3, lambda y: y**-2),
    "ReciprocalBackward0": Pole("reciprocal", "result", torch.square, lambda y: y.abs().reciprocal()),
    "DivBackward0": _at_zero("div", "other"),
    "DivBackward2": _at_zero("div", "other"),
    "AddcdivBackward0": _at_zero("addcdiv", "tensor2"),
    "PowBackward1": _at_zero("pow", "self"),
    "AcosBackward0": _at_one("acos", _arc),
    "AsinBackward0": _at_one("asin", _arc),
    "AtanhBackward0": _at_one("atanh", lambda x: (1 - x * x).reciprocal()),
    "AcoshBackward0": Pole("acosh", "self", lambda x: (x * x - 1).rsqrt(), lambda x: x - 1),
    "TanBackward0": Pole("tan", "result", lambda y: 1 + y * y, lambda y: (1 + y * y).rsqrt()),
    "ErfinvBackward0": _at_one("erfinv", lambda x: x.erfinv().square().exp()),
    "DigammaBackward0": _at_zero("digamma", "self", lambda x: torch.special.polygamma(1, x)),
    "LgammaBackward0": _at_zero("lgamma", "self", torch.digamma),
    "PolygammaBackward0": _at_zero("polygamma", "self"),
    # the derivative of a norm is the vector divided by it
    "LinalgVectorNormBackward0": _at_zero("vector_norm", "result"),
    "NormBackward0": _at_zero("norm", "result"),
    "NormBackward1": _at_zero("norm", "result"),
    "StdBackward0": _at_zero("std", "result"),
    "HypotBackward0": _at_zero("hypot", "result"),
}


def _pole_of(node: Any, name: str) -> Pole | None:
    if name != "PowBackward0":
        return POLES.get(name)
    exponent = getattr(node, "_saved_exponent", 1)
    if isinstance(exponent, (int, float)) and exponent < 1 and exponent != 0:
        return _at_zero("pow", "self", lambda x: x ** (exponent - 1))
    return None


class _Sample(NamedTuple):
    values: Tensor  # the least, the largest and some others, in one dimension, at least float32
    where: str  # the user's line, or ""
    dtype: torch.dtype  # of the tensor


def _sample_of(x: Tensor, with_line: bool, ends_alone: bool) -> _Sample:
    picked = x.detach()
    if ends_alone:
        picked = picked.new_empty(0)
    elif picked.is_contiguous():
        step = -(-picked.numel() // _VALUES)
        picked = picked.view(-1)[:: step | 1]  # an odd step: not one column of a matrix
    else:
        for dim in range(picked.dim()):
            step = min(picked.size(dim), -(-picked.numel() // _VALUES))
            picked = picked[(slice(None),) * dim + (slice(None, None, step),)]
    values = torch.cat((torch.stack(x.detach().aminmax()), picked.reshape(-1)))
    frame = outside(sys._getframe(2), ENGINES) if with_line else None
    where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return _Sample(values.to(torch.promote_types(x.dtype, torch.float32)), where, x.dtype)


#: A pole that has samples of both runs, the exact ones first.
_Found = tuple[Pole, _Sample, _Sample]


def _quietly(method: Callable[..., T]) -> Callable[..., T | None]:
    """Let a method of :class:`SavedSamples` give the samples up where it would raise."""

    @functools.wraps(method)
    def quiet(self: SavedSamples, *args: Any, **kwargs: Any) -> T | None:
        if not self.given_up:
            try:
                with private.without_function_modes():
                    return method(self, *args, **kwargs)
            except Exception as error:
                self.given_up = True
                logger.debug("gradckpt: samples of %s were not compared: %r", self.region, error)
        return None

    return quiet


class SavedSamples:
    """The samples of one region; the methods are called by C, and raise nothing but a warning."""

    def __init__(self, codec: str, function: Any, of_policy: int) -> None:
        self.codec = codec
        self.of_policy = of_policy  # 1: the codec is that of kept outputs, not of the region's inputs; 2: both have one
        self.region = name_of(function)
        self.given_up = False
        self._start = private.next_node_number()
        self._stream: Any = None  # of the samples' device, on which all of them are taken and read
        self._exact: dict[int, _Sample] = {}
        self._restored: dict[int, _Sample] = {}
        self._poles: list[tuple[int, Pole]] = []

    def note_saved(self, slot: int, x: Tensor) -> None:
        if slot < _SLOTS:
            self._note(self._exact, slot, x, with_line=True)

    def note_restored(self, slot: int, x: Tensor) -> None:
        if slot in self._exact:
            self._note(self._restored, slot, x, ends_alone=self._exact[slot].values.numel() == _ENDS)

    @_quietly
    def _note(
        self, samples: dict[int, _Sample], slot: int, x: Tensor, with_line: bool = False, ends_alone: bool = False
    ) -> None:
        if not x.is_floating_point() or not x.numel() or (x.is_leaf and x.requires_grad):
            return
        if _is_capturing(x.device) or not self._is_ordered(x.device):
            self.given_up = True
            return
        samples[slot] = _sample_of(x, with_line, ends_alone)

    def _is_ordered(self, device: torch.device) -> bool:
        """Return whether the device's current stream is that of the samples before."""
        if device.type == "cpu":
            return True
        stream = torch.accelerator.current_stream(device)
        self._stream = stream if self._stream is None else self._stream
        return bool(stream == self._stream)

    @_quietly
    def find_nodes(self, frame: Any, result: Any, most: int) -> bool:
        """Find which operator saved what; return whether there is anything to compare.

        ``most``: so many nodes may be looked at; see csrc/engine/region/origin.h.
        """
        if not (self._stream is None or self._is_ordered(self._stream.device)):
            return False
        self._poles = list(_poles_behind(frame, result, self._start, most))
        wanted = {slot for slot, _ in self._poles}
        for slot, sample in self._exact.items():
            if slot not in wanted:
                self._exact[slot] = sample._replace(values=sample.values[:_ENDS].clone())
        return bool(self._exact)

    def judge(self) -> None:
        """Compare the samples of both runs, and warn."""
        found = self._compare()
        if found is None:
            return
        if _is_read_at_once(found[1].device) or _report is not None:
            self._say(*found)
        else:
            pending.append((self, *found))

    @_quietly
    def _compare(self) -> tuple[list[_Found], Tensor, list[str]] | None:
        """Return the poles, the numbers of :func:`_compared` for each, and for the slots without
        a pole, in further rows, whether they left the finite numbers."""
        poles = [
            (pole, self._exact[slot], self._restored[slot])
            for slot, pole in self._poles
            if slot in self._exact and slot in self._restored
        ]
        pairs = [(sample, self._restored[slot]) for slot, sample in self._exact.items() if slot in self._restored]
        if not pairs:
            return None
        if self._stream is not None and not self._is_ordered(self._stream.device):
            return None
        with torch.no_grad():
            rows = [_compared(*each) for each in poles]
            for exact, restored in pairs:
                left = exact.values[:_ENDS].isfinite().all() & ~restored.values[:_ENDS].isfinite().all()
                rows.append(torch.nn.functional.pad(left.float().reshape(1), (0, _COLUMNS - 1)))
            device = rows[0].device
            return poles, torch.stack([row.to(device) for row in rows]), [exact.where for exact, _ in pairs]

    def _say(self, poles: list[_Found], numbers: Tensor, lines: list[str]) -> None:
        rows = numbers.tolist()
        worst, weight = None, 0.0
        for (pole, exact, _), row in zip(poles, rows, strict=False):
            verdict = _Verdict(*row)
            if verdict.weight(self.codec) > weight:
                worst, weight = (pole.name, exact.where, exact.dtype, verdict), verdict.weight(self.codec)
        left = [line for line, row in zip(lines, rows[len(poles) :], strict=True) if row[0]]
        if worst is not None:
            say(self._text(*worst, bool(left)))
        elif left:
            say(self._text("an operator", left[0], None, None, True))

    def _text(self, op: str, line: str, dtype: torch.dtype | None, verdict: _Verdict | None, left: bool) -> str:
        what = f"{op} ({line}) in {self.region}" if line else f"{op} in {self.region}"
        error, bf16 = (0.0, 0.0) if verdict is None else verdict.errors(self.codec)
        fails = verdict is None or max(verdict.norm_bf16, verdict.relative_bf16) > FAILS
        # the codec bf16 takes float32 alone, and "lossless" does not hold many magnitudes
        helps = not fails and self.codec != "bf16" and dtype == torch.float32
        inputs, kept = ('compress="bf16"', '"bf16"') if helps else ("compress=None", "outputs exactly")
        places = (f"pass {inputs} there", f"keep {kept} in its policy")
        place = " and ".join(places) if self.of_policy == 2 else places[self.of_policy]
        if verdict is None or verdict.left or left:
            return (
                f"gradckpt: {what} leaves its domain on values of {self.codec}, so gradients are not finite; {place}, "
                "or move it out"
            )
        return (
            f"gradckpt: {what} amplifies the error of {self.codec}: its derivative is {_percent(error)} off, with bf16 "
            f"{_percent(bf16)}; {place}, or move it out"
        )


# ---- the comparison ----

_COLUMNS = 7

_HUGE = 1e12  # its square is finite


class _Verdict(NamedTuple):
    """What :func:`_compared` computes."""

    left: float  # values whose derivative is no longer finite
    reach: float  # see REACH
    growth: float  # see GROWTH
    relative: float  # RMS of the relative errors of the derivatives, each at most 1
    relative_bf16: float
    norm: float  # the relative error of the derivatives in the L2 norm, at most 1
    norm_bf16: float

    def weight(self, codec: str) -> float:
        """Return how bad it is; 0: nothing is to be said."""
        if self.left:
            return math.inf
        return self.errors(codec)[0] if self.reach >= REACH and self.growth >= GROWTH else 0.0

    def errors(self, codec: str) -> tuple[float, float]:
        """Return the larger error that is too large, and bf16's, or zeros."""
        least = max(FLOOR, TIMES_CODEC * ordinary_error(codec))
        both = (self.norm, self.norm_bf16), (self.relative, self.relative_bf16)
        return max(
            ((error, bf16) for error, bf16 in both if error > max(least, min(TIMES_BF16 * bf16, FAILS))),
            default=(0.0, 0.0),
        )


@functools.cache
def ordinary_error(codec: str) -> float:
    """Return the relative L2 error of Gaussian values in a codec."""
    levels = torch.linspace(-1, 1, 4098)[1:-1].erfinv().reshape(128, 32).t().contiguous()
    restored = codecs.encode(levels, codec).decode()
    return float((restored - levels).norm() / levels.norm())


def _compared(pole: Pole, exact: _Sample, other: _Sample) -> Tensor:
    derivative, u, v = pole.derivative, exact.values, other.values
    d, restored, rounded = derivative(u), derivative(v), derivative(u.to(torch.bfloat16).to(u.dtype))
    good = d.isfinite()
    size = torch.where(good, d, 0).abs()
    columns = [(good & ~restored.isfinite()).sum(), *_reach_and_growth(pole.distance(u), pole.distance(v), good)]
    for found in (restored, rounded):
        off = torch.where(good, (found - d).abs(), 0)
        relative = torch.where(off > 0, off / size, 0).nan_to_num(1.0, 1.0).clamp(max=1)
        columns += [relative.square().mean().sqrt(), (off.norm() / size.norm()).nan_to_num(0.0, 1.0).clamp(max=1)]
    left, reach, growth, relative, norm, relative_bf16, norm_bf16 = (each.double().reshape(()) for each in columns)
    return torch.stack([left, reach, growth, relative, relative_bf16, norm, norm_bf16]).float()


def _reach_and_growth(distance: Tensor, restored: Tensor, good: Tensor) -> tuple[Tensor, Tensor]:
    n = good.numel()
    off = ((restored - distance) / distance).nan_to_num(1.0).abs().clamp(max=_HUGE)
    far = torch.where(good, distance, math.inf)
    order = far.argsort()
    errors = torch.where(good, off, 0)[order].square()
    parts = min(n, _PARTS)
    worst = errors[: n // parts * parts].view(parts, -1).mean(1).max().sqrt()
    growth = torch.where(worst >= _WHOLE, math.inf, worst / errors[n // 4 :].mean().sqrt())
    most = torch.where(good, distance, -math.inf).sort().values[-1 - n // 10]
    return most / far[order[0]], growth


def _percent(share: float) -> str:
    return f"{100 * share:#.2g} %" if share < 0.0995 else f"{100 * share:.0f} %"


# ---- the graph ----


def _poles_behind(frame: Any, result: Any, start: int, most: int) -> Iterator[tuple[int, Pole]]:
    """Yield the slots of poles among the nodes that the region has made.

    At most ``most`` nodes are looked at.
    """
    tensors = (x for x in private.tree_leaves(result) if isinstance(x, Tensor))
    made = (node for node in graph_behind(tensors, start) if not hasattr(node, "variable"))  # else a leaf's
    for node in itertools.islice(made, most):
        pole = _pole_of(node, node.name())
        if pole is not None:
            holder = getattr(getattr(node, f"_raw_saved_{pole.argument}", None), "data", None)
            slot = getattr(holder, "slot", None)
            if slot is not None and slot[0] is frame:
                yield slot[1], pole


# ---- what is said ----

#: Verdicts of devices, which are read in the next step.
pending: list[tuple[SavedSamples, list[_Found], Tensor, list[str]]] = []

#: What takes the texts in place of a warning; None: nothing does.
_report: list[str] | None = None


def say(text: str) -> None:
    if _report is not None:
        _report.append(text)
    else:
        warn_user(text, UserWarning)


def read_pending() -> None:
    """Read the verdicts of devices, unless a graph is captured."""
    while pending and not _is_capturing(pending[0][2].device):
        samples, poles, numbers, lines = pending.pop(0)
        samples._say(poles, numbers, lines)


@contextlib.contextmanager
def reported() -> Iterator[list[str]]:
    """Look at all kinds of regions anew, and collect what would be said; within such a block,
    another one adds to the list of that.
    """
    global _report
    if _report is not None:
        yield _report
        return
    before = _C.sample_anew(True) or 0
    texts: list[str] = []
    _report = texts
    try:
        yield texts
    finally:
        _report = None
        _C.sample_anew(before)


def _is_read_at_once(device: torch.device) -> bool:
    return device.type == "cpu"


def _is_capturing(device: torch.device) -> bool:
    return is_capturing(getattr(torch, device.type, None))
