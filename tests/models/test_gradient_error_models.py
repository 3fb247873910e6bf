"""gradckpt.gradient_error on models that checkpoint by themselves, compiled and distributed ones,
and on all kinds of parameters."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers")

import model_families
import worlds
from model_families import FAMILIES
from processes import SharedCount
from small_models import Untouched
from test_gradient_error import Block, Net, batch, prepared

import gradckpt
from gradckpt._engine import op_mixing

# ---- ways in which a model checkpoints ----


@pytest.mark.parametrize("enabled", [False, True])
def test_a_forward_that_calls_torchs_checkpoint_itself(enabled):
    """Nothing is enabled: torch's function is patched. An enabled model means its regions."""
    plain, own = Net(), Net(lambda block, x: checkpoint(block, x, use_reentrant=False))
    if enabled:
        gradckpt.enable(own, None, modules=Block)
    expected, result = (gradckpt.gradient_error(model, batch(), ["int8", "int4"]) for model in (plain, own))
    for codec in ("int8", "int4"):
        assert result[codec].total == pytest.approx(expected[codec].total, rel=1e-6)


def test_what_the_patch_of_a_forward_cannot_do():
    own = Net(lambda block, x: checkpoint(block, x, use_reentrant=False))
    with pytest.raises(ValueError, match="every_n_layers needs enable"):
        gradckpt.gradient_error(own, batch(), [{"compress": "int8", "every_n_layers": 2}])


def test_reentrant_checkpoints_compress_nothing():
    x, y = batch()
    model = Net(lambda block, x: checkpoint(block, x, use_reentrant=True))
    error = gradckpt.gradient_error(model, (x.requires_grad_(), y), "int8")["int8"]
    assert error.total is None
    assert "use_reentrant=True" in error.note


def test_a_forward_that_compresses_by_itself_has_no_exact_run():
    model = Net(lambda block, x: gradckpt.checkpoint(block, x, compress="int8"))
    with pytest.raises(ValueError, match="the forward compresses in int8 by itself"):
        gradckpt.gradient_error(model, batch())
    with pytest.raises(ValueError, match="by itself"), gradckpt.compress_saved("int8"):
        gradckpt.gradient_error(Net(), batch())


def test_a_user_s_patch_around_does_not_reach_the_exact_run():
    own = Net(lambda block, x: checkpoint(block, x, use_reentrant=False))
    expected = gradckpt.gradient_error(own, batch())
    with gradckpt.patched("int4"):
        assert gradckpt.gradient_error(own, batch()) == expected


def test_modules():
    model = Net()
    one, all_of_them = (
        gradckpt.gradient_error(model, batch(), "int4", modules=modules) for modules in ("*.2", "blocks.*[0-9]")
    )
    assert one["int4"].total < all_of_them["int4"].total
    gradckpt.enable(model, None, modules="*.2")
    assert gradckpt.gradient_error(model, batch(), "int4")["int4"] == one["int4"]


def test_a_model_without_blocks_can_only_save():
    model = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 4))
    x, _ = batch()
    with pytest.raises(ValueError, match="no repeated block"):
        gradckpt.gradient_error(model, lambda: model(x).square().mean())
    error = gradckpt.gradient_error(model, lambda: model(x).square().mean(), "compress_saved int8")[0]
    assert 0 < error.total < 0.05


def test_compiled_models_run_eagerly_and_keep_their_graphs():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    model = Net()
    torch.manual_seed(1)
    expected = gradckpt.gradient_error(model, batch(), ["int8", "int4"])
    compiled = torch.compile(model, backend=backend)
    compiled(*batch())
    count = len(graphs)
    torch.manual_seed(1)
    result = gradckpt.gradient_error(compiled, batch(), ["int8", "int4"], modules=Block)
    compiled(*batch())
    assert len(graphs) == count > 0
    assert [each.total for each in result] == [each.total for each in expected]


def llama_error(attention, setting):
    model = model_families.build("llama", attention, **({"attention_dropout": 0.0} if attention == "sdpa" else {}))
    return gradckpt.gradient_error(model, FAMILIES["llama"].batch(), [setting])[0]


def test_a_policy_that_keeps_nothing_is_noted():
    """Eager attention is several operators; the fused one runs again beside restored inputs."""
    saved = {"compress": None, "policy": "save_attention"}
    eager, sdpa = llama_error("eager", saved), llama_error("sdpa", saved)
    assert eager.total == 0 == sdpa.total
    assert (eager.note, sdpa.note) == ("(the policy kept nothing)", "")
    eager = llama_error("eager", {**saved, "compress": "int8"})
    op_mixing.ran_again.clear()
    with pytest.warns(gradckpt.GradckptInactiveWarning, match=r"flash_attention_for_cpu.default runs again"):
        sdpa = llama_error("sdpa", {**saved, "compress": "int8"})
    assert eager.total > 0 < sdpa.total
    assert eager.note == sdpa.note == "(the policy kept nothing)"
    for attention in ("eager", "sdpa"):
        found = llama_error(attention, "selective int8")
        assert found.total > 0
        assert found.note == "", "products are kept beside restored inputs"


def reduced_by_one_rank():
    model = prepared(False)
    model.zero_grad()
    inner = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    reduced = SharedCount()

    def hook(_, bucket):
        reduced.add()
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    inner.register_comm_hook(None, hook)
    for _ in range(3):  # the buckets are made anew after the first
        inner.zero_grad()
        inner(*batch()).backward()
    reduced.clear()
    for measured in (inner, model):  # the latter: its step reduces, into the same buckets each time
        with Untouched(inner):
            results = gradckpt.gradient_error(measured, lambda: inner(*batch()), "int4", modules=Block)
        assert results[0].total > 0.01
        assert bool(reduced.value) == (measured is model)


def test_data_parallel():
    """One rank of DistributedDataParallel, whose gradients are views of its buckets."""
    worlds.of_one(reduced_by_one_rank)


# ---- kinds of parameters and gradients ----


class Tied(nn.Module):
    """Tied weights, frozen parameters, one without a gradient, sparse gradients, a complex one."""

    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(64, 128, sparse=sparse)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].up = self.blocks[1].up
        self.blocks[0].up.requires_grad_(False)
        self.unused, self.phase = nn.Linear(2, 2), nn.Parameter(torch.ones(128, dtype=torch.complex64))

    def forward(self, ids):
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return (x * self.phase).abs().square().mean()


def test_kinds_of_gradients():
    ids = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(1))
    dense, sparse = (gradckpt.gradient_error(Tied(kind), ids, ["int8", "int4"]) for kind in (False, True))
    assert 0 < dense["int8"].total < dense["int4"].total < 1
    for one, other in zip(dense, sparse, strict=True):
        assert one.total == pytest.approx(other.total, rel=1e-4)
        assert one.cosine == pytest.approx(other.cosine, rel=1e-6)


class Touchy(torch.autograd.Function):
    """The identity; its gradient grows with the error of the restored input."""

    @staticmethod
    def forward(ctx, x, first, factor):
        ctx.save_for_backward(1 + (x - first).norm() * factor * factor)  # of the recompute
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None, None


class Fragile(Block):
    def __init__(self, factor):
        super().__init__()
        self.factor, self.first, self.drop = factor, None, nn.Identity()

    def forward(self, x):
        if self.first is None:  # of this step: attributes are those of before in each run
            self.first = x.detach().clone()
        return super().forward(Touchy.apply(x, self.first, self.factor))


def fragile(factor):
    model = Net()
    model.blocks[1] = Fragile(factor)
    return gradckpt.gradient_error(model, batch(), ["int8", "lossless"], modules=(Block, Fragile))


def test_a_large_error_names_the_parameter_and_what_to_try():
    result = fragile(3.0)
    assert result["lossless"].total == 0
    assert result["int8"].total > 0.5
    name, worst = result["int8"].worst[0]
    assert name.startswith("blocks.0.")
    assert worst > 1
    assert f"; {name} is the worst parameter" in result.verdict
    assert result.verdict.endswith("; try lossless (0 %).")
    assert "more than computing in bf16" in result.verdict


def test_gradients_that_become_infinite_are_reported_and_not_counted():
    result = fragile(1e38)
    assert result["int8"].total is None
    assert result.verdict.startswith("int8 makes the gradient of blocks.0.")
    assert result["lossless"].total == 0


def test_exact_gradients_that_are_infinite_end_the_measurement():
    model = Net()
    result = gradckpt.gradient_error(model, lambda: model(*batch()) * float("inf"))
    assert len(result) == 0
    assert "is infinite or NaN, so nothing was compared" in result.verdict
    assert result.verdict in str(result)
