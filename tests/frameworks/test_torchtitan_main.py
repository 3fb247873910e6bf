"""The policies for torchtitan's main branch, on a stand-in for it (programs/torchtitan_main)."""

import collections
import importlib
import inspect
import json
import sys
from typing import NamedTuple

import pytest
import torch
from checkout import PROGRAMS
from model_families import error

import gradckpt

LAYERS, WIDTH, ROWS = 3, 64, 32


class Titan(NamedTuple):
    ours: object  # gradckpt.integrations.torchtitan
    theirs: object  # torchtitan.distributed.activation_checkpoint
    model: object  # builds one
    calls: collections.Counter
    order: list


def forget():
    for name in [
        name for name in sys.modules if name.split(".")[0] == "torchtitan" or "integrations.torchtitan" in name
    ]:
        del sys.modules[name]


@pytest.fixture
def titan(monkeypatch):
    monkeypatch.syspath_prepend(str(PROGRAMS / "torchtitan_main"))
    forget()
    from torchtitan.protocols.module import Module

    calls, order = collections.Counter(), []

    def region(function, name, *, recompute):
        remat = sys.modules.get("torch_remat")
        return function if remat is None else remat.region(function, name, recompute=recompute)

    def needed(*tensors):
        if "torch_remat" in sys.modules:
            sys.modules["torch_remat"].recompute_needs_tensor(*tensors)

    class FeedForward(Module):
        def __init__(self):
            super().__init__()
            self.w13, self.w2 = torch.nn.Linear(WIDTH, 128), torch.nn.Linear(128, WIDTH)

        def first(self, x):
            calls["w13"] += 1
            return torch.nn.functional.dropout(self.w13(x), 0.1)

        def forward(self, x):
            h = region(self.first, self.remat_region_name("w13"), recompute=self.remat_should_recompute("w13"))(x)
            needed(h)
            return self.w2(torch.nn.functional.silu(h))

    class Block(Module):
        """A feed-forward layer whose tokens are scaled by a choice that must not be made twice."""

        def __init__(self):
            super().__init__()
            self.gate, self.feed_forward = torch.nn.Linear(WIDTH, 4), FeedForward()

        def choose(self, x):
            calls["choice"] += 1
            return self.gate(x).topk(1).values

        def forward(self, x):
            calls["block"] += 1
            scale = region(self.choose, self.remat_region_name("routing_decision"), recompute=False)(x)
            needed(scale)
            return x + scale * torch.nn.functional.dropout(self.feed_forward(x), 0.1)

        def configure_remat_regions(self, save_patterns, recompute_patterns):
            order.append("configure_remat_regions")
            super().configure_remat_regions(save_patterns, recompute_patterns)

    class Model(Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Linear(WIDTH, WIDTH)
            self.layers = torch.nn.ModuleDict({str(i): Block() for i in range(LAYERS)})

        def forward(self, x):
            x = self.embed(x)
            for block in self.layers.values():
                x = block(x)
            return x

    ours = importlib.import_module("gradckpt.integrations.torchtitan")
    yield Titan(ours, importlib.import_module("torchtitan.distributed.activation_checkpoint"), Model, calls, order)
    forget()


def step(titan, config=None, model=None):
    """Loss, gradients, and the random state after the step."""
    model = model or titan.model()
    if config is not None:
        config.build().apply(model)
    gradckpt.stats.reset()
    titan.calls.clear()
    torch.manual_seed(1)
    loss = model(torch.randn(ROWS, WIDTH)).square().mean()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], torch.get_rng_state()


def same(a, b):
    return torch.equal(a[0], b[0]) and all(map(torch.equal, a[1], b[1])) and torch.equal(a[2], b[2])


NAMES = ["CompressedFullAC", "CompressedRegionAC", "CompressedSelectiveAC"]
policies = pytest.mark.parametrize("name", NAMES)


@policies
def test_shape_of_a_policy(titan, name):
    """What torchtitan's parallelize functions and its Trainer.Config rely on."""
    ours = getattr(titan.ours, name)
    assert issubclass(ours, titan.theirs.RegionAC)
    assert issubclass(ours.Config, titan.theirs.RegionAC.Config)
    for method in ("__init__", "_wrap_block", "apply"):
        names = list(inspect.signature(getattr(ours, method)).parameters)
        assert names[:2] == list(inspect.signature(getattr(titan.theirs.RegionAC, method)).parameters)[:2]
    assert inspect.signature(ours._wrap_block).parameters["base_fqn"].kind is inspect.Parameter.KEYWORD_ONLY
    policy = ours.Config().build(dump_folder="out")
    assert isinstance(policy, ours)
    assert policy.dump_folder == "out"
    config = ours.Config(compress="int6", save_regions=["feed_forward.*"])
    assert ours.Config(**json.loads(json.dumps(config.to_dict()))) == config


def test_the_release_has_its_own(titan):
    assert not hasattr(titan.ours, "CompressedConfig")
    assert set(titan.ours.__all__) == set(NAMES)


def test_patterns_of_selective(titan):
    stock = titan.theirs.SelectiveAC.Config()
    ours = titan.ours.CompressedSelectiveAC.Config()
    assert ours.save_regions == stock.save_regions
    assert ours.recompute_regions == stock.recompute_regions


@policies
def test_blocks_are_regions_in_place(titan, name):
    """RegionAC drops what _wrap_block returns, and tells the block its regions first."""
    model = titan.model()
    blocks, keys = list(model.layers.values()), list(model.state_dict())
    policy = getattr(titan.ours, name).Config().build()
    wrap = policy._wrap_block

    def wrapped(module, *, base_fqn=None):
        titan.order.append(base_fqn)
        return wrap(module, base_fqn=base_fqn)

    policy._wrap_block = wrapped
    policy.apply(model)
    assert titan.order == [each for i in range(LAYERS) for each in ("configure_remat_regions", f"layers.{i}")]
    assert list(model.layers.values()) == blocks
    assert list(model.state_dict()) == keys
    step(titan, model=model)
    assert gradckpt.stats()["compressed"] == gradckpt.stats()["eligible"] == LAYERS
    gradckpt.disable(model)
    step(titan, model=model)
    assert gradckpt.stats()["regions"] == 0


def test_blocks_that_are_wrapped_already(titan):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = titan.model()
    model.layers["1"].feed_forward = checkpoint_wrapper(model.layers["1"].feed_forward)
    with pytest.raises(ValueError, match=r"gradckpt: .*CheckpointWrapper"):
        titan.ours.CompressedFullAC.Config().build().apply(model)


def test_exact_without_compression(titan):
    plain = step(titan)
    for name in NAMES:
        assert same(step(titan, getattr(titan.ours, name).Config(compress="none")), plain)
    assert gradckpt.stats()["regions"] == LAYERS


def test_fields(titan):
    plain, config = step(titan), titan.ours.CompressedRegionAC.Config
    found = step(titan, config())
    assert torch.equal(found[0], plain[0])
    assert 0 < error(found[1], plain[1]) < 0.02
    step(titan, config(compress="int4"))
    assert gradckpt.stats()["ratio"] == pytest.approx(4.375 / 32)
    step(titan, config(min_numel=10**9))
    assert gradckpt.stats()["uncompressed"] == {"smaller than min_numel": LAYERS}
    assert not torch.equal(step(titan, config(fake_quantize=True, compress="int4"))[0], plain[0])
    assert not same(step(titan, config(compress="none", preserve_rng_state=False)), plain)
    step(titan, config(policy="save_matmuls:int8"))
    assert gradckpt.stats()["encoded"] > LAYERS
    assert step(titan, config(compress="none", debug=True, determinism_check="none"))
    with pytest.raises(ValueError, match="gradckpt: unknown codec 'int9'"):
        config(compress="int9").build()
    with pytest.raises(ValueError, match="gradckpt: fake_quantize=True needs a codec"):
        config(compress="none", fake_quantize=True).build()


def test_hooks_for_torch_remat_are_refused(titan):
    class Hooked(titan.ours.CompressedRegionAC):
        def get_saved_tensors_hooks(self, module, *, base_fqn):
            return gradckpt.compress_saved("int8").hooks

    with pytest.raises(ValueError, match=r"gradckpt: Hooked has get_saved_tensors_hooks\(\)"):
        Hooked(Hooked.Config()).apply(titan.model())


def test_says_what_it_did(titan, caplog):
    with caplog.at_level("INFO", "gradckpt"):
        titan.ours.CompressedFullAC.Config().build().apply(titan.model())
    assert f"gradckpt: CompressedFullAC: {LAYERS} blocks, inputs int8" in caplog.text


REGIONS = {
    "none": ({}, {"block": 2, "choice": 1, "w13": 2}),
    "one": ({"save_regions": ["feed_forward.w13"]}, {"block": 2, "choice": 1, "w13": 1}),
    "all": ({"save_regions": ["*"]}, {"block": 2, "choice": 1, "w13": 1}),
    "all but one": (
        {"save_regions": ["*"], "recompute_regions": ["*.w13"]},
        {"block": 2, "choice": 1, "w13": 2},
    ),
}


@pytest.mark.parametrize("compress", ["none", "lossless", "int8"])
@pytest.mark.parametrize("case", REGIONS)
def test_regions_run_as_often_as_the_model_says(titan, case, compress):
    """What the model always saves runs once; so does what the configuration chooses. Dropout after
    a saved region, and inside one, draws what it drew in the forward. Saved regions keep their
    arguments beside a codec that rounds, so gradients err only where one that reads the block's
    input runs again."""
    pytest.importorskip("torch_remat", reason="torch_remat is not installed")
    fields, per_block = REGIONS[case]
    plain = step(titan)
    found = step(titan, titan.ours.CompressedRegionAC.Config(compress=compress, **fields))
    assert titan.calls == {name: LAYERS * count for name, count in per_block.items()}
    assert torch.equal(found[0], plain[0])
    assert torch.equal(found[2], plain[2])
    assert gradckpt.stats()["compressed"] == (0 if compress == "none" else LAYERS)
    errs = compress == "int8" and per_block["w13"] == 2
    assert 0 < error(found[1], plain[1]) < 0.02 if errs else same(found, plain)
