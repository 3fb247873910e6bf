"""gradckpt.plan and gradient_error of steps that read values, write, or run elsewhere."""

import threading

import pytest
import torch
from torch import nn

import gradckpt

X = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.read = read

    def forward(self, x):
        y = self.linear(x)
        return y if self.read is None or self.read(y.detach()) else y.exp() * y


class Model(nn.Module):
    def __init__(self, read=None):
        super().__init__()
        self.layers = nn.ModuleList(Block(read) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0]
        return x.mean()


def is_real(plan):
    return any("real steps were measured" in sentence for sentence in plan.about)


def test_plan_of_lstms_measures():
    assert is_real(gradckpt.plan(Recurrent(), (X,), modules=nn.LSTM))


def test_plan_of_a_step_in_another_thread_measures():
    model = Model()

    def step():
        thread = threading.Thread(target=lambda: model(X).backward())
        thread.start()
        thread.join()

    assert is_real(gradckpt.plan(model, step))


def test_plan_simulates_under_autocast_and_where_a_step_keeps_tensors():
    model, kept = Model(lambda y: kept.append(y) or True), []
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_real(gradckpt.plan(model, (X,)))
        assert not is_real(gradckpt.plan(model, (X,)))


@pytest.mark.parametrize("measure", [False, True])
def test_plan_keeps_gradients(measure):
    model = Model()
    model(X).backward()
    optimizer = torch.optim.SGD(model.parameters())
    before = [(p, p.grad, p.grad.clone()) for p in model.parameters()]

    def step():
        optimizer.zero_grad()
        model(X).backward()

    for batch in (step, (X,)):
        gradckpt.plan(model, batch, measure=measure)
        assert all(p.grad is grad and torch.equal(grad, value) for p, grad, value in before)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_plan_refuses_an_optimizer_step_and_keeps_parameters(optimizer):
    model = Model()
    model(X).backward()
    optimizer = optimizer(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]

    def step():
        model(X).backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"leave optimizer\.step\(\) out"):
        gradckpt.plan(model, step)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    with pytest.raises(ValueError, match=r"leave optimizer\.step\(\) out"):
        gradckpt.plan(model, step, measure=True)


def test_plan_and_gradient_error_work_in_inference_mode():
    model = Model()
    with torch.inference_mode():
        assert not is_real(gradckpt.plan(model, (X,)))
        assert gradckpt.gradient_error(model, (X,), "int8").loss > 0


def test_gradient_error_refuses_a_batch_that_changes():
    class Scaling(Model):
        def forward(self, x):
            return super().forward(x.mul_(2))

    with pytest.raises(ValueError, match="changed its batch in place"):
        gradckpt.gradient_error(Scaling(), (X.clone(),), "int8")


def test_plan_never_lets_ddp_allocate_simulated_buckets():
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Model(), gradient_as_bucket_view=True)
        model(X).backward()
        peaks = [row.total for row in gradckpt.plan(model, (X,)).rows]
        assert peaks == [row.total for row in gradckpt.plan(model.module, (X,)).rows]
    finally:
        distributed.destroy_process_group()
