"""Host cost of a region, beside torch.utils.checkpoint in the same rounds.

A chain of tiny regions (Linear, ReLU), so that the machinery is what is measured: microseconds of
the host for forward and backward, nothing waited for. Beside them what sys.setprofile sees: Python
frames and calls of C functions per region, those of the plain region and of its recompute taken
off. Autograd runs a device's backward on a thread of its own, so hooks on the first and the last
gradient turn the profiler on and off there.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from gpu_job import Job, cell, difference, gradients
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt

Call = Callable[[Any, torch.Tensor], torch.Tensor]
#: Of the rounds the lower quartile counts: other programs only ever add time.
ROUNDS, DEPTH, WIDTH = 40, 50, 8
#: Frames that are named in the report.
NAMED = 12

INT8 = gradckpt.CompressionConfig(codec="int8", min_numel=0)
RAW = gradckpt.CompressionConfig(codec="raw", min_numel=0)
HOST = gradckpt.Offload("cpu", host_budget="64MiB", min_bytes="1B", keep_last=0)


def on_cpu(f: Any, x: torch.Tensor) -> torch.Tensor:
    """As transformers' offload=True."""
    with save_on_cpu(pin_memory=x.device.type != "cpu", device_type=x.device.type):
        return gradckpt.checkpoint(f, x)


RAW_WAY, OFFLOADED = "gradckpt raw", "gradckpt raw, offloaded"
WAYS: dict[str, Call] = {
    "plain": lambda f, x: f(x),
    "torch": lambda f, x: torch_checkpoint(f, x, use_reentrant=False),
    "torch, preserve_rng_state=False": lambda f, x: torch_checkpoint(
        f, x, use_reentrant=False, preserve_rng_state=False
    ),
    "gradckpt": lambda f, x: gradckpt.checkpoint(f, x),
    "gradckpt, preserve_rng_state=False": lambda f, x: gradckpt.checkpoint(f, x, preserve_rng_state=False),
    "gradckpt int8": lambda f, x: gradckpt.checkpoint(f, x, compress=INT8),
    RAW_WAY: lambda f, x: gradckpt.checkpoint(f, x, compress=RAW),
    OFFLOADED: lambda f, x: gradckpt.checkpoint(f, x, compress=RAW, offload=HOST),
    "gradckpt in save_on_cpu": on_cpu,
    "SelectiveRecompute": lambda f, x: gradckpt.SelectiveRecompute.apply(f, None, x),
}
LOSSY = {"gradckpt int8"}


class Chain:
    def __init__(self, job: Job, depth: int) -> None:
        self.device = job.device
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(depth)
        ).to(job.device.kind)
        self.x = torch.randn(4, WIDTH).to(job.device.kind).requires_grad_()

    def forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """The chain's input, whose gradient comes last, and the loss."""
        first = self.x * 1.0
        h = first
        for layer in self.layers:
            h = call(layer, h)
        return first, h.sum()

    def clear(self) -> None:
        self.x.grad = None
        self.layers.zero_grad()

    def gradients(self, call: Call) -> list[torch.Tensor]:
        self.clear()
        self.forward(call)[1].backward()
        return gradients([self.x, *self.layers.parameters()])


# ---- time


def timed(chain: Chain, call: Call) -> tuple[float, float]:
    """Seconds of the host for forward and backward."""
    chain.clear()
    chain.device.synchronize()
    start = time.perf_counter()
    _, loss = chain.forward(call)
    middle = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    chain.device.synchronize()
    return middle - start, end - middle


def quartiles(chain: Chain, rounds: int) -> dict[str, tuple[float, float]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 3):
            for name, call in WAYS.items():
                seconds = timed(chain, call)
                if number >= 3:
                    found[name].append(seconds)
            gc.collect()
    finally:
        gc.enable()
    low = {}
    for name, each in found.items():
        forward, backward = (sorted(part)[len(part) // 4] for part in zip(*each, strict=True))
        low[name] = forward, backward
    return low


# ---- frames


def label(code: Any) -> str:
    return f"{os.path.basename(code.co_filename)}:{code.co_name}"


class Profile:
    """Calls that one thread at a time makes."""

    def __init__(self) -> None:
        self.frames: Counter[str] = Counter()
        self.calls = 0

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.frames[label(frame.f_code)] += 1
        elif event == "c_call":
            self.calls += 1


def profiled(chain: Chain, call: Call) -> tuple[Profile, Profile]:
    """Of the forward and of the backward."""
    chain.clear()
    forward, backward = Profile(), Profile()
    sys.setprofile(forward)
    first, loss = chain.forward(call)
    sys.setprofile(None)
    loss.register_hook(lambda gradient: sys.setprofile(backward))
    first.register_hook(lambda gradient: sys.setprofile(None))
    loss.backward()
    sys.setprofile(None)
    return forward, backward


def frames(job: Job, chain: Chain) -> None:
    columns = ["way", "Python frames, forward", "backward", "C calls, forward", "backward"]
    row = job.table("per region, as sys.setprofile sees it, without the plain region and its recompute", columns)
    plain_forward, plain_backward = profiled(chain, WAYS["plain"])
    depth = len(chain.layers)
    for name, call in WAYS.items():
        profiled(chain, call)  # what a first call makes
        forward, backward = profiled(chain, call)
        ours = forward.frames - plain_forward.frames
        # The recompute makes the plain region's frames once more.
        again = backward.frames - plain_backward.frames - plain_forward.frames
        recomputes = name != "plain"
        calls = forward.calls - plain_forward.calls
        calls_again = backward.calls - plain_backward.calls - plain_forward.calls * recomputes
        row(name, *(cell(n / depth, 1) for n in (ours.total(), again.total(), calls, calls_again)))
        job.figures[f"frames, {name}"] = {
            "forward": {where: n / depth for where, n in ours.most_common(NAMED)},
            "backward": {where: n / depth for where, n in again.most_common(NAMED)},
        }
        if name == "gradckpt":
            listed = ", ".join(f"{where} {n / depth:.1f}" for where, n in (ours + again).most_common(NAMED))
            job.note(f"frames of a gradckpt region: {listed or 'none'}")
    job.check(forward.frames.total() > 0, "the profiler saw no frame")
    job.check(backward.frames.total() > 0, "the profiler saw no frame of the backward")


def measure(job: Job) -> None:
    depth, rounds = (5, 3) if job.small else (DEPTH, ROUNDS if job.device.is_cuda else 15)
    chain = Chain(job, depth)
    with job.part("gradients"):
        wanted = chain.gradients(WAYS["plain"])
        for name, call in WAYS.items():
            error = difference(chain.gradients(call), wanted)
            good = error < 0.2 if name in LOSSY else error == 0
            job.check(good, f"{name}: the gradients differ by {error:.3g}")
    with job.part("microseconds"):
        row = job.table(
            f"microseconds of the host per region, chain of {depth}",
            ["way", "forward", "backward", "both", "beyond plain", "of torch's"],
        )
        found = quartiles(chain, rounds)
        both = {name: sum(seconds) / depth * 1e6 for name, seconds in found.items()}
        torchs = both["torch"] - both["plain"]
        for name, (forward, backward) in found.items():
            more = both[name] - both["plain"]
            row(
                *(name, cell(forward / depth * 1e6, 1), cell(backward / depth * 1e6, 1), cell(both[name], 1)),
                *(cell(more, 1), cell(more / torchs if torchs > 0 else None)),
            )
        job.figures["us_per_region"] = both
        job.note(f"offload adds {both[OFFLOADED] - both[RAW_WAY]:.1f} us to a region's raw payload")
        job.check(both["plain"] > 0, "a plain region took no time")
        if job.device.is_cuda and not job.small:
            ours = both["gradckpt"]
            job.check(ours <= both["torch"], f"a region costs {ours:.1f} us, torch's {both['torch']:.1f} us")
    with job.part("frames"):
        frames(job, chain)


def run(job: Job) -> None:
    with job.device.codecs_of_the_host():
        measure(job)
