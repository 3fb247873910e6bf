"""Formats that are no codecs of gradckpt, measured beside those that are.

    python benchmarks/bench_candidates.py [--models llama,task-vit,deep,lora] [--json FILE]

Three tables. Errors are relative L2 errors of gradients, means of three batches that were not
trained on; bits are those of the payloads, over all layers.

Deltas: int4 of the difference between the inputs of neighbouring layers, with keys in int8
(candidate_formats.Deltas), instead of the inputs themselves. rho is that difference's share of the
norm of the earlier input. HOT's cut: half of the Hadamard coefficients along tokens in int8, for
the inputs of layers, and for those of linear layers, where it changes the gradients of the weights
alone. LoRA: the inputs of all ``lora_A``; VeLoRA is PEFT's own code, LoRAct and the best matrix of
rank 1 are prototypes. Inputs that several layers read are counted once where the format keeps them
once.

Models: those of trained_models.py without outliers; ``task-``: those of training_tasks.py after
their exact run with seed 0; ``deep``: a Llama of 24 x 64 after 300 steps, and ``deep-long`` after
1,500. Trained at the first call (minutes), and kept in build/trained_models and build/training.
Inputs of layers are bfloat16, those of linear layers float32. What a top-k chose in the forward is
chosen again in the recompute, as gradckpt does; the load-balancing term of the mixture is left out.

Checked: lossless changes no gradient and everything else does, bits are those of the formats, the
transform inverts with all 16 coefficients, deltas decode to what the encoder had, no VeLoRA of one
group is nearer to the inputs than the best matrix of rank 1, and PEFT's gradients are those of its
prototype. --quick: two models after a few steps.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import candidate_formats
import guards
import machine
import torch
import trained_models
import training_runs
import training_tasks
import training_ways
from candidate_formats import FAR, Codec, Cut, Deltas, Exact, Format, LinearInputs, LowRank, RankOne, Velora, replayed
from torch import Tensor, nn
from trained_models import Batch

import gradckpt

BATCHES = 3
DEEP = {"layers": 24, "hidden": 64, "seq": 128}
#: Deltas gain with depth, and neighbours are nearer the less was trained.
DEEP_STEPS = {"deep": 300, "deep-long": 1500}
SMALL = ("llama", "llama-wide", "gpt2", "bert", "vit")
TASKS = ("llama", "vit", "moe", "resnet")
MODELS = (*SMALL, *(f"task-{name}" for name in TASKS), *DEEP_STEPS, "lora")
#: The most that the error of a candidate is believed to be; a codec's is at most 1.
MOST = 10.0
Row = dict[str, Any]


class Subject(NamedTuple):
    about: str
    model: nn.Module
    layers: Sequence[nn.Module]
    batches: list[Batch]


# ---- models


def folder_of(options: argparse.Namespace) -> Path:
    """Return the folder of this state of the tasks and of this file's recipes."""
    facts = [training_runs.meaning(Path(training_tasks.__file__).read_text()), DEEP, torch.__version__]
    return options.folder / f"states-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def keep(file: Path, model: nn.Module, train: Callable[[], None]) -> None:
    """Load what is kept in this file; train it where nothing is."""
    if not file.exists():
        train()
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file.with_suffix(".part"))
        file.with_suffix(".part").replace(file)
    model.load_state_dict(torch.load(file, weights_only=True))


def after_exact_run(task: str, options: argparse.Namespace) -> nn.Module:
    """The model of a task after its run with seed 0, without checkpointing."""
    folder, steps = folder_of(options), options.steps or training_tasks.TASKS[task].steps
    training = training_runs.Training(training_runs.Job(task, training_ways.EXACT, 0, steps, "cpu", folder))

    def train() -> None:
        for number in range(steps):
            training.step(number)

    keep(folder / f"{task}-{steps}.pt", training.model, train)
    return training.model


def deep(steps: int, options: argparse.Namespace) -> nn.Module:
    folder = folder_of(options)
    model = training_tasks.llama(0, folder, **DEEP)
    optimizer, schedule = training_tasks.optimizer_of(model, steps, 1e-3)

    def train() -> None:
        for number in range(steps):
            batch = training_tasks.next_byte(training_tasks.sources, number, seq=DEEP["seq"])
            training_tasks.train_step(model, batch, optimizer, schedule)

    keep(folder / f"deep-{steps}.pt", model, train)
    return model


def held_out(task: str) -> list[Batch]:
    """Batches of the size that was trained on."""
    recipe = training_tasks.TASKS[task]
    rows = len(next(iter(recipe.batch(0).values())))
    parts = [{name: x.split(rows)[part] for name, x in recipe.held_out()[0].items()} for part in range(BATCHES)]
    return [{**part, "output_router_logits": False} if task == "moe" else part for part in parts]


def subject(name: str, options: argparse.Namespace) -> Subject:
    if name in DEEP_STEPS:
        text = training_tasks.sources().held_out
        batches = [training_tasks.windows(text, 8, DEEP["seq"], -1 - number) for number in range(BATCHES)]
        model = deep(options.steps or DEEP_STEPS[name], options)
        return Subject(
            f"Llama, {DEEP['layers']} x {DEEP['hidden']}, {DEEP_STEPS[name]:,} steps",
            model,
            model.model.layers,
            batches,
        )
    if name.startswith("task-"):
        task = name.removeprefix("task-")
        model = after_exact_run(task, options)
        block = training_tasks.TASKS[task].block
        layers = [module for module in model.modules() if type(module).__name__ == block]
        return Subject(training_tasks.TASKS[task].about.split(", bytes")[0], model, layers, held_out(task))
    model = trained_models.load(name, trained_models.print_step)
    about = f"{name}, {trained_models.MODELS[name].about.rpartition(',')[0]}"
    batches = [trained_models.held_out(name, number) for number in range(BATCHES)]
    return Subject(about, model, trained_models.layers_of(name, model), batches)


# ---- gradients


def from_layer_inputs(one: Subject, batch: Batch, form: Format) -> dict[str, Tensor]:
    with replayed() as choices, trained_models.rebuilt(one.layers, form):
        found = trained_models.gradients(one.model, batch)
    guards.check(not choices, f"{one.about}: a recompute chose anew what the forward had chosen")
    return found


def from_linear_inputs(model: nn.Module, batch: Batch, form: Format) -> dict[str, Tensor]:
    """The gradients of the weights whose inputs were restored."""
    with LinearInputs(form) as inputs:
        found = trained_models.gradients(model, batch)
    return {name: found[name] for name, p in model.named_parameters() if p in inputs.weights}


def relative(pairs: list[tuple[dict[str, Tensor], dict[str, Tensor]]]) -> float:
    return trained_models.compare(pairs).relative


# ---- deltas and HOT's cut: one row for each model


def formats() -> dict[str, Format]:
    return {
        "lossless": Codec("lossless"),
        "int8": Codec("int8"),
        "int6": Codec("int6"),
        "int4": Codec("int4"),
        "no deltas": Deltas(deltas=False),
        "deltas": Deltas(),
        "deltas, keys by rho": Deltas(FAR),
        "cut": Cut(),
    }


def rhos(one: Subject) -> list[float]:
    """Of neighbouring layers with inputs of one shape."""
    inputs: list[Tensor] = []

    def note(layer: int, x: Tensor) -> Tensor:
        inputs.append(x.float().clone())
        return x

    with torch.no_grad(), trained_models.rebuilt(one.layers, note):
        one.model(**one.batches[0])
    pairs = itertools.pairwise(inputs)
    return [float((b - a).norm() / a.norm()) for a, b in pairs if a.shape == b.shape]


def check_error(what: str, error: float, form: Format) -> None:
    ours = isinstance(form, Codec)
    lossy = not (isinstance(form, Exact) or (ours and form.name == "lossless"))
    guards.gradients(what, error, lossy=lossy, most=1.0 if ours else MOST)


def check_bits(what: str, found: float, least: str, most: str, part: float = 1.0) -> None:
    """``part`` of the bits of two codecs; rows of 64 values and less have a byte of their own."""
    bits = {name: part * gradckpt.codecs.info(name)["bits_per_value"] for name in (least, most)}
    guards.at_least(f"{what}, bits for each value", found, bits[least], f"those of {least}" + " x 1/2" * (part < 1))
    guards.at_most(f"{what}, bits for each value", found, 1.2 * bits[most], f"1.2 x those of {most}")


def measure(name: str, options: argparse.Namespace) -> Row:
    one = subject(name, options)
    row: Row = {"model": name, "about": one.about, "layers": len(one.layers), "rho": rhos(one)}
    exact = [from_layer_inputs(one, batch, Exact()) for batch in one.batches]
    for key, form in formats().items():
        got = [from_layer_inputs(one, batch, form) for batch in one.batches]
        error = relative(list(zip(got, exact, strict=True)))
        check_error(f"{name}, {key}", error, form)
        row[key] = {"error": error, "bits": form.bits}
    for codec in ("int8", "int6", "int4"):
        check_bits(f"{name}, {codec}", row[codec]["bits"], codec, codec)
    for key in ("no deltas", "deltas", "deltas, keys by rho"):
        check_bits(f"{name}, {key}", row[key]["bits"], "int4", "int8")
    check_bits(f"{name}, HOT's cut", row["cut"]["bits"], "int8", "int8", 0.5)
    exact = [from_linear_inputs(one.model, batch, Exact()) for batch in one.batches]
    for key, form in (("linear lossless", Codec("lossless")), ("linear cut", Cut()), ("linear int4", Codec("int4"))):
        got = [from_linear_inputs(one.model, batch, form) for batch in one.batches]
        error = relative(list(zip(got, exact, strict=True)))
        check_error(f"{name}, {key}", error, form)
        row[key] = {"error": error, "bits": form.bits}
    return row


def check_formats() -> None:
    """Of the prototypes, on values of their own."""
    identity = candidate_formats.hadamard() @ candidate_formats.hadamard().T
    off = float((identity - torch.eye(candidate_formats.BLOCK)).abs().max())
    guards.check(off == 0, f"HOT's cut: the transform is off by {off:.2g} from an orthonormal one")
    x = torch.randn(3, 50, 64, generator=torch.Generator().manual_seed(0))
    off = float((Cut(candidate_formats.BLOCK, "lossless")(0, x) - x).abs().max())
    guards.check(off < 1e-6, f"HOT's cut: with all coefficients the values differ by {off:.2g}")
    form, steps = Deltas(), torch.randn(12, 4, 64, generator=torch.Generator().manual_seed(0)).cumsum(0)
    decoded = [form(layer, x) for layer, x in enumerate(steps)]
    same = all(torch.equal(form.restored(layer), x) for layer, x in enumerate(decoded))
    guards.check(same, "deltas: what a layer decodes to is not what the encoder had")


# ---- LoRA


def adapters(state: dict[str, Tensor], groups: int) -> nn.Module:
    """The model of task ``lora`` with that state, and with VeLoRA of so many groups."""
    import peft
    from peft.tuners.lora.config import VeloraConfig

    config = peft.LoraConfig(**training_tasks.LORA, velora_config=VeloraConfig(num_groups=groups))
    model = peft.get_peft_model(training_tasks.llama(0, Path()), config)
    wrong = model.load_state_dict(state, strict=False)
    guards.check(
        not wrong.unexpected_keys and all("velora" in key for key in wrong.missing_keys),
        "lora: the state is not that of the adapters",
    )
    return model.train()


def adapter_gradients(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.double().flatten() for name, p in model.named_parameters() if p.requires_grad}


def lora_formats() -> dict[str, Callable[[], Format]]:
    return {
        "float32": Exact,
        "`lossless`": lambda: Codec("lossless"),
        "`int8`": lambda: Codec("int8"),
        "`int6`": lambda: Codec("int6"),
        "`int4`": lambda: Codec("int4"),
        "VeLoRA, 64 groups (PEFT's default)": lambda: Velora(64),
        "VeLoRA, 8 groups": lambda: Velora(8),
        "VeLoRA, 1 group": lambda: Velora(1),
        "LoRAct, rank of 1/8 of the width": LowRank,
        "the same, one more iteration": lambda: LowRank(iterations=1),
        "LoRAct, rank of 1/4 of the width": lambda: LowRank(1 / 4),
        "best matrix of rank 1": RankOne,
    }


def measure_lora(options: argparse.Namespace) -> list[Row]:
    model = after_exact_run("lora", options)
    state, batches = model.state_dict(), held_out("lora")
    exact = [adapter_gradients(model, batch) for batch in batches]
    chosen = {p for name, p in model.named_parameters() if "lora_A" in name}
    rows = []
    for name, make in lora_formats().items():
        form, got, errors = make(), [], []
        for batch in batches:
            with LinearInputs(form, chosen) as inputs:
                got.append(adapter_gradients(model, batch))
            guards.check(inputs.weights == chosen, f"lora, {name}: an adapter kept its input as it was")
            errors.append(inputs.error)
        if isinstance(form, Velora):
            got = check_velora(name, adapters(state, form.groups), batches, got)
        pairs = list(zip(got, exact, strict=True))
        error = relative(pairs)
        check_error(f"lora, {name}", error, form)
        of_a = relative([tuple({n: g for n, g in of.items() if "lora_A" in n} for of in pair) for pair in pairs])
        rows.append({"format": name, "nbytes": form.nbytes / len(batches), "input": statistics.fmean(errors)})
        rows[-1] |= {"error": error, "of_a": of_a}
    nearest = {row["format"]: row["input"] for row in rows}
    guards.at_least(
        "lora, VeLoRA of 1 group: error of the inputs",
        nearest["VeLoRA, 1 group"],
        nearest["best matrix of rank 1"],
        "that of the best matrix of rank 1",
    )
    return rows


def check_velora(name: str, model: nn.Module, batches: list[Batch], ours: list[dict[str, Tensor]]) -> list[Any]:
    """Return the gradients of PEFT's own code, which the prototype's equal up to rounding."""
    found = [adapter_gradients(model, batch) for batch in batches]
    off = relative(list(zip(ours, found, strict=True)))
    guards.at_most(f"lora, {name}: difference of the prototype from PEFT", off, 1e-5, "float32's rounding")
    return found


# ---- what is shown


def percent(share: float) -> str:
    return f"{100 * share:.2f} %" if share < 0.1 else f"{100 * share:.1f} %"


def figures(found: Row) -> str:
    return f"{percent(found['error'])}, {found['bits']:.2f}"


def near(row: Row) -> int:
    return sum(rho <= FAR for rho in row["rho"])


def passes(row: Row) -> bool:
    """The rule: neighbours are near on most layers, and deltas have a smaller error than int6."""
    return 2 * near(row) > len(row["rho"]) and row["deltas"]["error"] < row["int6"]["error"]


def cells_of_deltas(row: Row) -> list[str]:
    others = sorted(row["rho"][1:])
    spread = f"{others[0]:.2f}, {statistics.median(others):.2f}, {others[-1]:.2f}" if others else ""
    return [
        row["about"],
        f"{row['rho'][0]:.2f}" if row["rho"] else "",
        spread,
        f"{near(row)} of {len(row['rho'])}",
        *(figures(row[key]) for key in ("int8", "int6", "int4", "no deltas", "deltas", "deltas, keys by rho")),
        "yes" if passes(row) else "no",
    ]


COLUMNS_OF_DELTAS = (
    "model",
    "rho of the first pair",
    "others: least, median, most",
    f"rho <= {FAR:g}",
    "`int8`: error, bits",
    "`int6`",
    "`int4`",
    "`int8` for the keys, `int4` for the others",
    "deltas",
    "deltas, keys by rho",
    "rule holds",
)
COLUMNS_OF_CUT = (
    "model",
    "layer inputs: HOT's cut, bits",
    "`int4`, bits",
    "inputs of linear layers: HOT's cut, bits",
    "`int4`, bits",
)
COLUMNS_OF_LORA = (
    "kept of the inputs",
    "bytes",
    "of float32",
    "error of the inputs",
    "of the gradients of `lora_A`",
    "of all adapters' gradients",
)


def cells_of_cut(row: Row) -> list[str]:
    return [row["about"], *(figures(row[key]) for key in ("cut", "int4", "linear cut", "linear int4"))]


def cells_of_lora(row: Row, whole: float) -> list[str]:
    errors = ["0" if row[key] == 0 else percent(row[key]) for key in ("input", "of_a", "error")]
    return [row["format"], f"{row['nbytes']:,.0f}", f"{100 * row['nbytes'] / whole:.1f} %", *errors]


def show(found: Row) -> None:
    rows, lora = found["models"], found["lora"]
    if rows:
        machine.print_markdown(
            "Deltas between layers: error of the gradients, bits for each value",
            list(COLUMNS_OF_DELTAS),
            [cells_of_deltas(row) for row in rows],
        )
        print(f"\nThe rule holds for {sum(map(passes, rows))} of {len(rows)} models.")
        machine.print_markdown(
            "HOT's cut: error of the gradients (of the weights of linear layers), bits for each value",
            list(COLUMNS_OF_CUT),
            [cells_of_cut(row) for row in rows],
        )
    if lora:
        machine.print_markdown(
            "LoRA: what is kept of the inputs of the adapters",
            list(COLUMNS_OF_LORA),
            [cells_of_lora(row, lora[0]["nbytes"]) for row in lora],
        )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated, of: %(default)s")
    parser.add_argument(
        "--folder", type=Path, default=training_runs.ROOT / "build" / "training", help="of trained tasks (%(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    options.steps = 5 if options.quick else None
    if options.quick:
        options.models = "task-llama,lora"
    machine.choose(parser, options, "models", MODELS)
    return options


def all_tables(options: argparse.Namespace) -> Row:
    found: Row = {"models": [], "lora": []}
    with machine.progress(len(options.models)) as step:
        for name in options.models:
            if name == "lora":
                found["lora"] = measure_lora(options)
            else:
                found["models"].append(measure(name, options))
            step(name)
    return found


def untrained_base(folder: Path) -> None:
    """Put weights that were not trained where the base model of ``lora`` is looked for."""
    folder.mkdir(parents=True)
    torch.save(training_tasks.llama(0, folder).state_dict(), folder / "base.pt")


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    machine.allow_old_name()
    torch.set_num_threads(1)  # as the runs of bench_training.py
    facts = machine.facts()
    check_formats()
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            options.folder = Path(folder)
            untrained_base(folder_of(options))
        found = all_tables(options)
    machine.print_head("candidates for codecs", facts)
    show(found)
    if options.json:
        options.json.write_text(json.dumps({"benchmark": "candidates", **facts, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
