"""Twelve decoder layers that attend to one encoder's states: bytes of its payloads, and what
encoding it again costs.

Each layer is a region that gets the states. They are encoded in every region, and equal bytes drop
every payload of them but the first. The other way gives each layer a tensor object of its own, so
that nothing is shared or compared.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from machine import facts, print_head, print_table

import gradckpt


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.out = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, h: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        k = self.key(states)
        out: torch.Tensor = self.out((h @ k.transpose(1, 2)).softmax(-1) @ k)
        return h + out


def step(layers: list[Layer], shared: bool, compress: Any) -> tuple[float, int, int]:
    """Seconds of the forward; bytes of payloads after it, and at its peak."""
    states, h = torch.randn(4, 512, 256).requires_grad_() * 1, torch.randn(4, 64, 256).requires_grad_() * 1
    gradckpt.stats.reset()
    start = time.perf_counter()
    for layer in layers:
        h = gradckpt.checkpoint(layer, h, states if shared else states.view_as(states), compress=compress)
    took = time.perf_counter() - start
    stats = gradckpt.stats()
    h.sum().backward()
    return took, stats["live_bytes"], stats["peak_live_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [Layer(256) for _ in range(12)]
    ways: dict[str, tuple[bool, Any]] = {
        "None": (True, None),
        "int8, one tensor": (True, "int8"),
        "int8, twelve": (False, "int8"),
    }
    best = {name: min(step(layers, *way) for _ in range(args.rounds)) for name, way in ways.items()}
    plain = best["None"][0]
    rows = [
        [name, f"{took * 1e3:.2f}", f"{(took - plain) / len(layers) * 1e6:.0f}", f"{live:,}", f"{peak:,}"]
        for name, (took, live, peak) in best.items()
    ]
    print_head("one tensor in twelve regions", facts())
    print_table("", ["compress", "forward ms", "more than None, us a layer", "payload bytes", "peak"], rows)


if __name__ == "__main__":
    main()
