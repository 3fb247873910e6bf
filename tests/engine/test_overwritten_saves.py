"""What a region has saved and changes in place later: its recompute raises, as autograd does."""

import pytest
import torch

import gradckpt

TEXT = r"^gradckpt: a tensor of shape \(4, 8\) was changed in place after this region had saved it; write x = x \+ y$"


def saved(x):
    x = x * 1
    y = x.sin()
    x.add_(1)
    return y * x


def scaled(x):
    return torch.tanh(x * 2)  # does not save x


def of_inner_region(x):
    x = x * 1
    h = gradckpt.checkpoint(scaled, x)
    x += h
    return x * torch.sigmoid(x.clone())


def unused(x):
    """The backward does not need it."""
    x = x * 1
    y = x.sin()
    x.add_(1)
    return y, x * 2


def harmless(x):
    x = x * 1
    x.add_(1)
    y = x.sin()
    y.mul_(2)
    return y.exp_()


def draw():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("function", [saved, of_inner_region])
def test_it_raises(function, early_stop):
    loss = gradckpt.checkpoint(function, draw(), early_stop=early_stop).sum()
    with pytest.raises(RuntimeError, match=TEXT):
        loss.backward()


def test_what_the_backward_does_not_need_may_change():
    x = draw()
    gradckpt.checkpoint(unused, x)[1].sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_writes_before_the_save_and_into_results():
    x, y = draw(), draw()
    harmless(x).sum().backward()
    gradckpt.checkpoint(harmless, y).sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_statistics_that_are_put_back_are_no_write():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(inplace=True)).train()
    x, y = draw(), draw()
    model(x).sum().backward()
    exact = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    gradckpt.checkpoint(model, y).sum().backward()
    assert torch.equal(x.grad, y.grad)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), exact, strict=True))
