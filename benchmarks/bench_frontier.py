"""Memory, time and gradient error of one training step: gradckpt beside every other way of
recomputing activations.

    python benchmarks/bench_frontier.py [--quick] [--device cuda] [--json FILE] [--plot FILE.svg]
                                        [--page docs/saved.md]

A Llama of the Hugging Face library, float32, after some steps of training. Peak: of a step, by
gradckpt.track_memory; gradients are there before, so activations alone count. Time: forward and
backward, all ways once in each round, in random order; the median, and the median of the ratio to
no checkpointing in the same round. On the CPU with one thread it is the time of the processor,
which on an idle machine is that of the clock. Error: of the gradients, relative L2 over all
parameters, against those of no checkpointing; the median of three batches. The error of bf16
autocast against float32 is the floor. With --autocast all steps run under bf16 autocast.

A point of gradckpt dominates a peer's that recomputes if its peak and its time are at most the
peer's and its error is at most the floor. Differences up to 5 % count as equal. Peers that are not
compiled are compared with points that are not compiled.

Checked: exact ways have the gradients of no checkpointing (compiled: but for the compiler's own
rounding), ways that recompute run operators again and the others run none, no peak is below the
bytes of the layers' inputs, no step faster than its matrix products.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import frontier_picture
import frontier_ways
import guards
import machine
import pages
import timing
import torch
import train_llama
from comparison import gradient_error

import gradckpt

MARKS = "<!-- by benchmarks/bench_frontier.py -->", "<!-- end -->"
MIB = 2**20
EQUAL = 1.05  # a ratio that counts as 1
EXACT = 1e-6  # the compiler's own rounding changes gradients by 1e-7
LOSSLESS = gradckpt.codecs.info("lossless")["sizes"]["float32"][0]
NORM = torch.ops.aten.rsqrt.default  # is saved by no way that recomputes
WARM = 2
COLUMNS = ("", "peak, MiB", "of none", "step, ms", "of none", "gradient error", "dominated by")
Row = dict[str, Any]
Step = Callable[..., None]


# ---- measuring


def trained(options: argparse.Namespace) -> tuple[Any, list[torch.Tensor]]:
    """The model, and three held-out batches."""
    text, held_out = train_llama.read_text()
    shape = argparse.Namespace(
        layers=options.layers, hidden=options.width, seq=options.tokens, batch=options.batch, seed=0
    )
    model = train_llama.build(shape).to(options.device)
    optimizer, schedule = train_llama.optimizer_of(model, max(options.train, 1), 1e-3)
    for i in range(options.train):
        ids = train_llama.take(text, shape, i).to(options.device)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        schedule.step()
    return model, [train_llama.take(held_out, shape, -1 - i).to(options.device) for i in range(3)]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def gradients(model: Any, step: Step, ids: torch.Tensor, **autocast: bool) -> dict[str, torch.Tensor]:
    for p in model.parameters():
        p.grad.zero_()
    step(ids, **autocast)
    return {name: p.grad.double().flatten() for name, p in model.named_parameters()}


def peak(step: Step, device: str) -> int:
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    with gradckpt.track_memory() as memory:
        step()
        synchronize(device)
    return int(memory.devices["cuda:0" if device == "cuda" else "cpu"].peak) - before


def seconds_by_round(steps: dict[str, Step], options: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    clock = timing.clock_of(options.threads if options.device == "cpu" else 0)

    def seconds(step: Step) -> float:
        return timing.seconds(lambda: (step(), synchronize(options.device)), clock)

    found = []
    gc.collect()
    gc.disable()
    try:
        for number in range(options.rounds + WARM):
            say(f"time: round {number + 1} of {options.rounds + WARM}")
            names = random.Random(number).sample(list(steps), len(steps))
            found.append({name: seconds(steps[name]) for name in names})
            gc.collect()
    finally:
        gc.enable()
    return found[WARM:]


def measure(options: argparse.Namespace, ways: list[Any], say: Callable[[str], None]) -> tuple[list[Row], float, Any]:
    """Rows, the error of bf16 autocast, and the ceiling."""
    say(f"{options.train} steps of training")
    model, batches = trained(options)
    steps: dict[str, Step] = {}
    rows, exact, floors, ceiling = [], [], [], None
    for way in ways:
        say(way.name)
        step = steps[way.name] = frontier_ways.step_of(way, model, batches[0], options.autocast)
        if way.group == frontier_ways.NONE:
            both = [[gradients(model, step, ids, autocast=on) for ids in batches] for on in (False, True)]
            exact = both[options.autocast]
            floors = [gradient_error(a, b)[0] for a, b in zip(both[1], both[0], strict=True)]
            ceiling = guards.Products(step, options.device, torch.bfloat16 if options.autocast else torch.float32)
            say(str(ceiling))
        errors = [gradient_error(gradients(model, step, a), b)[0] for a, b in zip(batches, exact, strict=True)]
        row = {key: getattr(way, key) for key in ("name", "group", "recomputes", "ours", "compiled")}
        rows.append({**row, "error": statistics.median(errors), "peak": peak(step, options.device)})
        check(rows[-1], way, step, options, ceiling)
    times = seconds_by_round(steps, options, say)
    for row in rows:
        ceiling.check(f"{row['name']}, step", min(t[row["name"]] for t in times))
        row["ms"] = statistics.median(t[row["name"]] for t in times) * 1e3
        row["of_none"] = statistics.median(t[row["name"]] / t[rows[0]["name"]] for t in times)
    floor = statistics.median(floors)
    for row in rows:
        if row["recomputes"] and not row["ours"]:
            row["beside"] = sorted(beside(row, rows, times, floor), key=lambda b: max(b["memory"], b["time"]))
            row["dominated_by"] = [b["name"] for b in row["beside"] if max(b["memory"], b["time"]) <= EQUAL]
    return rows, floor, ceiling


def check(row: Row, way: Any, step: Step, options: argparse.Namespace, ceiling: guards.Products) -> None:
    """The gradients and the peak of a way; what it runs, unless it is compiled."""
    rounded = way.compiled and row["error"] < EXACT
    guards.gradients(way.name, row["error"] * (not rounded), lossy=bool(way.formats))
    bits = min((gradckpt.codecs.info(codec)["bits_per_value"] for codec in way.formats), default=LOSSLESS)
    inputs = options.layers * options.batch * options.tokens * options.width * bits / 8
    guards.at_least(f"{way.name}, peak", row["peak"], inputs, f"the layers' inputs at {bits:g} bits for each value")
    if not way.compiled:
        again = guards.counted(step).calls[NORM] - ceiling.calls[NORM]
        guards.check((again > 0) == way.recomputes, f"{way.name}: {again} norms of {ceiling.calls[NORM]} run again")


# ---- the claim


def beside(peer: Row, rows: list[Row], times: list[Row], floor: float) -> list[Row]:
    """Points of ours whose error is at most the floor, with their memory and time, relative to the
    peer's.
    """
    return [
        {
            "name": row["name"],
            "exact": row["error"] < EXACT,
            "memory": row["peak"] / peer["peak"],
            "time": statistics.median(t[row["name"]] / t[peer["name"]] for t in times),
        }
        for row in rows
        if row["ours"] and row["error"] <= floor and row["compiled"] <= peer["compiled"]
    ]


def beside_words(b: Row) -> str:
    return f"`{b['name']}`: {b['memory']:.2f} of its memory, {b['time']:.2f} of its time"


def claim(rows: list[Row], floor: float) -> list[str]:
    """What is claimed, and each peer's point without a point of ours that dominates it."""
    points = [row for row in rows if "dominated_by" in row]
    won = [row for row in points if row["dominated_by"]]
    exactly = [row for row in won if any(b["exact"] for b in row["beside"] if b["name"] in row["dominated_by"])]
    lines = [
        f"{len(won)} of {len(points)} points of peers that recompute are dominated: gradckpt needs at most their "
        f"memory and their time (5 % counts as equal), with a gradient error of at most bf16 autocast's {floor:.2%}. "
        f"{len(exactly)} of them are dominated by a point with exact gradients."
    ]
    for row in points:
        if not row["dominated_by"]:
            nearest = f" Nearest is {beside_words(row['beside'][0])}." if row["beside"] else ""
            lines.append(f"{row['name']} is not dominated.{nearest}")
    return lines


# ---- what is shown


def cells(row: Row, base: Row) -> list[str]:
    error = "0" if row["error"] == 0 else f"{row['error']:.3%}" if row["error"] > 5e-6 else f"{row['error']:.0e}"
    found = [
        row["name"],
        f"{row['peak'] / MIB:.1f}",
        f"{row['peak'] / base['peak']:.2f}",
        f"{row['ms']:.0f}",
        f"{row['of_none']:.2f}",
        error,
    ]
    if not row.get("dominated_by"):
        return [*found, "**none**" if "dominated_by" in row else ""]
    number, best = len(row["dominated_by"]), beside_words(row["beside"][0])
    return [*found, best if number == 1 else f"{number}, e.g. {best}"]


def table_of(rows: list[Row], ours: bool) -> list[list[str]]:
    return [cells(row, rows[0])[: None if not ours else -1] for row in rows if row["ours"] == ours]


def show(rows: list[Row], floor: float) -> str:
    lines = []
    for title, ours in (("Peers", False), ("gradckpt", True)):
        columns = [title, *COLUMNS[1 : None if not ours else -1]]
        table = [columns, ["---"] * len(columns), *table_of(rows, ours)]
        lines += ["| " + " | ".join(line) + " |" for line in table] + [""]
    return "\n".join([*lines, *claim(rows, floor)])


# ---- the program


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value, words in (
        ("layers", 24, "decoder layers"),
        ("width", 256, "of the model"),
        ("tokens", 512, "in a sequence"),
        ("batch", 1, "sequences in a step"),
        ("train", 20, "steps of training before"),
        ("rounds", 25, "in which each way takes a step"),
        ("threads", 1, "of torch on the CPU"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{words} (%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(%(default)s)")
    parser.add_argument(
        "--groups", default=",".join(frontier_ways.GROUPS), help="comma-separated, of: %(default)s", metavar="A,B"
    )
    parser.add_argument("--autocast", action="store_true", help="all steps under bf16 autocast")
    machine.add_quick(parser)
    parser.add_argument("--read", type=Path, metavar="FILE", help="show the figures of an earlier --json, run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory against time there (SVG)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables between the marks of this page")
    options = parser.parse_args(argv)
    machine.choose(parser, options, "groups", frontier_ways.GROUPS)
    if min(options.layers, options.width, options.tokens, options.batch, options.rounds, options.threads) < 1:
        parser.error("all numbers are 1 or more, --train is 0 or more")
    if options.quick:
        small = {"layers": 4, "width": 64, "tokens": 64, "train": 0, "rounds": 3}
        vars(options).update(small, groups=[g for g in options.groups if g not in frontier_ways.COMPILED])
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    machine.require(options.device, "bench_frontier")
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    if options.read:
        found = json.loads(options.read.read_text())
        print(f"{show(found['rows'], found['floor'])}")
        write(found, options)
        return
    ways = [w for w in frontier_ways.all_ways() if w.group in (frontier_ways.NONE, *options.groups)]
    facts = machine.facts(options.device)
    size = f"{options.layers} layers x {options.width}, batch {options.batch} x {options.tokens}, "
    size += "bf16 autocast" if options.autocast else "float32"
    with machine.progress(len(ways) + options.rounds + WARM + 1) as say:
        rows, floor, ceiling = measure(options, ways, say)
    machine.print_head(f"memory, time and gradient error: Llama, {size}", facts)
    if frontier_ways.remat is None and "remat" in options.groups:
        print("  torch_remat: not installed (pip install torch_remat==0.2.2)")
    print(f"\n{show(rows, floor)}\n{ceiling}")
    write(
        {"benchmark": "frontier", **facts, "size": size, "floor": floor, "rounds": options.rounds, "rows": rows},
        options,
    )


def write(found: Row, options: argparse.Namespace) -> None:
    if options.page:
        text = show(found["rows"], found["floor"])
        options.page.write_text(pages.fill(options.page.read_text(), MARKS, lambda _: text))
    if options.plot:
        options.plot.write_text(frontier_picture.draw(found))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
