"""use_reentrant=True and None: torch's older algorithm, its restrictions and its texts."""

from collections import namedtuple

import pytest
import torch
from behaviours import behaviour, leaf
from torch.utils.checkpoint import noop_context_fn


def reentrant(run, function, *args, **options):
    return run.checkpoint(function, *args, use_reentrant=True, **options)


@pytest.mark.parametrize("value", [True, 1, "yes"])
@behaviour
def test_use_reentrant_is_asked_for_its_truth(run, value):
    return run.gradients(run.watched(lambda t: t.sin().exp()), leaf(4), use_reentrant=value)


@behaviour(ours=("compat",))
def test_not_given_is_none(run):
    x = leaf(4)
    y = run.bare(run.watched(lambda t: t.sin().exp()), x)
    run.log(type(y.grad_fn).__name__)
    y.sum().backward()
    return x.grad


@behaviour
def test_none_warns_with_grad_off_and_before_errors(run):
    with torch.no_grad():
        run.log(run.checkpoint(torch.sin, leaf(4), use_reentrant=None))
    with run.error(ValueError, "Unexpected keyword arguments: other"):
        run.checkpoint(torch.sin, leaf(4), use_reentrant=None, other=1)


@behaviour
def test_warning_names_the_callers_line(run):
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.checkpoint(torch.sin, torch.ones(4), use_reentrant=True)
    run.log([(w.category, str(w.message)) for w in caught])


@behaviour
def test_no_input_needs_a_gradient(run):
    w = leaf(4, 4)
    y = reentrant(run, run.watched(lambda t: (t @ w).sin()), torch.randn(4, 4))
    run.log(y, y.grad_fn is None)


@behaviour
def test_tensors_in_containers_do_not_count(run):
    x = leaf(4)
    return reentrant(run, run.watched(lambda d: d["x"].sin()), {"x": x})


@behaviour
def test_keywords_are_refused(run):
    for options in ({"other": 1}, {"a": 1, "b": 2}, {"t": leaf(2)}):
        with run.error(ValueError, "Unexpected keyword arguments"):
            reentrant(run, torch.sin, leaf(4), **options)
    for options in ({"debug": True}, {"debug": 0}, {"context_fn": list}, {"debug": None}):
        with run.error(ValueError, "only supported when"):
            reentrant(run, torch.sin, leaf(4), **options)


@behaviour
def test_keywords_that_do_nothing_are_accepted(run):
    x = leaf(4)
    options = {"debug": False, "context_fn": noop_context_fn, "early_stop": False, "determinism_check": "no such check"}
    reentrant(run, run.watched(lambda t: t.sin().exp()), x, **options).sum().backward()
    return x.grad


@behaviour
def test_function_given_by_keyword(run):
    with run.error((TypeError, ValueError)):
        run.bare(function=torch.sin, input=leaf(4), use_reentrant=True)


# ---- results ----

Pair = namedtuple("Pair", "a b")
RESULTS = {
    "tuple": lambda t: (t.sin(), t.cos()),
    "list": lambda t: [t.sin(), t.cos()],
    "one in a tuple": lambda t: (t.sin(),),
    "with other things": lambda t: (t.sin(), None, 3, "text", t.detach()),
    "integers too": lambda t: (t.sin(), t.argmax()),
    "namedtuple": lambda t: Pair(t.sin(), t.cos()),
    "input": lambda t: t,
    "view": lambda t: t[1:],
    "dict": lambda t: {"a": t.sin()},
    "none": lambda t: None,
    "number": lambda t: 3,
    "detached": lambda t: t.sin().detach(),
    "nested": lambda t: ([t.sin()], t.cos()),
    "in place": lambda t: t.mul_(2),
}


@pytest.mark.parametrize("kind", RESULTS)
@behaviour
def test_results(run, kind):
    x = leaf(4)
    try:
        y = reentrant(run, run.watched(RESULTS[kind]), x * 1)
        run.log(type(y).__name__, y)
        tensors = [t for t in torch.utils._pytree.tree_leaves(y) if isinstance(t, torch.Tensor) and t.requires_grad]
        sum(t.sum() for t in tensors if t.is_floating_point()).backward()
    except (RuntimeError, TypeError, AttributeError) as e:
        run.log("error", e)
    return x.grad


@behaviour
def test_no_result_requires_a_gradient(run):
    y = reentrant(run, run.watched(lambda t: (t > 0).float()), leaf(4))
    with run.error(RuntimeError, "none of output has requires_grad=True"):
        y.sum().backward()


@behaviour
def test_arguments_of_every_kind(run):
    class Box:
        pass

    box, x, c = Box(), leaf(4), torch.ones(4)

    def fn(t, n, b, c, none, s, i):
        run.log(t is x, b is box, c is c, none, s, t.is_leaf, t.requires_grad, c.requires_grad, i)
        return t.sin() * n * c

    reentrant(run, fn, x, 3, box, c, None, "text", torch.tensor([1])).sum().backward()
    return x.grad, c.grad


# ---- backward ----


@behaviour
def test_grad_and_inputs_are_refused(run):
    x, w = leaf(4), leaf(4)
    y = reentrant(run, run.watched(lambda t, w: (t * w).sin()), x, w)
    with run.error(RuntimeError, r"torch.utils.checkpoint is incompatible with .grad\(\)"):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
    with run.error(RuntimeError, r"torch.utils.checkpoint is incompatible with .grad\(\)"):
        y.sum().backward(inputs=[x], retain_graph=True)
    y.sum().backward()
    return x.grad, w.grad


@behaviour
def test_double_backward_is_not_supported(run):
    x = leaf(4)
    reentrant(run, run.watched(lambda t: t.sin().exp()), x).sum().backward(create_graph=True)
    g, x.grad = x.grad, None
    run.log(g)
    try:
        g.sum().backward()
    except RuntimeError as e:
        run.log("error", e)
    return x.grad


@behaviour
def test_device_context_is_not_kept(run):
    x = leaf(4)
    with torch.device("meta"):
        y = reentrant(run, lambda t: run.log(torch.ones(1).device) or t.sin(), x)
    y.sum().backward()
    return x.grad


@behaviour
def test_graph_node(run):
    x, w = leaf(4), leaf(4)
    y = reentrant(run, lambda t, n, w: (t * w).sin(), x, 3, w)
    node = y.grad_fn
    run.log(node.name(), [f and f.name() for f, _ in node.next_functions])
    node.register_hook(lambda gi, go: run.log("after", gi, go))
    node.register_prehook(lambda go: run.log("before", go))
    y.sum().backward()
    return x.grad
