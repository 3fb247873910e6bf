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
    "Linear of a vector": (lambda: nn.Linear(D, D), [(D,)]),
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
    "MaxPool2d": (lambda: nn.MaxPool2d(2), [_IMAGE]),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), [_IMAGE]),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(3), [_IMAGE]),
    "Upsample": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), [_IMAGE]),
    "PixelShuffle": (lambda: nn.PixelShuffle(2), [_IMAGE]),
    "ReflectionPad2d": (lambda: nn.ReflectionPad2d(1), [_IMAGE]),
    "Unfold": (lambda: nn.Unfold(2), [_IMAGE]),
    "GELU": (nn.GELU, [_TOKENS]),
    "SiLU": (nn.SiLU, [_TOKENS]),
    "PReLU": (lambda: nn.PReLU(C), [_IMAGE]),
    "GLU": (nn.GLU, [_TOKENS]),
    "Softmax": (lambda: nn.Softmax(-1), [_TOKENS]),
    "Softmax2d": (nn.Softmax2d, [_IMAGE]),
    "LogSoftmax": (lambda: nn.LogSoftmax(-1), [_TOKENS]),
    "Dropout": (lambda: nn.Dropout(0.2), [_TOKENS]),
    "Dropout2d": (lambda: nn.Dropout2d(0.2), [_IMAGE]),
    "Flatten": (lambda: nn.Sequential(nn.Flatten(1), nn.Linear(T * D, 8)), [_TOKENS]),
    "CosineSimilarity": (lambda: nn.CosineSimilarity(-1), [_TOKENS, _TOKENS]),
    "PairwiseDistance": (nn.PairwiseDistance, [_TOKENS, _TOKENS]),
    "MSELoss": (nn.MSELoss, [_TOKENS, _TOKENS]),
    "HuberLoss": (nn.HuberLoss, [_TOKENS, _TOKENS]),
    "GRU": (lambda: nn.GRU(D, D, batch_first=True), [_TOKENS]),
    "LSTM": (lambda: nn.LSTM(D, D), [_TOKENS]),
    "RNNCell": (lambda: nn.RNNCell(D, D), [(D, D)]),
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
    "a scalar": (lambda x: x.sin() * x, [()]),
    "a scalar and a matrix": (lambda x, m: (x * m).tanh(), [(), (D, D)]),
    "matmul": (lambda a, b: (a @ b).tanh(), [_TOKENS, (B, D, D)]),
    "matmul of what is shared": (lambda a, b: (a @ b).tanh(), [_TOKENS, (D, D)]),
    "einsum": (lambda a, b: torch.einsum("btd,bsd->bts", a, b).tanh(), [_TOKENS, _TOKENS]),
    "baddbmm": (lambda a, b, c: torch.baddbmm(a, b, c).tanh(), [(B, D, D)] * 3),
    "addmm": (lambda a, b, c: torch.addmm(a, b, c).tanh(), [(D, D)] * 3),
    "attention": (F.scaled_dot_product_attention, [_HEADS] * 3),
    "attention, causal": (functools.partial(F.scaled_dot_product_attention, is_causal=True), [_HEADS] * 3),
    "attention by hand": (_scores, [_HEADS] * 3),
    "sums and norms": (lambda x: x * x.sum(-1, keepdim=True) + x.norm(dim=1, keepdim=True), [_TOKENS]),
    "cumulative": (lambda x: x.cumsum(1).tanh() * x.cumprod(-1), [_TOKENS]),
    "sorting": (lambda x: x.sort(-1)[0] * x.topk(D, -1)[0], [_TOKENS]),
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


def _longformer() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from transformers import LEDConfig
    from transformers.models.led.modeling_led import LEDEncoderLayer

    config = LEDConfig(d_model=D, encoder_attention_heads=2, encoder_ffn_dim=D, attention_window=[8], encoder_layers=1)
    mask = torch.zeros(B, T)
    kept = {
        "attention_mask": mask,
        "is_index_masked": mask < 0,
        "is_index_global_attn": mask > 0,
        "is_global_attn": False,
    }
    layer = LEDEncoderLayer(config, 0)
    return _Named(layer, kept), (_values(*_TOKENS),), {}


def _cross() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config = BertConfig(
        hidden_size=D, num_attention_heads=2, intermediate_size=D, is_decoder=True, add_cross_attention=True
    )
    config._attn_implementation = "sdpa"
    layer = BertLayer(config, layer_idx=0)
    return _Crossed(layer), (_values(*_TOKENS), _values(*_TOKENS)), {}


class _Named(nn.Module):
    def __init__(self, layer: nn.Module, kept: dict[str, Any]) -> None:
        super().__init__()
        self.layer, self.kept = layer, kept

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layer(x, **self.kept)
        return out[0] if isinstance(out, tuple) else out


class _Crossed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, encoded: torch.Tensor) -> Any:
        out = self.layer(x, encoder_hidden_states=encoded)
        return out[0] if isinstance(out, tuple) else out


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
    found += [Subject("a LED's layer", _longformer), Subject("a BERT decoder's layer", _cross)]
    return found


MODULES = _subjects()
