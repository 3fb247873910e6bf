"""Selective recompute: memory, time and error of what can be kept,
and what keeping costs on the host.

    python benchmarks/bench_selective.py [--quick] [--markdown] [--plot FILE] [--json FILE]

Frontier: Llamas, every layer a region, under no checkpointing, torch's and ours. Kept: bytes alive
after the forward that were not before it, counted by torch's profiler, which sees every allocation
and every release: layer inputs, kept outputs, payloads, random states, and what lies outside the
layers. Time: forward and backward, all ways in turn, round by round: the median, and the median of
the ratio to torch's full checkpoint in the same round. Error of the gradient after a few steps of
training, against no checkpointing: relative L2 over all parameters, and the cosine of the worst
parameter (of those with 1 % of the gradient's norm and more).

Saves in int8: bytes kept against arithmetic; operators run, counted by a dispatch mode.

Host cost: benchmarks/selective_cost.py, in a table beside its aim.

Checked: uncompressed ways have the gradients of no checkpointing to the last bit; what is saved in
int8 has the bytes that arithmetic says, to 1 %; no named operator runs again and every other one
does; no step is faster than its matrix products.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KINETO_LOG_LEVEL", "99")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import guards
import machine
import selective_cost
import timing
import torch
import train_llama
from bench_fidelity import Steps
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

import gradckpt
from gradckpt import policies

MIB = 2**20
INT8_BYTES = gradckpt.codecs.info("int8")["bits_per_value"] / 8
Run = Callable[..., Any]


class Way(NamedTuple):
    """One kind of checkpoint; function None: none at all."""

    family: str
    keeps: str
    function: Run | None

    @property
    def title(self) -> str:
        return self.family if self.keeps == "inputs" else f"{self.family}, {self.keeps}"


def by_torch(*ops: Any) -> Run:
    contexts = {"context_fn": functools.partial(torch_contexts, list(ops))} if ops else {}
    return functools.partial(torch_checkpoint, use_reentrant=False, **contexts)


def by_us(policy: Any = None, inputs: str | None = None, saves: str | None = None) -> Run:
    """Region inputs under one codec, what the policy names under another; None: as they are."""
    contexts = {}
    if policy is not None:
        kept = policy.compressed(saves) if saves else policy
        contexts["context_fn"] = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, kept)
    return functools.partial(gradckpt.checkpoint, compress=inputs, **contexts)


KEEPS = {
    "matmuls": policies.save_matmuls,
    "attention": policies.save_attention,
    "every other matmul": policies.every_other_matmul,
}
#: family -> (codec of the inputs, codec of what the policy names)
CODECS = {
    "gradckpt": (None, None),
    "gradckpt, saves int8": (None, "int8"),
    "gradckpt, inputs and saves int8": ("int8", "int8"),
    "gradckpt, inputs and saves int4": ("int4", "int4"),
}
ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def all_ways() -> list[Way]:
    ways = [
        Way("no checkpointing", "inputs", None),
        Way("torch", "inputs", by_torch()),
        Way("torch", "matmuls", by_torch(torch.ops.aten.mm.default)),
        Way("torch", "attention", by_torch(ATTENTION)),
    ]
    for family, (inputs, saves) in CODECS.items():
        if family != "gradckpt, saves int8":
            ways.append(Way(family, "inputs", by_us(None, inputs)))
        kept = {name: policy for name, policy in KEEPS.items() if saves is None or name != "attention"}
        ways += [Way(family, name, by_us(policy, inputs, saves)) for name, policy in kept.items()]
    return ways


# ---- a model ----


def switch(model: Any, way: Way) -> None:
    model.activation_checkpointing_disable()
    if way.function is not None:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=way.function)


def step(model: Any, ids: torch.Tensor) -> None:
    model(input_ids=ids, labels=ids).loss.backward()


def alive_bytes(model: Any, ids: torch.Tensor) -> int:
    """Allocated in a forward and not yet released at its end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = model(input_ids=ids, labels=ids).loss
    found = sum(e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    loss.detach_()
    return int(found)


def trained(shape: argparse.Namespace, text: torch.Tensor, steps: int) -> Any:
    model = train_llama.build(shape)
    optimizer, schedule = train_llama.optimizer_of(model, max(steps, 1), shape.lr)
    for i in range(steps):
        optimizer.zero_grad()
        step(model, train_llama.take(text, shape, i))
        optimizer.step()
        schedule.step()
    return model


def frontier(
    model: Any, ids: torch.Tensor, rounds: int, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], guards.Products]:
    ways = all_ways()
    rows = []
    switch(model, ways[0])
    exact = train_llama.step(model, ids).gradients
    for way in ways:
        say(f"memory and gradients: {way.title}")
        switch(model, way)
        row = {"family": way.family, "keeps": way.keeps, "title": way.title}
        relative, cosine = train_llama.gradient_error(train_llama.step(model, ids).gradients, exact)
        guards.gradients(way.title, relative, lossy=way.family.endswith(("int8", "int4")))
        model.zero_grad()
        rows.append({**row, "bytes": alive_bytes(model, ids), "error": relative, "cosine": cosine})
    switch(model, ways[0])
    ceiling = guards.Products(lambda: step(model, ids))
    times: list[list[float]] = []
    for number in range(rounds + 1):
        say(f"time: round {number} of {rounds}")
        times.append([])
        for way in ways:
            switch(model, way)
            times[-1].append(timing.seconds(lambda: step(model, ids)))
    for i, row in enumerate(rows):
        ceiling.check(f"{row['title']}, step", min(t[i] for t in times))
        row["ms"] = statistics.median(t[i] for t in times[1:]) * 1e3
        row["of_torch"] = statistics.median(t[i] / t[1] for t in times[1:])
        row["dominates"] = dominated(rows, times[1:], i) if row["family"].startswith("gradckpt") else []
    return rows, ceiling


def dominated(rows: list[dict[str, Any]], times: list[list[float]], i: int) -> list[str]:
    """What torch's selective checkpoints keep that need more memory than row i,
    and are no faster."""
    return [
        peer["keeps"]
        for j, peer in enumerate(rows)
        if peer["family"] == "torch" and peer["keeps"] != "inputs"
        if rows[i]["bytes"] < peer["bytes"] and statistics.median(t[i] / t[j] for t in times) <= 1
    ]


# ---- saves in int8 ----


def count(model: Any, ids: torch.Tensor, way: Way) -> Counter[Any]:
    switch(model, way)
    found = guards.counted(lambda: step(model, ids)).calls
    model.zero_grad()
    return found


def matmul_bytes(shape: argparse.Namespace, config: Any) -> float:
    """Of the matrix products of all layers, in int8."""
    values = 5 * config.hidden_size + 2 * config.intermediate_size  # q, k, v, o, down; gate, up
    return shape.layers * shape.batch * shape.seq * values * INT8_BYTES


def saves(model: Any, ids: torch.Tensor, shape: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    nothing, full = Way("", "", None), Way("", "", by_us())
    plain, whole = count(model, ids, nothing), count(model, ids, full)
    kept_of = {row["title"]: row for row in rows}
    found = []
    for name, arithmetic in (("matmuls", matmul_bytes),):
        row = kept_of[f"gradckpt, saves int8, {name}"]
        some = count(model, ids, Way("", "", by_us(KEEPS[name], None, "int8")))
        again = {op: whole[op] - plain[op] for op in plain if whole[op] > plain[op]}
        named = {op for op in again if op in KEEPS[name].rules}
        ignored = torch.ops.aten.detach.default  # kept outputs are handed out as aliases
        others = [op for op in again if op not in named and op is not ignored]
        found.append(
            {
                "keeps": name,
                "bytes": row["bytes"] - kept_of["gradckpt"]["bytes"],
                "arithmetic": arithmetic(shape, model.config),
                "cosine": row["cosine"],
                "named_full": sum(again[op] for op in named),
                "named_again": sum(some[op] - plain[op] for op in named),
                "others_full": sum(again[op] for op in others),
                "others_again": sum(some[op] - plain[op] for op in others),
            }
        )
        check_saves(found[-1])
    return found


def check_saves(row: dict[str, Any]) -> None:
    """Rows of 64 values have a byte each, which arithmetic leaves out: 1.6 %."""
    what, apart = f"{row['keeps']} saved in int8", abs(row["bytes"] / row["arithmetic"] - 1)
    guards.check(apart <= 0.02, f"{what}: {row['bytes']:,} bytes; arithmetic says {row['arithmetic']:,.0f}")
    guards.check(row["named_full"] > 0, f"{what}: a full checkpoint runs none of its operators again")
    guards.check(row["named_again"] == 0, f"{what}: {row['named_again']} of its operators run again")
    guards.check(
        row["others_again"] == row["others_full"] > 0,
        f"{what}: {row['others_again']} of {row['others_full']} other operators run again",
    )


# ---- all ----


def shapes(quick: bool) -> dict[str, argparse.Namespace]:
    common = {"seed": 0, "lr": 1e-3}
    if quick:
        return {"tiny": argparse.Namespace(layers=2, hidden=64, batch=2, seq=256, **common)}
    return {
        "small": argparse.Namespace(layers=6, hidden=128, batch=4, seq=256, **common),
        "larger": argparse.Namespace(layers=4, hidden=512, batch=1, seq=512, **common),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    models = shapes(options.quick)
    steps = Steps(len(models) + 1)
    text, held_out = train_llama.read_text()
    found: dict[str, Any] = {"models": {}}
    with steps.bar:
        for name, shape in models.items():
            steps.say(f"{name}: {options.train} steps of training")
            model = trained(shape, text, options.train)
            ids = train_llama.take(held_out, shape, -1)
            rows, ceiling = frontier(model, ids, options.rounds, lambda words, name=name: steps.say(f"{name}: {words}"))
            found["models"][name] = {
                "about": f"{shape.layers} layers x {shape.hidden}, batch {shape.batch} x {shape.seq}, float32",
                "frontier": rows,
                "ceiling": str(ceiling),
                "saves": saves(model, ids, shape, rows),
            }
            steps.done()
        steps.say("host cost per operator")
        found["operators"] = selective_cost.operators(options.host_rounds)
        steps.say("host cost of a Llama layer")
        found["operators"].append(selective_cost.layer(options.host_rounds))
        steps.say("host cost of replay_discrete")
        found["discrete_outputs"] = selective_cost.replay_discrete(options.host_rounds)
        steps.say("host cost of one-node regions")
        found["regions"] = selective_cost.regions(options.host_rounds)
        steps.done()
    return found


# ---- what is shown ----


def frontier_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            row["family"],
            "" if row["keeps"] == "inputs" else row["keeps"],
            f"{row['bytes'] / MIB:.2f}",
            f"{row['ms']:.1f}",
            f"{row['of_torch']:.3f}",
            "0" if row["error"] == 0 else f"{row['error']:.2%}",
            f"{row['cosine']:.5f}",
            ", ".join(row["dominates"]),
        ]
        for row in rows
    ]


def saves_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            row["keeps"],
            f"{row['bytes']:,}",
            f"{row['arithmetic']:,.0f}",
            f"{row['bytes'] / row['arithmetic'] - 1:+.2%}",
            f"{row['cosine']:.5f}",
            f"{row['named_again']} of {row['named_full']}",
            f"{row['others_again']} of {row['others_full']}",
        ]
        for row in rows
    ]


def operator_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            row["what"],
            f"{row['torch']:.1f}",
            f"{row['gradckpt']:.2f}",
            f"{row['gradckpt'] / row['torch']:.3f}",
            f"{row['bound_us']:.1f} us" if "bound_us" in row else f"{row['bound']:.3f} of torch's",
        ]
        for row in rows
    ]


def region_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    table = []
    for row in found:
        for name, us in row.items():
            if not isinstance(us, dict):
                continue
            peer = row["torch, reentrant"]
            cells = [row["region"] if us is peer else "", name]
            for reading in ("in place", "plain"):
                cells += [f"{us[reading]:.1f}", f"{us[reading] / peer[reading]:.3f}"]
            table.append([*cells, f"{row['bound']:.3f}" if name == "SelectiveRecompute" else ""])
    return table


def show(found: dict[str, Any], markdown: bool) -> None:
    table = machine.print_markdown if markdown else machine.print_table
    for name, model in found["models"].items():
        columns = ["", "keeps", "MiB", "step ms", "of torch", "gradient error", "worst cosine", "dominates torch's"]
        table(f"{name} Llama: {model['about']}", columns, frontier_rows(model["frontier"]))
        columns = ["kept in int8", "bytes", "by arithmetic", "", "worst cosine", "named run again", "others run again"]
        table(f"{name} Llama: saves in int8", columns, saves_rows(model["saves"]))
        print(model["ceiling"])
    columns = ["added by forward and recompute, us", "torch", "gradckpt", "of torch's", "aim"]
    table("host cost of selective contexts", columns, operator_rows(found["operators"]))
    columns = ["a step of a tiny Llama, inputs in int8", "least ms", "median ms", "of the first"]
    cells = [
        [r["what"], f"{r['least']:.2f}", f"{r['median']:.2f}", f"{r['ratio']:.3f}"] for r in found["discrete_outputs"]
    ]
    table("host cost of replay_discrete", columns, cells)
    columns = ["region", "", "in place us", "of torch's", "plain us", "of torch's", "aim"]
    title = "overhead per one-node region with nothing kept; recompute and the forward without grad not counted"
    table(title, columns, region_rows(found["regions"]))


COLORS = {
    "no checkpointing": "#9aa0a6",
    "torch": "#202124",
    "gradckpt": "#1a73e8",
    "gradckpt, saves int8": "#e37400",
    "gradckpt, inputs and saves int8": "#188038",
    "gradckpt, inputs and saves int4": "#d93025",
}
MARKERS = {"inputs": "o", "attention": "^", "every other matmul": "D", "matmuls": "s"}


def draw(found: dict[str, Any], path: Path) -> None:
    """Memory against time: the colour is the kind of checkpoint,
    the shape what is kept besides the inputs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    models = found["models"]
    figure, grid = plt.subplots(
        1, len(models), figsize=(5.2 * len(models) + 2.8, 4.8), layout="constrained", squeeze=False
    )
    for axes, (name, model) in zip(grid[0], models.items(), strict=True):
        for row in model["frontier"]:
            style = {"color": COLORS[row["family"]], "marker": MARKERS[row["keeps"]], "edgecolor": "white"}
            axes.scatter(row["bytes"] / MIB, row["of_torch"], s=90, linewidth=0.6, zorder=3, **style)
        axes.set(
            xscale="log",
            xlabel="MiB alive between forward and backward",
            ylabel="step time, of torch's full checkpoint",
        )
        axes.set_title(f"{name} Llama\n{model['about']}", fontsize=10)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: f"{value:g}" if str(value)[0] in "25" else "")
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    families = [Line2D([], [], color=c, marker="o", ls="", label=name) for name, c in COLORS.items()]
    kept = [
        Line2D([], [], color="#5f6368", marker=m, ls="", label=f"keeps {name}{' only' if name == 'inputs' else ''}")
        for name, m in MARKERS.items()
    ]
    figure.legend(handles=families + kept, loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=140)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of a step of each way (default: %(default)s)")
    parser.add_argument("--host-rounds", type=int, default=80, help="of the host cost (default: %(default)s)")
    parser.add_argument(
        "--train", type=int, default=40, help="steps before anything is measured (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    machine.add_quick(parser)
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw memory against time there (matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(argv)
    if min(options.rounds, options.host_rounds, options.threads) < 1 or options.train < 0:
        parser.error("--rounds, --host-rounds and --threads are 1 or more, --train is 0 or more")
    if options.quick:
        options.rounds, options.host_rounds, options.train = 2, 3, 0
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    torch.set_num_threads(options.threads)
    facts = machine.facts()
    found = measure(options)
    machine.print_head("selective recompute", facts)
    show(found, options.markdown)
    if options.plot:
        draw(found, options.plot)
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "selective", **facts, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
