"""A diffusion model of diffusers whose checkpoints are kept compressed,
beside diffusers' own checkpointing.

Trains a small UNet (or a transformer with two streams, as in SD3) to remove noise from blobs whose
place the condition tells, from the same seeds: with enable_gradient_checkpointing() as it is, and
with gradckpt.checkpoint as its gradient_checkpointing_func, without and with compression. Prints
what was kept, the losses and the error of the gradients; the exit status is 1 when something that
must hold does not. Needs diffusers.

    python examples/diffusers_unet.py --model sd3 --compress int4
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from diffusers import DDPMScheduler, ModelMixin, SD3Transformer2DModel, UNet2DConditionModel
except ModuleNotFoundError as error:
    sys.exit(f"{error}; pip install diffusers")

from comparison import Gradients, Result, gradient_error, print_checks, print_heading, print_row
from comparison import train as train_by

import gradckpt

CHANNELS, SIDE = 4, 16  # of the latents
TOKENS, WIDTH = 32, 64  # of the condition
#: The largest error of the gradients (relative L2) that each codec may make here.
BOUNDS = {"int8": 0.03, "fp8": 0.1, "int6": 0.1, "int4": 0.4, "lossless": 0.0}


# ---- models and data


def unet() -> ModelMixin:
    return UNet2DConditionModel(
        sample_size=SIDE,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=8,
    )


def sd3() -> ModelMixin:
    return SD3Transformer2DModel(
        sample_size=SIDE,
        patch_size=1,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=32,
        joint_attention_dim=WIDTH,
        caption_projection_dim=128,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=SIDE,
    )


MODELS = {"unet": unet, "sd3": sd3}


def batch_of(args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Latents with a blob at a random place, and a condition that holds the place."""
    draw = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    place = torch.rand(args.batch, 2, 1, 1, generator=draw) * SIDE
    y, x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    blob = torch.exp(-((y - place[:, 0]) ** 2 + (x - place[:, 1]) ** 2) / 8)
    latents = blob.unsqueeze(1) * torch.tensor([1.0, -1.0, 0.5, -0.5]).view(1, -1, 1, 1)
    waves = torch.arange(1, WIDTH // 4 + 1) / 10 * place.flatten(1).unsqueeze(-1)
    condition = torch.cat([waves.sin(), waves.cos()], -1).flatten(1).unsqueeze(1).expand(-1, TOKENS, -1)
    return latents, condition + 0.1 * torch.randn(args.batch, TOKENS, WIDTH, generator=draw)


# ---- training


def train(checkpoint: Callable[..., Any] | None, args: argparse.Namespace) -> tuple[Result, Gradients]:
    """``checkpoint``: diffusers' gradient_checkpointing_func; None is its own."""
    torch.manual_seed(args.seed)
    model = MODELS[args.model]().train()
    model.enable_gradient_checkpointing(gradient_checkpointing_func=checkpoint)
    scheduler = DDPMScheduler(num_train_timesteps=1000)

    def loss_of(step: int) -> Tensor:
        latents, condition = batch_of(args, step)
        noise = torch.randn_like(latents)
        times = torch.randint(scheduler.config.num_train_timesteps, (args.batch,))
        pooled = {} if args.model == "unet" else {"pooled_projections": condition.mean(1)}
        noisy = scheduler.add_noise(latents, noise, times)
        found = model(noisy, timestep=times, encoder_hidden_states=condition, **pooled).sample
        return F.mse_loss(found, noise)

    return train_by(model, loss_of, args.steps, args.lr)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="unet", help="(%(default)s)")
    parser.add_argument("--compress", choices=sorted(BOUNDS), default="int8", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="each run (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="also print the results as one JSON line")
    args = parser.parse_args(argv)
    if min(args.steps, args.batch) < 1:
        parser.error("--steps and --batch are 1 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    codec = args.compress
    ways: dict[str, Callable[..., Any] | None] = {
        "diffusers' checkpointing": None,
        "gradckpt None": gradckpt.checkpoint,
        f"gradckpt {codec}": functools.partial(gradckpt.checkpoint, compress=codec),
    }
    results: dict[str, Result] = {}
    exact: Gradients = {}
    print(f"{args.model}, {args.batch} latents of {CHANNELS} x {SIDE} x {SIDE}, {args.steps} steps")
    print_heading()
    for way, checkpoint in ways.items():
        result, gradients = train(checkpoint, args)
        exact = exact or gradients
        result.error, result.cosine = gradient_error(gradients, exact)
        print_row(way, result)
        results[way] = result

    stock, none, ours = results.values()
    bound = BOUNDS[codec]
    status = print_checks(
        {
            "None: losses of all steps equal to diffusers' checkpointing, to the bit": none.losses == stock.losses,
            "None: gradients, too": none.error == 0.0,
            f"{ours.regions // args.steps} regions in each step": none.regions == ours.regions > 0,
            f"{codec}: {ours.compressed // args.steps} tensors compressed in each step": ours.compressed > 0,
            f"{codec}: first loss equal to diffusers' checkpointing": ours.losses[0] == stock.losses[0],
            f"{codec}: gradients within {bound:.0%}, worst cosine {ours.cosine:.5f}": ours.error <= bound,
        }
    )
    if args.json:
        print(json.dumps({way: vars(result) for way, result in results.items()}))
    return status


if __name__ == "__main__":
    sys.exit(main())
