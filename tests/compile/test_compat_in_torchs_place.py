"""compat's functions where a script put them in place of torch's."""

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint

from gradckpt import compat


@pytest.fixture(autouse=True)
def replaced(monkeypatch):
    for name in ("checkpoint", "create_selective_checkpoint_contexts"):
        monkeypatch.setattr(torch_checkpoint, name, getattr(compat, name))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(x):
    return torch.sin(x @ x).relu()


def test_a_compiled_function_runs_such_a_region_outside_its_graphs():
    """Dynamo knows torch's function by its name, which now is ours."""

    def step(x):
        return torch_checkpoint.checkpoint(layer, x, use_reentrant=False) * 2

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (want,) = torch.autograd.grad((layer(x) * 2).sum(), x)
    (got,) = torch.autograd.grad(torch.compile(step, backend="aot_eager")(x).sum(), x)
    assert torch.equal(got, want)


def test_an_entry_that_is_no_operator_raises_torchs_error():
    with pytest.raises(ValueError, match="OpOverload"):
        torch_checkpoint.create_selective_checkpoint_contexts([torch.relu])
