"""Twelve decoder layers that attend to one encoder's states: bytes of its payloads, and what
encoding it again costs.

Each layer is a region that gets the states. They are encoded in every region, and equal bytes drop
every payload of them but the first. The other way gives each layer a tensor object of its own, so
that nothing is shared or compared.

Checked: the bytes of the payloads are those of one tensor of states and of twelve inputs (twelve of
each, the other way), and the gradients those of no compression but for the codec's error.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

import guards
import timing
import torch
from machine import add_quick, facts, print_head, print_table

import gradckpt

STATES, INPUTS = (4, 512, 256), (4, 64, 256)


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.key, self.out = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, h: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        k = self.key(states)
        out: torch.Tensor = self.out((h @ k.transpose(1, 2)).softmax(-1) @ k)
        return h + out


class Step(NamedTuple):
    seconds: float  # of the forward
    live: int  # bytes of payloads after it
    peak: int
    gradients: torch.Tensor


def step(layers: list[Layer], shared: bool, compress: Any) -> Step:
    torch.manual_seed(1)
    states, h = torch.randn(STATES).requires_grad_() * 1, torch.randn(INPUTS).requires_grad_() * 1
    gradckpt.stats.reset()

    def forward() -> None:
        nonlocal h
        for layer in layers:
            h = gradckpt.checkpoint(layer, h, states if shared else states.view_as(states), compress=compress)

    took = timing.seconds(forward, timing.clock_of(torch.get_num_threads()))
    stats = gradckpt.stats()
    parameters = [p for layer in layers for p in layer.parameters()]
    gradients = torch.autograd.grad(h.sum(), parameters)
    return Step(took, stats["live_bytes"], stats["peak_live_bytes"], torch.cat([g.flatten() for g in gradients]))


def check(name: str, found: Step, exact: Step, layers: int) -> None:
    error = float((found.gradients - exact.gradients).norm() / exact.gradients.norm())
    guards.gradients(name, error, lossy=name != "None")
    bits = gradckpt.codecs.info("int8")["bits_per_value"]
    values = {"None": 0, "int8, one tensor": layers * math.prod(INPUTS) + math.prod(STATES)}
    wanted = values.get(name, layers * (math.prod(INPUTS) + math.prod(STATES))) * bits / 8
    guards.check(found.live == wanted, f"{name}: {found.live:,} bytes of payloads; arithmetic says {wanted:,.0f}")
    guards.takes(f"{name}, forward", found.seconds, exact.seconds, "the forward without compression")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    add_quick(parser)
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds = 3
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [Layer(256) for _ in range(12)]
    ways: dict[str, tuple[bool, Any]] = {
        "None": (True, None),
        "int8, one tensor": (True, "int8"),
        "int8, twelve": (False, "int8"),
    }
    best = {
        name: min((step(layers, *way) for _ in range(args.rounds)), key=lambda found: found.seconds)
        for name, way in ways.items()
    }
    for name, found in best.items():
        check(name, found, best["None"], len(layers))
    plain = best["None"].seconds
    rows = [
        [name, f"{took * 1e3:.2f}", f"{(took - plain) / len(layers) * 1e6:.0f}", f"{live:,}", f"{peak:,}"]
        for name, (took, live, peak, _) in best.items()
    ]
    print_head("one tensor in twelve regions", facts())
    print_table("", ["compress", "forward ms", "more than None, us a layer", "payload bytes", "peak"], rows)


if __name__ == "__main__":
    main()
