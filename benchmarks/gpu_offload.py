"""Payloads in host memory: the link's rate, gradients behind delays, and ways to train.

Gradients with offload are those without, to the last bit, also where a delay on the compute stream
makes every copy late: what is not ordered would read stale bytes.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import gpu_llama
import torch
from gpu_job import Job, Skip, cell, difference, gradients
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt
from gradckpt._engine.places import SAVED, place_of

MIB = 1 << 20
CODECS = (None, "int8", "lossless")
#: Of a pinned copy's rate, on a card.
LEAST_RATE = 0.9
#: Of int8, relative.
MOST = 0.2


# ---- the link


def copies(job: Job, nbytes: int) -> tuple[float, float]:
    """GB/s of torch's copies out of the device and into it, with pinned memory."""
    there = torch.ones(nbytes, dtype=torch.uint8, device=job.device.kind)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    found = []
    for to, source in ((host, there), (there, host)):
        to.copy_(source, non_blocking=True)
        found.append(nbytes / job.device.seconds(lambda to=to, source=source: to.copy_(source, non_blocking=True), 4))
    return found[0] / 1e9, found[1] / 1e9


def link(job: Job) -> None:
    """Tensors go to the host as they are, and come back last first."""
    n, nbytes = (8, 2 * MIB) if job.small else (16, 64 * MIB)
    offload = gradckpt.Offload("cpu", keep_last=0)
    pack, unpack = gradckpt.compress_saved(None, offload=offload).hooks
    leaf = torch.randn(nbytes // 4, device=job.device.kind, requires_grad=True)
    tensors = [leaf * 1 for _ in range(n)]
    packed: list[Any] = []

    def out() -> None:
        packed.extend(pack(x) for x in tensors)

    def back() -> None:
        while packed:
            restored = unpack(packed.pop())
        job.check(torch.equal(restored, tensors[0]), "another tensor came back from the host")

    out()  # memory is pinned now
    back()
    rates = [n * nbytes / job.device.seconds(run) / 1e9 for run in (out, back)]
    plain = copies(job, nbytes)
    figures = place_of(offload, SAVED).figures()  # type: ignore[union-attr]
    row = job.table("Link, GB/s", ["way", "out", "in"])
    row("pinned copy", cell(plain[0], 1), cell(plain[1], 1))
    row("gradckpt, raw", cell(rates[0], 1), cell(rates[1], 1))
    job.figures["link"] = {"copy": plain, "offload": rates, "place": figures}
    job.check(figures["copies_out"] >= 2 * n - 1, f"only {figures['copies_out']} copies left the device")
    if job.device.is_cuda:
        for name, ours, theirs in zip(("out", "in"), rates, plain, strict=True):
            job.check(ours >= LEAST_RATE * theirs, f"link {name}: {ours:.1f} GB/s, a pinned copy has {theirs:.1f}")


# ---- order


def behind_delays(job: Job) -> None:
    width = 128 if job.small else 2048
    torch.manual_seed(1)
    blocks = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(8)]
    layers = torch.nn.ModuleList(blocks).to(job.device.kind, torch.bfloat16)
    x = torch.randn(width, width).to(job.device.kind, torch.bfloat16).requires_grad_()
    rings = ("auto", 2 * x.nbytes) if not job.small else ("auto",)

    def step(codec: str | None, offload: Any, late: int) -> list[torch.Tensor]:
        layers.zero_grad()
        h = x * 1.0
        for i, layer in enumerate(layers):
            if i % 3 == late:
                job.device.delay()
            h = gradckpt.checkpoint(layer, h, compress=codec, offload=offload)
        loss = h.float().square().mean()
        job.device.delay()
        loss.backward()
        job.device.synchronize()
        return gradients(layers.parameters())

    for codec in CODECS:
        wanted = step(codec, None, 0)
        for ring in rings:
            offload = gradckpt.Offload("cpu", ring=ring, min_bytes="1KiB")
            for late in range(3):
                error = difference(step(codec, offload, late), wanted)
                job.check(error == 0, f"{codec}, ring {ring}, delay {late}: gradients differ by {error:.3g}")


# ---- ways to train


class Way(NamedTuple):
    name: str
    active: Callable[[gpu_llama.Llama], contextlib.AbstractContextManager[Any]]
    lossy: bool = False


@contextlib.contextmanager
def layers_run(model: gpu_llama.Llama, run: Callable[..., Any]) -> Iterator[None]:
    for layer in model.layers:
        layer.forward = lambda *args, forward=layer.forward: run(forward, *args)
    try:
        yield
    finally:
        for layer in model.layers:
            del layer.forward


def plainly(model: gpu_llama.Llama) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def by_torch(model: gpu_llama.Llama) -> contextlib.AbstractContextManager[Any]:
    return layers_run(model, lambda forward, *args: torch_checkpoint(forward, *args, use_reentrant=False))


def by_transformers(model: gpu_llama.Llama) -> contextlib.AbstractContextManager[Any]:
    """What offload=True does there since 5.17."""

    def run(forward: Callable[..., Any], *args: Any) -> Any:
        with save_on_cpu(pin_memory=True, device_type=args[0].device.type):
            return torch_checkpoint(forward, *args, use_reentrant=False)

    return layers_run(model, run)


@contextlib.contextmanager
def by_trl(model: gpu_llama.Llama) -> Iterator[None]:
    """All saved tensors; nothing is recomputed."""
    try:
        module: Any = importlib.import_module("trl.models.activation_offloading")
    except ImportError as error:
        raise Skip(f"trl is not installed ({error})") from None
    context = module.OffloadActivations()
    forward = model.forward

    def within(ids: torch.Tensor) -> Any:
        with context:
            return forward(ids)

    model.forward = within  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward


def by_us(codec: str | None, **keywords: Any) -> Callable[[gpu_llama.Llama], contextlib.AbstractContextManager[Any]]:
    return lambda model: gradckpt.enable(model, codec, modules=gpu_llama.Layer, **keywords)


NONE = "none"
WAYS = (
    Way(NONE, plainly),
    Way("torch checkpoint", by_torch),
    Way("gradckpt int8", by_us("int8"), True),
    Way("gradckpt raw, offloaded", by_us(None, offload="cpu")),
    Way("gradckpt int8, offloaded", by_us("int8", offload="cpu"), True),
    Way("gradckpt saves int8, offloaded", by_us("int8", recompute=False, offload="cpu"), True),
    Way("checkpoint, offload of transformers", by_transformers),
    Way("TRL OffloadActivations", by_trl),
)


def train(job: Job, sizes: gpu_llama.Sizes, tokens: int) -> None:
    model = gpu_llama.build(sizes, job.device.kind)
    ids = gpu_llama.batch(tokens, job.device.kind)
    row = job.table(f"{sizes.title}, {tokens:,} tokens", ["way", "ms a step", "of none", "peak GiB", "error"])
    wanted: list[torch.Tensor] = []
    plain = 0.0

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(ids).loss.backward()

    for way in WAYS:
        with job.part(f"{sizes.title}: {way.name}"):
            with way.active(model):
                step()
                step()
                found = gradients(model.parameters())
                memory = job.device.memory_of(step)
                seconds = min(job.device.seconds(step) for _ in range(2 if job.small else 4))
            if way.name == NONE:
                wanted, plain = found, seconds
            error = difference(found, wanted)
            good = 0 < error < MOST if way.lossy else error <= 1e-2
            job.check(good, f"{sizes.title}, {way.name}: gradients differ by {error:.3g}")
            peak = memory.allocated / 2**30
            row(way.name, cell(seconds * 1e3, 1), cell(seconds / plain), cell(peak, 3), cell(error, 5))
            job.figures.setdefault(sizes.title, {})[way.name] = {"seconds": seconds, "peak": memory.allocated}


def run(job: Job) -> None:
    with job.part("link"):
        link(job)
    with job.part("behind delays"):
        behind_delays(job)
    layers, hidden, tokens = (2, 256, 128) if job.small else (24, 1024, 8192)
    with job.part(f"{layers} x {hidden}"):
        train(job, gpu_llama.Sizes(layers, hidden), tokens)
