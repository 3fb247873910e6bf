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

from comparison import add_options, checks_of, parse_options, print_checks, print_runs

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
        module.model.activation_checkpointing_enable({"use_reentrant": False})
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


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes, by DDP (%(default)s)")
    add_options(parser, "process and step")
    args = parse_options(parser, argv)
    if args.devices < 1:
        parser.error("--devices is 1 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning|transformers|torch")
    stock, _ = train(args, [])
    ours, stats = train(args, [GradckptCallback(args.compress)])
    found = checks_of(stock.losses, ours.losses, stats, args, "transformers' checkpointing")
    report(stock.losses, ours.losses, stats, found, args)
    return 0 if all(found.values()) else 1


@rank_zero_only
def report(
    stock: list[float], ours: list[float], stats: dict[str, Any], found: dict[str, bool], args: argparse.Namespace
) -> None:
    print(f"{args.devices} processes, {args.layers} layers, {args.steps} steps; loss of process 0:")
    print_runs({"transformers' checkpointing": stock, f"gradckpt {args.compress}": ours}, stats)
    print_checks(found)


if __name__ == "__main__":
    sys.exit(main())
