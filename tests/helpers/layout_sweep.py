"""Regions whose arguments are laid out in every way that a program passes on: slices, expansions,
transpositions, channels_last.

With a codec without loss every gradient is that of plain autograd, to the last bit; with one that
rounds the error is at most that of the same values handed in contiguous. Widths equal numbers of
rows wherever that can be, so that a tensor which comes back in another order has no wrong shape.

    python tests/helpers/layout_sweep.py modules [--part 1/4] [--all] [--only Linear]

goes over (subject, layout, codec, entry point) and prints what is wrong. Without --all each subject
meets every layout, and over the subjects every pair of the others. OpInfo (``operators``) wants a
process of its own.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from layout_subjects import MODULES, Subject
from nestings import Tail
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import gradckpt

EXACT = ("raw", "lossless")
ROUNDS = ("int8", "int4", "fp8", "bf16")
CODECS = (*EXACT, *ROUNDS)

# ---- layouts ----


class Layout(NamedTuple):
    """A larger memory for values of this shape, and the view of it that has them. Expanded values
    repeat."""

    room: Callable[[torch.Size], tuple[int, ...]]
    view: Callable[[torch.Tensor], torch.Tensor]
    fits: Callable[[torch.Size], bool]


def _last(shape: torch.Size, n: int) -> tuple[int, ...]:
    return (*shape[:-1], n)


CHANNELS_LAST = torch.channels_last
LAYOUTS = {
    "contiguous": Layout(tuple, lambda x: x, lambda s: True),
    "offset slice": Layout(lambda s: (s[0], s[1] + 1, *s[2:]), lambda x: x[:, 1:], lambda s: len(s) > 1 and min(s) > 0),
    "chunk": Layout(lambda s: _last(s, 3 * s[-1]), lambda x: x.chunk(3, -1)[1], lambda s: len(s) > 0 and min(s) > 0),
    "unbind": Layout(lambda s: (s[0], 3, *s[1:]), lambda x: x.unbind(1)[1], lambda s: len(s) > 0),
    "select": Layout(lambda s: (*s, 4), lambda x: x.select(-1, 2), lambda s: True),
    "expand": Layout(lambda s: (1, *s[1:]), lambda x: x, lambda s: len(s) > 0 and s[0] > 1),
    "step 2": Layout(lambda s: _last(s, 2 * s[-1]), lambda x: x[..., ::2], lambda s: len(s) > 0),
    "transposed": Layout(lambda s: (*s[:-2], s[-1], s[-2]), lambda x: x.transpose(-1, -2), lambda s: len(s) > 1),
    "channels last": Layout(tuple, lambda x: x.contiguous(memory_format=CHANNELS_LAST), lambda s: len(s) == 4),
    "slice of channels last": Layout(
        lambda s: (s[0], 2 * s[1], *s[2:]),
        lambda x: x.contiguous(memory_format=CHANNELS_LAST)[:, : x.shape[1] // 2],
        lambda s: len(s) == 4,
    ),
    "one-sized": Layout(lambda s: (3, *s[1:]), lambda x: x[1:2], lambda s: len(s) > 1 and s[0] == 1),
}


def place(layout: str, values: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A leaf, and the function that makes the argument of it."""
    one = LAYOUTS[layout]
    shape = values.shape
    if layout == "contiguous" or not one.fits(shape):
        leaf = values.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        return leaf, lambda x: x * 1
    if layout == "expand":
        leaf = values.detach()[:1].clone(memory_format=torch.contiguous_format).requires_grad_()
        return leaf, lambda x: (x * 1).expand(shape)
    leaf = torch.ones(one.room(shape), dtype=values.dtype)
    if layout.endswith("channels last"):
        leaf[:, : shape[1]] = values.detach()
    else:
        one.view(leaf).copy_(values.detach())
    return leaf.requires_grad_(), lambda x: one.view(x * 1)


# ---- entry points ----


class _Model(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.block = Tail(function)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block(*args, **kwargs)


def _config(codec: str | None) -> Any:
    return codec and gradckpt.CompressionConfig(codec, min_numel=0)


def _checkpoint(codec: str | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    return gradckpt.checkpoint(function, *args, compress=_config(codec), **kwargs)


def _fake_quantized(codec: str | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    """In a region of its own kind."""
    config = codec and gradckpt.CompressionConfig(codec, min_numel=0, fake_quantize=True)
    region = functools.partial(gradckpt.checkpoint, compress=config)
    return region(functools.partial(region, function), *args, **kwargs)


def _saved(codec: str | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    return gradckpt.compress_saved(_config(codec))(function)(*args, **kwargs)


def _reentrant(codec: str | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    """It takes no codec and no containers, and inside it is a region that does."""

    leaves, spec = tree_flatten((args, kwargs))

    def inner(*leaves: Any) -> tuple[Any, ...]:
        args, kwargs = tree_unflatten(leaves, spec)
        return tuple(tree_leaves(_checkpoint(codec, function, *args, **kwargs)))

    return gradckpt.checkpoint(inner, *leaves, use_reentrant=True)


def _selective(codec: str | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    return gradckpt.SelectiveRecompute.apply(Tail(function), None, *args, compress=_config(codec), **kwargs)


def _policy(policy: Any, codec: str | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    return gradckpt.checkpoint(function, *args, compress=_config(codec), policy=policy, **kwargs)


_MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def _by_function(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    saves = op in _MATMULS
    policy = torch_checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if saves else policy.PREFER_RECOMPUTE


def _enable(codec: str | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    model = _Model(function).train()
    gradckpt.enable(model, _config(codec), modules=[model.block])
    try:
        return model(*args, **kwargs)
    finally:
        gradckpt.disable(model)


def _aot_eager(codec: str | None, function: Any, *args: Any, **kwargs: Any) -> Any:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return gradckpt.checkpoint(function, *args, compress=_config(codec), **kwargs)

    return compiled(*args, **kwargs)


ENTRY_POINTS: dict[str, Callable[..., Any]] = {
    "checkpoint": _checkpoint,
    "fake_quantize": _fake_quantized,
    "compress_saved": _saved,
    "reentrant": _reentrant,
    "SelectiveRecompute": _selective,
    "save_matmuls": functools.partial(_policy, "save_matmuls"),
    "save_attention": functools.partial(_policy, "save_attention"),
    "a policy by function": functools.partial(_policy, _by_function),
    "enable": _enable,
    "aot_eager": _aot_eager,
}


# ---- one case ----


class Case(NamedTuple):
    subject: Subject
    layout: str
    codec: str
    entry_point: str

    def __str__(self) -> str:
        return f"{self.subject.name} | {self.layout} | {self.codec} | {self.entry_point}"


def _differentiable(x: Any) -> bool:
    return type(x) is torch.Tensor and x.dtype in (torch.float32, torch.bfloat16, torch.float64) and x.requires_grad


class _Expanding(torch.nn.Module):
    """The function, of arguments that it expands itself."""

    def __init__(self, function: Callable[..., Any], shapes: list[torch.Size | None]) -> None:
        super().__init__()
        self.function, self.shapes = function, shapes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [x if shape is None else x.expand(shape) for x, shape in zip(leaves, self.shapes, strict=True)]
        args, kwargs = tree_unflatten(leaves, spec)
        return self.function(*args, **kwargs)


def gradients(case: Case, entry_point: Callable[..., Any], contiguous: bool) -> list[torch.Tensor]:
    """Of the arguments' leaves and of the module, for outputs weighted the same way in every run.
    ``contiguous``: the same values, each once (a compiled graph holds each element), handed in
    contiguous."""
    torch.manual_seed(1)
    function, args, kwargs = case.subject.make()
    leaves, shapes = [], []

    def laid_out(x: Any) -> Any:
        shapes.append(None)
        if not _differentiable(x):
            return x
        leaf, view = place(case.layout, x)
        leaves.append(leaf)
        given = view(leaf)
        if contiguous and given.shape != leaf.shape and case.layout == "expand" and case.entry_point != "aot_eager":
            shapes[-1] = given.shape
            return leaf * 1
        return given.clone(memory_format=torch.contiguous_format) if contiguous else given

    args, kwargs = tree_map(laid_out, (args, kwargs))
    torch.manual_seed(2)
    out = entry_point(_Expanding(function, shapes) if any(shapes) else function, *args, **kwargs)
    outputs, weights = [], []
    for i, t in enumerate(tree_leaves(out)):
        if isinstance(t, torch.Tensor) and t.requires_grad:  # of one node, all floating ones do
            torch.manual_seed(3 + i)
            outputs.append(t)
            weights.append(torch.randn_like(t, memory_format=torch.contiguous_format))
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    wanted = [*leaves, *parameters]
    for p in parameters:
        p.grad = None
    torch.autograd.backward(outputs, weights)
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]


def _plain(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(a, b, strict=True))


def error(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Of the whole gradient."""
    a, b = (torch.cat([x.detach().double().flatten() for x in grads]) for grads in (found, wanted))
    good = b.isfinite()
    if not bool(a[good].isfinite().all()):
        return float("inf")
    return float((a[good] - b[good]).norm() / b[good].norm().clamp_min(1e-9))


#: Added to what the same values cost when they are contiguous: torch takes other kernels for them.
FLOOR = 2e-4


def _is_of_the_entry_point(case: Case, wanted: list[torch.Tensor]) -> bool:
    """Does the entry point differ from plain autograd without a codec too?"""
    try:
        return not same(gradients(case, functools.partial(ENTRY_POINTS[case.entry_point], None), False), wanted)
    except Exception:
        return True


REFUSED, OF_THE_ENTRY_POINT = "refused", "of the entry point alone"


def wrong(case: Case) -> str | None:
    """What is wrong with this case; or that plain autograd refuses it, or that the entry point
    has it without a codec too."""
    try:
        wanted = gradients(case, _plain, contiguous=False)
    except Exception:
        return REFUSED
    found = _differs(case, wanted)
    return OF_THE_ENTRY_POINT if found not in (None, REFUSED) and _is_of_the_entry_point(case, wanted) else found


def _differs(case: Case, wanted: list[torch.Tensor]) -> str | None:
    entry_point = functools.partial(ENTRY_POINTS[case.entry_point], case.codec)
    try:
        found = gradients(case, entry_point, contiguous=False)
    except Exception as raised:
        try:
            gradients(case, entry_point, contiguous=True)
        except Exception:
            return REFUSED  # whatever the layout
        return f"{type(raised).__name__}: {str(raised).strip()[:160]}"
    if case.codec in EXACT:
        if same(found, wanted) or not same(gradients(case, _plain, contiguous=False), wanted):
            return None
        return f"not the bits of plain autograd: {error(found, wanted):.2g}"
    now = error(found, wanted)
    contiguous = error(gradients(case, entry_point, True), gradients(case, _plain, True))
    if now <= 1.2 * contiguous + FLOOR or contiguous == float("inf"):
        return None
    return f"error {now:.2g}, contiguous {contiguous:.2g}"


# ---- the sweep ----


def fitting(subject: Subject) -> list[str]:
    """Layouts that at least one argument can have."""
    torch.manual_seed(1)
    _, args, kwargs = subject.make()
    shapes = [x.shape for x in tree_leaves((args, kwargs)) if _differentiable(x)]
    return [name for name, layout in LAYOUTS.items() if name != "contiguous" and any(map(layout.fits, shapes))]


def cases(subjects: list[Subject], everything: bool, few: int = 0) -> Iterator[Case]:
    """Every combination; or of each subject every layout (``few``: so many), and over the subjects
    every pair of the others."""
    for s, subject in enumerate(subjects):
        layouts = fitting(subject)
        entry_points = [entry_point for entry_point in ENTRY_POINTS if entry_point != "aot_eager" or subject.compiles]
        if everything:
            yield from itertools.starmap(
                functools.partial(Case, subject), itertools.product(layouts, CODECS, entry_points)
            )
            continue
        for i in range(min(few, len(layouts)) if few else len(layouts)):
            n = s + i if few else i
            yield Case(
                subject,
                layouts[n % len(layouts)],
                CODECS[(s + i) % len(CODECS)],
                entry_points[(s + 3 * i) % len(entry_points)],
            )


class Sweep:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    def check(self, case: Case) -> None:
        self.counts["cases"] += 1
        before = gradckpt.stats()["compressed"]
        found = wrong(case)
        self.counts["compressed"] += gradckpt.stats()["compressed"] > before
        if found in (REFUSED, OF_THE_ENTRY_POINT):
            self.counts[found] += 1
        elif found:
            self.wrong.append(f"{case}: {found}")


#: Operators that read between the elements of their argument, which a payload does not hold; and
#: one that saves its noise before the kernel fills it.
LEFT = ("as_strided", "as_strided_copy", "as_strided_scatter", "as_strided_partial_views", "nn_functional_rrelu")


def operator_subjects(part: int, parts: int, everything: bool) -> list[Subject]:
    from operator_samples import cases as samples_of
    from operator_samples import operators

    found = []
    for op in operators()[part::parts]:
        if op.formatted_name in LEFT:
            continue
        if op.supports_autograd and torch.float32 in op.supported_backward_dtypes("cpu"):
            samples = list(samples_of(op, torch.float32, False))
            samples = [case for case in samples if any(map(_differentiable, tree_leaves((case.args, case.kwargs))))]
            for case in samples if everything else samples[:: max(1, len(samples) // 2)][:2]:
                made = functools.partial(lambda case: (case.function, case.args, case.kwargs), case)
                found.append(Subject(case.name, made, compiles=False))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("operators", "modules"))
    parser.add_argument("--part", default="0/1", help="I/N: every N-th subject, from the I-th")
    parser.add_argument("--all", action="store_true", help="every combination")
    parser.add_argument("--few", type=int, default=0, help="so many layouts of each subject")
    parser.add_argument("--only", default="", help="subjects whose name has this")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    part, parts = map(int, chosen.part.split("/"))
    subjects = operator_subjects(part, parts, chosen.all) if chosen.what == "operators" else MODULES[part::parts]
    subjects = [subject for subject in subjects if chosen.only in subject.name]
    sweep = Sweep()
    for case in cases(subjects, chosen.all, chosen.few):
        sweep.check(case)
    print(f"{len(subjects)} subjects, " + ", ".join(f"{n} {name}" for name, n in sweep.counts.items()))
    for line in sweep.wrong:
        print(f"  WRONG {line}")
    return int(bool(sweep.wrong))


if __name__ == "__main__":
    sys.exit(main())
