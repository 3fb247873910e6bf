"""What gradckpt.enable does to the gradients of thirteen families of transformers models.

    python benchmarks/bench_families.py [--codecs int8,int6] [--families llama,t5] [--fake-quantize]
                                        [--markdown] [--json FILE]

The models of tests/helpers/model_families.py: tiny, random weights, float32, padded batches,
dropout. One step each, from the same seed: under torch's own checkpointing, under gradckpt with
compress=None and with each codec. None: loss, every gradient and the random numbers of
compress=None, beside torch's, to the last bit. Of each codec: inputs of layers that it took, of
those that it might take, and their size; whether the loss is torch's to the last bit (=); the
gradients' error, relative L2 over all parameters; the worst parameter's cosine, and which that is.
The exit status is 1 when None differs or a parameter loses its gradient.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import machine
import torch
import transformers
from model_families import ATTENTIONS, FAMILIES, build, errors, gradients, missing, nonzero, stock

import gradckpt

Row = dict[str, Any]
COLUMNS = ("model", "None", "codec", "inputs", "KiB", "loss", "error", "cosine", "of")


def exact(family: str, attention: str, theirs: tuple[Any, ...]) -> bool:
    """With ``compress=None``: loss, every gradient and the random numbers, to the last bit."""
    model = build(family, attention)
    with gradckpt.enable(model, compress=None):
        loss, grads, rng = gradients(family, model)
    same = grads.keys() == theirs[1].keys() and all(torch.equal(g, theirs[1][name]) for name, g in grads.items())
    return same and torch.equal(loss, theirs[0]) and torch.equal(rng, theirs[2])


def compressed(family: str, attention: str, codec: str, fake_quantize: bool, theirs: tuple[Any, ...]) -> Row:
    model = build(family, attention)
    gradckpt.stats.reset()
    with gradckpt.enable(model, compress={"codec": codec, "fake_quantize": fake_quantize}):
        loss, grads, _ = gradients(family, model)
    stats = gradckpt.stats()
    return {
        "codec": codec + " fake-quantized" * fake_quantize,
        **{
            key: stats[key] for key in ("eligible", "compressed", "shared", "bytes_in", "bytes_out", "discrete_outputs")
        },
        "loss_equal": torch.equal(loss, theirs[0]),
        "gradients_lost": sorted(nonzero(theirs[1]) - nonzero(grads)),
        **errors(grads, theirs[1])._asdict(),
    }


def measure(options: argparse.Namespace) -> list[Row]:
    rows = []
    with machine.progress(len(options.families) * len(ATTENTIONS)) as step:
        for family in options.families:
            for attention in ATTENTIONS:
                step(f"{family}, {attention}")
                row: Row = {"family": family, "attention": attention, "missing": missing(family, attention), "runs": []}
                rows.append(row)
                if row["missing"]:
                    continue
                theirs = gradients(family, stock(build(family, attention)))
                row["none_equal"] = exact(family, attention, theirs)
                row["parameters"] = len(nonzero(theirs[1]))
                for codec in options.codecs:
                    row["runs"].append(compressed(family, attention, codec, options.fake_quantize, theirs))
    return rows


# ---- what is shown


def equal(value: bool) -> str:
    return "=" if value else "differs"


def short(parameter: str) -> str:
    """The layer's number and the last name: "2.k_proj"."""
    words = parameter.removesuffix(".weight").split(".")
    number = next((word for word in words if word.isdigit()), None)
    return f"{number}.{words[-1]}" if number else words[-1]


def cells(row: Row) -> list[list[str]]:
    lines = []
    for run in row["runs"]:
        lost = len(run["gradients_lost"])
        lines.append(
            [
                f"{row['family']} {row['attention']}",
                equal(row["none_equal"]),
                run["codec"],
                f"{run['compressed']} of {run['eligible']}",
                f"{run['bytes_in'] / 1024:.0f} -> {run['bytes_out'] / 1024:.1f}",
                equal(run["loss_equal"]),
                f"{lost} LOST" if lost else f"{run['relative']:.2%}",
                f"{run['cosine']:.5f}",
                short(run["parameter"]),
            ]
        )
    return lines


def show(rows: list[Row], markdown: bool) -> None:
    table = machine.print_markdown if markdown else machine.print_table
    title = f"gradients beside torch's checkpointing, transformers {transformers.__version__}"
    table(title, list(COLUMNS), [line for row in rows for line in cells(row)])
    for row in rows:
        if row["missing"]:
            print(f"left out: {row['missing']}")
    made = [row for row in rows if not row["missing"]]
    runs = [run for row in made for run in row["runs"]]
    bad = sum(bool(run["gradients_lost"]) for run in runs)
    print(f"None bit-equal: {sum(row['none_equal'] for row in made)} of {len(made)}; runs that lost a gradient: {bad}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated, of: %(default)s")
    parser.add_argument("--codecs", default="int8", help=f"comma-separated, of: {', '.join(gradckpt.codecs.names())}")
    parser.add_argument("--fake-quantize", action="store_true", help="run the forward on the restored values, too")
    parser.add_argument("--markdown", action="store_true", help="the table in Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    options = parser.parse_args(argv)
    machine.choose(parser, options, "families", FAMILIES)
    machine.choose(parser, options, "codecs", gradckpt.codecs.names())
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    facts = {**machine.facts(), "transformers": transformers.__version__}
    rows = measure(options)
    machine.print_head("families of transformers models", facts)
    show(rows, options.markdown)
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "families", **facts, "rows": rows}, indent=1) + "\n")
    good = all(
        row["missing"] or (row["none_equal"] and not any(run["gradients_lost"] for run in row["runs"])) for row in rows
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
