"""Blocks that call DeepSpeed's checkpointing,
trained under ZeRO with its own and with gradckpt's in its place.

The model is written as code for DeepSpeed is: ``checkpointing.checkpoint(block, hidden)``. Which
``checkpointing`` that is makes the only difference between the two runs, from the same seeds.
Prints both losses, how many blocks were checkpointed, what their inputs take, and what must hold;
the exit status is 1 when it does not. Needs deepspeed.

    python examples/deepspeed_zero.py --zero 3 --compress int6
    torchrun --standalone --nproc-per-node 2 examples/deepspeed_zero.py
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from typing import Any

import torch
from torch.nn import functional

if not torch.accelerator.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

try:
    import deepspeed
except ModuleNotFoundError as error:
    sys.exit(f"{error}; pip install deepspeed")

from comparison import add_options, batches, checks_of, parse_options, print_checks, print_runs

import gradckpt
from gradckpt.integrations import deepspeed as compressed_checkpointing


class Block(torch.nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads = args.hidden // 32
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(args.hidden) for _ in range(2))
        self.qkv = torch.nn.Linear(args.hidden, 3 * args.hidden)
        self.out = torch.nn.Linear(args.hidden, args.hidden)
        self.up = torch.nn.Linear(args.hidden, 4 * args.hidden)
        self.down = torch.nn.Linear(4 * args.hidden, args.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + functional.dropout(self.out(attended), 0.1, self.training)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class Language(torch.nn.Module):
    def __init__(self, args: argparse.Namespace, checkpointing: Any) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = torch.nn.Embedding(256, args.hidden)
        self.blocks = torch.nn.ModuleList(Block(args) for _ in range(args.layers))
        self.head = torch.nn.Linear(args.hidden, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = self.checkpointing.checkpoint(block, hidden)
        return functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(args: argparse.Namespace, checkpointing: Any) -> list[float]:
    torch.manual_seed(args.seed)
    model = Language(args, checkpointing).train()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": args.batch,
            "zero_optimization": {"stage": args.zero},
            "zero_allow_untested_optimizer": True,
        },
    )
    torch.manual_seed(args.seed + torch.distributed.get_rank())
    losses = []
    for ids in batches(__file__, args):
        loss = engine(ids.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=2, help="stage of ZeRO (%(default)s)")
    parser.add_argument("--checkpoint-in-cpu", action="store_true", help="keep what is compressed in host memory")
    add_options(parser, "process and step")
    return parse_options(parser, argv)


def join() -> None:
    """The process group: torchrun's or deepspeed's, or of this process alone."""
    if not torch.accelerator.is_available():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled for minutes, for inference
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for key, value in alone.items():
        os.environ.setdefault(key, value)
    deepspeed.init_distributed(None if torch.accelerator.is_available() else "gloo")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    deepspeed.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", module="torch")
    join()
    theirs = train(args, deepspeed.checkpointing)
    compressed_checkpointing.configure(None, compress=args.compress, checkpoint_in_cpu=args.checkpoint_in_cpu)
    gradckpt.stats.reset()
    ours = train(args, compressed_checkpointing)
    stats = gradckpt.stats()
    found = checks_of(theirs, ours, stats, args, "DeepSpeed's checkpointing")
    if torch.distributed.get_rank() == 0:
        world = torch.distributed.get_world_size()
        print(f"ZeRO {args.zero}, processes: {world}, blocks: {args.layers}; loss of process 0:")
        print_runs({"DeepSpeed's checkpointing": theirs, f"gradckpt {args.compress}": ours}, stats)
        print_checks(found)
    torch.distributed.barrier()  # Gloo's threads let go of their last tensors while Python is there to free them
    torch.distributed.destroy_process_group()
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
