"""Formats that bench_candidates.py compares with gradckpt's codecs, in plain torch.

``Deltas`` and ``Cut`` are candidates for a codec; ``Velora``, ``LowRank`` and ``RankOne`` are what
others keep of the input of a LoRA adapter. A format is called with a layer's number and a tensor,
returns the tensor as a backward would see it, and counts the bytes that it would keep.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import gradckpt

BLOCK = 16  # tokens of a Hadamard transform
#: Above this share of the value's norm a delta of 4 bits has a larger error than int6.
FAR = 0.25


class Format:
    """A round trip, and the bytes and values that went through it."""

    shared = True  # several linear layers with one input keep it once

    def __init__(self) -> None:
        self.nbytes = self.values = 0

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.values

    def count(self, nbytes: int, x: Tensor) -> None:
        self.nbytes += nbytes
        self.values += x.numel()

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        raise NotImplementedError


class Exact(Format):
    def __call__(self, layer: int, x: Tensor) -> Tensor:
        self.count(x.nbytes, x)
        return x


class Codec(Format):
    """One of gradckpt's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        payload = gradckpt.codecs.encode(x, self.name)
        self.count(payload.nbytes, x)
        return payload.decode()


# ---- deltas between layers


class Deltas(Format):
    """int4 of the difference to the decoded input of the layer before, with keys in int8.

    Called in forward order. Keys are the first two layers of a shape and every eighth one; with
    ``far``, the first layer of a shape and all whose difference is above that share of the value's
    norm. A difference larger than the value is not taken: int4 of the value itself. The control,
    ``deltas=False``, takes none.
    """

    def __init__(self, far: float | None = None, every: int = 8, deltas: bool = True) -> None:
        super().__init__()
        self.far, self.every, self.most = far, every, 1.0 if deltas else 0.0
        self.kept: list[tuple[str, gradckpt.codecs.Payload]] = []  # of the last batch

    def form(self, place: int, share: float) -> str:
        """Return the form of the layer at this place of its shape; the difference's share of the
        norm."""
        if place == 0 or (place % self.every == 0 or place == 1 if self.far is None else share > self.far):
            return "key"
        return "delta" if share <= self.most else "direct"

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        if layer == 0:
            self.kept = []
        if layer == 0 or x.shape != self.decoded.shape:
            self.place, self.decoded = 0, torch.zeros_like(x, dtype=torch.float32)
        value = x.float()
        difference = value - self.decoded
        form = self.form(self.place, float(difference.norm() / value.norm()))
        payload = gradckpt.codecs.encode(difference if form == "delta" else x, "int8" if form == "key" else "int4")
        self.kept.append((form, payload))
        self.count(payload.nbytes, x)
        self.place += 1
        self.decoded = payload.decode().float() + (self.decoded if form == "delta" else 0)
        return self.decoded.to(x.dtype)

    def restored(self, layer: int) -> Tensor:
        """Return a layer of the last batch, in float32, from its payload and those it needs."""
        form, payload = self.kept[layer]
        value = payload.decode().float()
        return value + self.restored(layer - 1) if form == "delta" else value


# ---- HOT's cut


@functools.cache
def hadamard() -> Tensor:
    """Return the orthonormal transform of 16; row n has n changes of sign."""
    matrix = torch.ones(1, 1)
    while len(matrix) < BLOCK:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    changes = (matrix[:, 1:] != matrix[:, :-1]).sum(1)
    return matrix[changes.argsort()] / BLOCK**0.5


class Cut(Format):
    """Of blocks of 16 tokens the Hadamard coefficients of lowest sequency, in int8.

    As HOT keeps the inputs of linear layers (arXiv 2503.21261). Tokens are all of the batch, in
    order; of images in channels-first form, their pixels. The last block is filled with zeros.
    """

    def __init__(self, most: int = 8, codec: str = "int8") -> None:
        super().__init__()
        self.most, self.codec = most, codec

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        last = x.movedim(1, -1) if x.dim() == 4 else x
        rows = last.reshape(-1, last.shape[-1]).float()
        blocks = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK)).unflatten(0, (-1, BLOCK))
        lowest = hadamard()[: self.most]
        payload = gradckpt.codecs.encode(lowest @ blocks, self.codec)
        self.count(payload.nbytes, x)
        restored = (lowest.T @ payload.decode()).flatten(0, 1)[: len(rows)].view(last.shape)
        return (restored.movedim(-1, 1) if x.dim() == 4 else restored).to(x.dtype)


# ---- what others keep of a LoRA adapter's input


class Velora(Format):
    """One number for each group of features: the product with the mean group of the batch, as in
    PEFT 0.21 (``init_type="batch_average"``, ``scale=1.0``)."""

    shared = False

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        width = x.shape[-1]
        size = -(-width // self.groups)
        parts = F.pad(x, (0, self.groups * size - width)).reshape(-1, self.groups, size)
        direction = F.normalize(parts.mean((0, 1)), dim=0)
        kept = parts @ direction
        self.count(kept.nbytes + direction.nbytes, x)
        return (kept[..., None] * direction).flatten(1)[:, :width].view(x.shape)


class LowRank(Format):
    """A low-rank factorisation of the batch's tokens, as LoRAct has it (arXiv 2509.23472): an
    orthonormal basis from a sample of features, without further iterations by default."""

    def __init__(self, share: float = 1 / 8, iterations: int = 0) -> None:
        super().__init__()
        self.share, self.iterations = share, iterations
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        sample = torch.randperm(rows.shape[1], generator=self.generator)[: int(rows.shape[1] * self.share)]
        basis = torch.linalg.qr(rows.T @ rows[:, sample]).Q
        for _ in range(self.iterations):
            basis = torch.linalg.qr(rows.T @ (rows @ basis)).Q
        kept = rows @ basis
        self.count(kept.nbytes + basis.nbytes, x)
        return (kept @ basis.T).view(x.shape)


class RankOne(Format):
    """The nearest matrix of rank 1, by singular values: no format of rank 1 is nearer."""

    def __call__(self, layer: int, x: Tensor) -> Tensor:
        u, s, v = torch.linalg.svd(x.reshape(-1, x.shape[-1]), full_matrices=False)
        self.count(u[:, 0].numel() * x.element_size() + v[0].numel() * x.element_size(), x)
        return (s[0] * u[:, :1] @ v[:1]).view(x.shape)


# ---- runs of a model


@contextlib.contextmanager
def replayed() -> Iterator[list[Tensor]]:
    """Within, what ``torch.topk`` chose without gradients is chosen again by the recomputes, last
    first."""
    plain, kept = torch.topk, []

    def topk(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            found = plain(x, *args, **kwargs)
            kept.append(found.indices)
            return found
        indices = kept.pop()
        return torch.return_types.topk((x.gather(-1, indices), indices))

    torch.topk = topk
    try:
        yield kept
    finally:
        torch.topk = plain


class FromRestored(torch.autograd.Function):
    """A linear layer whose weight has its gradient from the restored input."""

    @staticmethod
    def forward(ctx, x, weight, bias, restored):
        ctx.save_for_backward(weight, restored)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        weight, restored = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return gradient @ weight, rows.T @ restored.flatten(0, -2), of_bias, None


class LinearInputs(TorchFunctionMode):
    """Every linear layer (of those weights alone) keeps a round trip of its input."""

    def __init__(self, form: Format, weights: set[nn.Parameter] | None = None) -> None:
        super().__init__()
        self.form, self.only = form, weights
        self.weights: set[nn.Parameter] = set()
        self.seen: dict[int, tuple[Tensor, Tensor]] = {}  # the input stays alive, and so its id
        self.off, self.norm = 0.0, 0.0

    def restored(self, x: Tensor) -> Tensor:
        new = id(x) not in self.seen
        if new or not self.form.shared:
            self.seen[id(x)] = x, self.form(0, x.detach())
        found = self.seen[id(x)][1]
        if new:
            self.off += float((found - x.detach()).double().square().sum())
            self.norm += float(x.detach().double().square().sum())
        return found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
        elif func is torch.addmm and isinstance(args[2], nn.Parameter):  # GPT-2's
            bias, x, weight = args[0], args[1], args[2].T
        else:
            return func(*args, **(kwargs or {}))
        of = weight if weight._base is None else weight._base
        if not of.requires_grad or (self.only is not None and of not in self.only):
            return func(*args, **(kwargs or {}))
        self.weights.add(of)
        return FromRestored.apply(x, weight, bias, self.restored(x))

    @property
    def error(self) -> float:
        """Of the inputs."""
        return math.sqrt(self.off / self.norm)
