"""Train a deep byte-level Llama on Python's own sources: what does checkpointing save,
cost and change?

Some steps are taken from the same weights in several ways, one after another: without
checkpointing, with torch's, with gradckpt's uncompressed, and with each codec. The program prints
and draws the memory of a step, the time of its forward and backward, and the error of its gradients
beside that of bf16 autocast. The exit status is 1 when something that must be equal to the last bit
is not, a codec changed nothing, or a step was faster than its matrix products can be.

    python examples/train_llama.py --steps 40 --codecs int8,int6,int4
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler, which track_memory uses, writes to stderr
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch

try:
    import rich.box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as error:
    sys.exit(f"{error}; pip install rich transformers matplotlib")

from comparison import gradient_error

import gradckpt

MIB = 2**20
NONE, TORCH, EXACT, FLOOR = "no checkpointing", "torch's checkpointing", "gradckpt None", "bf16 autocast"
#: Modules inside a layer whose outputs show whether a recompute repeats the forward.
PROBES = ("input_layernorm", "q_proj", "o_proj", "post_attention_layernorm", "gate_proj", "up_proj")


class Step(NamedTuple):
    loss: float
    seconds: float  # of forward and backward
    gradients: dict[str, torch.Tensor]


@dataclass
class Result:
    """Of one way: a figure for each step that was compared, and the memory of one step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # of the gradient, relative L2
    memory: Any = None

    @property
    def error(self) -> float:
        return statistics.median(self.errors)

    @property
    def peak(self) -> float:
        return self.memory.peak / MIB

    @property
    def time(self) -> float:
        return statistics.median(self.seconds)


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


def build(args: argparse.Namespace, initializer_range: float = 0.02) -> LlamaForCausalLM:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 8 // 3 // 8 * 8,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 32),
        max_position_embeddings=args.seq,
        initializer_range=initializer_range,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def optimizer_of(model: torch.nn.Module, steps: int, lr: float):
    """AdamW, and its schedule: a short warm-up, then half a cosine down to a tenth."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    warmup = max(1, min(10, steps // 5))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / warmup) * (0.1 + 0.45 * (1 + math.cos(math.pi * i / max(1, steps))))
    )
    return optimizer, schedule


@contextmanager
def checkpointing(model: LlamaForCausalLM, way: Any) -> Iterator[None]:
    """``way``: one of the four names above, or what gradckpt.enable takes."""
    if way == TORCH:
        model.activation_checkpointing_enable({"use_reentrant": False})
    elif way not in (NONE, FLOOR):
        gradckpt.enable(model, None if way == EXACT else way)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == FLOOR):
        yield
    if way == TORCH:
        model.activation_checkpointing_disable()
    elif way not in (NONE, FLOOR):
        gradckpt.disable(model)


# ---- measuring


def step(model: LlamaForCausalLM, ids: torch.Tensor) -> Step:
    model.zero_grad()
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    seconds = time.perf_counter() - start
    return Step(loss.item(), seconds, {name: p.grad.double().flatten() for name, p in model.named_parameters()})


def compare(model: LlamaForCausalLM, ids: torch.Tensor, results: dict[str, Result]) -> None:
    """Take the gradients of one batch in all ways, in turn,
    so that a busy machine slows each of them."""
    exact: dict[str, torch.Tensor] = {}
    for way, result in results.items():
        with checkpointing(model, way):
            found = step(model, ids)
        exact = exact or found.gradients  # the first way is no checkpointing
        result.losses.append(found.loss)
        result.seconds.append(found.seconds)
        result.errors.append(gradient_error(found.gradients, exact)[0])


def memory_of_step(model: LlamaForCausalLM, ids: torch.Tensor) -> gradckpt.track_memory:
    """Of two steps, the faster one. Gradients are added to those that are there,
    so that activations alone show."""
    tracked = []
    for _ in range(2):
        with gradckpt.track_memory() as memory:
            model(input_ids=ids, labels=ids).loss.backward()
        tracked.append(memory)
    return min(tracked, key=lambda memory: memory.timeline[-1].seconds)


def recompute_equals_forward(model: LlamaForCausalLM, ids: torch.Tensor) -> bool:
    """Whether each probed module gave the same bits in the forward and in its recompute."""
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        return lambda module, args, output: outputs.setdefault(name, []).append(output.detach().clone())

    probed = [(n, m) for n, m in model.model.layers.named_modules() if n.rsplit(".", 1)[-1] in PROBES]
    hooks = [module.register_forward_hook(keep(name)) for name, module in probed]
    step(model, ids)
    for hook in hooks:
        hook.remove()
    return len(outputs) == len(probed) and all(len(o) == 2 and torch.equal(*o) for o in outputs.values())


def least_seconds(model: LlamaForCausalLM, ids: torch.Tensor) -> float:
    """Of a step's matrix products, at the rate of a large one: no way can be faster."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    a = torch.randn(512, 512)
    times = []
    for _ in range(25):  # short ones, of which some are not interrupted
        start = time.perf_counter()
        torch.mm(a, a)
        times.append(time.perf_counter() - start)
    return 6 * weights * ids.numel() * min(times) / (2 * 512**3)  # once forward, twice backward


def checks(model: LlamaForCausalLM, ids: torch.Tensor, results: dict[str, Result]) -> list[tuple[bool, str]]:
    """What must hold, in words."""
    # Twice as fast is believed: caches, other programs.
    floor = least_seconds(model, ids)
    slow = all(2 * min(r.seconds) >= floor for way, r in results.items() if way != FLOOR)
    found = [(slow, f"no step is faster than its matrix products: {floor * 1000:.1f} ms")]
    for way, r in results.items():
        same, equal = r.losses == results[NONE].losses, "bit-equal to no checkpointing"
        if way in (TORCH, EXACT):
            found.append((same and not any(r.errors), f"{way}: loss and gradients {equal}"))
        elif way not in (NONE, FLOOR):
            bits = gradckpt.codecs.info(way)["bits_per_value"]
            want = len(model.model.layers) * ids.numel() * model.config.hidden_size * bits / 8
            size = max(point.boundaries for point in r.memory.timeline)
            found.append((same, f"{way}: loss {equal}"))
            found.append((0 < min(r.errors) <= max(r.errors) < 1, f"{way}: gradients differ"))
            found.append((abs(size / want - 1) <= 0.01, f"{way}: checkpoints within 1 % of {bits:g} bits per value"))
    for fake_quantize in (True, False):
        with checkpointing(model, {"codec": "int8", "fake_quantize": fake_quantize}):
            equal = recompute_equals_forward(model, ids)
        # The second is the control: were it equal, the first would prove nothing.
        words = (
            "int8 fake_quantize: recompute equals the forward"
            if fake_quantize
            else "int8: recompute runs on restored values"
        )
        found.append((equal == fake_quantize, words))
    return found


# ---- what is shown


def title(way: str) -> str:
    return way if way in (NONE, TORCH, EXACT, FLOOR) else f"gradckpt {way}"


def show_table(results: dict[str, Result], size: str, console: Console) -> None:
    table = Table(title=size, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    table.caption = (
        "Peak: activations of a forward and backward. Kept: what the forward leaves for the backward. Medians of "
        f"{len(results[NONE].errors)} steps, each from the same weights in all ways. Error: relative L2 over all "
        "parameters, against the float32 gradient."
    )
    table.add_column("", no_wrap=True)
    for heading in ("peak\nMiB", "kept\nMiB", "time\nms", "of\ntorch's", "gradient\nerror", "lowest to\nhighest"):
        table.add_column(heading, justify="right")
    for way, r in results.items():
        row = [title(way), "", "", "", ""]
        if way != FLOOR:
            kept = max(point.boundaries + point.saves for point in r.memory.timeline) / MIB
            row[1:] = [f"{r.peak:.1f}", f"{kept:.1f}", f"{r.time * 1000:.0f}"]
            row.append(f"{r.time / results[TORCH].time:.2f}")
        row += [f"{r.error:.2%}", f"{min(r.errors):.2%} to {max(r.errors):.2%}"] if any(r.errors) else ["0"]
        table.add_row(*row)
    console.print(table)


def sentences(results: dict[str, Result], codecs: list[str]) -> list[str]:
    """The result in three, from what was measured."""
    none, stock, floor = results[NONE], results[TORCH], results[FLOOR].error

    def longer(result: Result, other: Result) -> str:
        more = result.time / other.time - 1
        return f"{abs(more):.1%} {'more' if more > 0 else 'less'}"

    sizes = [f"{results[c].peak:.1f} with {c} ({stock.peak / results[c].peak:.1f} times less)" for c in codecs]
    times = [f"{c} {longer(results[c], stock)} than torch's" for c in codecs]
    errors = [f"{c}'s {results[c].error:.2%} is {'below' if results[c].error < floor else 'above'} it" for c in codecs]
    return [
        f"Memory: {none.peak:.0f} MiB at the peak, {stock.peak:.1f} with torch's checkpointing, {', '.join(sizes)}.",
        f"Time: torch's checkpointing takes {longer(stock, none)} time than none; {', '.join(times)}.",
        f"Gradients: bf16 autocast alone makes an error of {floor:.2%}; {', '.join(errors)}.",
    ]


def draw(results: dict[str, Result], codecs: list[str], size: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.titlelocation": "left", "axes.titleweight": "bold"})
    figure = plt.figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 1))
    gradckpt.track_memory.compare({title(way): results[way].memory for way in (NONE, TORCH, *codecs)}, left)
    left.set(title="Activations during one training step", xlabel=f"seconds  ({size})")
    colours = {line.get_label(): line.get_color() for line in left.lines}
    floor = results[FLOOR].error
    right.axhline(100 * floor, color=colours[NONE], ls="--", lw=1.2)
    right.annotate(f"bf16 autocast {floor:.2%}", (-0.55, 100 * floor), (0, 4), textcoords="offset points")
    for place, codec in enumerate(codecs):
        errors = [100 * error for error in results[codec].errors]
        right.plot([place] * len(errors), errors, "o", color=colours[title(codec)], alpha=0.35, mew=0)
        right.plot([place - 0.25, place + 0.25], [100 * results[codec].error] * 2, color=colours[title(codec)], lw=2.5)
    right.set(title="Gradient error", xlim=(-0.6, len(codecs) - 0.4))
    right.set_yscale("log", base=2)
    right.yaxis.set_major_formatter("{x:g}%")
    right.set_xticks(range(len(codecs)), [f"{codec}\n{results[codec].error:.2%}" for codec in codecs])
    right.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default="int8,int4", metavar="A,B", help="lossy codecs (%(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", default=60, help="training steps (%(default)s)")
    parser.add_argument(
        "--every", type=int, metavar="N", default=6, help="compare the ways every N steps (%(default)s)"
    )
    parser.add_argument("--layers", type=int, metavar="N", default=64, help="decoder layers, 128 wide (%(default)s)")
    parser.add_argument("--seq", type=int, metavar="N", default=512, help="bytes per sequence (%(default)s)")
    parser.add_argument("--batch", type=int, metavar="N", default=1, help="sequences per step (%(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("demo.png"), help="the picture (%(default)s)")
    args = parser.parse_args(argv)
    args.codecs, args.hidden = args.codecs.split(","), 128
    lossy = [name for name in gradckpt.codecs.names() if gradckpt.codecs.info(name)["max_error"]]
    if not set(args.codecs) <= set(lossy):
        parser.error(f"--codecs takes one or more of {','.join(lossy)}")
    if min(args.steps, args.every, args.layers, args.seq, args.batch) < 1:
        parser.error("--steps, --every, --layers, --seq and --batch are 1 or more")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    console = Console()
    text, held_out = read_text()
    model = build(args, initializer_range=0.05)  # 0.02 is for wide models: the layers would hardly count at first
    for layer in model.model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):  # as in GPT-2, so that so deep a model learns
            linear.weight.data /= math.sqrt(2 * args.layers)
    results = {way: Result() for way in (NONE, TORCH, EXACT, *args.codecs, FLOOR)}
    optimizer, schedule = optimizer_of(model, args.steps, 1e-3)
    for number in track(range(args.steps), "training", console=console, disable=not console.is_terminal):
        ids = take(text, args, args.seed * 1_000_003 + number)
        if number % args.every == 0:
            compare(model, ids, results)
        step(model, ids)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    ids = take(held_out, args, args.seed)
    for way, result in results.items():
        if way != FLOOR:
            with checkpointing(model, way):
                result.memory = memory_of_step(model, ids)
    size = f"{args.layers} layers x {args.hidden}, batch {args.batch} x {args.seq}, float32"
    show_table(results, size, console)
    for line in sentences(results, args.codecs):
        console.print(line, highlight=False)
    found = checks(model, ids, results)
    for good, words in found:
        console.print(f"{'[green]ok[/green]    ' if good else '[red]FAILED[/red]'} {words}", highlight=False)
    draw(results, args.codecs, size, args.out)
    console.print(f"wrote {args.out}", highlight=False)
    return 0 if all(good for good, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
