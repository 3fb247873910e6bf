"""A byte-level GPT in plain PyTorch, no framework, with its checkpoints kept in several ways.

Trains on the sources of Python's standard library with AdamW and gradient accumulation, from the
same seeds: without checkpointing, with torch's, and with the four forms that gradckpt has for one's
own modules: the call, the decorator, rules for modules, and a sequence in segments. Prints what
autograd kept, the losses and the error of the gradients; the exit status is 1 when something that
must hold does not.

    python examples/plain_gpt.py --steps 30 --layers 6
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from comparison import print_checks
from torch import Tensor, nn

import gradckpt

MIB = 2**20
#: The largest error of the gradients (relative L2) that each codec may make here.
BOUNDS = {"int8": 0.02, "int4": 0.2}

# ---- the model


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """``run_blocks(blocks, hidden)``: how the blocks are run,
    which is where checkpointing comes in."""

    def __init__(self, args: argparse.Namespace, run_blocks: Callable[[nn.Sequential, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, args.width), nn.Embedding(args.seq, args.width)
        self.blocks = nn.Sequential(*(Block(args.width, args.width // 32) for _ in range(args.layers)))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, 256, bias=False)
        self.run_blocks = run_blocks

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids[:, :-1]) + self.positions.weight[: ids.shape[1] - 1]
        hidden = self.run_blocks(self.blocks, hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), ids[:, 1:].flatten())


# ---- the ways to checkpoint it


def plainly(blocks: nn.Sequential, hidden: Tensor) -> Tensor:
    for block in blocks:
        hidden = block(hidden)
    return hidden


def with_torch(blocks: nn.Sequential, hidden: Tensor) -> Tensor:
    for block in blocks:
        hidden = torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False)
    return hidden


def called(compress: str | None) -> Callable[[nn.Sequential, Tensor], Tensor]:
    """The call, in torch's place."""

    def run(blocks: nn.Sequential, hidden: Tensor) -> Tensor:
        for block in blocks:
            hidden = gradckpt.checkpoint(block, hidden, compress=compress)
        return hidden

    return run


@gradckpt.checkpoint(compress="int8")
def run_block(block: Block, hidden: Tensor) -> Tensor:
    """Decorated: each call is one region."""
    return block(hidden)


def decorated(blocks: nn.Sequential, hidden: Tensor) -> Tensor:
    for block in blocks:
        hidden = run_block(block, hidden)
    return hidden


def in_segments(blocks: nn.Sequential, hidden: Tensor) -> Tensor:
    """Regions of two blocks each. The last segment is run as it is, as in torch:
    its backward comes first."""
    return gradckpt.checkpoint_sequential(blocks, max(2, len(blocks) // 2), hidden, compress="int8")


def rules_of(model: GPT) -> dict[Any, str]:
    """For gradckpt.enable. The last block's backward comes first,
    so that running it again would save nothing."""
    return {model.blocks[-1]: "skip", Block: "int8"}


@dataclass
class Way:
    run_blocks: Callable[[nn.Sequential, Tensor], Tensor]
    codec: str | None = None  # whose bound counts; None: the gradients are exact
    rules: bool = False


WAYS = {
    "no checkpointing": Way(plainly),
    "torch checkpointing": Way(with_torch),
    "gradckpt None": Way(called(None)),
    "gradckpt int8": Way(called("int8"), "int8"),
    "gradckpt int4": Way(called("int4"), "int4"),
    "decorator, int8": Way(decorated, "int8"),
    "rules, int8": Way(plainly, "int8", rules=True),
    "segments, int8": Way(in_segments, "int8"),
}

# ---- training


@dataclass
class Result:
    kept: int  # bytes that autograd keeps after the forward of one batch, parameters not counted
    losses: list[float]
    compressed: int  # tensors, in all steps
    bytes_in: int
    bytes_out: int
    error: float = 0.0  # of the first batch's gradient, relative L2


def read_text() -> Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batch_of(text: Tensor, args: argparse.Namespace, number: int) -> Tensor:
    draw = random.Random(args.seed * 1_000_003 + number)
    starts = [draw.randrange(len(text) - args.seq - 1) for _ in range(args.batch)]
    return torch.stack([text[start : start + args.seq + 1] for start in starts])


def kept_bytes(model: GPT, ids: Tensor) -> int:
    """What the forward leaves with autograd: every storage once,
    as the hooks of saved tensors see it."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, tuple[int, Tensor]] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes(), x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(ids)
    return sum(nbytes for nbytes, _ in seen.values())


def train(way: Way, text: Tensor, args: argparse.Namespace) -> tuple[Result, Tensor]:
    torch.manual_seed(args.seed)
    model = GPT(args, way.run_blocks).train()
    if way.rules:
        gradckpt.enable(model, modules=rules_of(model))
    kept = kept_bytes(model, batch_of(text, args, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    gradckpt.stats.reset()
    losses = []
    first = torch.empty(0)
    for step in range(args.steps):
        total = 0.0
        for part in range(args.accumulate):
            loss = model(batch_of(text, args, step * args.accumulate + part)) / args.accumulate
            loss.backward()
            total += loss.item()
        if step == 0:
            first = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    stats = gradckpt.stats()
    return Result(kept, losses, stats["compressed"], stats["bytes_in"], stats["bytes_out"]), first


def checks(results: dict[str, Result], args: argparse.Namespace) -> dict[str, bool]:
    """What must hold, in words."""
    plain, stock, ours = (results[name] for name in ("no checkpointing", "torch checkpointing", "gradckpt None"))
    found = {
        f"gradckpt None: losses of all {args.steps} steps equal to torch's, to the bit": ours.losses == stock.losses,
        "gradckpt None: gradients equal to those without checkpointing, to the bit": ours.error == stock.error == 0.0,
    }
    for name, way in WAYS.items():
        if way.codec is not None:
            result, bound = results[name], BOUNDS[way.codec]
            found |= {
                f"{name}: {result.compressed} tensors compressed": result.compressed > 0,
                f"{name}: first loss equal to that without checkpointing": result.losses[0] == plain.losses[0],
                f"{name}: gradients within {bound:.0%}": 0.0 < result.error <= bound,
            }
    return found | {"decorator and call: one": results["decorator, int8"].losses == results["gradckpt int8"].losses}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="of the optimizer, each run (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks, 2 or more (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32 (%(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per batch (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="also print the results as one JSON line")
    args = parser.parse_args(argv)
    if min(args.steps, args.accumulate, args.seq, args.batch) < 1 or args.layers < 2 or args.width % 32:
        parser.error("counts are 1 or more, --layers is 2 or more, --width is a multiple of 32")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    text = read_text()
    results: dict[str, Result] = {}
    exact = torch.empty(0)
    print(
        f"{args.layers} blocks x {args.width}, {args.accumulate} x {args.batch} x {args.seq} bytes, {args.steps} steps"
    )
    print(f"{'':20} {'autograd keeps':>16} {'first loss':>12} {'last loss':>12} {'gradient error':>15}")
    for name, way in WAYS.items():
        result, gradient = train(way, text, args)
        exact = gradient if name == "no checkpointing" else exact
        result.error = float((gradient - exact).norm() / exact.norm())
        results[name] = result
        first, last = result.losses[0], result.losses[-1]
        print(f"{name:20} {result.kept / MIB:12.3f} MiB {first:12.5f} {last:12.5f} {result.error:15.3%}")
    status = print_checks(checks(results, args))
    if args.json:
        print(json.dumps({name: vars(result) for name, result in results.items()}))
    return status


if __name__ == "__main__":
    sys.exit(main())
