"""A Llama in a LightningModule, trained by Lightning on several processes, its checkpoints
compressed by a callback.

Trains twice from the same seeds: with the checkpointing that transformers has, and with
GradckptCallback. Prints both losses, how many layers were checkpointed, what their inputs take, and
what must hold; the exit status is 1 when it does not. Needs lightning and transformers.

    python examples/lightning_ddp.py --devices 2 --compress int6
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

try:
    import lightning.pytorch as pl
    from lightning.pytorch.utilities import rank_zero_only
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as error:
    sys.exit(f"{error}; pip install lightning transformers")

import gradckpt
from gradckpt.integrations.lightning import GradckptCallback


class Bytes(torch.utils.data.Dataset):
    """Windows of this file."""

    def __init__(self, args: argparse.Namespace) -> None:
        with open(__file__, "rb") as file:
            self.text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8).long()
        self.args = args

    def __len__(self) -> int:
        return self.args.steps * self.args.batch * self.args.devices

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * 97 % (len(self.text) - self.args.seq)
        return self.text[start : start + self.args.seq]


class Language(pl.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=args.hidden,
            intermediate_size=2 * args.hidden,
            num_hidden_layers=args.layers,
            num_attention_heads=args.hidden // 32,
            use_cache=False,
        )
        torch.manual_seed(args.seed)
        self.model = LlamaForCausalLM(config).train()
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(args: argparse.Namespace, callbacks: list[pl.Callback]) -> tuple[Language, dict[str, Any]]:
    module = Language(args)
    if not callbacks:
        module.model.gradient_checkpointing_enable({"use_reentrant": False})
    gradckpt.stats.reset()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, torch.utils.data.DataLoader(Bytes(args), batch_size=args.batch))
    return module, gradckpt.stats()


def checks(stock: list[float], ours: list[float], stats: dict[str, Any], args: argparse.Namespace) -> dict[str, bool]:
    """What must hold, in words."""
    wanted = args.layers * args.steps
    if args.compress is None:
        return {
            f"each layer was checkpointed in each step: {args.layers} x {args.steps}": stats["regions"] == wanted,
            "every loss equal to that of transformers' checkpointing": ours == stock,
        }
    return {
        f"the input of each layer was compressed in each step: {args.layers} x {args.steps}": (
            stats["compressed"] == wanted
        ),
        "first loss equal to that of transformers' checkpointing": ours[0] == stock[0],
        "last loss within 2 % of it": abs(ours[-1] - stock[-1]) < 0.02 * stock[-1],
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes, by DDP (%(default)s)")
    parser.add_argument("--compress", default="int8", help="a codec, or none (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="(%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per process and step (%(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="a multiple of 32 (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if min(args.devices, args.steps, args.batch, args.layers) < 1 or args.hidden < 32 or args.hidden % 32:
        parser.error("--devices, --steps, --batch and --layers are 1 or more, --hidden is a multiple of 32")
    if args.compress == "none":
        args.compress = None
    elif args.compress not in (*gradckpt.codecs.names(), "fp8"):
        parser.error(f"--compress is none or one of {', '.join(gradckpt.codecs.names())}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning|transformers|torch")
    stock, _ = train(args, [])
    ours, stats = train(args, [GradckptCallback(args.compress)])
    found = checks(stock.losses, ours.losses, stats, args)
    report(stock.losses, ours.losses, stats, found, args)
    return 0 if all(found.values()) else 1


@rank_zero_only
def report(
    stock: list[float], ours: list[float], stats: dict[str, Any], found: dict[str, bool], args: argparse.Namespace
) -> None:
    print(f"{args.devices} processes, {args.layers} layers, {args.steps} steps; loss of process 0:")
    print("transformers' checkpointing ", " ".join(f"{loss:.4f}" for loss in stock))
    print(f"gradckpt {args.compress!s:19}", " ".join(f"{loss:.4f}" for loss in ours))
    print(
        f"{stats['regions']} regions, {stats['compressed']} inputs compressed: "
        f"{stats['bytes_in']} bytes kept in {stats['bytes_out']}"
    )
    for words, good in found.items():
        print("ok    " if good else "FAILED", words)


if __name__ == "__main__":
    sys.exit(main())
