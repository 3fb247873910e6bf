"""diffusers: its models from config with gradckpt.checkpoint as
their checkpointing function, beside their own."""

import copy
import functools
import pickle
import runpy
import sys

import diffusers
import pytest
import torch
from checkout import SCRIPTS
from launcher import LAUNCH, call
from peft import LoraConfig

import gradckpt

INT8 = functools.partial(gradckpt.checkpoint, compress="int8")
DOWN, UP = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
IMAGES = {"sample_size": 16, "in_channels": 4, "out_channels": 4}
HEADS = {"num_attention_heads": 4, "attention_head_dim": 16}
TIMES = torch.tensor([3, 7])


def unet():
    """Convolutions with skip connections; attention with a condition."""
    model = diffusers.UNet2DConditionModel(
        **IMAGES,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=DOWN,
        up_block_types=UP,
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    inputs = {"sample": torch.randn(2, 4, 16, 16), "timestep": TIMES, "encoder_hidden_states": torch.randn(2, 40, 32)}
    return model, inputs


def dit():
    """One stream, and None among the arguments."""
    model = diffusers.DiTTransformer2DModel(**HEADS, in_channels=4, num_layers=3, sample_size=16, norm_num_groups=1)
    return model, {"hidden_states": torch.randn(2, 4, 16, 16), "timestep": TIMES, "class_labels": torch.tensor([1, 2])}


def pixart():
    """A mask, and a condition that every block gets."""
    model = diffusers.PixArtTransformer2DModel(
        **HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        sample_size=16,
        cross_attention_dim=64,
        caption_channels=32,
        norm_num_groups=1,
        use_additional_conditions=False,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 40, 32),
        "encoder_attention_mask": torch.arange(40).lt(30).expand(2, 40).float(),
        "timestep": TIMES,
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return model, inputs


def sd3():
    """Two streams in, two streams out; the last block drops one."""
    model = diffusers.SD3Transformer2DModel(
        **IMAGES,
        patch_size=1,
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=8,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=32,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 40, 32),
        "pooled_projections": torch.randn(2, 64),
        "timestep": TIMES,
    }
    return model, inputs


def flux():
    """Two streams, then one; rotary tables in a tuple."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    inputs = {
        "hidden_states": torch.randn(2, 64, 4),
        "encoder_hidden_states": torch.randn(2, 40, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": TIMES / 10,
        "img_ids": torch.randn(64, 3),
        "txt_ids": torch.randn(40, 3),
    }
    return model, inputs


def vae():
    """An encoder and a decoder of convolutions;
    blocks without any tensor that requires grad at the start."""
    model = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        norm_num_groups=8,
    )
    return model, {"sample": torch.randn(2, 3, 32, 32)}


def wan():
    """Video."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 16, 16),
        "encoder_hidden_states": torch.randn(1, 40, 16),
        "timestep": TIMES[:1],
    }
    return model, inputs


#: family -> (regions and compressed tensors of a step,
#: the largest error of the gradients with int8)
FAMILIES = {
    unet: (11, 11, 0.01),
    dit: (3, 3, 0.01),
    pixart: (3, 6, 0.01),
    sd3: (3, 6, 0.01),
    flux: (4, 8, 0.01),
    vae: (10, 8, 0.02),
    wan: (2, 2, 0.01),
}
EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)


def build(family):
    torch.manual_seed(0)
    model, inputs = family()
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


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def relative_error(found, exact):
    assert found.keys() == exact.keys()
    a, b = (torch.cat([g[name].flatten().double() for name in exact]) for g in (found, exact))
    return float((a - b).norm() / b.norm())


@EACH
def test_every_family_with_and_without_compression(family):
    model, inputs = build(family)
    regions, compressed, bound = FAMILIES[family]
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
    assert 0 < relative_error(int8, gradients) < bound


def test_in_eval_mode_too():
    """diffusers checkpoints whenever grad is enabled."""
    model, inputs = build(sd3)
    _, _, stats = checkpointed(model.eval(), inputs, INT8)
    assert stats["compressed"] == FAMILIES[sd3][1]
    gradckpt.stats.reset()
    with torch.no_grad():
        model(**inputs)
    assert gradckpt.stats()["compressed"] == 0


@pytest.mark.parametrize("family", [unet, sd3], ids=lambda family: family.__name__)
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
    assert 0 < stats["compressed"] < FAMILIES[family][1]
    assert stats["uncompressed"]["does not require grad"] > 0
    assert 0 < relative_error(int8, gradients) < 0.01


def test_autocast():
    model, inputs = build(dit)
    loss, gradients, _ = checkpointed(model, inputs, None, dtype=torch.bfloat16)
    none_loss, none, _ = checkpointed(model, inputs, gradckpt.checkpoint, dtype=torch.bfloat16)
    assert torch.equal(none_loss, loss)
    assert equal(none, gradients)
    _, int8, stats = checkpointed(model, inputs, INT8, dtype=torch.bfloat16)
    assert stats["compressed"] == FAMILIES[dit][1]
    assert 0 < relative_error(int8, gradients) < 0.01


def test_the_choice_lives_on_the_model(tmp_path):
    """Copies and pickles have it, saved weights do not,
    and it ends when checkpointing is turned off."""
    model, inputs = build(dit)
    _, gradients, _ = checkpointed(model, inputs, INT8)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        gradckpt.stats.reset()
        assert equal(step(other, inputs)[1], gradients)
        assert gradckpt.stats()["compressed"] == FAMILIES[dit][1]
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert not loaded.is_gradient_checkpointing
    model.disable_gradient_checkpointing()
    gradckpt.stats.reset()
    step(model, inputs)
    assert gradckpt.stats()["regions"] == 0


@pytest.mark.parametrize("family", [unet, flux], ids=lambda family: family.__name__)
def test_its_own_checkpointing_under_patched(family):
    model, inputs = build(family)
    _, gradients, _ = checkpointed(model, inputs, INT8)
    model.enable_gradient_checkpointing()
    with gradckpt.patched("int8") as handle:
        _, found = step(model, inputs)
    assert (handle.stats()["calls"], handle.stats()["compressed"]) == FAMILIES[family][:2]
    assert equal(found, gradients)


def test_rules_for_modules():
    """modules= knows the blocks of transformers as layers, without diffusers' flag."""
    model, inputs = build(flux)
    _, gradients, _ = checkpointed(model, inputs, INT8)
    model.disable_gradient_checkpointing()
    gradckpt.stats.reset()
    with gradckpt.enable(model, "int8", modules="layer") as handle:
        assert list(handle.modules) == [
            *(f"transformer_blocks.{i}" for i in range(2)),
            *(f"single_transformer_blocks.{i}" for i in range(2)),
        ]
        assert relative_error(step(model, inputs)[1], gradients) < 0.01
    assert gradckpt.stats()["compressed"] > 0


def test_enable_names_the_line():
    """Where several blocks repeat; one alone is chosen."""
    with pytest.raises(ValueError, match=r"^gradckpt: \w+ is a model of diffusers; call model\.enable_"):
        gradckpt.enable(build(flux)[0], "int4")
    model = build(dit)[0]
    assert list(gradckpt.enable(model, "int4").modules) == [f"transformer_blocks.{i}" for i in range(3)]


def test_an_unchanged_script_under_the_launcher(tmp_path, monkeypatch):
    script = SCRIPTS / "diffusers_loop.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--save", str(tmp_path / "stock.pt")])
    runpy.run_path(str(script), run_name="__main__")
    done = call(*LAUNCH, "--compress", "int8", script, "--save", tmp_path / "int8.pt", cwd=tmp_path)
    assert "6 calls of checkpoint; gradckpt ran 6 regions with grad" in done.stderr
    assert "compressed 6 of 6 tensors" in done.stderr
    stock, int8 = (torch.load(tmp_path / f"{name}.pt") for name in ("stock", "int8"))
    assert int8["losses"][0] == stock["losses"][0]
    assert not equal(int8["weights"], stock["weights"])
