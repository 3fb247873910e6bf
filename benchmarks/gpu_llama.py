"""A Llama in plain torch, and one of the Hugging Face library, for the stages of gpu.py.

Decoder layers (RMSNorm, attention with rotary positions by torch's SDPA, SwiGLU) with random
weights; the loss in chunks of tokens, each computed again in the backward, so that logits do not
hide what layers need.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from gpu_job import Skip
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint

HEAD = 128
VOCABULARY = 1024
#: Tokens whose logits exist at once.
CHUNK = 2048


class Sizes(NamedTuple):
    layers: int
    hidden: int
    of_layers: int = 0  # of the model that this is a slice of

    @property
    def title(self) -> str:
        sliced = f" (of {self.of_layers})" if self.of_layers else ""
        return f"{self.layers}{sliced} x {self.hidden}"


class Output(NamedTuple):
    loss: torch.Tensor


def rotary(tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every position, [tokens, HEAD]."""
    frequency = 10000.0 ** (-torch.arange(0, HEAD, 2, device=device) / HEAD)
    angle = torch.arange(tokens, device=device)[:, None] * frequency
    angle = torch.cat([angle, angle], 1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], -1) * sin


class Layer(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = hidden * 8 // 3 // 128 * 128
        self.heads = hidden // HEAD
        self.attention_norm, self.mlp_norm = torch.nn.RMSNorm(hidden), torch.nn.RMSNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (torch.nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x.shape
        parts = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, HEAD)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        mixed = functional.scaled_dot_product_attention(rotated(q, cos, sin), rotated(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        y = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(torch.nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = torch.nn.Embedding(VOCABULARY, sizes.hidden)
        self.layers = torch.nn.ModuleList(Layer(sizes.hidden) for _ in range(sizes.layers))
        self.norm = torch.nn.RMSNorm(sizes.hidden)
        self.head = torch.nn.Linear(sizes.hidden, VOCABULARY, bias=False)

    def loss_of(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        return functional.cross_entropy(logits, labels.flatten(), reduction="sum")

    def forward(self, ids: torch.Tensor) -> Output:
        x = self.embedding(ids)
        cos, sin = rotary(ids.shape[1], ids.device, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        labels = ids.roll(-1, 1)
        parts = zip(x.split(CHUNK, 1), labels.split(CHUNK, 1), strict=True)
        losses = [torch_checkpoint(self.loss_of, part, wanted, use_reentrant=False) for part, wanted in parts]
        return Output(torch.stack(losses).sum() / ids.numel())


def build(sizes: Sizes, device: str, dtype: torch.dtype = torch.bfloat16) -> Llama:
    torch.manual_seed(0)
    with torch.device(device):
        model = Llama(sizes).to(dtype).train()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.02)
    return model


def batch(tokens: int, device: str, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (1, tokens), generator=generator).to(device)


def hugging_face(device: str, small: bool, layers: int = 4, **config: Any) -> Any:
    """LlamaForCausalLM, built here: nothing is downloaded."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise Skip(f"needs transformers ({error})") from None
    hidden = 64 if small else 512
    torch.manual_seed(0)
    made = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **{"attn_implementation": "eager", **config},
    )
    return LlamaForCausalLM(made).to(device=device, dtype=torch.bfloat16).train()
