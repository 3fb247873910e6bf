"""Programs that write into what a policy keeps, and operators and modules whose own kernels do.

``python kept_then_written.py PART PARTS [all]`` runs the samples of torch's table (OpInfo) under
policies, with operands in several layouts, and prints what differs from plain autograd.
"""

import functools
import itertools
import json
import sys
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt

aten, policies = torch.ops.aten, gradckpt.policies
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


def of_contexts(ck, policy, function, *args, **options):
    return ck(function, *args, context_fn=lambda: contexts(policy, **options))


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
    from opinfo import cases, operators

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


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    json.dump(sweep_of_operators(int(sys.argv[1]), int(sys.argv[2]), "all" in sys.argv), sys.stdout)
