"""The command ``gradckpt plan``."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from gradckpt._offload import PLACES, Offload, parse_bytes
from gradckpt._planning import devices
from gradckpt._planning.comparison import compare_source
from gradckpt._planning.config_model import MIXED, PREPARE, STORED, ConfigModel
from gradckpt._planning.config_profile import plan_source
from gradckpt._planning.device_memory import Budget, size_budget
from gradckpt._planning.devices import LINKS, Link, parse_link
from gradckpt._planning.libraries import FORMATS, LOSSES
from gradckpt._planning.model_and_batch import OPTIMIZERS, SHARDS
from gradckpt._planning.options import allowed
from gradckpt._planning.region_plan import NoPlan
from gradckpt._planning.simulated_tensors import NotSimulated
from gradckpt._planning.step_trace import late_progress

T = TypeVar("T")

_DESCRIPTION = """Compute what a training step of a model needs, without weights and without a GPU:
the peak in each ready setting, its largest part, and the longest sequence that fits. With
--budget, choose for each region what is kept, compressed or recomputed, so that the step stays
within it."""

_EPILOG = """examples:
  gradckpt plan meta-llama/Meta-Llama-3-8B --tokens 8k --lora r=16,dtype=bf16 --weights nf4-nested \\
      --prepare none --loss trl --device RTX-4090      # QLoRA as people train it with TRL
  gradckpt plan meta-llama/Meta-Llama-3-8B --tokens 32k --lora r=16 --loss liger --device RTX-4090
  gradckpt plan ./config.json --tokens 131072 --gpus 8 --shard fsdp --loss liger --memory 80GB
  gradckpt plan ./config.json --tokens 8192 --device H100-SXM --budget 90% --compress int8 --save plan.json

A hub id needs a network, once. "allocated" is what torch's allocator hands out at the peak, "needed"
what it must have from the device, fragmentation included: that has to fit. Not counted: the CUDA
context and libraries' workspaces (about 1 GiB together). Times are estimates. Exit status: 0 some
setting or plan fits or no memory was given, 1 none fits, 2 wrong usage."""


#: More tokens, samples or devices than any has.
_LARGEST = 2**40


def _usage(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser for argparse, which prints what is wrong as wrong usage."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error).removeprefix("gradckpt: ")) from None

    return read


@_usage
def _number(text: str) -> int:
    digits = text.replace("_", "").replace(",", "")
    if digits[-1:] in ("k", "K") and digits[:-1].isdecimal():
        digits = str(int(digits[:-1]) * 1024)
    if not digits.isdecimal() or not 0 < int(digits) < _LARGEST:
        raise ValueError(f"gradckpt: {text!r} is no such number; give 1 or more, as in 8192 or 8k")
    return int(digits)


@_usage
def _codecs(text: str) -> list[str]:
    codecs = [name.strip() for name in text.split(",")]
    allowed(codecs, False)  # unknown codecs raise
    return codecs


#: The arguments of the command, with what argparse is to know of each.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "config": {
        "metavar": "CONFIG",
        "help": "a config.json or its folder, a hub id, or package.module:function that returns (model, batch)",
    },
    "--tokens": {
        "type": _number,
        "metavar": "N",
        "help": "length of a sequence, as in 32768 or 32k; not for images",
    },
    "--batch": {
        "type": _number,
        "default": 1,
        "metavar": "N",
        "help": "sequences or images of one device; default 1",
    },
    "--dtype": {
        "default": "bf16",
        "metavar": "DTYPE",
        "help": f"of parameters, of: {', '.join((*STORED, *MIXED))} (float32 under autocast)",
    },
    "--lora": {
        "metavar": "r=16[,targets=q_proj+v_proj][,dtype=bf16]",
        "help": "train adapters; default: float32, on all linear layers but the output head",
    },
    "--weights": {"choices": FORMATS, "help": "how frozen weights are stored, with --lora"},
    "--prepare": {
        "choices": PREPARE,
        "help": "with --weights: the others in float32, by prepare_model_for_kbit_training (default), or as loaded",
    },
    "--optimizer": {
        "default": "adamw",
        "metavar": "NAME",
        "help": f"default adamw, of: {', '.join(OPTIMIZERS)}",
    },
    "--gpus": {
        "type": _number,
        "default": 1,
        "metavar": "N",
        "help": "devices that train together; default 1",
    },
    "--shard": {"choices": SHARDS, "help": "what they divide among them"},
    "--loss": {
        "choices": ("model", *LOSSES),
        "default": "model",
        "help": "the model's own (default), or without all logits, as TRL, Liger or torch's linear_cross_entropy",
    },
    "--tiles": {
        "type": _number,
        "metavar": "N",
        "help": "let MLPs run in so many tiles of the sequence, as tiles=N",
    },
    "--accumulate": {
        "action": "store_true",
        "help": "gradients of earlier batches exist when the step begins",
    },
    "--memory": {
        "type": _usage(parse_bytes),
        "metavar": "SIZE",
        "help": "of one device: 24GiB, 24GB (which is 22.35 GiB) or bytes; --device knows cards",
    },
    "--budget": {
        "metavar": "SIZE",
        "help": "choose an option for each region: 60GiB, 90%% or activations:6GiB",
    },
    "--compress": {
        "type": _codecs,
        "metavar": "CODECS",
        "help": "lossy codecs that --budget may use, as in int8,int4; default none",
    },
    "--offload": {"choices": PLACES, "help": "let --budget offload payloads to this place"},
    "--link": {"metavar": "LINK", "help": f"of --offload: GB/s, or one of: {', '.join(LINKS)}"},
    "--host-budget": {
        "type": _usage(parse_bytes),
        "metavar": "SIZE",
        "help": "of --offload: what host memory may hold; default: all",
    },
    "--save": {
        "metavar": "FILE",
        "help": "write the plan of --budget, for gradckpt.enable(model, plan=FILE)",
    },
    "--device": {
        "type": _usage(devices.find),
        "metavar": "NAME",
        "help": f"one of: {', '.join(d.name for d in devices.DEVICES)}",
    },
    "--traceback": {"action": "store_true", "help": "show where an error of another library comes from"},
    "--json": {"action": "store_true", "help": "print one JSON document on stdout, nothing else"},
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    made = argparse.ArgumentParser(
        prog="gradckpt plan",
        usage="%(prog)s CONFIG [--tokens N] [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, how in _ARGUMENTS.items():
        made.add_argument(name, **how)
    return made


def main(arguments: Sequence[str]) -> int:
    """Print the plan that the arguments ask for; return the exit status."""
    made = parser()
    options = made.parse_args(arguments)
    source: ConfigModel | None = None
    try:
        budget, place = _budget(options), _place(options)
        link = None if options.link is None else parse_link(options.link)
        with _progress(options) as progress:
            progress("building the model")
            with _without_collections():
                source = ConfigModel(
                    options.config,
                    dtype=options.dtype,
                    lora=options.lora,
                    weights=options.weights,
                    prepare=options.prepare,
                    optimizer=options.optimizer,
                    gpus=options.gpus,
                    shard=options.shard,
                    loss=options.loss,
                    accumulate=options.accumulate,
                )
            data, text, status = (
                _compare(options, source, progress)
                if budget is None
                else _plan(options, source, budget, place, link, progress)
            )
    except Exception as error:
        if options.traceback:
            raise
        made.error(_in_a_sentence(error, options, source))
    print(json.dumps(data, indent=2) if options.json else text)
    return status


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Import without them: what imports make stays, and to look through it takes a second."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


#: The way out where a config is not enough.
_IN_SCRIPT = "call gradckpt.plan(model, batch) in your script instead"


def _in_a_sentence(error: Exception, options: argparse.Namespace, source: ConfigModel | None) -> str:
    """Return what went wrong; our own errors say all, those of other libraries not where."""
    text = " ".join(re.split(r"Exception raised from|\nframe #0", str(error))[0].split())
    if text.startswith("gradckpt: "):
        return text.removeprefix("gradckpt: ")
    if len(text) > _LONG:
        text = f"{text[:_LONG]}..."
    what = text if isinstance(error, NotSimulated) else f"{type(error).__name__}: {text}".removesuffix(": ")
    if source is None:
        return f"{options.config} gives no model ({what}); correct it (--traceback shows where)"
    name = type(source.model).__name__
    size = f" of {options.tokens:,} tokens" if options.tokens is not None else ""
    return f"{name} cannot simulate a step{size} ({what}); {_IN_SCRIPT} (--traceback shows where)"


#: Characters of another library's message.
_LONG = 300

#: What is printed as JSON or as text, and the exit status.
_Answer = tuple[dict[str, Any], str, int]


def _compare(options: argparse.Namespace, source: ConfigModel, progress: Any) -> _Answer:
    """Answer which ready settings fit."""
    found = compare_source(
        source,
        options.tokens,
        options.batch,
        memory=options.memory,
        device=options.device,
        tiles=options.tiles,
        progress=progress,
    )
    fits = found.memory is None or any(row.fits for row in found.rows)
    return found.to_dict(), str(found), 0 if fits else 1


def _plan(
    options: argparse.Namespace,
    source: ConfigModel,
    budget: Budget,
    place: Offload | None,
    link: Link | None,
    progress: Any,
) -> _Answer:
    """Answer how the step stays within a budget; write the plan."""
    try:
        found = plan_source(
            source,
            options.tokens,
            options.batch,
            budget,
            compress=options.compress,
            device=options.device,
            offload=place,
            link=link,
            tiles=options.tiles,
            progress=progress,
        )
    except NoPlan as error:
        text = str(error).removeprefix("gradckpt: ")
        text = text[0].upper() + text[1:]
        return {"verdict": text, "budget": budget.size, "smallest_budget": error.smallest_budget}, text, 1
    text, status = str(found), 0
    if options.save is not None:
        try:
            found.save(options.save)
            text += f"\nSaved to {options.save}, for gradckpt.enable(model, plan={json.dumps(options.save)})."
        except OSError as error:  # the plan took long, so it is printed
            print(f"gradckpt plan: error: {options.save} cannot be written: {error.strerror}", file=sys.stderr)
            status = 2
    return {"verdict": found.verdict, **found.to_dict()}, text, status


def _place(options: argparse.Namespace) -> Offload | None:
    """Return the place that payloads may have.

    Raises:
        ValueError: Another option needs one.
    """
    if options.offload is not None:
        return Offload(options.offload, host_budget=options.host_budget)
    for flag, value in (("--link", options.link), ("--host-budget", options.host_budget)):
        if value is not None:
            raise ValueError(f"gradckpt: {flag} needs a place; add one, as in --offload cpu")
    return None


def _budget(options: argparse.Namespace) -> Budget | None:
    """Return the budget that was given.

    Raises:
        ValueError: It is none, or excludes another option.
    """
    if options.budget is None:
        given = (("--compress", options.compress), ("--save", options.save), ("--offload", options.offload))
        for flag, value in given:
            if value is not None:
                raise ValueError(f"gradckpt: {flag} needs a budget; add one, as in --budget 60GiB")
        return None
    if options.save is not None:
        _check_save(options)

    def total() -> int:
        if options.memory is not None:
            return int(options.memory)
        if options.device is None:
            raise ValueError(
                f"gradckpt: {options.budget} of which device is unknown; add --device or --memory, as in --device H200"
            )
        return int(options.device.memory)

    budget = size_budget(options.budget, total)
    if options.memory is not None and not budget.step_only and budget.size > options.memory:
        raise ValueError(f"gradckpt: --budget {options.budget} is above --memory; give less")
    return budget


def _check_save(options: argparse.Namespace) -> None:
    """Check that a plan can be saved, before it is made.

    Raises:
        ValueError: It cannot.
    """
    if options.lora is not None:
        raise ValueError(
            "gradckpt: --save needs the plain model, since PEFT gives modules other names; plan the live model with "
            "gradckpt.plan(model, batch, budget=...)"
        )
    folder = os.path.dirname(options.save) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"gradckpt: --save has no folder {folder!r} to write to; make it first")
    if os.path.isdir(options.save):
        raise ValueError(f"gradckpt: --save={options.save} is a folder; add the name of a file, as in plan.json")
    if not os.access(options.save if os.path.exists(options.save) else folder, os.W_OK):
        raise ValueError(f"gradckpt: --save={options.save} cannot be written; choose another folder")


@contextlib.contextmanager
def _progress(options: argparse.Namespace) -> Iterator[Any]:
    """Show on a terminal what is being computed, and keep libraries silent."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings(), late_progress("plan", not options.json) as show:
        warnings.simplefilter("ignore")
        yield show
