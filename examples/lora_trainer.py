"""LoRA through the Hugging Face Trainer, checkpoints compressed by one flag,
beside torch's own checkpointing.

A byte-level Llama is first trained whole on the sources of Python's standard library (no
checkpointing), then its frozen copy gets LoRA adapters and is fine-tuned on the texts of Python's
help(), twice from the same seeds: with activation_checkpointing=True as it is, and with
activation_checkpointing_kwargs={"compress": ...}. Prints both loss curves, what was kept, the error
of the adapters' gradients at the final weights, and what must hold; the exit status is 1 when it
does not. Needs peft.

    python examples/lora_trainer.py --steps 30 --compress int6
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch

try:
    import rich.box
    from peft import LoraConfig, PeftModel, get_peft_model
    from rich.console import Console
    from rich.table import Table
    from transformers import PrinterCallback, Trainer, TrainingArguments
except ModuleNotFoundError as error:
    sys.exit(f"{error}; pip install peft transformers accelerate rich")

from comparison import gradient_error
from train_llama import build, read_text, take

import gradckpt

Weights = dict[str, torch.Tensor]
#: Largest error of the adapters' gradients (relative L2) that each codec may make here.
BOUNDS = {"int8": 0.02, "fp8": 0.05, "int6": 0.05, "int4": 0.2, "raw": 0.0}


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    held_out: float = 0.0
    base_untouched: bool = False
    adapters_moved: bool = False
    bytes_in: int = 0
    bytes_out: int = 0
    compressed: int = 0
    error: float = 0.0  # of the adapters' gradients, relative L2
    cosine: float = 1.0  # of the worst of them


# ---- data and model


def help_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes of what Python's help() prints on its topics."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        sys.exit("lora_trainer: this Python comes without pydoc_data.topics, the texts of help()")
    parts = ["\n".join(text for i, text in enumerate(topics.values()) if (i % 10 == 0) == held) for held in (0, 1)]
    train, held_out = (torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8) for part in parts)
    return train, held_out


class Windows(torch.utils.data.Dataset):
    """Random windows of a text; the seed and the index alone decide which."""

    def __init__(self, text: torch.Tensor, args: argparse.Namespace) -> None:
        self.text, self.args = text, args

    def __len__(self) -> int:
        return self.args.steps * self.args.batch

    def __getitem__(self, index: int) -> Weights:
        one = argparse.Namespace(seq=self.args.seq, batch=1)
        ids = take(self.text, one, self.args.seed * 1_000_003 + index)[0]
        return {"input_ids": ids, "labels": ids}


def pretrain(args: argparse.Namespace) -> Weights:
    """The base: a few steps on Python sources, so that there is something to adapt."""
    text, _ = read_text()
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(args.base_steps):
        ids = take(text, args, -1 - step)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def adapted(base: Weights, args: argparse.Namespace) -> PeftModel:
    model = build(args)
    model.load_state_dict(base)
    torch.manual_seed(args.seed)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))


# ---- one run


def gradients(model: PeftModel, ids: torch.Tensor) -> Weights:
    """Of the adapters."""
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.double().flatten() for name, p in model.named_parameters() if p.grad is not None}


def train(base: Weights, args: argparse.Namespace, compress: str | None) -> Result:
    text, held_out = help_texts()
    model = adapted(base, args)
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if compress:
        gradckpt.enable(model)
        kwargs = {"compress": compress}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradckpt.stats.reset()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            activation_checkpointing=True,
            activation_checkpointing_kwargs=kwargs,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=args.seed,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Windows(text, args))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    stats = gradckpt.stats()
    result = Result([row["loss"] for row in trainer.state.log_history if "loss" in row])
    result.bytes_in, result.bytes_out, result.compressed = stats["bytes_in"], stats["bytes_out"], stats["compressed"]
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    result.base_untouched, result.adapters_moved = not moved - trained, bool(moved) and moved <= trained

    ids = take(held_out, args, args.seed)
    model.train()
    mode = gradients(model, ids)
    if compress:
        gradckpt.disable(model)
        result.error, result.cosine = gradient_error(mode, gradients(model, ids))
    model.eval()
    with torch.no_grad():
        batches = [take(held_out, args, 100 + i) for i in range(4)]
        result.held_out = statistics.fmean(model(input_ids=b, labels=b).loss.item() for b in batches)
    return result


# ---- what is shown


def show(torch_run: Result, ours: Result, args: argparse.Namespace, console: Console) -> None:
    table = Table(title="training loss, nats per byte", box=rich.box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("step", "torch checkpointing", f"gradckpt {args.compress}", "difference"):
        table.add_column(heading, justify="right")
    every = max(1, args.steps // 12)
    for step, (theirs, mine) in enumerate(zip(torch_run.losses, ours.losses, strict=True), 1):
        if step == 1 or step % every == 0 or step == args.steps:
            table.add_row(str(step), f"{theirs:.4f}", f"{mine:.4f}", f"{mine - theirs:+.4f}")
    table.add_section()
    gap = ours.held_out - torch_run.held_out
    table.add_row("held out", f"{torch_run.held_out:.4f}", f"{ours.held_out:.4f}", f"{gap:+.4f}")
    console.print(table)
    console.print(
        f"{ours.compressed} checkpoints, {ours.bytes_in / 2**20:.1f} MiB, kept in {ours.bytes_out / 2**20:.1f} MiB; "
        f"error of the adapters' gradients {ours.error:.2%}, worst adapter's cosine {ours.cosine:.5f}",
        highlight=False,
    )


def checks(torch_run: Result, ours: Result, args: argparse.Namespace) -> list[tuple[bool, str]]:
    """What must hold, in words."""
    wanted = (args.layers - 1) * args.steps  # the first layer's input is a leaf, which autograd keeps anyway
    return [
        (
            ours.compressed == wanted,
            f"the input of each layer but the first was compressed in each step: {args.layers - 1} x {args.steps}",
        ),
        (torch_run.compressed == 0, "and none without the flag"),
        (ours.losses[0] == torch_run.losses[0], "first loss equal to torch's checkpointing"),
        (ours.base_untouched and torch_run.base_untouched, "the frozen base is untouched, to the last bit"),
        (ours.adapters_moved and torch_run.adapters_moved, "the adapters moved"),
        (ours.error <= BOUNDS[args.compress], f"adapters' gradients within {BOUNDS[args.compress]:.0%} of exact ones"),
    ]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of fine-tuning, each run (%(default)s)")
    parser.add_argument("--base-steps", type=int, default=60, help="of training the base (%(default)s)")
    parser.add_argument("--compress", choices=sorted(BOUNDS), default="int8", help="(%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers, 2 or more (%(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 32 (%(default)s)")
    parser.add_argument("--seq", type=int, default=128, help="bytes per sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per step (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="of the adapters (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="also print the results as one JSON line")
    args = parser.parse_args(argv)
    if (
        min(args.steps, args.base_steps, args.layers - 1, args.seq, args.batch, args.hidden // 32) < 1
        or args.hidden % 32
    ):
        parser.error("--steps, --base-steps, --seq and --batch are 1 or more, --layers 2, --hidden is a multiple of 32")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)  # which PEFT reads
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    console.print(f"training the base on Python's standard library, {args.base_steps} steps", highlight=False)
    base = pretrain(args)
    runs = {}
    for compress in (None, args.compress):
        console.print(f"LoRA on the texts of help(), {'gradckpt ' + compress if compress else 'torch checkpointing'}")
        runs[compress] = train(base, args, compress)
    torch_run, ours = runs[None], runs[args.compress]
    show(torch_run, ours, args, console)
    found = checks(torch_run, ours, args)
    for good, words in found:
        console.print(f"{'[green]ok[/green]    ' if good else '[red]FAILED[/red]'} {words}", highlight=False)
    if args.json:
        print(json.dumps({"arguments": vars(args), "torch": vars(torch_run), "gradckpt": vars(ours)}))
    return 0 if all(good for good, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
