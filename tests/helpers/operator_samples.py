"""PyTorch's own table of operators with samples of their arguments (OpInfo).

Who reads it does so in a process of its own: torch's test package freezes backend flags, loads a
hypothesis profile and may initialise CUDA when it is imported."""

from __future__ import annotations

import functools
import itertools
import json
import random
import sys
import types
import unittest
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.checkpoint
from torch.utils._pytree import tree_leaves, tree_map

import gradckpt

SAMPLES = 8
SPREAD = 24
MAX_NUMEL = 100_000  # of the inputs of a sample


class Case(NamedTuple):
    """An operator with one sample of arguments."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def operators() -> list[Any]:
    """torch's table. Its module wants expecttest, for classes that nothing here uses:
    an empty replacement will do."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        replacement: Any = types.ModuleType("expecttest")
        replacement.TestCase = unittest.TestCase
        sys.modules["expecttest"] = replacement
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def cases(op: Any, dtype: torch.dtype, everything: bool) -> Iterator[Case]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    samples = op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd)
    chosen = samples if everything else itertools.islice(samples, 0, SPREAD, SPREAD // SAMPLES)
    for sample in chosen:
        args = (sample.input, *sample.args)
        tensors = [t for t in tree_leaves((args, sample.kwargs)) if isinstance(t, torch.Tensor)]
        if sum(t.numel() for t in tensors) <= MAX_NUMEL:
            yield Case(op.formatted_name, op.op, args, sample.kwargs)


# ---- Where operators jump: a straight line from an input to one nearby is searched for places
# where what the operator returns, or the gradient through it, changes by an amount that does not
# shrink with the step.
#
# There a region of the operator runs on the one side, and again on the other, and keeps what the
# forward decided. Where that does not jump, the result is replayed.

STEPS = 12  # that a line is divided into
LONGEST = 3  # of them, by what changes within, are searched
HALVINGS = 40
APART = 1e-7
SMALL = 1e-6  # beside the largest value
NOISE = 1e-11  # of a value that would be zero, but for rounding

#: What may jump: bools, integers and shapes; values; gradients.
KINDS = ("discrete", "values", "gradients")


class Point(NamedTuple):
    """What an operator returned at one place of a line; and the gradient there,
    None where it has no such."""

    discrete: tuple[Any, ...]
    values: tuple[torch.Tensor, ...]
    gradients: tuple[torch.Tensor, ...]


Line = Callable[[float], Point]


# ---- lines ----


def is_moved(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and x.dtype in (torch.float32, torch.float64)


def nearly_restored(x: torch.Tensor) -> torch.Tensor:
    """Near to what a codec gives back, whose zeros are exact: one is,
    and no other values are equal."""
    flat = x.detach().flatten()
    near = flat + 0.97 * (gradckpt.codecs.encode(flat.float(), "int4").decode().to(x.dtype) - flat)
    if x.numel() > 1:
        near[flat.abs().argmin()] = 0
    return near.view(x.shape)


class Moved:
    """The arguments of a sample, each floating one on a line of its own."""

    def __init__(self, case: Case, far: float, seed: int) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        self.starts: dict[int, torch.Tensor] = {}
        self.shifts: dict[int, torch.Tensor] = {}
        for x in tree_leaves((case.args, case.kwargs)):
            if is_moved(x) and id(x) not in self.starts and x.numel():
                size = x.detach().abs().amax()
                noise = torch.rand(x.shape, generator=generator, dtype=x.dtype) * 2 - 1
                start = x.detach() + 1e-3 * size * noise  # off the ties and the zeros that samples have
                further = torch.rand(x.shape, generator=generator, dtype=x.dtype) * 2 - 1
                end = start + far * size * further if far else nearly_restored(start)
                self.starts[id(x)], self.shifts[id(x)] = start, end - start

    def leaves(self) -> dict[int, torch.Tensor]:
        """At the start, of all that takes a gradient."""
        autograd = [x for x in tree_leaves((self.case.args, self.case.kwargs)) if id(x) in self.starts]
        return {id(x): self.starts[id(x)].clone().requires_grad_(x.requires_grad) for x in autograd}

    def call(self, leaves: dict[int, torch.Tensor], t: float) -> Any:
        """The operator at that place."""

        def at(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or id(x) not in leaves:
                return x.detach() if isinstance(x, torch.Tensor) else x
            return leaves[id(x)] + t * self.shifts[id(x)]

        args, kwargs = tree_map(at, (self.case.args, self.case.kwargs))
        torch.manual_seed(1)
        return self.case.function(*args, **kwargs)


def split(result: Any) -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
    outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.layout == torch.strided]
    floating = [x for x in outputs if x.is_floating_point()]
    discrete = [x.detach().clone() for x in outputs if not x.is_floating_point() and not x.is_complex()]
    return (*map(tuple, map(list, (x.shape for x in outputs))), *discrete), tuple(floating)


def differentiate(floating: tuple[torch.Tensor, ...], leaves: dict[int, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The gradients of these, weighted alike each time."""
    outputs = [x for x in floating if x.requires_grad]
    wanted = [x for x in leaves.values() if x.requires_grad]
    if not outputs or not wanted:
        return ()
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in outputs]
    grads = torch.autograd.grad(outputs, wanted, weights, allow_unused=True, retain_graph=True)
    return tuple(g for g in grads if g is not None and g.layout == torch.strided)


def alone(moved: Moved) -> Line:
    """The operator by itself."""

    def line(t: float) -> Point:
        leaves = moved.leaves()
        discrete, floating = split(moved.call(leaves, t))
        return Point(discrete, tuple(x.detach().clone() for x in floating), differentiate(floating, leaves))

    return line


def recomputed(moved: Moved, start: float, replay_discrete: bool | str) -> Line:
    """A region whose forward ran at the start,
    and which runs again at another place of the line."""
    at, seen = start, []
    leaves = moved.leaves()

    def region(decides: torch.Tensor) -> Any:
        discrete, floating = split(moved.call(leaves, at))
        seen[:] = [(discrete, tuple(x.detach().clone() for x in floating))]
        return *floating, (decides * 2).sin()  # which saves what a backward has to run the region again for

    config = gradckpt.CompressionConfig("int8", replay_discrete=replay_discrete, min_numel=1)
    anchor = torch.ones(4, requires_grad=True)
    outputs = gradckpt.checkpoint(region, anchor * 1, compress=config, early_stop=False)

    def line(t: float) -> Point:
        nonlocal at
        at = t
        gradients = differentiate(outputs, {**leaves, id(anchor): anchor})
        discrete, values = seen[0]
        return Point(discrete, values, gradients)

    return line


# ---- jumps ----


def distance(a: Point, b: Point, kind: str) -> float:
    """The largest change; of integers and shapes, 1. What is not finite is no value,
    and does not count."""
    first, second = getattr(a, kind), getattr(b, kind)
    if kind == "discrete":
        same = len(first) == len(second) and all(_same(x, y) for x, y in zip(first, second, strict=True))
        return 0.0 if same else 1.0
    if len(first) != len(second) or any(x.shape != y.shape for x, y in zip(first, second, strict=True)):
        return 0.0  # another shape is a jump of that kind
    changes = ((x - y).abs() for x, y in zip(first, second, strict=True) if x.numel())
    return max((float(torch.where(c.isfinite(), c, 0).amax()) for c in changes), default=0.0)


def _same(x: Any, y: Any) -> bool:
    return torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y


def size_of(points: list[Point], kind: str) -> float:
    values = [x for point in points for x in getattr(point, kind) if x.numel()]
    return max((float(torch.where(x.isfinite(), x, 0).abs().amax()) for x in values), default=0.0)


class Jump(NamedTuple):
    """Between two places that are next to each other;
    its size is beside that of the largest value."""

    kind: str
    size: float
    before: float
    behind: float
    scale: float


def halve(line: Line, a: tuple[float, Point], b: tuple[float, Point], kind: str, scale: float) -> Jump | None:
    """What is left of a change in a piece of a line when it becomes very short."""
    changes = [distance(a[1], b[1], kind)]
    for i in range(HALVINGS):
        middle = (a[0] + b[0]) / 2, line((a[0] + b[0]) / 2)
        left, right = distance(a[1], middle[1], kind), distance(middle[1], b[1], kind)
        a, b = (a, middle) if left >= right else (middle, b)
        changes.append(max(left, right))
        if changes[-1] <= SMALL * scale or (i >= 4 and changes[-1] < changes[-6] / 20):
            return None
    lasting = kind == "discrete" or 1 / 3 < changes[-1] / changes[-15] < 3  # less: a steep slope; more: a pole
    # A little further apart: values that change places there are not equal.
    # At the end of a line there may be a zero.
    behind = b[0] if b[0] == 1 else b[0] + APART
    return Jump(kind, changes[-1] / scale, a[0] - APART, behind, scale) if lasting else None


def jumps(line: Line) -> list[Jump]:
    places = [i / STEPS for i in range(STEPS + 1)]
    points = [line(t) for t in places]
    again = line(0.0)
    found: list[Jump | None] = []
    for kind in KINDS:
        scale = 1.0 if kind == "discrete" else size_of(points, kind)
        if distance(points[0], again, kind) > 0 or scale < NOISE:
            continue  # not deterministic, or nothing of that kind
        changes = [distance(points[i], points[i + 1], kind) for i in range(STEPS)]
        pieces = [i for i in sorted(range(STEPS), key=changes.__getitem__)[-LONGEST:] if changes[i] > SMALL * scale]
        ends = [((places[i], points[i]), (places[i + 1], points[i + 1])) for i in pieces]
        found += [halve(line, *each, kind, scale) for each in ends]
    return [jump for jump in found if jump is not None]


def is_replayed(moved: Moved, jump: Jump, replay_discrete: bool | str = True) -> bool:
    """A forward on the one side and a recompute on the other give
    what a recompute on the first side gives."""
    line = recomputed(moved, jump.before, replay_discrete)
    try:
        change = distance(line(jump.before), line(jump.behind), jump.kind)
    except torch.utils.checkpoint.CheckpointError:
        return False  # other shapes are saved
    return change <= 0.05 * jump.size * jump.scale  # next to a pole, the slope alone is some per cent


# ---- errors ----


def gradient_error(moved: Moved, codec: str) -> float | None:
    """Of a region of the operator, all of whose inputs come back approximate; None:
    it has no gradient."""

    def gradients(compress: Any) -> torch.Tensor | None:
        leaves = moved.leaves()
        names = list(leaves)

        def region(*inputs: torch.Tensor) -> Any:
            result = moved.call(dict(zip(names, inputs, strict=True)), 0.0)
            return split(result)[1]

        inputs = [x * 1 for x in leaves.values()]
        floating = gradckpt.checkpoint(region, *inputs, compress=compress)
        grads = differentiate(floating, leaves)
        return torch.cat([g.flatten() for g in grads]) if grads else None

    exact = gradients(None)
    if exact is None or not exact.isfinite().all() or exact.norm() == 0:
        return None
    found = gradients(gradckpt.CompressionConfig(codec, min_numel=1))
    return float((found - exact).norm() / exact.norm())


# ---- an operator ----


IN_PLACE = " in place"


def variants(op: Any, case: Case) -> Iterator[Case]:
    """The operator, and its form that writes into its first argument."""
    yield case
    if op.inplace_variant is not None and isinstance(case.args[0], torch.Tensor):

        def inplace(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return op.inplace_variant(x * 1, *args, **kwargs)

        yield case._replace(name=case.name + IN_PLACE, function=inplace)


def further_cases() -> Iterator[Case]:
    """What torch's samples lack: places that are reduced into more than once,
    and orders of norms apart."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    places = torch.randint(4, (9, 6), generator=generator)
    for reduce in ("amax", "amin"):
        for include_self in (True, False):
            options = {"reduce": reduce, "include_self": include_self}
            for name, index in (("scatter_reduce", places), ("index_reduce", places[:, 0])):
                for form, how in ((name, ""), (name + "_", IN_PLACE)):
                    function = functools.partial(_reduce_into, form, 0, index, options)
                    yield Case(f"{name}({reduce}){how}", function, (values(5, 6), values(9, 6)), {})
    infinity = float("inf")
    yield Case("cdist(inf)", torch.cdist, (values(2, 5, 4), values(3, 4)), {"p": infinity})
    yield Case("pdist(inf)", torch.nn.functional.pdist, (values(6, 4),), {"p": infinity})
    for p in (infinity, -infinity):
        yield Case(f"dist({p})", torch.dist, (values(4, 5), values(5)), {"p": p})
        yield Case(f"norm({p})", torch.norm, (values(4, 5),), {"p": p, "dim": -1})


def _reduce_into(form: str, dim: int, index: torch.Tensor, options: Any, x: torch.Tensor, source: torch.Tensor) -> Any:
    return getattr(x * 1, form)(dim, index, source, **options)


#: How far they lead, beside the largest value, and a seed; 0: to what a codec gives back.
LINES = ((0.3, 1), (0, 2), (1.5, 3))


def search(case: Case) -> Iterator[tuple[Moved, Jump]]:
    """Jumps on some lines from a sample. Where a line leaves what the operator takes,
    none is found."""
    for far, seed in LINES:
        moved = Moved(case, far, seed)
        if not moved.starts:
            return
        try:
            found = jumps(alone(moved))
        except Exception:
            continue
        yield from ((moved, jump) for jump in found)


# ---- Which operators have a kernel that writes into what an operator that it calls has returned,
# and what that one is.
#
# ``python operator_samples.py`` runs the samples of torch's table (OpInfo) and prints them as
# JSON. A kernel of Python's stands before every operator, on the key that gradckpt catches on: a
# process of its own.

aten = torch.ops.aten
KEY = torch._C.DispatchKey.Negative
BELOW = torch._C._dispatch_keyset_full_after(KEY)
include = torch._C._dispatch_tls_set_dispatch_key_included

#: New memory is there to be written into.
FACTORIES = ("zeros", "new_zeros", "zeros_like", "new_empty", "empty_like", "ones_like", "arange")

depth = 0
returned = []
written = defaultdict(set)


def plain_tensors(out):
    return [x for x in tree_leaves(out) if type(x) is torch.Tensor and x.layout is torch.strided]


def same(x, y):
    return x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())


def note(op, out):
    if depth > 0:
        returned.extend((op, x, x.clone()) for x in plain_tensors(out))
        return
    for called, now, then in returned:
        if called._opname not in FACTORIES and not same(now, then):
            written[op._opname].add(str(called))
    returned.clear()


def watcher(op):
    takes_tensor = [str(argument.type) == "Tensor" for argument in op._schema.arguments]

    def kernel(keys, *args, **kwargs):
        global depth
        include(KEY, False)
        wrapped = [
            torch.tensor(x) if t and not isinstance(x, torch.Tensor) and x is not None else x
            for x, t in zip(args, takes_tensor, strict=False)
        ]
        include(KEY, True)
        depth += 1
        try:
            out = op.redispatch(keys & BELOW, *wrapped, **kwargs)
        finally:
            depth -= 1
        include(KEY, False)
        try:
            note(op, out)
        finally:
            include(KEY, True)
        return out

    return kernel


def watch_all(library):
    for packet in sorted(
        {name[6:].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    ):
        for overload in getattr(getattr(aten, packet, None), "overloads", list)():
            op = getattr(getattr(aten, packet), overload)
            if any(argument.alias_info is not None for argument in op._schema.arguments):
                continue
            known = torch._C._dispatch_has_kernel(op.name())  # not so TorchScript's own
            if known and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Negative"):
                library.impl(op, watcher(op), "Negative", with_keyset=True)


def run(function, *args, **kwargs):
    global depth
    depth = 0
    include(KEY, True)
    try:
        function(*args, **kwargs)
    except Exception:  # a sample that this machine or the kernel refuses
        returned.clear()
    finally:
        include(KEY, False)


def main():
    table = operators()
    library = torch.library.Library("aten", "IMPL")
    watch_all(library)
    for info in table:
        if torch.float32 in info.supported_dtypes("cpu"):
            samples = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
            for sample in itertools.islice(samples, 30):
                run(info.op, sample.input, *sample.args, **sample.kwargs)
    x = torch.randn(64, 64)
    run(torch.cdist, x, x + 1)
    json.dump({name: sorted(called) for name, called in written.items()}, sys.stdout)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
