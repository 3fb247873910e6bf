"""plan(budget=) tries its plan in a real step, which may need more than the simulated one."""

import itertools
import types

import pytest
import torch
from processes import SharedCount
from torch import nn

import gradckpt
from gradckpt._planning import comparison, options, plan, profile
from gradckpt._planning.device_memory import Budget
from gradckpt._planning.region_plan import NoPlan

WIDTH, LAYERS = 64, 12
X = torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(0))
SCRATCH = 500_000  # bytes that a simulated step does not see


@torch.library.custom_op("gradckpt_tests::scratch", mutates_args=())
def scratch(x: torch.Tensor) -> torch.Tensor:
    buffer = x.new_empty(SCRATCH, dtype=torch.uint8)
    return x * 2 + 0 * int(buffer.numel() == 0)


@scratch.register_fake
def _(x):
    return torch.empty_like(x)


def _backward(ctx, gradient):
    return scratch(gradient)


scratch.register_autograd(_backward)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + scratch(self.linear(x).tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def measured(model):
    model.zero_grad()
    with gradckpt.track_memory() as memory:
        model(X).backward()
    model.zero_grad()
    return memory.peak


@pytest.fixture(autouse=True, scope="module")
def _short_measurements():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "_SECONDS", 0.0)
        patch.setattr(options, "_SECONDS", 0.0)
        patch.setattr(options, "_LEAST", 1)
        yield


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def free(model):
    """A plan that may use all; it keeps everything, and has run."""
    return gradckpt.plan(model, X, modules=Block, budget="1TiB")


def added(plan, size):
    return size - sum(plan.fixed.values())


def test_what_a_real_step_needs_counts(model, free):
    """Above the smallest simulated budget, plans measure as much as they say, within the budget."""
    plain = measured(model)
    assert added(free, free.peak) == pytest.approx(plain, rel=1e-4)
    assert any("more than the simulated one" in text for text in free.about), free.about
    with pytest.raises(ValueError, match="the smallest budget is") as refused:
        gradckpt.plan(model, X, modules=Block, budget="activations:1KiB")
    smallest = refused.value.smallest_budget
    for i in range(4):
        budget = smallest + (plain - smallest) * i // 4
        plan = gradckpt.plan(model, X, modules=Block, budget=f"activations:{budget}")
        with plan.apply(model):
            assert measured(model) <= added(plan, plan.peak) <= budget
        assert plan.pareto()[0]["budget"] <= plan.peak


def test_a_profile_remembers_it(model, free, tmp_path):
    path = tmp_path / "plan.json"
    free.save(path)
    again = gradckpt.plan(model, X, modules=Block, budget="1TiB", profile=path)
    assert again.peak == free.peak
    least, plain = added(free, free.smallest_budget), added(free, free.plain)
    budget = (least + plain) // 2
    plan = gradckpt.plan(model, X, modules=Block, budget=f"activations:{budget}", profile=path)
    assert least < added(plan, plan.peak) <= budget
    with plan.apply(model):
        assert measured(model) <= added(plan, plan.peak)


def test_ranks_run_equally_many_steps(model, monkeypatch):
    """Each of them would try another plan, and its backward communicates with the others."""
    steps = SharedCount()

    def step():
        steps.add()
        model(X).backward()

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "track_memory", None)  # which a real step of a plan runs in
        gradckpt.plan(model, step, modules=Block, budget="1TiB")
    assert steps.value


class StepError(ValueError):
    def __init__(self, text):
        super().__init__(text)
        self.x = X  # which JSON cannot carry


@pytest.mark.parametrize("error", [StepError("of the step"), NoPlan("too small", 7)], ids=["step", "plan"])
def test_other_ranks_learn_why_there_is_no_plan(model, error, monkeypatch):
    """Else they wait for an answer until the store gives up."""

    def refuse(budget):
        raise error

    store = torch.distributed.HashStore()
    found = types.SimpleNamespace(model=model, held=0, smallest_peak=lambda: 1, plan=refuse)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(plan.private, "default_store", lambda: store)
    monkeypatch.setattr(plan, "_rounds", itertools.count(1))
    with pytest.raises(ValueError) as own:
        plan._among_ranks(found, Budget(5, True, "5"))
    assert own.value is error
    assert store.check(["gradckpt/budget/1/plan/0"])
    with pytest.raises(ValueError) as other:
        plan._taken(store.get("gradckpt/budget/1/plan/0").decode())
    assert str(other.value) == str(error)
    assert getattr(other.value, "smallest_budget", None) == getattr(error, "smallest_budget", None)
