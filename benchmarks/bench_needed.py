"""What torch's caching allocator needs of a device for a step, beside what the step allocates.

    python benchmarks/bench_needed.py [--rows 3b,13b]

Llama-like models in bfloat16 with checkpoints around all layers. The steps are simulated for a CUDA
device, whose gradients exist already; each allocation and release goes through a model of torch's
allocator (csrc/planner/caching_allocator.h). *needed* is the smallest capacity from which on the
step completes, without weights and gradients.

Ways: torch's checkpoint; int8; the same with codes and scales of a payload in one allocation, as it
was; and with the scales of all payloads in one pooled buffer, allocated before the step.

Checked: payloads are allocated as the format has them, nothing is needed that is less than the
checkpoints by arithmetic, and the plan's *needed* is that of the step replayed in full length.
"""

from __future__ import annotations

import argparse
import array
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import guards
import machine
import torch
import transformers

import gradckpt
from gradckpt._planning.config_profile import shortened, unrolled
from gradckpt._planning.device_memory import fixed_bytes
from gradckpt._planning.options import find_blocks
from gradckpt._planning.segments import Segment, held_blocks, memory_use, pairs
from gradckpt._planning.step_trace import trace_step
from gradckpt._settings import READY

MIB = 2**20
#: width, inner width, layers, heads, heads of keys and values, sequences, tokens
ROWS = {
    "24 x 1024, 4 x 4k": (1024, 2816, 24, 16, 16, 4, 4096),
    "28 x 3072, 16k": (3072, 8192, 28, 24, 8, 1, 16384),
    "32 x 4096, 8k": (4096, 14336, 32, 32, 8, 1, 8192),
    "32 x 4096, 4k": (4096, 11008, 32, 32, 32, 1, 4096),
}
SMALL = {"8 x 256, 2k": (256, 704, 8, 4, 4, 1, 2048)}
SETTINGS = {setting.name: setting for setting in READY}
#: Bytes of codes for each byte of scales, of int8 from 16 bits.
CODES = 64
Shape = tuple[int, int, int, int, int, int, int]
Use = dict[str, Any]


def model_of(shape: Shape) -> torch.nn.Module:
    width, inner, layers, heads, groups, _, _ = shape
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        use_cache=False,
    )
    with torch.device("meta"):
        model: torch.nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    return model


def segments_of(model: torch.nn.Module, shape: Shape, setting: str, *, whole: bool = False) -> list[Segment]:
    """The step, of six layers that stand for all, or of all."""
    ids = torch.zeros(shape[-2:], dtype=torch.long)

    def step(batch: Any) -> None:
        model(**batch).loss.backward()

    blocks = find_blocks(model)
    batch = {"input_ids": ids, "labels": ids}
    if whole:
        with SETTINGS[setting].active(model):
            return trace_step(model, step, batch, blocks=blocks, cuda=True).segments
    with shortened(model, blocks) as short, SETTINGS[setting].active(model):
        found = trace_step(model, step, batch, blocks=short.modules, cuda=True).segments
    return unrolled(found, short.copies)


def of_step(model: torch.nn.Module, run: Callable[[Any], object], batch: Any) -> Use:
    """What the allocator needs for a step of any model, as it is enabled now: what is there during
    the whole step included. `run` runs forward and backward of the batch."""
    held = held_blocks(model, fixed_bytes(model))
    return memory_use(trace_step(model, run, batch, cuda=True).segments, held)


# ---- payloads otherwise


def payloads_of(segments: Sequence[Segment], codes: int) -> dict[int, int]:
    """The storage of the scales by that of the codes: they are allocated one after the other."""
    changes = [change for segment in segments for change in pairs(segment.changes)]
    return {
        storage: next_storage
        for (size, storage), (next_size, next_storage) in itertools.pairwise(changes)
        if size == codes and next_size == codes // CODES
    }


def rewritten(segments: Sequence[Segment], write: Callable[[int, int], int]) -> list[Segment]:
    """The segments with other sizes; 0: not allocated."""
    found = []
    for segment in segments:
        changes = array.array("q")
        for size, storage in pairs(segment.changes):
            changes.extend((write(abs(size), storage) * (1 if size > 0 else -1), storage))
        found.append(Segment(segment.phase, segment.block, [], [], changes=changes))
    return found


def ways(segments: Sequence[Segment], codes: int, layers: int) -> dict[str, Use]:
    payloads = payloads_of(segments, codes)
    scales = set(payloads.values())
    guards.check(len(payloads) == layers, f"{len(payloads)} payloads of {codes:,} bytes, not {layers}")
    joined = rewritten(segments, lambda size, s: 0 if s in scales else size + size // CODES if s in payloads else size)
    pooled = rewritten(segments, lambda size, s: 0 if s in scales else size)
    return {
        "int8": memory_use(segments),
        "int8, codes and scales in one": memory_use(joined),
        "int8, scales pooled": memory_use(pooled, [layers * codes // CODES]),
    }


# ---- rows


def row_of(name: str, shape: Shape) -> dict[str, Use]:
    model, values = model_of(shape), shape[-2] * shape[-1] * shape[0]
    torchs = segments_of(model, shape, "torch")
    ours = segments_of(model, shape, "int8")
    found = {"torch": memory_use(torchs), **ways(ours, values, shape[2])}
    full = memory_use(segments_of(model, shape, "int8", whole=True))
    guards.check(
        full["needed"] == found["int8"]["needed"],
        f"{name}: the plan needs {found['int8']['needed']:,} bytes, the whole step {full['needed']:,}",
    )
    for way, use in found.items():
        least = shape[2] * values * (2 if way == "torch" else 1)
        guards.at_least(f"{name}, {way}: bytes needed", use["needed"], least, "all checkpoints")
        guards.at_least(f"{name}, {way}: bytes needed", use["needed"], use["allocated"], "those allocated")
    return found


def show(results: dict[str, dict[str, Use]], options: argparse.Namespace) -> None:
    rows = []
    for name, found in results.items():
        torchs = found["torch"]
        for way, use in found.items():
            ratio, torchs_ratio = use["needed"] / use["allocated"], torchs["needed"] / torchs["allocated"]
            rows.append(
                [
                    name,
                    way,
                    f"{use['allocated'] / MIB:,.0f}",
                    f"{use['needed'] / MIB:,.0f}",
                    f"{use['allocated'] / torchs['allocated']:.3f}",
                    f"{use['needed'] / torchs['needed']:.3f}",
                    f"{ratio:.3f}",
                    f"{ratio / torchs_ratio:.3f}",
                ]
            )
    head = ["model", "checkpoints", "allocated MiB", "needed MiB", "of torch's", "needed of torch's"]
    head += ["needed / allocated", "of torch's ratio"]
    table = machine.print_markdown if options.markdown else machine.print_table
    table("segments of torch's default", head, rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", help=f"comma-separated numbers from 1 to {len(ROWS)}; default all")
    parser.add_argument("--markdown", action="store_true")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    transformers.utils.logging.set_verbosity_error()
    found = machine.facts()
    machine.print_head("memory that torch's allocator needs, by a model of it", found)
    rows = SMALL if options.quick else ROWS
    if options.rows:
        rows = {name: rows[name] for i, name in enumerate(rows, 1) if str(i) in options.rows.split(",")}
    results = {name: row_of(name, shape) for name, shape in rows.items()}
    show(results, options)
    machine.print_json({"benchmark": "bench_needed", **found, "version": gradckpt.__version__, "rows": results})


if __name__ == "__main__":
    main()
