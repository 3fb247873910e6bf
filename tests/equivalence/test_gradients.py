"""Ways to ask for gradients: grad with inputs, several backwards, double backward, hooks,
custom Functions."""

import pytest
import torch
import torch.nn.functional as F
from behaviours import behaviour, leaf
from torch.utils.checkpoint import CheckpointError


def block(t, w):
    return F.layer_norm(F.gelu(t @ w), (4,)) + t.sin()


# ---- asking ----


@pytest.mark.parametrize("early_stop", [True, False])
@behaviour
def test_grad_with_inputs(run, early_stop):
    x, w = leaf(4, 4), leaf(4, 4)
    y = run.checkpoint(run.watched(block), x, w, early_stop=early_stop)
    run.log(torch.autograd.grad(y.sum(), w, retain_graph=True))
    run.log(torch.autograd.grad(y.sum(), [x, w]))
    return x.grad


@behaviour
def test_backward_with_inputs(run):
    x, w = leaf(4, 4), leaf(4, 4)
    run.checkpoint(run.watched(block), x, w).sum().backward(inputs=[w])
    return x.grad, w.grad


@behaviour
def test_grad_of_an_intermediate(run):
    x, w = leaf(4, 4), leaf(4, 4)
    h = x * 2
    y = run.checkpoint(run.watched(block), h, w)
    return torch.autograd.grad(y.sum(), h)


@behaviour
def test_unused_inputs(run):
    x, w, unused = leaf(4, 4), leaf(4, 4), leaf(4, 4)
    y = run.checkpoint(run.watched(lambda t, w, u: block(t, w)), x, w, unused)
    with run.error(RuntimeError, "appears to not have been used"):
        torch.autograd.grad(y.sum(), unused, retain_graph=True)
    return torch.autograd.grad(y.sum(), [unused, x], allow_unused=True)


@behaviour
def test_materialized_and_batched_grads(run):
    x, w = leaf(4, 4), leaf(4, 4)
    y = run.checkpoint(run.watched(block), x, w)
    seeds = torch.eye(4).reshape(4, 1, 4).expand(4, 4, 4)
    run.log(torch.autograd.grad(y, x, seeds, retain_graph=True, is_grads_batched=True))
    return torch.autograd.grad(y.sum(), [x, leaf(2)], materialize_grads=True)


@behaviour
def test_jacobian_and_hessian(run):
    w = torch.randn(4, 4)

    def f(t):
        return run.checkpoint(run.watched(lambda u: (u @ w).sin().exp()), t).sum()

    x = torch.randn(2, 4)
    return torch.autograd.functional.jacobian(f, x), torch.autograd.functional.hessian(f, x[0])


@behaviour
def test_second_backward_without_retain_graph(run):
    x, w = leaf(4, 4), leaf(4, 4)
    y = run.checkpoint(run.watched(block), x, w)
    y.sum().backward()
    with run.error(RuntimeError, "Trying to backward through the graph a second time"):
        y.sum().backward()
    return x.grad


@behaviour
def test_gradcheck(run):
    w = torch.randn(3, 3, dtype=torch.float64)
    x = leaf(2, 3, dtype=torch.float64)

    def f(t):
        return run.checkpoint(lambda u: (u @ w).sin().exp() * u, t)

    return torch.autograd.gradcheck(f, x), torch.autograd.gradgradcheck(f, x)


# ---- double backward ----


@pytest.mark.parametrize("early_stop", [True, False])
@behaviour
def test_double_backward(run, early_stop):
    x, w = leaf(4, 4), leaf(4, 4)
    y = run.checkpoint(run.watched(lambda t, w: (t @ w).sin().exp() * t), x, w, early_stop=early_stop)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    run.log("second", g)
    return torch.autograd.grad(g.pow(2).sum(), [x, w])


@behaviour
def test_gradient_penalty(run):
    x, w = leaf(4, 4), leaf(4, 4)
    y = run.checkpoint(run.watched(lambda t, w: F.softplus(t @ w)), x, w)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + (g.norm() - 1).pow(2)).backward()
    return x.grad, w.grad


@behaviour
def test_third_derivative(run):
    x = g = leaf(4, dtype=torch.float64)
    g = run.checkpoint(run.watched(lambda t: t.sin().exp()), x).sum()
    for i in range(3):
        (g,) = torch.autograd.grad(g.sum(), x, create_graph=True)
        run.log(i, g)


@behaviour
def test_gradient_through_a_region_inside_the_gradient(run):
    """A region computes a gradient with a graph, which then takes part in the loss."""
    x = leaf(4)

    def fn(t):
        (g,) = torch.autograd.grad((t.sin() * t).sum(), t, create_graph=True)
        return g.exp() * t

    y = run.checkpoint(run.watched(fn), x)
    y.sum().backward()
    return y, x.grad


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
def test_node_hooks(run):
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: t.sin().exp().cos()), x)
    node = y.grad_fn
    node.metadata["key"] = 1
    node.register_prehook(lambda g: run.log("before", g))
    node.register_hook(lambda gi, go: run.log("after", gi, go))
    node.next_functions[0][0].register_hook(lambda gi, go: run.log("parent", gi, go))
    y.sum().backward()
    return x.grad, node.metadata["key"]


@behaviour
def test_multi_grad_hook(run):
    x, w = leaf(4, 4), leaf(4, 4)
    torch.autograd.graph.register_multi_grad_hook((x, w), lambda gs: run.log(gs))
    run.checkpoint(run.watched(block), x, w).sum().backward()
    return x.grad


@behaviour
def test_detach_inside(run):
    def fn(t):
        return t.sin().detach() * t.exp() + t.cos().detach()

    x = leaf(4)
    run.checkpoint(run.watched(fn), x).sum().backward()
    return x.grad


@behaviour
def test_everything_detached(run):
    y = run.checkpoint(run.watched(lambda t: t.sin().exp().detach()), leaf(4))
    with run.error(RuntimeError, "does not require grad"):
        y.sum().backward()


@behaviour
def test_argument_asked_to_require_grad_inside(run):
    def fn(t):
        return t.requires_grad_().sin().exp()

    x = torch.randn(4)
    run.checkpoint(run.watched(fn), x).sum().backward()
    return x.grad


# ---- custom Functions ----


def saver(run, save, reads=1):
    class Saver(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t, k):
            out = t.exp()
            ctx.k = k
            ctx.save_for_backward(*save(t, out))
            run.log("forward")
            return out

        @staticmethod
        def backward(ctx, g):
            for _ in range(reads):
                saved = ctx.saved_tensors
            run.log("backward", saved)
            return g * ctx.k * (1 if not saved or saved[-1] is None else saved[-1]), None

    return Saver


SAVES = {
    "input": lambda t, out: (t,),
    "output": lambda t, out: (out,),
    "both": lambda t, out: (t, out),
    "none": lambda t, out: (None, out),
    "nothing": lambda t, out: (),
    "another": lambda t, out: (t.cos(), t.detach().sin()),
    "twice": lambda t, out: (t, t),
}


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("save", SAVES)
@behaviour
def test_custom_function(run, save, early_stop):
    function = saver(run, SAVES[save])
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: function.apply(t.sin(), 2).tanh()), x, early_stop=early_stop)
    y.sum().backward()
    return x.grad


@behaviour
def test_custom_function_that_reads_twice(run):
    function = saver(run, SAVES["both"], reads=2)
    y = run.checkpoint(run.watched(lambda t: function.apply(t.sin(), 2).tanh()), leaf(4))
    with run.error(CheckpointError, "already unpacked once"):
        y.sum().backward()


@behaviour
def test_custom_function_twice_differentiable(run):
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(t):
            return t**3, t**2

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs, output[1])
            ctx.mark_non_differentiable(output[1])

        @staticmethod
        def backward(ctx, g, _):
            t, _square = ctx.saved_tensors
            return 3 * g * t * t

    x = leaf(4, dtype=torch.float64)
    y = run.checkpoint(run.watched(lambda t: Cube.apply(t.sin())[0].exp()), x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    return g, h, torch.autograd.grad(h.sum(), x)


@pytest.mark.parametrize("early_stop", [True, False])
@behaviour
def test_custom_function_with_repeated_gradients(run, early_stop):
    """Each backward with a graph of its own recomputes once,
    and the Function's saved tensors are not freed early."""
    function = saver(run, SAVES["both"])
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: function.apply(t.sin(), 2).cos()), x, early_stop=early_stop)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (h,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad((g * h).sum(), x, retain_graph=True)
    run.log("again")
    return g, h, gg, torch.autograd.grad(g.sum(), x)


@behaviour
def test_custom_function_in_place(run):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.mark_dirty(t)
            return t.mul_(2)

        @staticmethod
        def backward(ctx, g):
            return g * 2

    x = leaf(4)
    run.checkpoint(run.watched(lambda t: Double.apply(t.sin()).exp()), x).sum().backward()
    return x.grad


@behaviour
def test_function_whose_backward_is_a_checkpoint(run):
    class Odd(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t.sin()

        @staticmethod
        def backward(ctx, g):
            (t,) = ctx.saved_tensors
            with torch.enable_grad():
                u = t.detach().requires_grad_()
                y = run.checkpoint(run.watched(lambda v: v.sin().exp(), "inner"), u).sum()
            return g * torch.autograd.grad(y, u)[0]

    x = leaf(4)
    run.checkpoint(run.watched(lambda t: Odd.apply(t.tanh()), "outer"), x).sum().backward()
    return x.grad


@behaviour
def test_error_in_a_custom_backward(run):
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t.clone()

        @staticmethod
        def backward(ctx, g):
            run.log(ctx.saved_tensors)
            raise LookupError("in backward")

    y = run.checkpoint(run.watched(lambda t: Bad.apply(t.sin()).exp()), leaf(4))
    with run.error(LookupError, "in backward"):
        y.sum().backward()
