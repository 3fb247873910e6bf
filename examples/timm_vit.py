"""A timm vision transformer whose checkpoints are kept compressed, beside timm's own checkpointing.

Trains on gratings in noise, one class per direction, from the same seeds: with
set_grad_checkpointing() as it is; the same under `with gradckpt.patched(...)`, which is all that a
timm training script needs; and with gradckpt.enable, which needs no flag of timm. Prints what was
kept, the losses and the error of the gradients; the exit status is 1 when something that must hold
does not. Needs timm.

    python examples/timm_vit.py --steps 20 --compress int4
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import timm
except ModuleNotFoundError as error:
    sys.exit(f"{error}; pip install timm")

from comparison import Gradients, Result, gradient_error, print_checks, print_heading, print_row
from comparison import train as train_by

import gradckpt

CLASSES = 8
#: The largest error of the gradients (relative L2) that each codec may make here.
BOUNDS = {"int8": 0.03, "fp8": 0.1, "int6": 0.1, "int4": 0.4, "lossless": 0.0}


def build(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(args.seed)
    # A width that is a multiple of 128, the group of the codecs,
    # gives each token scales of its own.
    return timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=args.size,
        patch_size=4,
        embed_dim=128,
        depth=args.layers,
        num_heads=4,
        num_classes=CLASSES,
        drop_path_rate=0.1,
    ).train()


def batch_of(args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Gratings of random phase and wavelength; the class is their direction."""
    draw = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    classes = torch.randint(CLASSES, (args.batch,), generator=draw)
    angle = (classes * math.pi / CLASSES).view(-1, 1, 1)
    phase, wavelength = (torch.rand(args.batch, 1, 1, generator=draw) for _ in range(2))
    y, x = torch.meshgrid(torch.arange(args.size), torch.arange(args.size), indexing="ij")
    wave = torch.sin((x * angle.cos() + y * angle.sin()) * 2 * math.pi / (4 + 8 * wavelength) + phase * 2 * math.pi)
    return wave.unsqueeze(1) + 0.3 * torch.randn(args.batch, 3, args.size, args.size, generator=draw), classes


def train(
    model: nn.Module, around: AbstractContextManager[object], args: argparse.Namespace
) -> tuple[Result, Gradients]:
    def loss_of(step: int) -> Tensor:
        images, classes = batch_of(args, step)
        return F.cross_entropy(model(images), classes)

    torch.manual_seed(args.seed)
    with around:
        return train_by(model, loss_of, args.steps, args.lr)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", choices=sorted(BOUNDS), default="int8", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="each run (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--size", type=int, default=32, help="of the images, a multiple of 4 (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="also print the results as one JSON line")
    args = parser.parse_args(argv)
    if min(args.steps, args.layers, args.batch, args.size) < 1 or args.size % 4:
        parser.error("counts are 1 or more, --size is a multiple of 4")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    codec = args.compress
    results: dict[str, Result] = {}
    exact: Gradients = {}
    # name -> (timm's flag, modules= of gradckpt.enable, what is around the loop)
    ways: dict[str, tuple[bool, str | None, AbstractContextManager[object]]] = {
        "timm's checkpointing": (True, None, contextlib.nullcontext()),
        "patched(None)": (True, None, gradckpt.patched(None)),
        f"patched({codec!r})": (True, None, gradckpt.patched(codec)),
        f"enable, {codec}": (False, codec, contextlib.nullcontext()),
    }
    print(f"{args.layers} layers, {args.batch} images of {args.size} x {args.size}, {args.steps} steps")
    print_heading()
    for name, (flag, rule, around) in ways.items():
        model = build(args)
        if flag:
            model.set_grad_checkpointing()
        if rule:
            gradckpt.enable(model, modules={"layer": rule})
        result, gradients = train(model, around, args)
        exact = exact or gradients
        result.error, result.cosine = gradient_error(gradients, exact)
        print_row(name, result)
        results[name] = result

    stock, none, patched, applied = results.values()
    wanted, bound = args.layers * args.steps, BOUNDS[codec]
    status = print_checks(
        {
            "patched(None): losses of all steps equal to timm's checkpointing, to the bit": none.losses == stock.losses,
            "patched(None): gradients, too": none.error == 0.0,
            f"patched: {wanted} tensors compressed, one per layer and step": patched.compressed == wanted,
            "patched: first loss equal to timm's checkpointing": patched.losses[0] == stock.losses[0],
            f"patched: gradients within {bound:.0%}, worst cosine {patched.cosine:.5f}": patched.error <= bound,
            "enable: the same numbers as patched": vars(applied) == vars(patched),
        }
    )
    if args.json:
        print(json.dumps({name: vars(result) for name, result in results.items()}))
    return status


if __name__ == "__main__":
    sys.exit(main())
