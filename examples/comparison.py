"""What several examples need beside what they show: two or more ways of training compared.

A few options, the losses, the error of the gradients, and what must hold, printed line by line.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import gradckpt

#: A parameter with less than this share of the gradient's norm does not count for the worst cosine.
NOISE = 0.01

Gradients = dict[str, Tensor]


def gradient_error(found: Gradients, exact: Gradients) -> tuple[float, float]:
    """Return the relative L2 error over all parameters, and the worst parameter's cosine."""
    norm = torch.cat([g.flatten() for g in exact.values()]).norm()
    gap = torch.cat([(found[name] - g).flatten() for name, g in exact.items()]).norm()
    pairs = [(found[name].flatten(), g.flatten()) for name, g in exact.items() if g.norm() >= NOISE * norm]
    return (gap / norm).item(), min(1.0, *(torch.cosine_similarity(f, e, dim=0).item() for f, e in pairs))


def print_checks(checks: Mapping[str, bool]) -> int:
    """Print what must hold, in words, and whether it does; return the exit status."""
    for words, good in checks.items():
        print("ok    " if good else "FAILED", words)
    return 0 if all(checks.values()) else 1


# ---- one model, trained in several ways in this process


@dataclass
class Result:
    losses: list[float]
    regions: int  # of gradckpt, in all steps
    compressed: int  # tensors
    bytes_in: int
    bytes_out: int
    error: float = 0.0  # of the first batch's gradient, relative L2
    cosine: float = 1.0  # of the worst parameter


def train(model: nn.Module, loss_of: Callable[[int], Tensor], steps: int, lr: float) -> tuple[Result, Gradients]:
    """Train with AdamW; return also the gradients of the first step."""
    gradckpt.stats.reset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses, first = [], {}
    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    stats = gradckpt.stats()
    return Result(losses, *(stats[key] for key in ("regions", "compressed", "bytes_in", "bytes_out"))), first


def print_heading() -> None:
    print(f"{'':26} {'regions':>8} {'inputs':>12} {'kept':>12} {'first loss':>11} {'last loss':>10} {'error':>8}")


def print_row(way: str, r: Result) -> None:
    sizes = f"{r.bytes_in / 1024:8.0f} KiB {r.bytes_out / 1024:8.0f} KiB"
    print(f"{way:26} {r.regions:8} {sizes} {r.losses[0]:11.5f} {r.losses[-1]:10.5f} {r.error:8.3%}")


# ---- a small model of bytes, trained by a framework with its own checkpointing and with gradckpt's


def add_options(parser: argparse.ArgumentParser, each: str = "step") -> None:
    parser.add_argument("--compress", default="int8", help="a codec, or none (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help=f"sequences per {each} (%(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 32 (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def parse_options(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    args = parser.parse_args(argv)
    if min(args.steps, args.batch, args.layers) < 1 or args.hidden < 32 or args.hidden % 32:
        parser.error("--steps, --batch and --layers are 1 or more, --hidden is a multiple of 32")
    if args.compress == "none":
        args.compress = None
    elif args.compress not in (*gradckpt.codecs.names(), "fp8"):
        parser.error(f"--compress is none or one of {', '.join(gradckpt.codecs.names())}")
    return args


def batches(path: str, args: argparse.Namespace) -> Iterator[Tensor]:
    """Yield a batch for each step: random windows of the file's bytes."""
    with open(path, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
    for _ in range(args.steps):
        starts = torch.randint(0, len(text) - args.seq, (args.batch,))
        yield torch.stack([text[start : start + args.seq] for start in starts])


def checks_of(
    theirs: list[float], ours: list[float], stats: Mapping[str, Any], args: argparse.Namespace, stock: str
) -> dict[str, bool]:
    """Return what must hold of the losses of two runs, in words; ``stock``: whose the first is."""
    wanted = args.layers * args.steps
    if args.compress is None:
        return {
            f"each layer was checkpointed in each step: {args.layers} x {args.steps}": stats["regions"] == wanted,
            f"every loss equal to that of {stock}": ours == theirs,
        }
    return {
        f"the input of each layer was compressed in each step: {args.layers} x {args.steps}": (
            stats["compressed"] == wanted
        ),
        f"first loss equal to that of {stock}": ours[0] == theirs[0],
        "last loss within 2 % of it": abs(ours[-1] - theirs[-1]) < 0.02 * theirs[-1],
    }


def print_runs(runs: Mapping[str, list[float]], stats: Mapping[str, Any]) -> None:
    """Print the losses of each run, by its name, and what gradckpt kept."""
    width = max(map(len, runs))
    for name, losses in runs.items():
        print(f"{name:{width}}", " ".join(f"{loss:.4f}" for loss in losses))
    print(
        f"{stats['regions']} regions, {stats['compressed']} inputs compressed: "
        f"{stats['bytes_in']} bytes kept in {stats['bytes_out']}"
    )
