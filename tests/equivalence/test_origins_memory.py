"""Arguments, closures and constants that are views of one another, laid out anew, or used again:
the recompute's are not, and that is no difference."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError

import gradckpt

N = 32
#: They hand out every tensor contiguous, as save_on_cpu(pin_memory=True) does.
LAYS_ANEW = (lambda t: t.detach().contiguous().clone(), lambda t: t)


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def gradient_inside(region, x):
    linear = nn.Linear(N, N)
    with torch.no_grad():
        for i, parameter in enumerate(linear.parameters()):
            parameter.copy_(leaf(*parameter.shape, seed=i).detach() / 6)

    def function(t):
        z = linear(t).view(N, N).sin()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(z.sum(), t, create_graph=True)
        return z + grad.sin()

    return region(function, x * 1)


def scratch_buffers_in_turn(region, x):
    buffers, masks = [torch.empty(N, N) for _ in range(2)], leaf(2, N, N, seed=2).detach()

    def function(t):
        a, b = buffers.pop().copy_(masks[0]), buffers.pop().copy_(masks[1])
        y = (t * a).sin() * b
        buffers.extend([a, b])
        return y

    return region(function, x * 1)


class _Identity(torch.autograd.Function):
    """As FSDP's, which lies around a block's input in the forward alone."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def identity_in_the_forward_alone(region, x):
    runs = []

    def function(t):
        runs.append(t)
        return (_Identity.apply(t) if len(runs) == 1 else t).sin()

    return region(function, x * 1)


PROGRAMS = [gradient_inside, scratch_buffers_in_turn, identity_in_the_forward_alone]


def gradient(program, region):
    x = leaf(N, N)
    program(region, x).square().sum().backward()
    return x.grad


@pytest.mark.parametrize("hooks", [False, True], ids=["", "laid anew"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_no_difference(program, hooks):
    def around():
        return torch.autograd.graph.saved_tensors_hooks(*LAYS_ANEW) if hooks else contextlib.nullcontext()

    with around():
        want = gradient(program, lambda f, *args: f(*args))
    for compress in (None, "lossless", "int8"):
        config = compress and {"codec": compress, "min_numel": 1}

        def region(f, *args, config=config):
            with around():
                return gradckpt.checkpoint(f, *args, compress=config)

        found = gradient(program, region)
        if compress != "int8" and not hooks:  # kernels differ by layout
            assert torch.equal(found, want), compress
        assert (found - want).norm() < (0.1 if compress == "int8" else 1e-5) * want.norm(), compress


def test_what_a_node_makes_is_not_learnt_from_one_tensor():
    """After an unpacked tensor that has a view's node and no base, views are still told apart."""
    gradient(gradient_inside, gradckpt.checkpoint)
    weight, order = nn.Parameter(leaf(2 * N, N, seed=4).detach()), [0, N]

    def swaps(x):
        order.reverse()
        a, b = (weight[i : i + N] for i in order)
        return (x @ a).sin() @ b

    with pytest.raises(CheckpointError, match="from parameter"):
        gradckpt.checkpoint(swaps, leaf(N, N) * 1).sum().backward()


@pytest.mark.parametrize("kind", ["nan", "meta", "sparse"])
def test_constants_whose_values_cannot_be_compared(kind):
    """Equal ones may change places; what cannot be compared raises an error of ours."""
    one = torch.full((N, N), float("nan")) if kind == "nan" else torch.eye(N)
    one = one.to("meta") if kind == "meta" else one.to_sparse() if kind == "sparse" else one
    masks = [one, one.clone()]
    x = leaf(N, N).detach().to("meta" if kind == "meta" else "cpu").requires_grad_()

    def alternates(t):
        masks.reverse()
        if kind == "sparse":
            return torch.sparse.mm(masks[0], torch.sparse.mm(masks[1], t).sin())
        return (t * masks[0]).sin() * masks[1]

    y = gradckpt.checkpoint(alternates, x * 1)
    if kind == "sparse":
        with pytest.raises(CheckpointError):
            y.sum().backward()
    else:
        y.sum().backward()


class Member(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.first, self.second, self.runs = make(1.0), make(2.0), 0

    def forward(self, x):
        self.runs += 1
        return (x.sin() * (self.first if self.runs == 1 else self.second)).cos()


@pytest.mark.parametrize("make", ["parameter", "buffer", "expanded"])
def test_another_member_of_the_module_raises_unless_it_is_equal(make):
    kinds = {
        "parameter": lambda value: nn.Parameter(torch.full((N, N), value), requires_grad=False),
        "buffer": lambda value: nn.Buffer(torch.full((N, N), value)),
        "expanded": lambda value: nn.Buffer(torch.full((1, N), value).expand(N, N)),
    }
    with pytest.raises(CheckpointError, match=r"'first'(.*\n)*.*'second'"):
        gradckpt.checkpoint(Member(kinds[make]), leaf(N, N) * 1).sum().backward()
    gradckpt.checkpoint(Member(lambda value: kinds[make](1.0)), leaf(N, N) * 1).sum().backward()


@pytest.mark.parametrize("how", ["replaced", "freed", "emptied"])
def test_a_member_that_was_replaced_or_freed_is_no_difference(how):
    module = Member(lambda value: nn.Parameter(torch.full((N, N), 2.0), requires_grad=False))
    y = gradckpt.checkpoint(module, leaf(N, N) * 1)
    old = module.first
    if how == "replaced":
        module.second = nn.Parameter(torch.full((N, N), 3.0), requires_grad=False)
        del module.first
    elif how == "freed":
        old.untyped_storage().resize_(0)
    else:
        old.data = torch.empty(0)
    y.sum().backward()


def test_constants_of_which_autograd_uses_little_are_no_difference():
    """Statistics that batch_norm saves, padding, running maxima that are logged."""
    norm, seen = nn.BatchNorm1d(N), []
    states = [{k: v.clone() for k, v in norm.named_buffers()}]

    def function(x):
        buffers = {k: v.clone() for k, v in states[-1].items()}
        y = torch.func.functional_call(norm, (dict(norm.named_parameters()), buffers), (x,))
        states.append(buffers)
        seen.append(torch.full((N,), 1e3 + len(seen)))
        return torch.minimum(y.sin(), seen[-1])

    gradckpt.checkpoint(function, leaf(N, N) * 1).sum().backward()
