"""diffusers: its models from config with gradckpt.checkpoint as
their checkpointing function, beside their own."""

import copy
import functools
import pickle
import runpy
import sys
from typing import NamedTuple

import compiled_blocks
import pytest
import torch
from checkout import PROGRAMS
from model_families import equal, error
from peft import LoraConfig
from worlds import LAUNCH, call

import gradckpt

INT8 = functools.partial(gradckpt.checkpoint, compress="int8")


class Family(NamedTuple):
    """A model of compiled_blocks; of a step: regions, compressed tensors, and the largest error of
    the gradients with int8."""

    shape: dict
    regions: int
    compressed: int
    bound: float = 0.01


FAMILIES = {
    "UNet2DCondition": Family({"length": 40}, 11, 11),
    "DiT": Family({"layers": 3}, 3, 3),
    "PixArt": Family({"layers": 3, "length": 40}, 3, 6),
    "SD3": Family({"layers": 3, "length": 40}, 3, 6),
    "Flux": Family({"layers": 2, "length": 40}, 4, 8),
    # Blocks without any tensor that requires grad at the start.
    "AutoencoderKL": Family({}, 10, 8, 0.02),
    "Wan": Family({"layers": 2, "length": 40}, 2, 4),
}
EACH = pytest.mark.parametrize("family", FAMILIES)


def build(family):
    torch.manual_seed(0)
    model, inputs = compiled_blocks.BLOCKS[family](**FAMILIES[family].shape)
    if family == "PixArt":  # a mask, which every block gets
        inputs["encoder_attention_mask"] = torch.arange(40).lt(30).expand(2, 40).float()
    return model.train(), inputs


def step(model, inputs, dtype=None):
    """Loss and gradients."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(**inputs).sample.float().square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def checkpointed(model, inputs, function, **options):
    """The same with ``function``, and what gradckpt counted."""
    model.enable_gradient_checkpointing(gradient_checkpointing_func=function)
    gradckpt.stats.reset()
    return *step(model, inputs, **options), gradckpt.stats()


@EACH
def test_every_family_with_and_without_compression(family):
    model, inputs = build(family)
    _, regions, compressed, bound = FAMILIES[family]
    plain_loss, _ = step(model, inputs)
    loss, gradients, stats = checkpointed(model, inputs, None)
    assert stats["regions"] == 0
    for exact in (gradckpt.checkpoint, functools.partial(gradckpt.checkpoint, compress="lossless")):
        same_loss, same, stats = checkpointed(model, inputs, exact)
        assert torch.equal(same_loss, loss)
        assert equal(same, gradients)
        assert stats["regions"] == regions
    int8_loss, int8, stats = checkpointed(model, inputs, INT8)
    assert torch.equal(int8_loss, plain_loss)
    assert (stats["regions"], stats["compressed"]) == (regions, compressed)
    assert 0 < stats["bytes_out"] < 0.26 * stats["bytes_in"]
    assert 0 < error(int8, gradients) < bound


def test_in_eval_mode_too():
    """diffusers checkpoints whenever grad is enabled."""
    model, inputs = build("SD3")
    _, _, stats = checkpointed(model.eval(), inputs, INT8)
    assert stats["compressed"] == FAMILIES["SD3"].compressed
    gradckpt.stats.reset()
    with torch.no_grad():
        model(**inputs)
    assert gradckpt.stats()["compressed"] == 0


@pytest.mark.parametrize("family", ["UNet2DCondition", "SD3"])
def test_adapters_on_a_frozen_base(family):
    """Inputs that need no grad yet, those of the first blocks, are kept as they are."""
    model, inputs = build(family)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v"]))
    loss, gradients, _ = checkpointed(model, inputs, None)
    none_loss, none, _ = checkpointed(model, inputs, gradckpt.checkpoint)
    assert torch.equal(none_loss, loss)
    assert equal(none, gradients)
    _, int8, stats = checkpointed(model, inputs, INT8)
    assert 0 < stats["compressed"] < FAMILIES[family].compressed
    assert stats["uncompressed"]["does not require grad"] > 0
    assert 0 < error(int8, gradients) < 0.01


def test_the_choice_lives_on_the_model(tmp_path):
    """Copies and pickles have it, saved weights do not,
    and it ends when checkpointing is turned off."""
    model, inputs = build("DiT")
    _, gradients, _ = checkpointed(model, inputs, INT8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        gradckpt.stats.reset()
        assert equal(step(other, inputs)[1], gradients)
        assert gradckpt.stats()["compressed"] == FAMILIES["DiT"].compressed
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert not loaded.is_gradient_checkpointing
    model.disable_gradient_checkpointing()
    gradckpt.stats.reset()
    step(model, inputs)
    assert gradckpt.stats()["regions"] == 0


@pytest.mark.parametrize("family", ["UNet2DCondition", "Flux"])
def test_its_own_checkpointing_under_patched(family):
    model, inputs = build(family)
    _, gradients, _ = checkpointed(model, inputs, INT8)
    model.enable_gradient_checkpointing()
    with gradckpt.patched("int8") as handle:
        _, found = step(model, inputs)
    assert (handle.stats()["calls"], handle.stats()["compressed"]) == FAMILIES[family][1:3]
    assert equal(found, gradients)


def test_rules_for_modules():
    """modules= knows the blocks of transformers as layers, without diffusers' flag."""
    model, inputs = build("Flux")
    _, gradients, _ = checkpointed(model, inputs, INT8)
    model.disable_gradient_checkpointing()
    gradckpt.stats.reset()
    with gradckpt.enable(model, "int8", modules="layer") as handle:
        assert list(handle.modules) == [
            *(f"transformer_blocks.{i}" for i in range(2)),
            *(f"single_transformer_blocks.{i}" for i in range(2)),
        ]
        assert error(step(model, inputs)[1], gradients) < 0.01
    assert gradckpt.stats()["compressed"] > 0


def test_enable_names_the_line():
    """Where several blocks repeat; one alone is chosen."""
    with pytest.raises(ValueError, match=r"^gradckpt: \w+ is a model of diffusers; call model\.enable_"):
        gradckpt.enable(build("Flux")[0], "int4")
    model = build("DiT")[0]
    assert list(gradckpt.enable(model, "int4").modules) == [f"transformer_blocks.{i}" for i in range(3)]


def test_an_unchanged_script_under_the_launcher(tmp_path, monkeypatch):
    script = PROGRAMS / "diffusers_loop.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--save", str(tmp_path / "stock.pt")])
    runpy.run_path(str(script), run_name="__main__")
    done = call(*LAUNCH, "--compress", "int8", script, "--save", tmp_path / "int8.pt", cwd=tmp_path)
    assert "6 calls of checkpoint; gradckpt ran 6 regions with grad" in done.stderr
    assert "compressed 6 of 6 tensors" in done.stderr
    stock, int8 = (torch.load(tmp_path / f"{name}.pt") for name in ("stock", "int8"))
    assert int8["losses"][0] == stock["losses"][0]
    assert not equal(int8["weights"], stock["weights"])
