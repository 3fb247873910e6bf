"""What gradckpt.gradient_error finds in fourteen families of transformers models.

    python benchmarks/bench_gradient_error.py [--families llama,t5] [--seeds 3] [--json FILE]
                                              [--page docs/numerics.md] [--picture FILE]
    python benchmarks/bench_gradient_error.py --timm vit_tiny_patch16_224,resnet18

The models of tests/helpers/model_families.py: tiny, random weights, float32, padded batches,
dropout. One step each, in training mode, with SDPA where transformers has it. Figures are medians
over the seeds, which decide the dropout. --page puts the table between its marks on that page;
--picture draws the errors against the bits per value (with matplotlib). --timm: models of timm
instead, with 8 random images of 224 x 224, cross entropy over 10 classes, one region per block; the
range over the seeds, which decide weights and images.

Checked: every codec changes the gradients, and by less than choosing other samples does.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import guards
import machine
import pages
import torch
import transformers
from model_families import ATTENTIONS, FAMILIES, build, missing

import gradckpt

MARKS = "<!-- by benchmarks/bench_gradient_error.py -->", "<!-- end -->"
CODECS = ("int8", "fp8", "int6", "int4")
FLOORS = ("bf16", "samples")
COLUMNS = ("model", *(f"`{codec}`" for codec in CODECS), "computing in bf16", "other samples", "worst under `int8`")
Row = dict[str, Any]


def total_of(one: Any) -> float:
    if one.total is None:
        raise SystemExit(f"{one.name}: {one.note}")
    return float(one.total)


def measure(family: str, seeds: int) -> Row | None:
    attention = next((each for each in reversed(ATTENTIONS) if missing(family, each) is None), None)
    if attention is None:
        return None
    found = []
    for seed in range(seeds):
        model = build(family, attention)
        torch.manual_seed(seed)
        found.append(gradckpt.gradient_error(model, FAMILIES[family].batch(), CODECS))
    row: Row = {"family": family, "attention": attention}
    row |= {codec: statistics.median(total_of(result[codec]) for result in found) for codec in CODECS}
    for i, name in enumerate(FLOORS):
        row[name] = statistics.median(total_of(result.floors[i]) for result in found)
    for codec in CODECS:
        guards.gradients(f"{family}, {codec}", row[codec], lossy=True, most=row["samples"])
    row["worst"], row["worst_error"] = found[0]["int8"].worst[0]
    return row


class Classifier(torch.nn.Module):
    """A model of timm, and its loss."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import timm

        self.model = timm.create_model(name, num_classes=10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.model(images), labels)


def measure_images(name: str, seeds: int) -> list[str]:
    """A line of the table: the lowest to the highest error of each codec, and of bf16."""
    found = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        net = Classifier(name).train()
        batch = torch.randn(8, 3, 224, 224), torch.randint(0, 10, (8,))
        block = type(net.model.blocks[0] if hasattr(net.model, "blocks") else net.model.layer1[0])
        result = gradckpt.gradient_error(net, batch, CODECS, modules=block)
        found.append([*(total_of(result[codec]) for codec in CODECS), total_of(result.floors[0])])
        for codec, error in zip(CODECS, found[-1], strict=False):
            guards.gradients(f"{name}, {codec}", error, lossy=True, most=total_of(result.floors[1]))
    return [name, *(f"{100 * min(each):.1f} to {100 * max(each):.1f} %" for each in zip(*found, strict=True))]


# ---- what is shown


def percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < 0.1 else f"{100 * share:.0f} %"


def cells(row: Row) -> list[str]:
    figures = [percent(row[name]) for name in (*CODECS, *FLOORS)]
    name = row["worst"].removesuffix(".weight").split(".")[-1]
    return [row["family"], *figures, f"{percent(row['worst_error'])}, a `{name}`"]


def table(rows: list[Row]) -> str:
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page_with(text: str, page: str) -> str:
    return str(pages.fill(page, (re.escape(MARKS[0]), MARKS[1]), lambda _: text))


#: Distinct for colour-blind readers, and by form.
LOOKS = {"int8": ("#0072b2", "o"), "fp8": ("#d55e00", "s"), "int6": ("#009e73", "D"), "int4": ("#cc79a7", "^")}


def draw(rows: list[Row], path: Path) -> None:
    """Error against bits per value: a mark for each family, a large one for the median."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_yscale("log")
    for name, what, colour, line in (
        ("samples", "choosing other samples", "#5f6368", "--"),
        ("bf16", "computing in bf16", "#000000", "-"),
    ):
        totals = [row[name] for row in rows]
        axes.axhspan(min(totals), max(totals), color=colour, alpha=0.08, linewidth=0)
        median = statistics.median(totals)
        axes.axhline(median, color=colour, linestyle=line, linewidth=1.4)
        axes.annotate(f"{what}: {percent(median)}", (3.35, median), ha="left", va="bottom", color=colour, size=12)
    for codec, (colour, mark) in LOOKS.items():
        # fp8 and int8 have the same number of bits; they stand side by side.
        bits = gradckpt.codecs.info(codec)["bits_per_value"] + {"int8": 0.15, "fp8": -0.15}.get(codec, 0.0)
        totals = [row[codec] for row in rows]
        axes.plot([bits] * len(rows), totals, mark, color=colour, markersize=5, alpha=0.45, markeredgewidth=0)
        median = statistics.median(totals)
        axes.plot([bits], [median], mark, color=colour, markersize=12, markeredgecolor="white")
        left = codec != "int8"
        axes.annotate(
            f"{codec}\n{percent(median)}",
            (bits, median),
            xytext=(-12, 0) if left else (12, 16),
            textcoords="offset points",
            ha="right" if left else "left",
            va="center",
            color=colour,
            size=13,
            weight="bold",
        )
    axes.set(xlim=(3.3, 9.4), xlabel="bits per value", ylabel="error of the gradients")
    axes.set_xticks([4.25, 6.125, 8.125], ["4.25", "6.125", "8.125"])
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    axes.tick_params(labelsize=12)
    axes.xaxis.label.set_size(13)
    axes.yaxis.label.set_size(13)
    axes.set_title(f"{len(rows)} model families, one step each; large marks: medians", loc="left", size=13)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated, of: %(default)s")
    parser.add_argument("--timm", metavar="A,B", help="these models of timm instead")
    parser.add_argument("--seeds", type=int, default=3, help="steps of each model (%(default)s)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the table between the marks of this page")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the errors to this file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    if options.quick:
        options.families, options.seeds = "llama", 1
    machine.choose(parser, options, "families", FAMILIES)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    facts = {**machine.facts(), "transformers": transformers.__version__, "seeds": options.seeds}
    if options.timm:
        lines = [measure_images(name, options.seeds) for name in options.timm.split(",")]
        machine.print_head("errors of gradients, models of timm", facts)
        machine.print_markdown("lowest to highest", ["model", *CODECS, "computing in bf16"], lines)
        return
    rows = []
    with machine.progress(len(options.families)) as step:
        for family in options.families:
            step(family)
            row = measure(family, options.seeds)
            rows += [row] if row else []
    machine.print_head("errors of gradients, families of transformers models", facts)
    print(f"\n{table(rows)}")
    if options.page:
        options.page.write_text(page_with(table(rows), options.page.read_text()))
    if options.picture:
        draw(rows, options.picture)
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "gradient_error", **facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
