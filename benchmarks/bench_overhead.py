"""Host microseconds per checkpointed region, beside torch.utils.checkpoint in the same run.

The region is tiny (Linear + ReLU), so that what is measured is the machinery: the time of plain
forward + backward and of the recompute itself (one more forward) is subtracted. Ours and torch's
are timed in turn, round by round; the medians of the rounds are reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import facts, print_head, print_json, print_table
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt


def build(width: int, depth: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(depth)]


def step(layers: list[torch.nn.Module], x: torch.Tensor, call: Callable[..., Any]) -> tuple[float, float]:
    """Seconds of the forward and of the backward of a chain of regions."""
    start = time.perf_counter()
    h = x
    for layer in layers:
        h = call(layer, h)
    middle = time.perf_counter()
    h.sum().backward()
    return middle - start, time.perf_counter() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=8, help="features of the Linear (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=50, help="regions in the chain (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="rounds, each way once (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print only the JSON line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    layers = build(args.width, args.depth)
    x = torch.randn(4, args.width, requires_grad=True) * 1
    tiny: dict[str, Any] = {"codec": "int8", "min_numel": 0}
    int8 = gradckpt.CompressionConfig(**tiny)
    ways: dict[str, Callable[..., Any]] = {
        "plain": lambda f, h: f(h),
        "torch": lambda f, h: torch_checkpoint(f, h, use_reentrant=False),
        "gradckpt None": lambda f, h: gradckpt.checkpoint(f, h),
        "gradckpt int8": lambda f, h: gradckpt.checkpoint(f, h, compress=int8),
        "torch, no RNG": lambda f, h: torch_checkpoint(f, h, use_reentrant=False, preserve_rng_state=False),
        "gradckpt None, no RNG": lambda f, h: gradckpt.checkpoint(f, h, preserve_rng_state=False),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for round_ in range(args.rounds + 5):
        for name, call in ways.items():
            x = x.detach().requires_grad_(True) * 1
            took = step(layers, x, call)
            if round_ >= 5:
                times[name].append(took)

    def median(name: str, part: int) -> float:
        return statistics.median(t[part] for t in times[name]) / args.depth * 1e6

    plain_forward, plain_backward = median("plain", 0), median("plain", 1)
    rows, result = [], {}
    for name in ways:
        forward, backward = median(name, 0), median(name, 1)
        over = 0.0 if name == "plain" else forward + backward - plain_forward - plain_backward - plain_forward
        result[name] = {"forward_us": forward, "backward_us": backward, "overhead_us": over}
        peer = "torch, no RNG" if "no RNG" in name else "torch"
        share = f"{over / result[peer]['overhead_us']:.3f}" if name.startswith("gradckpt") else ""
        rows.append([name, f"{forward:.1f}", f"{backward:.1f}", f"{over:.1f}", share])
    found = facts()
    if not args.json:
        print_head("host cost per checkpointed region (Linear + ReLU)", found)
        print_table("", ["", "forward us", "backward us", "overhead us", "of torch's"], rows)
        print(
            "overhead: forward + backward per region, less plain forward + backward, less one forward (the recompute)"
        )
    print_json({"benchmark": "overhead", **found, "us_per_region": result})


if __name__ == "__main__":
    main()
