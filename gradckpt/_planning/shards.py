"""What one device holds during the whole step, and how it is divided among devices:
:func:`divide`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn

from gradckpt._models.kinds import repeated_blocks
from gradckpt._planning.frozen_weights import QuantizedLinear

__all__ = ["OPTIMIZERS", "SHARDS", "Held", "divide"]


def _eight_bits(parameter: torch.Tensor, states: int) -> int:
    """Return the bytes of bitsandbytes' states: small tensors stay in float32."""
    n = parameter.numel()
    return states * (4 * n if n < 4096 else n + 4 * -(-n // 256))


def _factored(parameter: torch.Tensor) -> int:
    """Return the bytes of Adafactor's states, float32 sums of rows and columns."""
    shape = parameter.shape
    if len(shape) < 2:
        return 4 * parameter.numel()
    return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1])


#: Optimizer -> bytes of the states of a parameter.
OPTIMIZERS: dict[str, Callable[[torch.Tensor], int]] = {
    "adamw": lambda parameter: 2 * parameter.nbytes,
    "adamw-8bit": lambda parameter: _eight_bits(parameter, 2),
    "sgd": lambda parameter: 0,
    "sgd-momentum": lambda parameter: parameter.nbytes,
    "lion": lambda parameter: parameter.nbytes,
    "lion-8bit": lambda parameter: _eight_bits(parameter, 1),
    "adafactor": _factored,
    "none": lambda parameter: 0,
}

SHARDS = ("ddp", "zero1", "zero2", "zero3", "fsdp")


class Held(NamedTuple):
    """Bytes of one device: ``fixed`` during the whole step, ``extra`` for the communication;
    ``gradient_scale``: the part of a gradient's bytes that stays on the device.
    """

    fixed: dict[str, int]
    extra: dict[str, int]
    gradient_scale: float
    about: list[str]


def divide(model: nn.Module, optimizer: str, gpus: int, shard: str | None, stored: torch.dtype | None) -> Held:
    """Return the bytes of one of ``gpus`` devices.

    ``stored``: the dtype in which sharded parameters and their gradients are kept if the modules
    compute with another one.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    packed = [b for m in model.modules() if isinstance(m, QuantizedLinear) for b in m.buffers(recurse=False)]
    others = sum(b.nbytes for b in model.buffers()) - sum(b.nbytes for b in packed)
    kept = [_like(p, stored) for p in parameters]
    weights = sum(x.nbytes for x in [*kept, *packed])
    states = sum(OPTIMIZERS[optimizer](_like(p, stored)) for p in trained)
    gradients = sum(p.nbytes for p in trained)
    scale = sum(_like(p, stored).nbytes for p in trained) / gradients if gradients else 1.0
    if shard is None:
        return Held({"weights": weights + others, "optimizer states": states}, {}, scale, [])
    fixed = {"weights": weights + others, "optimizer states": states}
    if shard == "ddp":
        about = [f"DDP on {gpus} devices: each has all weights, gradients and states, and buckets for the gradients."]
        return Held(fixed, {"gradient buckets": gradients}, scale, about)
    master = [p for p in trained if p.dtype.itemsize == 2] if shard.startswith("zero") else []
    if master:  # DeepSpeed steps in float32
        fixed["master weights"] = -(-sum(4 * p.numel() for p in master) // gpus)
        states = sum(OPTIMIZERS[optimizer](_like(p, torch.float32)) for p in trained)
    fixed["optimizer states"] = -(-states // gpus)
    about = [_SENTENCES[shard].format(gpus=gpus)]
    if master:
        about.append("DeepSpeed keeps float32 copies of the trainable 16-bit weights, in equal parts.")
    if shard == "zero1":
        return Held(fixed, {}, scale, about)
    scale /= gpus
    if shard == "zero2":
        return Held(fixed, {}, scale, about)
    if shard == "fsdp" and stored is None and any(p.dtype.itemsize == 2 for p in trained):
        about.append("Weights stay in 16 bits; with bf16=True, accelerate's FSDP has them in float32 (bf16-mixed).")
    fixed["weights"] = -(-weights // gpus) + others
    return Held(fixed, _gathered(model), scale, about)


_SENTENCES = {
    "zero1": "ZeRO-1 on {gpus} devices: each has all weights and gradients, and its part of the optimizer states.",
    "zero2": "ZeRO-2 on {gpus} devices: each has all weights, and its part of the gradients and optimizer states.",
    "zero3": "ZeRO-3 on {gpus} devices: two blocks and the modules outside of blocks are gathered on each.",
    "fsdp": "FSDP on {gpus} devices: two blocks and the modules outside of blocks are gathered on each.",
}


def _like(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return x if dtype is None else torch.empty(x.shape, dtype=dtype, device="meta")


def _gathered(model: nn.Module) -> dict[str, int]:
    """Return the bytes that are whole on each device under FSDP.

    Weights: the block in use, the block that comes next, and what lies outside of all blocks
    (embeddings, head), which FSDP does not shard again before the backward ends. Gradients: those
    of a block and their copy in the reduction under way, and those outside of blocks.
    """
    blocks = [model.get_submodule(name) for found in repeated_blocks(model) for name in found.names]
    inside = {p for block in blocks for p in block.parameters()}
    outside = [p for p in model.parameters() if p not in inside]
    largest = max((_whole(block) for block in blocks), default=0)
    gradients = max((_nbytes(p for p in block.parameters() if p.requires_grad) for block in blocks), default=0)
    return {
        "gathered blocks": 2 * largest,
        "gathered outside of blocks": _nbytes(outside),
        "whole gradients": 2 * gradients + _nbytes(p for p in outside if p.requires_grad),
    }


def _whole(block: nn.Module) -> int:
    packed = [b for m in block.modules() if isinstance(m, QuantizedLinear) for b in m.buffers(recurse=False)]
    return _nbytes([*block.parameters(), *packed])


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors)
