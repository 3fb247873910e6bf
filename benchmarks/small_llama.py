"""A Llama of the Hugging Face library with random weights, and what its forward leaves to the
backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import machine
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gradckpt

VOCABULARY = 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    for name, value in (("layers", 4), ("hidden", 256), ("tokens", 512), ("repeat", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    machine.add_quick(parser)


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    options = parser.parse_args(argv)
    if options.quick:
        options.layers, options.hidden, options.tokens, options.repeat = 1, 128, 128, 2
    return options


def inputs_bytes(options: argparse.Namespace, codec: str | None = None) -> float:
    """Of the inputs of all layers, by arithmetic."""
    bits, *_, of_a_row = gradckpt.codecs.info(codec)["sizes"]["float32"] if codec else (32, 0)
    of_rows = of_a_row * options.tokens * (options.hidden >= 64 and options.hidden % 128 != 0)
    return float(options.layers * (options.tokens * options.hidden * bits / 8 + of_rows))


def build(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,  # or transformers logs while it is traced, which breaks the graph
    )
    return LlamaForCausalLM(config)


def kept(model: torch.nn.Module, forward: Callable[[], Any]) -> list[torch.Tensor]:
    """Tensors of the storages that torch's hooks see in a forward, each once, weights apart."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage()._cdata not in weights:
            seen[x.untyped_storage()._cdata] = x.detach()
        return x.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return list(seen.values())


def nbytes(tensors: list[torch.Tensor]) -> int:
    return sum(x.untyped_storage().nbytes() for x in tensors)
