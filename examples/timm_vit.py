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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import timm
except ModuleNotFoundError as error:
    sys.exit(f"{error}; pip install timm")

import gradckpt

CLASSES = 8
#: The largest error of the gradients (relative L2) that each codec may make here.
BOUNDS = {"int8": 0.03, "fp8": 0.1, "int6": 0.1, "int4": 0.4, "lossless": 0.0}


@dataclass
class Result:
    losses: list[float]
    regions: int  # of gradckpt, in all steps
    compressed: int  # tensors
    bytes_in: int
    bytes_out: int
    error: float = 0.0  # of the first batch's gradient, relative L2
    cosine: float = 1.0  # of the worst parameter that holds 1 % of the gradient's norm or more


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


def train(model: nn.Module, around: AbstractContextManager[object], args: argparse.Namespace) -> tuple[Result, Tensor]:
    gradckpt.stats.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    torch.manual_seed(args.seed)
    losses, first = [], {}
    with around:
        for step in range(args.steps):
            images, classes = batch_of(args, step)
            loss = F.cross_entropy(model(images), classes)
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            losses.append(loss.item())
    stats = gradckpt.stats()
    return Result(losses, *(stats[key] for key in ("regions", "compressed", "bytes_in", "bytes_out"))), first


def compare(result: Result, found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    a, b = (torch.cat([gradients[name].flatten() for name in exact]) for gradients in (found, exact))
    result.error = float((a - b).norm() / b.norm())
    large = [name for name in exact if exact[name].norm() >= 0.01 * b.norm()]
    result.cosine = min(float(F.cosine_similarity(found[n].flatten(), exact[n].flatten(), dim=0)) for n in large)


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
    results, gradients = {}, {}
    # name -> (timm's flag, modules= of gradckpt.enable, what is around the loop)
    ways: dict[str, tuple[bool, str | None, AbstractContextManager[object]]] = {
        "timm's checkpointing": (True, None, contextlib.nullcontext()),
        "patched(None)": (True, None, gradckpt.patched(None)),
        f"patched({codec!r})": (True, None, gradckpt.patched(codec)),
        f"enable, {codec}": (False, codec, contextlib.nullcontext()),
    }
    print(f"{args.layers} layers, {args.batch} images of {args.size} x {args.size}, {args.steps} steps")
    print(f"{'':22} {'regions':>8} {'inputs':>12} {'kept':>12} {'first loss':>11} {'last loss':>10} {'error':>8}")
    for name, (flag, rule, around) in ways.items():
        model = build(args)
        if flag:
            model.set_grad_checkpointing()
        if rule:
            gradckpt.enable(model, modules={"layer": rule})
        results[name], gradients[name] = train(model, around, args)
        r = results[name]
        compare(r, gradients[name], gradients["timm's checkpointing"])
        sizes = f"{r.bytes_in / 1024:8.0f} KiB {r.bytes_out / 1024:8.0f} KiB"
        print(f"{name:22} {r.regions:8} {sizes} {r.losses[0]:11.5f} {r.losses[-1]:10.5f} {r.error:8.3%}")

    stock, none, patched, applied = results.values()
    wanted, bound = args.layers * args.steps, BOUNDS[codec]
    found = [
        (none.losses == stock.losses, "patched(None): losses of all steps equal to timm's checkpointing, to the bit"),
        (none.error == 0.0, "patched(None): gradients, too"),
        (
            patched.compressed == wanted,
            f"patched: {wanted} tensors compressed, one per layer and step",
        ),
        (patched.losses[0] == stock.losses[0], "patched: first loss equal to timm's checkpointing"),
        (patched.error <= bound, f"patched: gradients within {bound:.0%}, worst cosine {patched.cosine:.5f}"),
        (vars(applied) == vars(patched), "enable: the same numbers as patched"),
    ]
    for good, words in found:
        print("ok    " if good else "FAILED", words)
    if args.json:
        print(json.dumps({name: vars(result) for name, result in results.items()}))
    return 0 if all(good for good, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
