"""GraphExecGroup: one recompute for several backwards, and what it refuses."""

import torch
from behaviours import behaviour, leaf
from torch.utils.checkpoint import CheckpointError, GraphExecGroup


def two_results(run, x, **options):
    return run.checkpoint(run.watched(lambda t: (t.sin().exp(), t.cos().tanh())), x, **options)


@behaviour
def test_two_groups_recompute_twice(run):
    x = leaf(4)
    a, b = two_results(run, x)
    with GraphExecGroup():
        a.sum().backward(retain_graph=True)
    with GraphExecGroup():
        b.sum().backward()
        a.sum().backward()
    return x.grad


@behaviour
def test_group_may_be_entered_again(run):
    x = leaf(4)
    a, b = two_results(run, x)
    group = GraphExecGroup()
    with group:
        a.sum().backward()
    run.log("between")
    with group:
        b.sum().backward()
    return x.grad


@behaviour
def test_refused_backward_works_after_the_group(run):
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: t.sin().exp()), x)
    with GraphExecGroup():
        y.sum().backward(retain_graph=True)
        with run.error(CheckpointError, "Performing two backward calls that overlap"):
            y.sum().backward(retain_graph=True)
    y.sum().backward()
    return x.grad


@behaviour
def test_saved_tensors_read_outside_a_backward_belong_to_the_group(run):
    y = run.checkpoint(run.watched(lambda t: t.sin().exp().cos()), leaf(4))
    with GraphExecGroup():
        run.log(y.grad_fn._saved_self)
        with run.error(CheckpointError):
            y.grad_fn._saved_self  # noqa: B018 - reading it unpacks it
        run.log(y.grad_fn.next_functions[0][0]._saved_result)


@behaviour
def test_group_and_a_backward_inside_the_region(run):
    """The recompute of the inner backward belongs to the group, so the outer one finds it done,
    in part."""

    def fn(t):
        y = t.sin()
        (g,) = torch.autograd.grad(y.sum(), t, retain_graph=True)
        return y.exp() * g

    with GraphExecGroup(), run.error((CheckpointError, AssertionError)):
        run.checkpoint(run.watched(fn), leaf(4)).sum().backward()
