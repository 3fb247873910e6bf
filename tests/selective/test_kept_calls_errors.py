"""Programs in which a call that does not run again meets exceptions, shared storages, policies and
other hooks: right to the last bit, or one sentence.
"""

import contextlib
import dataclasses

import pytest
import torch
from selective_ways import checkpointed, kept_call

import gradckpt

W = torch.randn(16, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()


def saved(function):
    return gradckpt.compress_saved({"codec": "lossless", "min_numel": 1})(function)


def gradients(function):
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(4)).requires_grad_()
    return torch.autograd.grad(function(x * 1).sum(), [x, W], allow_unused=True, materialize_grads=True)


def square(x):
    return (x * x).sin()


def heads(x):
    return (x @ W).view(16, 4, 4).transpose(0, 1)


def torchs(function):
    return lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)


def in_products(x):
    """Its tensors have one shape, so that no error tells which of them went elsewhere."""
    return (kept_call(lambda h: h.tanh() * h.sin())(x) @ W).tanh() * x


EXACT = {
    "policy inside, policy outside": (
        checkpointed(
            lambda x: (kept_call(checkpointed(torch.sin, policy="save_attention"))(x) @ W).sin(), policy="save_matmuls"
        ),
        lambda x: (x.sin() @ W).sin(),
    ),
    "saves after the call": (
        checkpointed(lambda x: saved(torch.sin)(kept_call(torch.sin)(x))),
        lambda x: x.sin().sin(),
    ),
    "saves in the call": (checkpointed(kept_call(saved(lambda x: (x @ W).sin()))), lambda x: (x @ W).sin()),
    "the call in saves": (checkpointed(saved(kept_call(lambda x: (x @ W).sin()))), lambda x: (x @ W).sin()),
    "the call in torch's checkpoint": (checkpointed(torchs(in_products)), in_products),
    "the call in torch's checkpoint in saves": (checkpointed(saved(torchs(in_products))), in_products),
    "saves around the region": (saved(checkpointed(kept_call(lambda x: (x @ W).sin()))), lambda x: (x @ W).sin()),
    "saves of a view, two regions": (
        checkpointed(lambda x: checkpointed(saved(torch.sin))(x.cos().t())),
        lambda x: x.cos().t().sin(),
    ),
    "saves of heads, two regions": (
        checkpointed(lambda x: checkpointed(saved(square))(heads(x))),
        lambda x: square(heads(x)),
    ),
}


@pytest.mark.parametrize("program", EXACT)
def test_exact(program):
    ours, plain = EXACT[program]
    assert all(map(torch.equal, gradients(ours), gradients(plain)))


@pytest.mark.parametrize("compress", [None, "lossless"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_arguments_that_share_a_storage(compress, order):
    def attention(q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v

    qkv = torch.randn(3, 2, 64, 16, requires_grad=True)
    parts = (qkv * 1).unbind(0)
    chosen = [parts[i] for i in order]
    ours = gradckpt.checkpoint(lambda *x: kept_call(attention)(*x).tanh(), *chosen, compress=compress)
    grads = [
        torch.autograd.grad(result.sum(), qkv, retain_graph=True)[0] for result in (ours, attention(*chosen).tanh())
    ]
    assert torch.equal(*grads)


def force(x):
    """A backward inside the forward."""
    z = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad((z @ W.detach()).tanh().sum(), z)
    return gradient * x


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("inside", [force, checkpointed(force), torchs(force)], ids=["bare", "region", "torch's"])
def test_a_backward_inside_the_call_reads_what_the_call_has(inside, early_stop):
    call = kept_call(lambda x: inside(x.sin()))
    ours = gradients(checkpointed(lambda x: call(x.sin()), early_stop=early_stop))
    assert all(map(torch.equal, ours, gradients(lambda x: force(x.sin().sin()))))


# ---- errors ----


@dataclasses.dataclass
class Result:
    value: torch.Tensor


def raises(x):
    torch.mm(x, W)
    raise ZeroDivisionError


def caught(x):
    with contextlib.suppress(ZeroDivisionError):
        kept_call(raises)(x)
    return x.exp().sin()


def tried_again(x):
    try:
        return kept_call(raises)(x)
    except ZeroDivisionError:
        return kept_call(torch.sin)(x)


ERRORS = {
    "caught": (caught, "raised and its region went on"),
    "tried again": (tried_again, "two calls of this region have the name"),
    "dataclass": (lambda x: kept_call(lambda y: Result(y.sin()))(x).value, "returned a Result, which may hold tensors"),
}


@pytest.mark.parametrize("program", ERRORS)
def test_what_cannot_be_kept_is_said(program):
    function, said = ERRORS[program]
    with pytest.raises(RuntimeError, match=said):
        gradients(checkpointed(function))
    exact = (gradients(checkpointed(torch.sin)), gradients(torch.sin))
    assert all(map(torch.equal, *exact)), "nothing is left behind"


def test_functions_whose_body_runs_later():
    def generator(x):
        yield x

    with pytest.raises(TypeError, match="whose body runs when it is called"):
        kept_call(generator)
