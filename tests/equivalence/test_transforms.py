"""torch.func, forward-mode AD, tensor subclasses, fake tensors:
refused or passed on exactly as torch does."""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from behaviours import SAVES_INPUTS_BY_A_NODE, behaviour, leaf, saves_inputs_alone
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor


def outcome(run, action):
    """Its result, or its error: whichever torch gives, ours must give too."""
    try:
        run.log("result", action())
    except Exception as e:
        run.log("error", e)


def region(run, reentrant=False):
    return lambda t: run.checkpoint(run.watched(lambda u: u.sin().exp() * u), t, use_reentrant=reentrant)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).sum())(x),
    "grad of grad": lambda f, x: torch.func.grad(lambda t: torch.func.grad(lambda u: f(u).sum())(t).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x)),
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "vmap of grad": lambda f, x: torch.func.vmap(torch.func.grad(lambda t: f(t).sum()))(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x[0]),
    "hessian": lambda f, x: torch.func.hessian(lambda t: f(t).sum())(x[0]),
    "linearize": lambda f, x: torch.func.linearize(f, x)[0],
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
@behaviour
def test_transform_around_a_region(run, name, reentrant):
    if SAVES_INPUTS_BY_A_NODE and not reentrant and name not in ("grad", "grad of grad", "vjp", "jacrev"):
        pytest.skip("torch's checkpoint saves its inputs by an autograd.Function, which has no rule for it")
    x = torch.randn(3, 4)
    outcome(run, lambda: TRANSFORMS[name](region(run, reentrant), x))


@pytest.mark.parametrize("name", TRANSFORMS)
@behaviour
def test_transform_inside_a_region(run, name):
    x = leaf(3, 4)

    def fn(t):
        result = TRANSFORMS[name](lambda u: u.sin().exp() * u, t)
        return torch.utils._pytree.tree_leaves(result)[0]

    def whole():
        y = run.checkpoint(run.watched(fn), x)
        y.sum().backward()
        return y

    outcome(run, whole)
    return x.grad


# ---- forward mode ----


@saves_inputs_alone
@pytest.mark.parametrize("requires_grad", [True, False])
@behaviour
def test_forward_mode(run, requires_grad):
    x, v = torch.randn(4, requires_grad=requires_grad), torch.randn(4)

    def whole():
        with fwAD.dual_level():
            y = region(run)(fwAD.make_dual(x, v))
            return tuple(fwAD.unpack_dual(y))

    outcome(run, whole)


@saves_inputs_alone
@behaviour
def test_forward_over_reverse(run):
    x, v = leaf(4), torch.randn(4)

    def whole():
        with fwAD.dual_level():
            y = region(run)(fwAD.make_dual(x, v))
            (g,) = torch.autograd.grad(y.sum(), x)
            return tuple(fwAD.unpack_dual(g))

    outcome(run, whole)


# ---- subclasses ----


class Tagged(torch.Tensor):
    """A subclass by __torch_function__ alone: results keep the class."""


@behaviour
def test_subclass_as_an_argument(run):
    x = torch.randn(4).as_subclass(Tagged).requires_grad_()

    def fn(t):
        run.log(type(t).__name__)
        return t.sin().exp()

    y = run.checkpoint(fn, x)
    y.sum().backward()
    return y, x.grad


@behaviour
def test_two_tensors_in_one(run):
    x = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()

    def fn(t):
        run.log(type(t).__name__)
        return t.sin().exp()

    y = run.checkpoint(fn, x)
    y.sum().backward()
    return type(y).__name__, y.a.detach(), y.b.detach(), x.grad.a, x.grad.b


@behaviour
def test_subclass_whose_recompute_differs(run):
    functions = iter([lambda t: t.exp().sin(), lambda t: t[:2].exp().sin()])
    x = TwoTensor(torch.randn(4), torch.randn(4)).requires_grad_()
    y = run.checkpoint(lambda t: next(functions)(t), x)
    with run.error(torch.utils.checkpoint.CheckpointError, "different metadata"):
        y.sum().backward()


@behaviour
def test_nested_tensors(run):
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged, requires_grad=True)
    y = run.checkpoint(run.watched(lambda t: t.sin().exp()), x)
    torch.cat([t.sum()[None] for t in y.unbind()]).sum().backward()
    return x.grad.values()


@behaviour
def test_fake_tensors(run):
    with FakeTensorMode():
        x = torch.randn(4, 4, requires_grad=True)
        y = run.checkpoint(run.watched(lambda t: (t @ t).sin().exp()), x)
        y.sum().backward()
        run.log(type(y).__name__, tuple(y.shape), tuple(x.grad.shape), x.grad.dtype)


@saves_inputs_alone
@behaviour
def test_traced_by_make_fx(run):
    from torch.fx.experimental.proxy_tensor import make_fx

    def step(x):
        y = run.checkpoint(lambda t: t.sin().exp(), x)
        return torch.autograd.grad(y.sum(), x)[0]

    graph = make_fx(step)(leaf(4))
    run.log([str(n.target) for n in graph.graph.nodes])


@saves_inputs_alone
@behaviour
def test_jit_trace(run):
    def fn(x):
        return run.checkpoint(lambda t: t.sin().exp(), x)

    def whole():
        return str(torch.jit.trace(fn, torch.randn(4), check_trace=False).graph)

    outcome(run, whole)
