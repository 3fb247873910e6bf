"""Regions on side streams, on other threads, in captured graphs, under autocast and GradScaler.

Each program runs once on the default stream and once as named here; gradients are equal to the last
bit, since a codec's bytes do not depend on the stream. A delay on the stream, where the device can,
makes what is not ordered read stale bytes.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

import gpu_inputs
import torch
from gpu_job import Job, Skip, cell, difference, gradients

import gradckpt

# cuBLAS reads it at its first product: with other workspaces its results depend on the streams.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
CODECS = (None, "int8", "lossless")
PAIRS = [(c, d) for c in gradckpt.codecs.names() for d in gradckpt.codecs.info(c)["dtypes"] if c != "sparse_int8"]
Call = Callable[[Any, torch.Tensor], torch.Tensor]


# ---- operators


def same(payload: torch.Tensor, restored: torch.Tensor, host: torch.Tensor, codec: str) -> bool:
    """Are these the host's bytes and values?"""
    wanted = torch.ops.gradckpt.encode(host, codec)
    values = torch.ops.gradckpt.decode(wanted, codec, [host.numel()], host.dtype)
    word = gpu_inputs.WORDS[host.dtype.itemsize]
    return torch.equal(payload.cpu(), wanted) and torch.equal(restored.cpu().view(word), values.view(word))


def decoded(payload: torch.Tensor, codec: str, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.gradckpt.decode(payload, codec, [x.numel()], x.dtype)
    return out


def operators_on_a_stream(job: Job) -> None:
    """Behind a delay and a write on a side stream: any other stream sees the zeros from before."""
    device = job.device
    for codec, dtype in PAIRS:
        host = gpu_inputs.gaussian(dtype, 100_003)
        filled, x = host.to(device.kind), torch.zeros_like(host, device=device.kind)
        decoded(torch.ops.gradckpt.encode(x, codec), codec, x)  # loads the kernels
        device.synchronize()
        side = device.stream()
        with device.on(side):
            device.delay()
            x.copy_(filled)
            payload = torch.ops.gradckpt.encode(x, codec)
            restored = decoded(payload, codec, x)
        if device.is_cuda:
            job.check(not side.query(), f"{codec} {dtype}: a call waited for the stream")
        device.synchronize()
        job.check(same(payload, restored, host, codec), f"{codec} {dtype}: wrong bytes on a side stream")


def operators_in_a_graph(job: Job) -> None:
    """Captured once; replayed, the bytes are those of what the input then holds."""
    device = job.device
    if reason := device.missing("graphs"):
        raise Skip(reason)
    n = 10_003 if job.small else 100_003
    for codec, dtype in PAIRS:
        x = gpu_inputs.gaussian(dtype, n).to(device.kind)
        decoded(torch.ops.gradckpt.encode(x, codec), codec, x)
        device.synchronize()
        graph = device.module.CUDAGraph()
        with device.module.graph(graph):
            payload = torch.ops.gradckpt.encode(x, codec)
            restored = decoded(payload, codec, x)
        for seed in (1, 2):
            host = gpu_inputs.gaussian(dtype, n, seed)
            x.copy_(host)
            graph.replay()
            device.synchronize()
            job.check(same(payload, restored, host, codec), f"{codec} {dtype}: wrong bytes from a replayed graph")


# ---- regions


class Chain:
    """Four regions, an input, and the gradients of a step."""

    def __init__(self, job: Job) -> None:
        self.device = job.device
        width = 128 if job.small else 1024
        torch.manual_seed(1)
        made = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(4)]
        self.layers = torch.nn.ModuleList(made).to(job.device.kind, torch.bfloat16)
        self.host = torch.randn(64, width).to(torch.bfloat16)
        self.x = self.host.to(job.device.kind, copy=True).requires_grad_()
        self.device.synchronize()

    def forward(self, call: Call) -> torch.Tensor:
        h = self.x * 1.0
        for layer in self.layers:
            h = call(layer, h)
        return h.float().square().mean()

    def clear(self) -> None:
        self.layers.zero_grad()
        self.x.grad = None

    def gradients(self) -> list[torch.Tensor]:
        self.device.synchronize()
        return gradients([self.x, *self.layers.parameters()])

    def plainly(self, call: Call) -> list[torch.Tensor]:
        self.clear()
        self.forward(call).backward()
        return self.gradients()


def region(codec: str | None) -> Call:
    return lambda f, x: gradckpt.checkpoint(f, x, compress=codec)


def on_side_stream(chain: Chain, call: Call) -> None:
    device, side = chain.device, chain.device.stream()
    side.wait_stream(device.current())
    with device.on(side):
        device.delay()
        chain.forward(call).backward()
    device.current().wait_stream(side)


def backward_on_another_stream(chain: Chain, call: Call) -> None:
    device, first, second = chain.device, chain.device.stream(), chain.device.stream()
    first.wait_stream(device.current())
    with device.on(first):
        device.delay()
        loss = chain.forward(call)
    second.wait_stream(first)
    with device.on(second):
        device.delay()
        loss.backward()
    device.current().wait_stream(second)
    device.current().wait_stream(first)


def backward_on_another_thread(chain: Chain, call: Call) -> None:
    loss = chain.forward(call)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def streams_take_turns(chain: Chain, call: Call) -> None:
    """Each layer on a stream of its own; inputs are dropped as soon as torch's rules permit, and
    other values are written where they were."""
    device = chain.device
    sides = [device.stream() for _ in chain.layers]
    h, last = chain.x * 1.0, device.current()
    for layer, side in zip(chain.layers, sides, strict=True):
        side.wait_stream(last)
        with device.on(side):
            device.delay()
            if device.queues:
                h.record_stream(side)
            h = call(layer, h)
            torch.full_like(h, 7.0)  # a block that was freed too early is this
        last = side
    device.current().wait_stream(last)
    if device.queues:
        h.record_stream(device.current())
    h.float().square().mean().backward()
    for side in sides:
        device.current().wait_stream(side)


ORDERS: dict[str, Callable[[Chain, Call], None]] = {
    "forward and backward on a side stream": on_side_stream,
    "backward on another stream": backward_on_another_stream,
    "backward on another thread": backward_on_another_thread,
    "a stream for each layer": streams_take_turns,
}


def regions_in_order(job: Job, row: Callable[..., None]) -> None:
    chain = Chain(job)
    for name, order in ORDERS.items():
        for codec in CODECS:
            with job.part(f"{name}, {codec}"):
                wanted = chain.plainly(region(codec))
                for _ in range(1 if job.small else 5):
                    chain.clear()
                    order(chain, region(codec))
                    error = difference(chain.gradients(), wanted)
                    job.check(error == 0, f"{name}, {codec}: gradients differ by {error:.3g} from the default stream's")
                row(name, str(codec), cell(error, 6))
        with job.part(f"{name}, compress_saved"):
            plain: Call = lambda f, x: f(x)  # noqa: E731
            with gradckpt.compress_saved("int8"):
                wanted = chain.plainly(plain)
            chain.clear()
            with gradckpt.compress_saved("int8"):
                order(chain, plain)
            error = difference(chain.gradients(), wanted)
            job.check(error == 0, f"{name}, compress_saved: gradients differ by {error:.3g} from the default stream's")
            row(name, "compress_saved int8", cell(error, 6))


def captured_regions(job: Job, row: Callable[..., None]) -> None:
    """A whole step in a graph; replayed on other values, it has the gradients of an eager step."""
    device = job.device
    if reason := device.missing("graphs"):
        raise Skip(reason)
    here = gradckpt.Offload("cpu", min_bytes="1B", keep_last=0)
    for codec, offload in itertools.product(CODECS, (False, here)):
        name = f"captured step, {codec}{', offloaded' if offload else ''}"
        with job.part(name):
            call: Call = functools.partial(
                gradckpt.checkpoint, compress=codec, preserve_rng_state=False, offload=offload
            )
            chain = Chain(job)
            side = device.stream()
            side.wait_stream(device.current())
            with device.on(side):
                for _ in range(3):
                    chain.clear()
                    chain.forward(call).backward()
            device.current().wait_stream(side)
            chain.clear()
            graph = device.module.CUDAGraph()
            before = gradckpt.stats()["offload"].get("copies_in", 0)
            with device.module.graph(graph):
                chain.forward(call).backward()
            other = chain.host.flip(0).to(device.kind)
            with torch.no_grad():
                chain.x.copy_(other)
            graph.replay()
            found = chain.gradients()
            error = difference(found, chain.plainly(call))
            job.check(error == 0, f"{name}: gradients differ by {error:.3g} from an eager step")
            row(name, str(codec), cell(error, 6))
            moved = gradckpt.stats()["offload"].get("copies_in", 0) - before
            job.check(moved > 0 or not offload, f"{name}: no payload came back from the host")


# ---- mixed precision


def autocast(job: Job, row: Callable[..., None]) -> None:
    chain = Chain(job)
    chain.layers.float()
    chain.x = chain.host.float().to(job.device.kind).requires_grad_()

    def run(call: Call) -> list[torch.Tensor]:
        chain.clear()
        with job.device.autocast():
            loss = chain.forward(call)
        loss.backward()
        return chain.gradients()

    wanted = run(lambda f, x: f(x))
    for codec in CODECS:
        error = difference(run(region(codec)), wanted)
        good = 0 < error < 0.3 if codec == "int8" else error == 0
        job.check(good, f"autocast, {codec}: gradients differ by {error:.3g} from those without checkpointing")
        row("autocast", str(codec), cell(error, 6))


def grad_scaler(job: Job, row: Callable[..., None]) -> None:
    """Three steps in float16; the second overflows and is skipped, in every setting."""

    def train(call: Call) -> tuple[list[torch.Tensor], list[float]]:
        chain = Chain(job)
        chain.layers.float()
        optimizer = torch.optim.SGD(chain.layers.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(job.device.kind, init_scale=1024.0)
        scales = []
        for number in range(3):
            optimizer.zero_grad()
            with torch.autocast(job.device.kind, torch.float16):
                loss = chain.forward(call) * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return [p.detach().clone() for p in chain.layers.parameters()], scales

    wanted, scales = train(lambda f, x: f(x))
    job.check(scales == [1024.0, 512.0, 512.0], f"GradScaler without checkpointing has the scales {scales}")
    for codec in CODECS:
        found, theirs = train(region(codec))
        error = difference(found, wanted)
        good = 0 < error < 0.1 if codec == "int8" else error == 0
        job.check(good, f"GradScaler, {codec}: trained weights differ by {error:.3g}")
        job.check(theirs == scales, f"GradScaler, {codec}: scales {theirs}, without checkpointing {scales}")
        row("GradScaler, weights after 3 steps", str(codec), cell(error, 6))


def run(job: Job) -> None:
    row = job.table("beside the same program on the default stream", ["order", "setting", "relative error"])
    with job.part("operators on a side stream"), torch.no_grad():
        operators_on_a_stream(job)
    with job.part("regions in other orders"):
        regions_in_order(job, row)
    with job.part("autocast"):
        autocast(job, row)
    with job.part("GradScaler"):
        grad_scaler(job, row)
    # Last: a capture that fails may leave the device in a state in which others fail.
    with job.part("operators in a captured graph"), torch.no_grad():
        operators_in_a_graph(job)
    with job.part("regions in a captured graph"):
        captured_regions(job, row)
