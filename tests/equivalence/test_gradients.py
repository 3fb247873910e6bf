"""Ways to ask for gradients: grad with inputs, several backwards, double backward, hooks,
custom Functions."""

import pytest
import torch
import torch.nn.functional as F
from behaviours import behaviour, leaf


def block(t, w):
    return F.layer_norm(F.gelu(t @ w), (4,)) + t.sin()


# ---- asking ----


@behaviour
def test_materialized_and_batched_grads(run):
    x, w = leaf(4, 4), leaf(4, 4)
    y = run.checkpoint(run.watched(block), x, w)
    seeds = torch.eye(4).reshape(4, 1, 4).expand(4, 4, 4)
    run.log(torch.autograd.grad(y, x, seeds, retain_graph=True, is_grads_batched=True))
    return torch.autograd.grad(y.sum(), [x, leaf(2)], materialize_grads=True)


# ---- double backward ----


@behaviour
def test_third_derivative(run):
    x = g = leaf(4, dtype=torch.float64)
    g = run.checkpoint(run.watched(lambda t: t.sin().exp()), x).sum()
    for i in range(3):
        (g,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        run.log(i, g)


# ---- hooks, names, graph ----


@behaviour
def test_graph_has_the_nodes_of_the_function(run):
    def walk(node, depth=0):
        if node is not None and depth < 12:
            run.log(depth, node.name())
            for parent, index in node.next_functions:
                run.log(index)
                walk(parent, depth + 1)

    x, w = leaf(4, 4), leaf(4, 4)
    walk(run.checkpoint(block, x * 2, w).grad_fn)


@behaviour
def test_gradient_hooks_inside(run):
    def fn(t):
        y = t.sin()
        y.register_hook(lambda g: run.log("hook", g))
        y.retain_grad()
        kept.append(y)
        return y.exp().cos()

    x, kept = leaf(4), []
    x.register_hook(lambda g: run.log("input", g) or g * 2)
    x.register_post_accumulate_grad_hook(lambda t: run.log("accumulated", t.grad))
    y = run.checkpoint(fn, x)
    y.register_hook(lambda g: run.log("output", g) or g * 3)
    y.sum().backward()
    return x.grad, [t.grad for t in kept]


@behaviour
def test_argument_asked_to_require_grad_inside(run):
    def fn(t):
        return t.requires_grad_().sin().exp()

    x = torch.randn(4)
    run.checkpoint(run.watched(fn), x).sum().backward()
    return x.grad


# ---- custom Functions ----


@pytest.mark.parametrize("early_stop", [True, False])
@behaviour
def test_custom_function_with_repeated_gradients(run, early_stop):
    """Each backward with a graph of its own recomputes once,
    and the Function's saved tensors are not freed early."""

    class Saver(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            out = t.exp()
            ctx.save_for_backward(t, out)
            run.log("forward")
            return out

        @staticmethod
        def backward(ctx, g):
            _, out = saved = ctx.saved_tensors
            run.log("backward", saved)
            return g * out

    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: Saver.apply(t.sin()).cos()), x, early_stop=early_stop)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad((g * h).sum(), x, retain_graph=True)
    run.log("again")
    return g, h, gg, torch.autograd.grad(g.sum(), x)
