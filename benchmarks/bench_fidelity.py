"""What the codecs lose: noise on synthetic values and on layer inputs of trained models,
errors of gradients.

    python benchmarks/bench_fidelity.py [--models llama,vit]
        [--codecs int8,int4] [--markdown] [--json FILE]

Everything in bfloat16. Bits: of the payload, measured. SQNR: signal to quantisation noise, in dB;
the synthetic sets are those of tests/helpers/codec_inputs.py (mean of 8), "X bulk" counts the
ordinary channels of X.

Trained models: benchmarks/trained_models.py, trained at the first call (minutes) and kept in
build/trained_models. SQNR is the mean over the layers, and the worst layer. The gradient's error
comes from running each layer again from its decoded input, against running it from the input itself
(the same bf16 values, fp32 maths): relative L2 over all parameters (mean of 3 held-out batches),
cosine over all of them and of the worst parameter (worst batch); parameters without a gradient are
left out. Two lines say how small an error can matter: the same model under bf16 autocast against
fp32, and with layer inputs rounded to bf16 against unrounded ones.

Checked: payloads have the bits of their format, exact codecs give every bit back and change no
gradient, lossy ones do, and no SQNR of Gaussian values is above 6.02 dB for each bit, which is the
most that any code of as many bits reaches. --quick: synthetic values only.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import guards
import machine
import torch
import trained_models
from codec_inputs import SETS, noise_set, sqnr
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import gradckpt

SEEDS = range(8)
COLUMNS = ("codec", "bits/value", "SQNR", "worst", "gradient error", "cosine", "worst", "of parameter")
FLOORS = {
    "bf16 autocast": trained_models.autocast_floor,
    "bf16 layer inputs": trained_models.rounding_floor,
}
Row = dict[str, Any]


class Steps:
    """A bar on a terminal, a line for each step elsewhere."""

    def __init__(self, total: int) -> None:
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description:48}"), BarColumn(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal, transient=True)
        self.task = self.bar.add_task("", total=total)

    def say(self, words: str) -> None:
        self.bar.update(self.task, description=words)
        if self.bar.disable:
            self.console.print(words, highlight=False)

    def trained(self, name: str, step: int, loss: float) -> None:
        total = trained_models.MODELS[name].steps
        if not self.bar.disable or step % 50 == 0 or step == total:
            self.say(f"training {name}, step {step}/{total}, loss {loss:.3f}")

    def done(self) -> None:
        self.bar.advance(self.task)


def codecs_of_bfloat16() -> list[str]:
    return [name for name in gradckpt.codecs.names() if "bfloat16" in gradckpt.codecs.info(name)["dtypes"]]


def round_trip(codec: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: gradckpt.codecs.encode(x, codec).decode()


def bits(tensors: list[torch.Tensor], codec: str) -> float:
    return 8 * sum(gradckpt.codecs.encode(x, codec).nbytes for x in tensors) / sum(x.numel() for x in tensors)


def synthetic(codec: str, seeds: Sequence[int]) -> Row:
    row: Row = {"codec": codec, "bits": bits([noise_set("Gaussian")[0]], codec)}
    stated, exact = gradckpt.codecs.info(codec)["sizes"]["bfloat16"][0], not gradckpt.codecs.info(codec)["max_error"]
    guards.at_least(f"{codec}, bits for each value", row["bits"], stated, "its format's")
    guards.at_most(f"{codec}, bits for each value", row["bits"], 1.01 * stated, "its format's and the last group's")
    for name in SETS:
        sets = [noise_set(name, seed) for seed in seeds]
        pairs = [(x, round_trip(codec)(x), ordinary) for x, ordinary in sets]
        row[name] = statistics.fmean(sqnr(x, restored) for x, restored, _ in pairs)
    row["X bulk"] = statistics.fmean(sqnr(*pair) for pair in pairs)
    guards.check(all(math.isinf(row[name]) for name in SETS) == exact, f"{codec} is {'not ' * exact}exact")
    if not exact:
        guards.at_most(f"{codec}, SQNR of Gaussian values", row["Gaussian"], 6.02 * row["bits"], "6.02 dB for each bit")
    return row


def real(model: str, codec: str) -> Row:
    inputs = trained_models.boundaries(model)
    noise = [sqnr(x, round_trip(codec)(x)) for x in inputs]
    error = trained_models.gradient_error(model, round_trip(codec))
    guards.gradients(f"{model}, {codec}", error.relative, lossy=bool(gradckpt.codecs.info(codec)["max_error"]))
    return {
        "codec": codec,
        "bits": bits(inputs, codec),
        "sqnr": statistics.fmean(noise),
        "sqnr_worst": min(noise),
        **error._asdict(),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    steps = Steps(len(options.codecs) * (1 + len(options.models)) + (1 + len(FLOORS)) * len(options.models))
    found: dict[str, Any] = {"synthetic": [], "models": {}}
    with steps.bar:
        for codec in options.codecs:
            steps.say(f"{codec} on synthetic values")
            found["synthetic"].append(synthetic(codec, options.seeds))
            steps.done()
        for model in options.models:
            steps.say(f"{model}: training, or loading what was trained")
            trained_models.load(model, steps.trained)
            steps.done()
            rows = found["models"][model] = []
            for codec in options.codecs:
                steps.say(f"{model}: {codec}")
                rows.append(real(model, codec))
                steps.done()
            for name, floor in FLOORS.items():
                steps.say(f"{model}: {name}")
                rows.append({"codec": name, **floor(model)._asdict()})
                steps.done()
    return found


# ---- what is shown


def decibel(value: float | None) -> str:
    return "" if value is None else "exact" if math.isinf(value) else f"{value:.1f}"


def cells(row: Row, layers: str) -> list[str]:
    """Of a model whose list of layers has that path, which parameters' names go without."""
    equal = row["relative"] == 0
    return [
        row["codec"],
        f"{row['bits']:.3f}" if "bits" in row else "",
        decibel(row.get("sqnr")),
        decibel(row.get("sqnr_worst")),
        "bit-equal" if equal else f"{row['relative']:.3%}",
        "1" if equal else f"{row['cosine']:.6f}",
        "1" if equal else f"{row['worst']:.5f}",
        "" if equal else row["parameter"].removeprefix(layers + ".").removesuffix(".weight"),
    ]


def show(found: dict[str, Any], markdown: bool) -> None:
    table = machine.print_markdown if markdown else machine.print_table
    names = [*SETS, "X bulk"]
    rows = [
        [r["codec"], f"{r['bits']:.3f}", *[decibel(r[n]) for n in names], f"{6.02 * r['bits']:.1f}"]
        for r in found["synthetic"]
    ]
    table("SQNR in dB, synthetic values", ["codec", "bits/value", *names, "ceiling, Gaussian"], rows)
    for model, rows in found["models"].items():
        recipe = trained_models.MODELS[model]
        table(f"{model}: {recipe.about}", list(COLUMNS), [cells(row, recipe.layers) for row in rows])


def finite(value: Any) -> Any:
    """JSON knows no infinity: null is exact."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and math.isinf(value) else value


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models, codecs = list(trained_models.MODELS), codecs_of_bfloat16()
    parser.add_argument("--models", default=",".join(models), help="comma-separated, of: %(default)s; none: ''")
    parser.add_argument("--codecs", default=",".join(codecs), help="comma-separated, of: %(default)s")
    parser.add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    options.seeds = SEEDS
    if options.quick:
        options.models, options.seeds = "", SEEDS[:1]
    machine.choose(parser, options, "models", models, or_none=True)
    machine.choose(parser, options, "codecs", codecs)
    return options


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    facts = machine.facts()
    found = measure(options)
    machine.print_head("fidelity of the codecs, bfloat16", facts)
    show(found, options.markdown)
    if options.json:
        options.json.write_text(json.dumps(finite({"benchmark": "fidelity", **facts, **found}), indent=1) + "\n")


if __name__ == "__main__":
    main()
