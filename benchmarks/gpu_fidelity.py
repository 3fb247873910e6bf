"""What the layers of a Llama hand on, and what each codec keeps of it.

rho: the difference between a layer's output and its input, relative to the input; small where
neighbouring layers' inputs are alike. SQNR: the power of a layer's input over that of a codec's
error, in dB; more is better. The weights are trained for a few steps on tokens with four followers
each, so that the layers are not as they were drawn.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import gpu_llama
import torch
from gpu_job import Job, cell

import gradckpt

#: dB that a format has at least on activations without outliers.
LEAST = {"fp8_e4m3": 25.0, "fp8_e5m2": 20.0, "int8": 35.0, "int8_plain": 25.0, "int6": 22.0, "int4": 10.0}
EXACT = ("raw", "lossless")
FOLLOWERS = 4


def text(tokens: int, sequences: int, device: str) -> torch.Tensor:
    """Sequences in which each token has four followers."""
    generator = torch.Generator().manual_seed(2)
    table = torch.randint(0, gpu_llama.VOCABULARY, (gpu_llama.VOCABULARY, FOLLOWERS), generator=generator)
    choice = torch.randint(0, FOLLOWERS, (sequences, tokens), generator=generator)
    found = torch.zeros(sequences, tokens, dtype=torch.long)
    for position in range(1, tokens):
        found[:, position] = table[found[:, position - 1], choice[:, position]]
    return found.to(device)


def train(job: Job, model: gpu_llama.Llama, ids: torch.Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    with gradckpt.enable(model, "int8", modules=gpu_llama.Layer):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    first, last = losses[0].item(), losses[-1].item()
    job.note(f"trained {steps} steps with int8: the loss went from {first:.3f} to {last:.3f}")
    job.check(math.isfinite(last), "the loss of the training is not finite")
    job.check(last < first, f"the training with int8 did not lower the loss: {first:.3f}, then {last:.3f}")


def inputs_of(model: gpu_llama.Llama, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of each layer, and the output of the last."""
    found: list[torch.Tensor] = []

    def keep(module: Any, args: Any, output: torch.Tensor) -> None:
        if not found:
            found.append(args[0].detach())
        found.append(output.detach())

    hooks = [layer.register_forward_hook(keep) for layer in model.layers]
    try:
        with torch.no_grad():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def decibels(x: torch.Tensor, restored: torch.Tensor) -> float:
    noise = (restored.double() - x.double()).square().sum().item()
    return 10 * math.log10(x.double().square().sum().item() / noise) if noise else math.inf


def run(job: Job) -> None:
    sizes = gpu_llama.Sizes(3, 128) if job.small else gpu_llama.Sizes(12, 2048)
    tokens, sequences, steps = (128, 1, 4) if job.small else (2048, 2, 40)
    model = gpu_llama.build(sizes, job.device.kind)
    ids = text(tokens, sequences, job.device.kind)
    with job.part("training"):
        train(job, model, ids, steps)
    states = inputs_of(model, ids)
    job.check(len(states) == sizes.layers + 1, f"{len(states)} states of {sizes.layers} layers")
    codecs = list(LEAST)
    row = job.table(
        f"{sizes.title}, {tokens:,} tokens: rho, and SQNR in dB of each layer's input",
        ["layer", "rho", *codecs, "lossless, bits a value"],
    )
    for number, (x, y) in enumerate(itertools.pairwise(states)):
        with job.part(f"layer {number}"):
            rho = (y.float() - x.float()).norm().item() / x.float().norm().item()
            job.check(math.isfinite(rho) and rho > 0, f"layer {number}: rho is {rho}")
            found = []
            for codec in codecs:
                sqnr = decibels(x, gradckpt.codecs.encode(x, codec).decode())
                good = LEAST[codec] <= sqnr < math.inf
                job.check(good, f"layer {number}, {codec}: {sqnr:.1f} dB, expected {LEAST[codec]:g} or more")
                found.append(cell(sqnr, 1))
            bits = 0.0
            for codec in EXACT:
                payload = gradckpt.codecs.encode(x, codec)
                job.check(torch.equal(payload.decode(), x), f"layer {number}, {codec}: not what was encoded")
                bits = 8 * payload.nbytes / x.numel()
            row(number, cell(rho, 3), *found, cell(bits))
