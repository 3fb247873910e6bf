"""plan(), budgets and gradient_error() of models that call higher order operators of torch:
simulated, or by real steps where Dynamo has to capture them first."""

import pytest
import selective_ways
import torch
from selective_ways import missing, surroundings
from torch._subclasses import FakeTensorMode

import gradckpt
from gradckpt._planning.simulation import SimulationMode

#: Those that can be simulated: kernels of others refuse modes, or torch's checkpoint refuses them.
SIMULATED = ["flex_attention", "associative_scan", "invoke_subgraph", "wrap", "made later"]
CAPTURED = ["cond"]


class Net(torch.nn.Module):
    def __init__(self, name):
        super().__init__()
        self.layers = torch.nn.ModuleList(selective_ways.OperatorBlock(name) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture
def net(request):
    if reason := missing(request.param):
        pytest.skip(reason)
    with surroundings():
        yield Net(request.param).train()


X = torch.randn(16, selective_ways.N, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("net", SIMULATED, indirect=True)
def test_simulated(net):
    found = gradckpt.plan(net, (X,))
    assert not any("measured" in text for text in found.about)
    with gradckpt.track_memory(net) as memory:
        net(X).backward()
    plain = found.rows[0]
    assert plain.name == "none"
    assert plain.peak.size == pytest.approx(memory.peak, abs=256)


@pytest.mark.parametrize("net", CAPTURED, indirect=True)
def test_by_real_steps(net):
    found = gradckpt.plan(net, (X,))
    assert any("Dynamo has to capture it first); real steps were measured" in text for text in found.about)
    assert all(row.total for row in found.rows)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("net", ["cond"], indirect=True)
def test_a_budget_says_why_it_cannot_be_planned(net):
    gradckpt.enable(net, budget="1GiB")
    with pytest.raises(ValueError, match=r"cond: Dynamo has to capture it first"):
        net(X)


@pytest.mark.parametrize("net", ["flex_attention"], indirect=True)
def test_a_budget(net):
    gradckpt.enable(net, budget="1GiB")
    for _ in range(3):
        net(X).backward()


@pytest.mark.parametrize("net", ["cond"], indirect=True)
def test_gradient_error(net):
    assert 0 < gradckpt.gradient_error(net, (X,), "int8")["int8"].total < 0.05


def test_tensors_that_are_traced_in_a_simulated_step_tell_their_shapes():
    """C++ asks them for these where no exception is survived."""
    fake = FakeTensorMode().from_tensor(torch.ones(2, 3))
    with SimulationMode() as mode:
        assert fake.device == torch.device("cpu")
        assert fake.t().contiguous().shape == (3, 2)
    assert mode.work == []
