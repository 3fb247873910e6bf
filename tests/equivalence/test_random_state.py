"""Random numbers: the recompute draws what the forward drew, and leaves the generator as it was."""

from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from behaviours import behaviour, leaf


@behaviour
def test_dropout_is_the_same_in_the_recompute(run):
    x = leaf(32)
    y = run.checkpoint(run.watched(lambda t: F.dropout(F.dropout(t, 0.5).sin(), 0.3).exp()), x)
    y.sum().backward()
    return y, x.grad


@behaviour
def test_numbers_drawn_inside(run):
    def fn(t):
        numbers = torch.randn(4), torch.rand(2), torch.randint(9, (3,)), torch.randperm(5), torch.bernoulli(t.sigmoid())
        run.log(numbers)
        return t.exp() * numbers[0] + torch.empty(4).uniform_().sin()

    x = leaf(4)
    run.checkpoint(fn, x, early_stop=False).sum().backward()
    return x.grad


@behaviour
def test_numbers_drawn_between_do_not_matter_and_go_on_as_they_were(run):
    x = leaf(16)
    a = run.checkpoint(run.watched(lambda t: F.dropout(t.sin()).exp(), "a"), x)
    run.log(torch.rand(2))
    b = run.checkpoint(run.watched(lambda t: F.dropout(t.cos()).exp(), "b"), a)
    run.log(torch.rand(2))
    b.sum().backward()
    return x.grad, torch.rand(2)


@behaviour
def test_seed_set_between_forward_and_backward(run):
    x = leaf(16)
    y = run.checkpoint(run.watched(lambda t: F.dropout(t.sin()).exp()), x)
    torch.manual_seed(123)
    y.sum().backward()
    return x.grad, torch.rand(2)


@behaviour
def test_seed_set_inside(run):
    def fn(t):
        torch.manual_seed(5)
        return F.dropout(t.sin()).exp()

    x = leaf(16)
    y = run.checkpoint(run.watched(fn), x)
    run.log(torch.rand(2))
    y.sum().backward()
    return x.grad, torch.rand(2)


@behaviour
def test_fork_rng_inside(run):
    """The states before and after are equal, yet numbers were drawn."""

    def fn(t):
        with torch.random.fork_rng(devices=[]):
            mask = torch.rand(16)
        return (t * mask).sin().exp()

    x = leaf(16)
    y = run.checkpoint(run.watched(fn), x)
    torch.rand(3)
    y.sum().backward()
    return x.grad, torch.rand(2)


@behaviour
def test_a_generator_of_the_users_own_goes_on(run):
    """Only default generators are kept: a private one gives other numbers in the recompute."""
    generator = torch.Generator().manual_seed(3)

    def fn(t):
        mask = torch.rand(4, generator=generator)
        run.log(mask)
        return t.sin().exp() * mask

    x = leaf(4)
    run.checkpoint(fn, x).sum().backward()
    return x.grad, torch.rand(2, generator=generator)


@behaviour
def test_random_state_when_it_is_not_preserved(run):
    x = leaf(16)
    y = run.checkpoint(run.watched(lambda t: F.dropout(t.sin()).exp()), x, preserve_rng_state=False)
    run.log(torch.rand(2))
    y.sum().backward()
    return x.grad, torch.rand(2)


@behaviour
def test_random_state_of_a_nested_region_that_is_not_preserved(run):
    def outer(t):
        t = run.checkpoint(
            run.watched(lambda u: F.dropout(u.sin()).exp(), "inner"), F.dropout(t), preserve_rng_state=False
        )
        return F.dropout(t).cos()

    x = leaf(16)
    run.checkpoint(run.watched(outer, "outer"), x).sum().backward()
    return x.grad, torch.rand(2)


@behaviour
def test_random_state_after_an_error_in_the_recompute(run):
    calls = []

    def fn(t):
        calls.append(1)
        t = F.dropout(t.sin())
        if len(calls) == 2:
            raise LookupError
        return t.exp()

    y = run.checkpoint(run.watched(fn), leaf(16))
    with run.error(LookupError):
        y.sum().backward()
    return torch.rand(2)


@behaviour
def test_random_state_after_an_error_in_the_forward(run):
    def fn(t):
        torch.rand(3)
        raise LookupError

    with run.error(LookupError):
        run.checkpoint(run.watched(fn), leaf(16))
    return torch.rand(2)


@behaviour
def test_other_random_modules_are_not_kept(run):
    generator = np.random.default_rng(0)
    x = leaf(4)
    run.checkpoint(lambda t: run.log(float(generator.random())) or t.sin().exp(), x).sum().backward()
    return x.grad


@behaviour
def test_tensors_in_containers_do_not_change_what_is_kept(run):
    box = {"t": [leaf(16)], "n": SimpleNamespace(t=leaf(16))}
    y = run.checkpoint(run.watched(lambda b: F.dropout(b["t"][0].sin() * b["n"].t).exp()), box)
    torch.rand(3)
    y.sum().backward()
    return box["t"][0].grad, box["n"].t.grad, torch.rand(2)


@behaviour
def test_two_backwards_draw_the_same_numbers(run):
    x = leaf(16)
    y = run.checkpoint(run.watched(lambda t: F.dropout(t.sin()).exp()), x)
    y.sum().backward(retain_graph=True)
    torch.rand(3)
    y.sum().backward()
    return x.grad, torch.rand(2)
