"""gradckpt.plan: simulated peaks beside real ones, of PEFT's and diffusers' models."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import diffusers
import peft
import pytest
import torch
import transformers
from diffusers.models.resnet import ResnetBlock2D

import gradckpt
from gradckpt._settings import READY

# Of transformers, for the names that PEFT still uses.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LAYERS, TOKENS = 12, 256


def assert_peaks_are_real(model, step, modules=None, rel=0.01):
    step()  # lazy buffers, and gradients
    plan = gradckpt.plan(model, step, modules=modules)
    assert not any("measured" in text for text in plan.about)
    peaks = {}
    for setting in READY:
        if setting.name not in {"none", "torch", "int8", "int4", "compress_saved int8"}:
            continue
        with setting.active(model, modules), gradckpt.track_memory() as memory:
            step()
        peaks[setting.name] = memory.peak
        assert plan[setting.name].peak.size == pytest.approx(memory.peak, rel=rel), setting.name
    assert peaks["int4"] < peaks["int8"] < peaks["torch"] < peaks["none"]


@pytest.mark.parametrize("autocast", [False, True])
def test_lora(autocast):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    base = transformers.LlamaForCausalLM(config)
    base = base.to(torch.bfloat16) if autocast else base
    lora = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear")
    model = peft.get_peft_model(base, lora).train()
    model.enable_input_require_grads()
    ids = torch.randint(1, 512, (4, TOKENS))

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()

    assert_peaks_are_real(model, step)


def test_unet():
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=(64, 64, 128, 128),
        down_block_types=("DownBlock2D",) * 3 + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * 3,
    ).train()
    assert sum(isinstance(module, ResnetBlock2D) for module in model.modules()) >= 12
    noise, times = torch.randn(2, 3, 32, 32), torch.tensor([3, 7])

    def step():
        model(noise, times).sample.square().mean().backward()

    assert_peaks_are_real(model, step, ResnetBlock2D)
