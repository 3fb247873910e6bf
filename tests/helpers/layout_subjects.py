"""What the regions of layout_sweep.py compute: modules of torch.nn, alone and first in a region,
and blocks of models. Rows and width are equal where that can be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

B, T, D = 2, 16, 32  # B * T == D
C, H = 8, 8


class Subject(NamedTuple):
    """``make`` returns a function with its arguments, always the same after one seed. Floating ones
    that require grad are laid out."""

    name: str
    make: Callable[[], tuple[Any, tuple[Any, ...], dict[str, Any]]]
    compiles: bool = False


def _values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, requires_grad=True)


# ---- modules ----

_TOKENS, _IMAGE, _LINE, _VOLUME = (B, T, D), (B, C, H, H), (B, C, 16), (1, 4, 4, 6, 6)

#: How to make each, and shapes of its arguments.
_MADE: dict[str, tuple[Callable[[], nn.Module], list[tuple[int, ...]]]] = {
    "Linear": (lambda: nn.Linear(D, D), [_TOKENS]),
    "Linear without bias": (lambda: nn.Linear(D, D, bias=False), [_TOKENS]),
    "Linear of rows": (lambda: nn.Linear(D, D), [(D, D)]),
    "Linear of one row": (lambda: nn.Linear(D, D), [(1, D)]),
    "Bilinear": (lambda: nn.Bilinear(D, D, 8), [_TOKENS, _TOKENS]),
    "LayerNorm": (lambda: nn.LayerNorm(D), [_TOKENS]),
    "RMSNorm": (lambda: nn.RMSNorm(D), [_TOKENS]),
    "GroupNorm": (lambda: nn.GroupNorm(2, C), [_IMAGE]),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(C), [_LINE]),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(C), [_IMAGE]),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(C, affine=True), [_IMAGE]),
    "Conv1d": (lambda: nn.Conv1d(C, C, 3, padding=1), [_LINE]),
    "Conv2d": (lambda: nn.Conv2d(C, C, 3, padding=1), [_IMAGE]),
    "Conv2d of patches": (lambda: nn.Conv2d(C, D, 4, stride=4), [_IMAGE]),
    "Conv2d by channels": (lambda: nn.Conv2d(C, C, 3, groups=C), [_IMAGE]),
    "Conv3d": (lambda: nn.Conv3d(4, 4, 3, padding=1), [_VOLUME]),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(C, C, 3), [_IMAGE]),
    "PReLU": (lambda: nn.PReLU(C), [_IMAGE]),
    "Flatten": (lambda: nn.Sequential(nn.Flatten(1), nn.Linear(T * D, 8)), [_TOKENS]),
    "GRU": (lambda: nn.GRU(D, D, batch_first=True), [_TOKENS]),
    "LSTM": (lambda: nn.LSTM(D, D), [_TOKENS]),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(D, 4, batch_first=True), [_TOKENS] * 3),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(D, 4, D, 0.1, batch_first=True), [_TOKENS]),
    "TransformerDecoderLayer": (lambda: nn.TransformerDecoderLayer(D, 4, D, 0.1), [_TOKENS, _TOKENS]),
}


class _First(nn.Module):
    """A module, and what reads its result."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        out = self.module(*args)
        out = out[0] if isinstance(out, tuple) else out
        read: torch.Tensor = out.tanh() * out
        return read


# ---- functions ----


def _scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-1) @ v


_HEADS = (B, 4, 8, 8)
_FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "a scalar and a matrix": (lambda x, m: (x * m).tanh(), [(), (D, D)]),
    "matmul of what is shared": (lambda a, b: (a @ b).tanh(), [_TOKENS, (D, D)]),
    "addmm": (lambda a, b, c: torch.addmm(a, b, c).tanh(), [(D, D)] * 3),
    "attention": (F.scaled_dot_product_attention, [_HEADS] * 3),
    "attention by hand": (_scores, [_HEADS] * 3),
    "reshaping": (lambda x: x.reshape(-1, D).sin() @ x.flatten(0, -2).T, [_TOKENS]),
    "gathering": (lambda x: x[:, [0, 2, 1]].sin() * x[:, :3], [_TOKENS]),
    "in place": (lambda x: x.sin().mul_(x).add_(x.exp()), [_TOKENS]),
}

# ---- blocks of models ----


class MixerBlock(nn.Module):
    """Of an MLP-Mixer: Linear over the tokens of a transposed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(T, D), nn.GELU(), nn.Linear(D, T))
        self.channels = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = x + self.channels(self.norms[1](x))
        return out


class SwinBlock(nn.Module):
    """Windows of an image that is rolled, attention in each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.norm(image.permute(0, 2, 3, 1)).roll((2, 2), (1, 2))
        windows = x.reshape(B, 2, H // 2, 2, H // 2, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, H * H // 4, C)
        q, k, v = self.qkv(windows).reshape(len(windows), -1, 3, 2, C // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: torch.Tensor = image + self.out(y).reshape(image.permute(0, 2, 3, 1).shape).permute(0, 3, 1, 2)
        return out


class Projected(nn.Module):
    """Attention whose region takes q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(F.scaled_dot_product_attention(self.q(q), k, v))
        return out


# ---- all ----


def _made(build: Callable[[], Any], shapes: list[tuple[int, ...]]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return build(), tuple(_values(*shape) for shape in shapes), {}


def _subjects() -> list[Subject]:
    found = []
    for name, (build, shapes) in _MADE.items():
        first = functools.partial(lambda build: _First(build()), build)
        found += [
            Subject(name, functools.partial(_made, build, shapes), compiles=name in ("Linear", "Conv2d")),
            Subject(f"{name}, first", functools.partial(_made, first, shapes)),
        ]
    for name, (function, shapes) in _FUNCTIONS.items():
        found.append(Subject(name, functools.partial(_made, functools.partial(lambda f: f, function), shapes)))
    blocks: dict[str, tuple[Callable[[], Any], list[tuple[int, ...]]]] = {
        "an MLP-Mixer's block": (MixerBlock, [_TOKENS]),
        "a Swin's block": (SwinBlock, [_IMAGE]),
        "projected attention": (Projected, [_TOKENS] * 3),
    }
    for name, (build, shapes) in blocks.items():
        found.append(Subject(name, functools.partial(_made, build, shapes), compiles=True))
    return found


MODULES = _subjects()
