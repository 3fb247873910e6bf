"""Random numbers: the recompute draws what the forward drew, and leaves the generator as it was."""

import numpy as np
import torch
import torch.nn.functional as F
from behaviours import behaviour, leaf


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
def test_other_random_modules_are_not_kept(run):
    generator = np.random.default_rng(0)
    x = leaf(4)
    run.checkpoint(lambda t: run.log(float(generator.random())) or t.sin().exp(), x).sum().backward()
    return x.grad
