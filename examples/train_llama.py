"""Trains a small byte-level Llama on Python's own standard library, with checkpoints kept in several ways.

The same seeds, batches and steps under: no checkpointing, torch's checkpointing, and gradckpt with
compress=None, fp8, int8, int6, int4 and int8 in replay mode. Prints a table, draws demo.png, and checks what
must be equal to the last bit; the exit status is 1 when it is not.

    python examples/train_llama.py --steps 60 --runs none,torch,int8
"""

import argparse
import json
import math
import os
import statistics
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import rich.box
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

import gradckpt

MIB = 2**20
#: name -> (shown as, compress or what turns checkpointing on, replay)
RUNS = {
    "none": ("no checkpointing", None, False),
    "torch": ("torch checkpointing", None, False),
    "gradckpt": ("gradckpt None", None, False),
    "fp8": ("gradckpt fp8", "fp8", False),
    "int8": ("gradckpt int8", "int8", False),
    "int6": ("gradckpt int6", "int6", False),
    "int4": ("gradckpt int4", "int4", False),
    "int8-replay": ("gradckpt int8 replay", "int8", True),
}
#: Bits per value by arithmetic: the code, and a 16-bit scale (int4: 32 bits) for each group of 128 values.
BITS = {"fp8": 8 + 16 / 128, "int8": 8 + 16 / 128, "int6": 6 + 16 / 128, "int4": 4 + 32 / 128}
#: A parameter with less than this share of the gradient's norm does not count for the worst cosine.
NOISE = 0.01
#: Modules inside a layer whose outputs show whether a recompute repeats the forward.
PROBES = ("input_layernorm", "q_proj", "o_proj", "post_attention_layernorm", "gate_proj", "up_proj")


@dataclass
class Result:
    name: str
    losses: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    kept: int = 0  # bytes of region inputs alive between forward and backward, the largest of all steps
    held_out: float = math.nan
    error: float = math.nan  # of the gradient, relative L2
    cosine: float = math.nan  # of the worst parameter
    recompute_equal: bool | None = None

    @property
    def title(self) -> str:
        return RUNS[self.name][0]

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses[-20:])


# ---- data and model


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Training and held-out bytes: the standard library's sources, every 20th file held out."""
    root = Path(sysconfig.get_path("stdlib"))
    leave = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not leave.intersection(p.relative_to(root).parts))
    if len(files) < 40:
        sys.exit(f"train_llama: only {len(files)} sources under {root}; install Python's standard library as .py files")
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, file in enumerate(files):
        parts[number % 20 == 0].append(file.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def take(text: torch.Tensor, args: argparse.Namespace, seed: int) -> torch.Tensor:
    """A batch of random windows; the seed alone decides which."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(text) - args.seq, (args.batch,), generator=generator)
    return torch.stack([text[s : s + args.seq] for s in starts.tolist()]).long()


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 32),
        max_position_embeddings=args.seq,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(getattr(torch, args.dtype)).train()


def optimizer_of(model: torch.nn.Module, steps: int, lr: float):
    """AdamW, and its schedule: a short warm-up, then half a cosine down to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    warmup = max(1, min(10, steps // 5))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * i / max(1, steps))))
    )
    return optimizer, schedule


def switch_on(model: LlamaForCausalLM, name: str) -> None:
    _, compress, replay = RUNS[name]
    if name == "torch":
        model.activation_checkpointing_enable({"use_reentrant": False})
    elif name != "none":
        gradckpt.enable(model, {"codec": compress, "replay": replay} if replay else compress)


# ---- measuring


class RegionInputs:
    """Watches the layers' inputs through weak references to their storages."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.hooks = [layer.register_forward_pre_hook(self.note) for layer in model.model.layers]

    def note(self, layer: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        storage = args[0].untyped_storage()
        self.seen[id(layer)] = StorageWeakRef(storage), storage.nbytes()

    def bytes(self) -> int:
        """Originals still alive, and gradckpt's payloads."""
        alive = {ref.cdata: size for ref, size in self.seen.values() if not ref.expired()}
        return sum(alive.values()) + gradckpt.stats()["live_bytes"]


def saved_bytes(model: LlamaForCausalLM, ids: torch.Tensor) -> int:
    """Everything autograd saves in a forward, parameters left out, each storage once."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}
    keep = []  # an address is an identity only as long as its tensor lives

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
            keep.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, labels=ids).loss.detach()
    return sum(sizes.values())


def gradients(model: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad.double().flatten() for name, p in model.named_parameters()}


def gradient_error(grads: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Relative L2 over all parameters; the worst parameter's cosine."""
    norm = torch.cat(list(exact.values())).norm()
    gap = torch.cat([grads[name] - exact[name] for name in exact]).norm()
    pairs = [(grads[name], g) for name, g in exact.items() if g.norm() >= NOISE * norm]
    return (gap / norm).item(), min(1.0, *(torch.cosine_similarity(g, e, dim=0).item() for g, e in pairs))


def recompute_equals_forward(model: LlamaForCausalLM, ids: torch.Tensor) -> bool:
    """Whether each probed module gave the same bits in the forward and in its recompute."""
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str):
        return lambda module, args, output: outputs.setdefault(name, []).append(output.detach().clone())

    probed = [(n, m) for n, m in model.model.layers.named_modules() if n.rsplit(".", 1)[-1] in PROBES]
    hooks = [module.register_forward_hook(keep(name)) for name, module in probed]
    gradients(model, ids)
    for hook in hooks:
        hook.remove()
    return len(outputs) == len(probed) and all(len(o) == 2 and torch.equal(*o) for o in outputs.values())


# ---- one run


def train(name: str, text: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace, tick) -> Result:
    result = Result(name)
    model = build(args)
    switch_on(model, name)
    inputs = RegionInputs(model)
    optimizer, schedule = optimizer_of(model, args.steps, args.lr)
    torch.manual_seed(args.seed)
    for step in range(args.steps):
        ids = take(text, args, args.seed * 1_000_003 + step)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        result.kept = max(result.kept, inputs.bytes())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        result.step_s.append(time.perf_counter() - start)
        result.losses.append(loss.item())
        tick(result)

    model.eval()
    with torch.no_grad():
        batches = [take(held_out, args, -1 - i) for i in range(8)]
        result.held_out = statistics.fmean(model(input_ids=b, labels=b).loss.item() for b in batches)
    model.train()
    if name not in ("none", "torch"):
        result.recompute_equal = recompute_equals_forward(model, batches[0])
    mode = gradients(model, batches[0])
    model.activation_checkpointing_disable()
    if name not in ("none", "torch"):
        gradckpt.disable(model)
    result.error, result.cosine = gradient_error(mode, gradients(model, batches[0]))
    return result


def arithmetic_bytes(name: str, args: argparse.Namespace) -> float:
    values = args.layers * args.batch * args.seq * args.hidden
    compress = RUNS[name][1]
    return values * (BITS[compress] / 8 if compress else getattr(torch, args.dtype).itemsize)


# ---- what is shown


def show_table(results: dict[str, Result], args: argparse.Namespace, console: Console) -> None:
    full = arithmetic_bytes("none", args)
    size = f"{args.layers} layers x {args.hidden}, batch {args.batch} x {args.seq} bytes, {args.dtype}"
    table = Table(
        title=f"{size}, {args.steps} steps",
        caption="Kept: bytes of the layers' inputs alive after the forward, measured in every step (originals through "
        "weak references to their storages, payloads from gradckpt.stats()). Step: median, recompute included. "
        f"Gradient error and worst parameter's cosine (parameters with {NOISE:.0%} of the gradient's norm and more): "
        "against exact autograd at the run's final weights.",
        caption_justify="left",
        box=rich.box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("\ncheckpoints", no_wrap=True)
    headings = ("kept\nMiB", "by arith-\nmetic", "\nratio", "step\nms", "train\nloss", "held-out\nloss")
    for heading in (*headings, "grad\nerror", "worst\ncosine"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, r in results.items():
        table.add_row(
            r.title,
            f"{r.kept / MIB:.3f}",
            f"{arithmetic_bytes(name, args) / MIB:.3f}",
            f"{r.kept / full:.3f}",
            f"{statistics.median(r.step_s) * 1000:.0f}",
            f"{r.loss:.4f}",
            f"{r.held_out:.4f}",
            "0" if r.error == 0 else f"{r.error:.2%}",
            f"{r.cosine:.4f}",
        )
    console.print(table)


def checks(results: dict[str, Result], args: argparse.Namespace) -> list[tuple[bool, str]]:
    """What must hold, in words."""
    found = []
    if {"torch", "gradckpt"} <= results.keys():
        same = results["torch"].losses == results["gradckpt"].losses
        words = f"gradckpt None: loss equal to torch's checkpointing to the last bit in all {args.steps} steps"
        found.append((same, words))
    if "none" in results:
        for name in ("gradckpt", "fp8", "int8", "int6", "int4"):
            if name in results:
                same = results[name].losses[0] == results["none"].losses[0]
                found.append((same, f"{results[name].title}: first loss bit-equal to no checkpointing"))
    if "int8-replay" in results:
        same = bool(results["int8-replay"].recompute_equal)
        found.append((same, "int8 replay: recompute bit-equal to the forward"))
    if "int8" in results:
        # The control: were this equal, the line above would prove nothing.
        found.append((results["int8"].recompute_equal is False, "int8 exact: recompute runs on restored values"))
    for name, r in results.items():
        if RUNS[name][1]:
            want = arithmetic_bytes(name, args)
            found.append((abs(r.kept - want) <= 0.01 * want, f"{r.title}: kept bytes within 1 % of arithmetic"))
    return found


def draw(results: dict[str, Result], args: argparse.Namespace, total: int | None) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shades = ("#9aa0a6", "#202124", "#1a73e8", "#e37400", "#188038", "#d93025", "#795548", "#a142f4")
    colors = dict(zip(RUNS, shades, strict=True))
    figure = plt.figure(figsize=(11, 4.6), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1), height_ratios=(2, 1))
    top = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[:, 1])
    axes = [top, right]
    steps = range(1, args.steps + 1)
    # The curves lie on each other: the first are drawn widest, so that all of them can be seen.
    for name, r in results.items():
        style = {"none": ("-", 7.0), "torch": ("-", 4.0)}.get(name, ("--" if "replay" in name else "-", 1.5))
        top.plot(steps, r.losses, color=colors[name], ls=style[0], lw=style[1], label=r.title)
    top.set(ylabel="nats per byte", title="Training loss")
    top.legend(frameon=False, fontsize=8.5, ncols=2)
    top.margins(x=0.01)
    if "none" in results:
        below = figure.add_subplot(grid[1, 0], sharex=top)
        axes.append(below)
        top.tick_params(labelbottom=False)
        below.axhline(0, color=colors["none"], lw=3)
        for name, r in results.items():
            if name != "none":
                gap = [a - b for a, b in zip(r.losses, results["none"].losses, strict=True)]
                below.plot(steps, gap, color=colors[name], ls="--" if "replay" in name else "-", lw=1.3)
        limit = max(1e-4, *(abs(v) * 1.1 for v in below.get_ylim()))
        below.set(ylim=(-limit, limit), ylabel="minus that of\nno checkpointing", xlabel="step")
    else:
        top.set_xlabel("step")

    names = list(results)[::-1]
    sizes = [results[name].kept / MIB for name in names]
    bars = right.barh([results[n].title for n in names], sizes, color=[colors[n] for n in names], height=0.62)
    full = arithmetic_bytes("none", args) / MIB
    right.bar_label(bars, [f"{s:.2f} MiB  ({s / full:.0%})" for s in sizes], padding=4, fontsize=9)
    right.set(xlabel="MiB of layer inputs between forward and backward", title="Kept checkpoints")
    right.set_xlim(0, max(sizes) * 1.42)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.title.set_fontweight("bold")
    note = f"byte-level Llama, {args.layers} x {args.hidden}, {args.dtype}, on the sources of Python's standard library"
    if total is not None:
        note += f"; without checkpointing autograd keeps {total / MIB:.0f} MiB in all"
    figure.supxlabel(note, fontsize=8.5, color="#5f6368")
    figure.savefig(args.out, dpi=150)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="training steps of each run (%(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="decoder layers (%(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 32 (%(default)s)")
    parser.add_argument("--seq", type=int, default=256, help="bytes per sequence (%(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="sequences per step (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the picture (%(default)s)")
    parser.add_argument("--runs", default=",".join(RUNS), help="comma-separated, of: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="also print the results as one JSON line")
    args = parser.parse_args(argv)
    args.runs = [name for name in args.runs.split(",") if name]
    unknown = [name for name in args.runs if name not in RUNS]
    if unknown or not args.runs:
        parser.error(f"--runs: {', '.join(unknown) or 'none given'}; choose from {', '.join(RUNS)}")
    if min(args.steps, args.layers, args.seq, args.batch) < 1 or args.hidden < 32 or args.hidden % 32:
        parser.error("--steps, --layers, --seq and --batch are 1 or more, --hidden is a multiple of 32")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    text, held_out = read_text()
    console.print(
        f"Python {sys.version.split()[0]} sources: {len(text) / 1e6:.1f} MB to train on, {len(held_out) / 1e6:.1f} MB "
        f"held out; torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
    ids = take(text, args, args.seed)
    total = saved_bytes(build(args), ids) if "none" in args.runs else None

    results: dict[str, Result] = {}
    columns = (
        TextColumn("{task.description:22}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    plain = not console.is_terminal
    with Progress(*columns, console=console, disable=plain) as bar:
        for name in args.runs:
            task = bar.add_task(RUNS[name][0], total=args.steps, loss="")

            def tick(result: Result, task=task) -> None:
                bar.update(task, advance=1, loss=f"loss {result.losses[-1]:.3f}")
                done = len(result.losses)
                if plain and (done % 20 == 0 or done == args.steps):
                    line = f"{result.title:22} {done:4}/{args.steps} loss {result.losses[-1]:.3f}"
                    console.print(line, highlight=False)

            results[name] = train(name, text, held_out, args, tick)

    show_table(results, args, console)
    if total is not None:
        console.print(f"Without checkpointing autograd keeps {total / MIB:.1f} MiB in all; parameters not counted.")
    found = checks(results, args)
    for good, words in found:
        console.print(f"{'[green]ok[/green]    ' if good else '[red]FAILED[/red]'} {words}", highlight=False)
    draw(results, args, total)
    console.print(f"wrote {args.out}")
    if args.json:
        rows = {n: {**vars(r), "step_s": statistics.median(r.step_s), "loss": r.loss} for n, r in results.items()}
        print(json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "saved_bytes": total, "runs": rows}))
    return 0 if all(good for good, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
