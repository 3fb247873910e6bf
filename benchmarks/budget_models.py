"""The models of bench_budget.py, of 12 or more regions each, and what it measures of them."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import timing
import torch
import transformers

import gradckpt
from gradckpt._planning import options, profile
from gradckpt._planning.profile import Profile
from gradckpt._settings import Setting
from gradckpt._training_step import alone, step_of_batch

VOCABULARY = 512
HEADS, KEYS = 4, 2


@dataclasses.dataclass(frozen=True)
class Size:
    """``width``: of the model; ``tokens``: of a sequence, and ``batch`` sequences."""

    width: int
    tokens: int
    batch: int
    layers: int = 12

    @property
    def blocks(self) -> dict[str, int]:
        return {
            "hidden_size": self.width,
            "intermediate_size": 2 * self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
        }

    @property
    def decoder(self) -> dict[str, Any]:
        return {
            **self.blocks,
            "num_key_value_heads": KEYS,
            "vocab_size": VOCABULARY,
            "attention_dropout": 0.1,
            "use_cache": False,
        }


@dataclasses.dataclass
class Case:
    """A model with its batch. ``modules``: as for gradckpt.enable."""

    name: str
    model: torch.nn.Module
    batch: Any
    modules: Any = None

    def step(self) -> None:
        self.model.zero_grad()
        step_of_batch(self.model, self.batch)()

    def profile(
        self, compress: Any = None, limits_error: bool = False, measure: bool = True, placement: Any = None
    ) -> Profile:
        """What plans are made from, as gradckpt.plan() does it."""
        run = lambda batch: step_of_batch(self.model, batch)()  # noqa: E731
        self.model.zero_grad()
        with alone(self.model):
            found = Profile(
                self.model,
                run,
                self.batch,
                modules=self.modules,
                compress=compress,
                limits_error=limits_error,
                placement=placement,
            )
            if measure:
                found.measure(self.batch)
        return found

    def plan(self, budget: int | str, **keywords: Any) -> gradckpt.Plan:
        """As a user makes one; gradients do not exist."""
        self.model.zero_grad()
        return gradckpt.plan(self.model, self.batch, modules=self.modules, budget=budget, **keywords)

    def peak(self, setting: Setting) -> int:
        """Measured bytes above the step's start; gradients do not exist then."""
        with setting.active(self.model, self.modules):
            self.model.zero_grad()
            with gradckpt.track_memory() as memory:
                step_of_batch(self.model, self.batch)()
        self.model.zero_grad()
        return memory.peak

    def seconds(self, setting: Any) -> float:
        with setting.active(self.model, self.modules):
            self.model.zero_grad()
            elapsed = timing.seconds(step_of_batch(self.model, self.batch), clock)
        self.model.zero_grad()
        return elapsed


# ---- models


def _ids(size: Size) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (size.batch, size.tokens))
    return {"input_ids": ids, "labels": ids}


def llama(size: Size) -> Case:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size.decoder))
    return Case("llama", model, _ids(size))


def gpt2(size: Size) -> Case:
    shape = {"n_embd": size.width, "n_layer": size.layers, "n_head": HEADS, "n_positions": size.tokens}
    config = transformers.GPT2Config(**shape, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, use_cache=False)
    return Case("gpt2", transformers.GPT2LMHeadModel(config), _ids(size))


def t5(size: Size) -> Case:
    config = transformers.T5Config(
        d_model=size.width,
        d_ff=2 * size.width,
        num_layers=size.layers // 2,
        num_heads=HEADS,
        d_kv=size.width // HEADS,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return Case("t5", transformers.T5ForConditionalGeneration(config), _ids(size))


def bert(size: Size) -> Case:
    config = transformers.BertConfig(**size.blocks, vocab_size=VOCABULARY, max_position_embeddings=size.tokens)
    return Case("bert", transformers.BertForMaskedLM(config), _ids(size))


def vit(size: Size) -> Case:
    side = 4 * round(size.tokens**0.5)
    dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    config = transformers.ViTConfig(**size.blocks, **dropout, image_size=side, patch_size=4, num_labels=10)
    batch = {"pixel_values": torch.randn(size.batch, 3, side, side), "labels": torch.randint(0, 10, (size.batch,))}
    return Case("vit", transformers.ViTForImageClassification(config), batch)


def mixtral(size: Size) -> Case:
    """With experts that are chosen equally often: see :func:`balanced`."""
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**size.decoder, num_local_experts=4))
    model.config._experts_implementation = "grouped_mm"
    return Case("mixtral", model, _ids(size))


class _Denoising(torch.nn.Module):
    def __init__(self, unet: Any) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        return self.unet(noise, times).sample.square().mean()


def unet(size: Size) -> Case:
    import diffusers  # takes a second, and not every environment has it
    from diffusers.models.resnet import ResnetBlock2D

    side = 2 * round(size.tokens**0.5)
    few, many = size.width // 2, size.width
    model = diffusers.UNet2DModel(
        sample_size=side,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=(few, few, many, many),
        down_block_types=("DownBlock2D",) * 3 + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * 3,
    )
    batch = torch.randn(size.batch, 3, side, side), torch.arange(size.batch)
    return Case("unet", _Denoising(model), batch, ResnetBlock2D)


MODELS: dict[str, Callable[[Size], Case]] = {
    each.__name__: each for each in (llama, gpt2, t5, bert, vit, unet, mixtral)
}


def case_of(name: str, size: Size) -> Case | None:
    """A model after one step, which makes its lazy buffers; None without the package it needs."""
    if name == "unet" and importlib.util.find_spec("diffusers") is None:
        print("  unet: skipped, diffusers is not installed")
        return None
    torch.manual_seed(0)
    case = MODELS[name](size)
    case.model.train()
    case.step()
    case.model.zero_grad()
    return case


_topk = torch.topk


@contextlib.contextmanager
def balanced(case: Case) -> Iterator[None]:
    """Let a mixture's tokens choose experts 0, 1, ... in turn, as in a simulated step."""
    if case.name != "mixtral":
        yield
        return

    def topk(x: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = _topk(x, k, dim)
        indices.data.copy_((torch.arange(indices.numel()) % x.shape[dim]).view_as(indices))
        return values, indices

    torch.topk = topk
    try:
        yield
    finally:
        torch.topk = _topk


# ---- the clock

clock = time.perf_counter


def use_clock(chosen: Callable[[], float]) -> None:
    """Measure by it here and in the planner. ``time.process_time`` is what the process uses: with
    one thread on an idle machine the same as the time, and other jobs change it less.
    """
    global clock
    clock = chosen
    shown = types.SimpleNamespace(perf_counter=chosen)
    options.time = profile.time = shown  # type: ignore[assignment]
