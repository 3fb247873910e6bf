"""Regions of which parts are kept: how exact their gradients are, and what is written into these
parts.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt
from gradckpt import policies

# ---- How exact a region's gradients are when parts of it are kept: by a call that does not run
# again, by a policy, by compress_saved. None may be much worse than the same region with the same
# codec, run again as a whole, in which everything comes from the same restored values.
#
# python tests/helpers/kept_parts.py one_truth [--only softmax] [--way kept] [--part 1/4]
#
# prints the cases that are worse.

Tensor = torch.Tensor
ROWS, WIDTH = 32, 256
#: An error is judged against this multiple of an unmarked region's, and never below this share:
#: what compress_saved saves has int8's own error, also where a gradient depends on no input.
FACTOR, FLOOR, SAVED_FLOOR = 1.5, 1e-3, 0.01


# ---- functions ----


def heads(x: Tensor) -> Tensor:
    return x.view(1, ROWS, 4, 64).transpose(1, 2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / 8
    return scores.softmax(-1) @ v


def masked(x: Tensor) -> Tensor:
    bias = torch.linspace(-2, 2, ROWS).expand(ROWS, ROWS)
    return F.scaled_dot_product_attention(heads(x), heads(x.roll(1, 0)), heads(x.sin()), attn_mask=bias)


def rms(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def by_index(reduce: str) -> Callable[[Tensor], Tensor]:
    index = (torch.arange(ROWS) % 8)[:, None].expand(ROWS, WIDTH)
    return lambda x: x.new_zeros(8, WIDTH).scatter_reduce(0, index, x, reduce, include_self=False)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax by hand": lambda x: (e := (x - x.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True),
    "logsumexp by hand": lambda x: (x - (m := x.amax(-1, keepdim=True))).exp().sum(-1).log() + m[:, 0],
    "cross entropy": lambda x: F.cross_entropy(x, torch.arange(ROWS), reduction="none"),
    "minus its largest": lambda x: x - x.amax(-1, keepdim=True),
    "over its largest": lambda x: x / x.max() * x,
    "over its largest size": lambda x: x * x / x.abs().max(),
    "minus its least": lambda x: (x - x.aminmax(dim=-1, keepdim=True)[0]) * x,
    "minus its median": lambda x: (x - x.median()) * x,
    "minus a quantile": lambda x: x - x.quantile(0.75, -1, keepdim=True),
    "standardized": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "norm 2": lambda x: x * x / x.norm(2, -1, keepdim=True),
    "largest norm": lambda x: x * x / torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True),
    "normalize": lambda x: F.normalize(x, dim=-1).pow(3),
    "layer norm": lambda x: F.layer_norm(x, (WIDTH,)).pow(3),
    "rms norm": lambda x: F.rms_norm(x, (WIDTH,)).pow(3),
    "rms norm by hand": lambda x: rms(x).pow(3),
    "group norm": lambda x: F.group_norm(x.view(4, 8, WIDTH), 4).pow(3),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True).pow(3),
    "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x.roll(1, 0)), heads(x.sin())),
    "causal attention": lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3, is_causal=True),
    "attention with a bias": masked,
    "attention by hand": lambda x: attention(heads(x), heads(x.roll(1, 0)), heads(x.sin())),
    "cdist": lambda x: torch.cdist(x, x.detach()[:8] * 2),
    "largest cdist": lambda x: torch.cdist(x, x.detach()[:8] * 2, p=float("inf")),
    "scatter amax": by_index("amax"),
    "scatter amin": by_index("amin"),
    "power of itself": lambda x: x.sigmoid() ** x.tanh(),
    "reciprocal square root": lambda x: (x * x + 1e-3).rsqrt(),
    "reciprocal": lambda x: (x * x + 1e-3).reciprocal(),
    "one over": lambda x: 1 / (x * x + 1e-3),
    "negative power": lambda x: (x * x + 1e-3) ** -1.5,
    "root": lambda x: (x * x + 1e-3).sqrt(),
    "logarithm": lambda x: (x * x + 1e-3).log(),
    "root of a sum of two": lambda x: (x * x).view(ROWS, -1, 2).sum(-1).add(1e-3).rsqrt(),
    "root of a part": lambda x: (x * x + 1e-3)[:, :128].masked_fill(x[:, 128:] > 1, 1.0).rsqrt(),
    "root of a part put together": lambda x: torch.cat([x * x + 1e-3, x.new_ones(1, WIDTH)]).rsqrt()[:ROWS],
    "root beside a sine": lambda x: (y := x * x, (y * 0.1).sin() + (y + 1e-3).rsqrt())[1],
    "quotient added": lambda x: torch.addcdiv(x, torch.ones_like(x), x * x + 1e-3),
    "angle": lambda x: torch.atan2(x * x, torch.full_like(x, 1e-3)),
    "gaussian": lambda x: (-x * x).exp(),
    "soft sign": lambda x: x * x / (1 + (x * x).abs()),
    "glu": lambda x: F.glu(x) * x[:, :128],
    "silu product": lambda x: F.silu(x) * x.roll(1, 0),
    "determinant": lambda x: torch.linalg.slogdet(x @ x.t() / WIDTH + torch.eye(ROWS))[1],
}

SCALES = (1e-2, 1.0, 16.0, 256.0)
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": lambda x: x.round(decimals=0),
    "saturated": lambda x: torch.where(x > 0, x + 30, x - 30),
}


class Input(NamedTuple):
    scale: float
    shape: str

    def leaf(self) -> Tensor:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        return SHAPES[self.shape](x * self.scale).requires_grad_()


INPUTS = [Input(scale, "normal") for scale in SCALES] + [Input(2.0, "ties"), Input(1.0, "saturated")]


# ---- the ways ----

Function = Callable[..., Any]
#: Small tensors, too.
INT8 = {"codec": "int8", "min_numel": 1}


def operators_of(function: Function, leaves: list[Tensor]) -> list[Any]:
    """What a policy may name of the function."""
    found: dict[Any, None] = {}

    class Note(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not op._schema.is_mutable and op.name() not in ("aten::detach", "aten::alias"):
                found[op] = None
            return op(*args, **(kwargs or {}))

    with Note(), torch.no_grad():
        function(*(x.detach() for x in leaves))
    return list(found)


def kept(function: Function, *x: Tensor) -> Any:
    return gradckpt.checkpoint(policies.region(function, "call", recompute=False), *x, compress=INT8)


def unmarked(function: Function, *x: Tensor) -> Any:
    return gradckpt.checkpoint(function, *x, compress=INT8)


def saved(function: Function, *x: Tensor) -> Any:
    return gradckpt.compress_saved(INT8)(function)(*x)


def by_policy(policy: Any, function: Function, *x: Tensor) -> Any:
    return gradckpt.checkpoint(function, *x, compress=INT8, policy=policy)


def ways(function: Function, leaves: list[Tensor]) -> Iterator[tuple[str, Any]]:
    yield "kept", kept
    yield "saved", saved
    named = operators_of(function, leaves)
    yield "policy: all", functools.partial(by_policy, named)
    if len(named) > 1:
        for op in named:
            yield f"policy: {op}", functools.partial(by_policy, [op])


def gradient(way: Function, function: Function, leaves: list[Tensor]) -> Tensor:
    torch.manual_seed(0)
    results = [y for y in tree_leaves(way(function, *(x * 1 for x in leaves))) if isinstance(y, Tensor)]
    results = [y for y in results if y.requires_grad]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in results]
    grads = torch.autograd.grad(results, leaves, weights, allow_unused=True)
    return torch.cat([torch.zeros(1).double(), *(g.flatten().double() for g in grads if g is not None)])


def error(got: Tensor, right: Tensor) -> float:
    return float((got - right).norm() / right.norm().clamp_min(1e-30))


def worse(name: str, function: Function, leaves: list[Tensor], only: str = "", floor: float = FLOOR) -> list[str]:
    """The ways in which the function's gradient is worse than an unmarked region's."""
    try:
        right = gradient(lambda f, *x: f(*x), function, leaves)
    except RuntimeError as refusal:
        if "is not implemented" not in str(refusal):  # this torch has no derivative of one of its operators
            raise
        return []
    if not right.isfinite().all() or not right.norm() > 0:
        return []
    allowed = error(gradient(unmarked, function, leaves), right)
    found = []
    for label, way in ways(function, leaves):
        if only not in label:
            continue
        try:
            got = error(gradient(way, function, leaves), right)
        except RuntimeError as refusal:
            if not any(text in str(refusal) for text in REFUSALS):
                raise
            continue
        # once an operator is caught anywhere, those that its kernel calls are no longer kept
        allowed = max(allowed, error(gradient(unmarked, function, leaves), right))
        if not got <= max(FACTOR * allowed, SAVED_FLOOR if label == "saved" else floor) and allowed == allowed:
            found.append(f"{name}, {label}: {got:.2g}, unmarked {allowed:.2g}")
    return found


#: The function writes into what is kept, or into its arguments.
REFUSALS = (*("has been mutated", "changed an argument in place", "was changed in place later"),)


# ---- torch's own operators ----


def of_case(case: Any) -> tuple[Function, list[Tensor]]:
    """The operator as a function of the tensors that require grad."""
    flat, spec = tree_flatten((case.args, case.kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, Tensor) and x.requires_grad]

    def function(*leaves: Tensor) -> Any:
        given = list(flat)
        for i, x in zip(places, leaves, strict=True):
            given[i] = x
        args, kwargs = tree_unflatten(given, spec)
        return case.function(*args, **kwargs)

    return function, [flat[i].detach().clone().requires_grad_() for i in places]


#: Their gradient is not a function of their input alone; or uneven rows share a group of what a
#: product has saved.
NOT_COMPARED = ("svd_lowrank", "pca_lowrank", "linalg_eig", "_segment_reduce_lengths", "cov")


def worse_operators(part: int, parts: int, only: str, way: str) -> list[str]:
    from operator_samples import cases, operators

    found = []
    for op in operators()[part::parts]:
        if only not in op.formatted_name or not op.supports_autograd or op.formatted_name.startswith(NOT_COMPARED):
            continue
        for case in cases(op, torch.float32, False) if torch.float32 in op.supported_dtypes("cpu") else ():
            function, leaves = of_case(case)
            for scale in (1.0, 16.0):
                scaled = [(x.detach() * scale).requires_grad_() for x in leaves if x.layout == torch.strided]
                try:
                    plain = len(scaled) == len(leaves) and tree_leaves(function(*scaled))
                except (RuntimeError, ValueError):  # out of the operator's domain
                    plain = None
                if plain and any(isinstance(y, Tensor) and y.requires_grad for y in plain):
                    found += worse(f"{op.formatted_name}, scale {scale}", function, scaled, way, SAVED_FLOOR)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", action="store_true", help="torch's own operators, from its sample table")
    parser.add_argument("--only", default="", help="functions with this in their name")
    parser.add_argument("--way", default="", help="ways with this in their name")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th function from the i-th on")
    given = parser.parse_args()
    part, parts = map(int, given.part.split("/"))
    if given.operators:
        found = worse_operators(part, parts, given.only, given.way)
    else:
        names = [name for name in FUNCTIONS if given.only in name][part::parts]
        inputs = [(f"{of.shape} of scale {of.scale}", of.leaf()) for of in INPUTS]
        found = [
            line
            for name in names
            for shape, x in inputs
            for line in worse(f"{name}, {shape}", FUNCTIONS[name], [x], given.way)
        ]
    print("\n".join(found))
    print(f"all other ways are as exact: {len(found)} worse")


# ---- Programs that write into what a policy keeps, and operators and modules whose own kernels
# do.
#
# ``python kept_parts.py kept_then_written PART PARTS [all]`` runs the samples of torch's table
# (OpInfo)
# under policies, with operands in several layouts, and prints what differs from plain autograd.

aten = torch.ops.aten
contexts = gradckpt.compat.create_selective_checkpoint_contexts
PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)

LAYOUTS = {
    "contiguous": lambda x: x * 1,
    "transposed": lambda x: (x * 1).mT.contiguous().mT if x.dim() > 1 else x * 1,
    "offset": lambda x: torch.cat([x, x])[len(x) :] if x.dim() else x * 1,
    "chunk": lambda x: torch.cat([x, x], -1).chunk(2, -1)[1] if x.dim() else x * 1,
}


def by_function(ctx, op, *args, **kwargs):
    return op in PRODUCTS


POLICIES = {
    "save_matmuls": "save_matmuls",
    "save_matmuls:lossless": "save_matmuls:lossless",
    "save_attention": "save_attention",
    "every_other_matmul": "every_other_matmul",
    "save_named": policies.save_named("h"),
    "function": by_function,
}


class Call(nn.Module):
    """A function with the parameters that it uses."""

    def __init__(self, function, parameters):
        super().__init__()
        self.function, self.held = function, nn.ParameterList(parameters)

    def forward(self, *args):
        return self.function(*args)


ENTRY_POINTS = {
    "checkpoint": lambda policy, call, *args: gradckpt.checkpoint(call, *args, policy=policy),
    "SelectiveRecompute": lambda policy, call, *args: gradckpt.SelectiveRecompute.apply(call, policy, *args),
    "torch's": lambda policy, call, *args: torchs_checkpoint(
        call, *args, use_reentrant=False, context_fn=lambda: contexts(policy)
    ),
    "reusable": lambda policy, call, *args: gradckpt.checkpoint(
        call, *args, context_fn=lambda: contexts(policy, reusable=True)
    ),
}
PLAIN = "plain"


def tensors_in(x):
    leaves = torch.utils._pytree.tree_leaves(x)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point() and t.requires_grad]


def gradients(call, entry_point, policy, leaves, layout, others=(), backwards=1):
    """Of every leaf and parameter, for each backward."""
    torch.manual_seed(1)
    args = [LAYOUTS[layout](x) for x in leaves]
    run = call if entry_point == PLAIN else functools.partial(ENTRY_POINTS[entry_point], policy, call)
    outs = tensors_in(run(*args, *others))
    loss = sum((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outs)
    wanted = [*leaves, *(p for p in call.parameters() if p.requires_grad)]
    found = []
    for i in range(backwards):
        found.append(torch.autograd.grad(loss, wanted, retain_graph=i + 1 < backwards, allow_unused=True))
    return found


def differs(one, other):
    return any(
        (a is None) != (b is None) or (a is not None and not same(a, b)) for a, b in zip(one, other, strict=True)
    )


def same(a, b):
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def check(call, leaves, layout, policy, entry_point, others=(), want=None, refused=False):
    """None, or what is wrong; refused: two may raise, a write that a version shows, as in torch,
    and a region of one node around a function that has other tensors with gradients."""
    want = gradients(call, PLAIN, None, leaves, layout, others)[0] if want is None else want
    backwards = 2 if entry_point == "reusable" else 1
    try:
        found = gradients(call, entry_point, POLICIES[policy], leaves, layout, others, backwards)
    except RuntimeError as error:
        lost = entry_point == "SelectiveRecompute" and "would lose the gradient of a tensor" in str(error)
        if refused and (lost or "has been mutated" in str(error)):
            return None
        return f"{type(error).__name__}: {error}"
    return "other gradients" if any(differs(each, want) for each in found) else None


# ---- programs ----

W, B = (nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3))) for shape in ((16, 16), (16,)))


def written(write):
    def program(x):
        y = x @ W
        write(y, x)
        return y.sin()

    return program


PROGRAMS = {
    "bias": lambda x: F.linear(x, W, B).sin(),
    "relu_": lambda x: (x @ W).relu_().sin(),
    "add_": written(lambda y, x: y.add_(1)),
    "iadd of a part": written(lambda y, x: y[..., :3].add_(x[..., :3])),
    "copy_": written(lambda y, x: y[..., :3].copy_(x[..., :3])),
    "item": written(lambda y, x: y.__setitem__((..., 0), 0.0)),
    "a list": written(lambda y, x: torch._foreach_mul_([y], 2.0)),
    "out": written(lambda y, x: torch.add(y.detach(), 1, out=y.detach())),
    "chunks": lambda x: (lambda a, b: a.sigmoid_() * b.tanh_())(*(x @ W).unsafe_chunk(2, -1)),
    "named": lambda x: policies.name(F.linear(x, W, B), "h").sin(),
    "named after a write": lambda x: policies.name((x @ W).relu_(), "h").sin(),
    "named after a copy": lambda x: policies.name((x @ W).copy_(x), "h").sin(),
    "attention": lambda x: F.scaled_dot_product_attention(*(F.linear(x, W, B).unsqueeze(1) for _ in range(3))),
}


def program(name):
    return Call(PROGRAMS[name], [W, B])


def input_of_programs():
    return [torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(4), requires_grad=True)]


# ---- modules and operators ----

MODULES = {
    "Linear": lambda: nn.Linear(16, 16),
    "Linear and a write": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True)),
    "Conv1d": lambda: nn.Conv1d(16, 16, 3, padding=1),
    "Bilinear": lambda: Call(*(lambda m: (lambda x: m(x, x), m.parameters()))(nn.Bilinear(16, 16, 16))),
    "MultiheadAttention": lambda: Call(
        *(lambda m: (lambda x: m(x, x, x)[0], m.parameters()))(nn.MultiheadAttention(16, 2))
    ),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True),
    "LSTM": lambda: nn.LSTM(16, 16, batch_first=True),
    "GRU": lambda: nn.GRU(16, 16, batch_first=True),
    "RNN": lambda: nn.RNN(16, 16, batch_first=True),
}


#: These write into a product itself.
REFUSED = {"Linear and a write", "RNN"}


def sweep_of_modules(combinations):
    wrong = []
    for name, layout, policy, entry_point in combinations(MODULES, LAYOUTS, POLICIES, ENTRY_POINTS):
        torch.manual_seed(0)
        found = check(MODULES[name](), input_of_programs(), layout, policy, entry_point, refused=name in REFUSED)
        wrong += [(name, layout, policy, entry_point, found)] if found else []
    return wrong


def sweep_of_operators(part, parts, everything=False):
    from operator_samples import cases, operators

    wrong, reached = [], 0
    combinations = list(itertools.product(POLICIES, ENTRY_POINTS, LAYOUTS))
    others = itertools.cycle(combinations)
    for op in operators()[part::parts]:
        if torch.float32 not in op.supported_dtypes("cpu") or not op.supports_autograd:
            continue
        for case in itertools.islice(cases(op, torch.float32, everything), None if everything else 3):
            leaves = [
                x for x in case.args if isinstance(x, torch.Tensor) and x.requires_grad and x.layout is torch.strided
            ]
            if not leaves or any(x.dtype is not torch.float32 for x in leaves):
                continue
            at = [i for i, x in enumerate(case.args) if any(x is leaf for leaf in leaves)]
            call = Call(functools.partial(again, case, at), [])
            leaves = [x.detach().clone().requires_grad_() for x in leaves]
            try:
                want = gradients(call, PLAIN, None, leaves, "contiguous")[0]
                gradckpt.stats.reset()
                check(call, leaves, "contiguous", "save_matmuls", "checkpoint", want=want, refused=True)
                if gradckpt.stats()["policy_outputs"] == 0 or differs(
                    gradients(call, PLAIN, None, leaves, "contiguous")[0], want
                ):
                    continue
            except Exception:  # what the operator itself refuses
                continue
            reached += 1
            for policy, entry_point, layout in itertools.islice(others, len(combinations) if everything else 12):
                found = check(call, leaves, layout, policy, entry_point, refused=True)
                wrong += [(case.name, layout, policy, entry_point, found)] if found else []
    return wrong, reached


def again(case, at, *leaves):
    args = list(case.args)
    for i, x in zip(at, leaves, strict=True):
        args[i] = x
    return case.function(*args, **case.kwargs)


def run_one_truth():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main()


def run_kept_then_written():
    warnings.simplefilter("ignore")
    json.dump(sweep_of_operators(int(sys.argv[1]), int(sys.argv[2]), "all" in sys.argv), sys.stdout)


if __name__ == "__main__":
    globals()[f"run_{sys.argv.pop(1)}"]()
