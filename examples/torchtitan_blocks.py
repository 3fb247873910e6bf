"""A model of blocks under torchtitan's FullAC or SelectiveAC,
and under the same with compressed inputs.

torchtitan's policies wrap what ``model.layers`` holds, in its own models and in any other: here a
small byte-level transformer. In a configuration of torchtitan the line is
``activation_checkpoint=CompressedFullAC.Config()``. Prints both losses, how many blocks were
wrapped, what their inputs take, and what must hold; the exit status is 1 when it does not. Needs
torchtitan.

    python examples/torchtitan_blocks.py --ac selective --compress int6
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import torch
from torch.nn import functional

try:
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
except ModuleNotFoundError as error:
    sys.exit(f"{error}; pip install torchtitan")

from comparison import add_options, batches, checks_of, parse_options, print_checks, print_runs

import gradckpt
from gradckpt.integrations.torch_distributed import CheckpointWrapper
from gradckpt.integrations.torchtitan import CompressedFullAC, CompressedSelectiveAC

POLICIES = {"full": (FullAC, CompressedFullAC), "selective": (SelectiveAC, CompressedSelectiveAC)}


class Block(torch.nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads = args.hidden // 32
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(args.hidden) for _ in range(2))
        self.wqkv = torch.nn.Linear(args.hidden, 3 * args.hidden, bias=False)
        self.wo = torch.nn.Linear(args.hidden, args.hidden, bias=False)
        self.w1 = torch.nn.Linear(args.hidden, 4 * args.hidden, bias=False)
        self.w2 = torch.nn.Linear(4 * args.hidden, args.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.wqkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.wo(attended)
        return x + self.w2(functional.silu(self.w1(self.norms[1](x))))


class Language(torch.nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(256, args.hidden)
        self.layers = torch.nn.ModuleDict({str(i): Block(args) for i in range(args.layers)})
        self.output = torch.nn.Linear(args.hidden, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.tok_embeddings(ids)
        for layer in self.layers.values():
            hidden = layer(hidden)
        return functional.cross_entropy(self.output(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(args: argparse.Namespace, policy: Any) -> tuple[list[float], int]:
    """Losses, and how many blocks are wrapped in gradckpt's CheckpointWrapper."""
    torch.manual_seed(args.seed)
    model = Language(args)
    policy.build().apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for ids in batches(__file__, args):
        optimizer.zero_grad()
        loss = model(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, sum(isinstance(module, CheckpointWrapper) for module in model.modules())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ac", choices=POLICIES, default="full", help="torchtitan's policy (%(default)s)")
    add_options(parser)
    return parse_options(parser, argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    warnings.filterwarnings("ignore", module="torch")
    stock, compressed = POLICIES[args.ac]
    theirs, _ = train(args, stock.Config())
    gradckpt.stats.reset()
    ours, wrapped = train(args, compressed.Config(compress=args.compress or "none"))
    stats = gradckpt.stats()
    print(f"{args.layers} blocks, {args.steps} steps; loss:")
    print_runs({stock.__name__: theirs, f"{compressed.__name__} {args.compress}": ours}, stats)
    found = {f"all {args.layers} layers are wrapped": wrapped == args.layers}
    return print_checks(found | checks_of(theirs, ours, stats, args, stock.__name__))


if __name__ == "__main__":
    sys.exit(main())
