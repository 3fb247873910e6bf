"""gradckpt.integrations.torchtitan on torchtitan's Llama;
test_torchtitan.py runs it where torchtitan is."""

import dataclasses
import importlib.util
import json
import sys
from unittest.mock import MagicMock

import pytest
import torch
import tyro
from torch.nn import functional

if importlib.util.find_spec("triton") is None:  # beside a torch for CPUs; of an exchange between experts' ranks
    sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig, FullAC, SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

import gradckpt
from gradckpt.integrations.torch_distributed import CheckpointWrapper
from gradckpt.integrations.torchtitan import CompressedConfig, CompressedFullAC, CompressedSelectiveAC

LAYERS, ROWS = 3, 64
PREFIX = "_checkpoint_wrapped_module."


def build():
    """torchtitan's debug model with fewer layers, and attention that has a backward on the CPU."""
    config = model_registry("debugmodel").model
    config.layers = config.layers[:LAYERS]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        model.init_states()
    return model.train()


def step(config=None, model=None):
    """Loss and gradients by parameter."""
    model = model or build()
    if config is not None:
        config.build().apply(model)
    gradckpt.stats.reset()
    torch.manual_seed(1)
    ids = torch.randint(0, 2048, (1, ROWS))
    loss = functional.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
    loss.backward()
    return loss, {name.replace(PREFIX, ""): p.grad for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def error(found, exact):
    a, b = (torch.cat([g[name].flatten() for name in exact]) for g in (found, exact))
    return ((a - b).norm() / b.norm()).item()


@pytest.fixture(scope="module")
def plain():
    return step()


PAIRS = [(CompressedFullAC, FullAC), (CompressedSelectiveAC, SelectiveAC)]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=["full", "selective"])
class TestBoth:
    def test_as_stock_without_compression(self, ours, theirs):
        loss, gradients = step(ours.Config(compress="none"))
        assert gradckpt.stats()["regions"] == LAYERS
        exact, exact_gradients = step(theirs.Config())
        assert torch.equal(loss, exact)
        assert same(gradients, exact_gradients)

    def test_within_the_bound_of_int8(self, ours, theirs, plain):
        loss, gradients = step(ours.Config())
        stats = gradckpt.stats()
        assert stats["compressed"] == stats["eligible"] == LAYERS
        assert stats["ratio"] == pytest.approx(8.125 / 32)
        assert torch.equal(loss, plain[0])
        assert 0 < error(gradients, plain[1]) < 0.02

    def test_blocks_and_keys(self, ours, theirs):
        model = build()
        keys = list(model.state_dict())
        ours.Config().build().apply(model)
        assert sum(isinstance(block, CheckpointWrapper) for block in model.layers.values()) == LAYERS
        assert list(model.state_dict()) == keys
        assert sorted(ModelWrapper(model).state_dict()) == sorted(keys)
        model.load_state_dict(build().state_dict())

    def test_keywords_are_torchtitans(self, ours, theirs):
        config = {"preserve_rng_state": False, "determinism_check": "none"}
        mine, other = build(), build()
        ours.Config(**config).build().apply(mine)
        theirs.Config(**config).build().apply(other)
        got, exact = (dict(model.layers["0"].checkpoint_fn.keywords) for model in (mine, other))
        assert got.pop("compress") == gradckpt.CompressionConfig("int8")
        assert exact.pop("use_reentrant") is False
        if "context_fn" in exact:
            assert callable(got.pop("context_fn"))
            del exact["context_fn"]
        assert got == exact

    def test_fields(self, ours, theirs):
        step(ours.Config(compress="int4"))
        assert gradckpt.stats()["ratio"] == pytest.approx(4.25 / 32)
        step(ours.Config(min_numel=10**9, compress="raw"))
        assert gradckpt.stats()["uncompressed"] == {"smaller than min_numel": LAYERS}
        loss, _ = step(ours.Config(fake_quantize=True, compress="int4"))
        exact, _ = step(ours.Config(compress="int4"))
        assert not torch.equal(loss, exact)

    def test_is_plain_data(self, ours, theirs):
        config = ours.Config(compress="int6")
        assert ours.Config(**json.loads(json.dumps(config.to_dict()))) == config

    def test_wrong_words(self, ours, theirs):
        with pytest.raises(ValueError, match="gradckpt: unknown codec 'int9'"):
            ours.Config(compress="int9").build()
        with pytest.raises(ValueError, match="gradckpt: fake_quantize=True needs a codec"):
            ours.Config(compress="none", fake_quantize=True).build()

    def test_blocks_that_are_wrapped_already(self, ours, theirs):
        for first in (theirs, ours):
            model = build()
            first.Config().build().apply(model)
            with pytest.raises(ValueError, match=r"gradckpt: .*CheckpointWrapper"):
                ours.Config().build().apply(model)


def test_a_policy_of_gradckpt(plain):
    loss, gradients = step(CompressedFullAC.Config(policy="save_matmuls:int8"))
    assert gradckpt.stats()["policy_outputs"] == 5 * LAYERS
    assert gradckpt.stats()["encoded"] == 6 * LAYERS
    assert torch.equal(loss, plain[0])
    assert 0 < error(gradients, plain[1]) < 0.02
    loss, gradients = step(CompressedFullAC.Config(compress="none", policy="save_attention"))
    assert gradckpt.stats()["policy_outputs"] == 2 * LAYERS  # with its log-sum-exp
    assert torch.equal(loss, plain[0])
    assert same(gradients, plain[1])
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="flash_attention_for_cpu.default runs again"):
        loss, gradients = step(CompressedFullAC.Config(policy="save_attention"))
    assert gradckpt.stats()["policy_outputs"] == 0
    assert torch.equal(loss, plain[0])
    assert 0 < error(gradients, plain[1]) < 0.02
    with pytest.raises(ValueError, match="gradckpt: "):
        CompressedFullAC.Config(policy="save_everything").build().apply(build())


def test_what_a_subclass_saves_is_saved():
    class Nothing(CompressedSelectiveAC):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(CompressedSelectiveAC.Config):
            pass

        def get_save_ops(self):
            asked.append(1)
            return set()

    asked = []
    step(Nothing.Config())
    assert len(asked) == LAYERS


def test_says_what_it_did(caplog):
    with caplog.at_level("INFO", "gradckpt"):
        CompressedFullAC.Config().build().apply(build())
    assert f"gradckpt: CompressedFullAC: {LAYERS} blocks, inputs int8" in caplog.text


class TestCommandLine:
    def parse(self, union, *args, default=None):
        cls = dataclasses.make_dataclass("Job", [("activation_checkpoint", union)])
        return tyro.cli(cls, args=args, default=cls(default or FullAC.Config())).activation_checkpoint

    def test_of_torchtitan_keeps_what_the_configuration_chose(self):
        for cls, name in ((CompressedFullAC, "full"), (CompressedSelectiveAC, "selective")):
            chosen = cls.Config(compress="int6")
            assert self.parse(ActivationCheckpointingConfig, default=chosen) == chosen
            args = (f"activation_checkpoint:{name}", "--activation_checkpoint.compress", "int4")
            assert self.parse(ActivationCheckpointingConfig, *args, default=chosen) == cls.Config(compress="int4")

    def test_with_our_names(self):
        args = ("activation_checkpoint:compressed-full", "--activation_checkpoint.compress", "fp8")
        assert self.parse(CompressedConfig, *args) == CompressedFullAC.Config(compress="fp8")
        assert self.parse(CompressedConfig, "activation_checkpoint:selective") == SelectiveAC.Config()
