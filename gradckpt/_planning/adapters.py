"""LoRA adapters with the operators of PEFT, in its order: :func:`add_adapters`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradckpt._planning.frozen_weights import QuantizedLinear, is_linear, linear_sizes
from gradckpt._planning.words import STORED, dtype_name

__all__ = ["Lora", "add_adapters", "parse_lora"]


_EXAMPLE = "r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj,dtype=bf16"


@dataclasses.dataclass(frozen=True)
class Lora:
    """A LoRA configuration with PEFT's defaults; without targets, all linear layers have one.
    ``dtype``: of the adapters; PEFT makes them float32, TRL's trainers bfloat16 where the rest is
    quantized.
    """

    r: int
    alpha: float = 8
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32


def parse_lora(text: str) -> Lora:
    """Return the configuration that a text means, as
    ``"r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj,dtype=bf16"``.

    Raises:
        ValueError: An entry is unknown or has no such value, or ``r`` is missing.
    """
    read: dict[str, Callable[[str], Any]] = {
        "r": int,
        "alpha": float,
        "dropout": float,
        "targets": lambda names: tuple(names.split("+")),
        "dtype": lambda name: STORED[dtype_name(name)],
    }
    given: dict[str, Any] = {}
    for entry in text.split(","):
        key, _, value = (part.strip() for part in entry.partition("="))
        if key in given:
            raise ValueError(f"gradckpt: LoRA setting {key} is given twice; write {_EXAMPLE}")
        if key not in read:
            raise ValueError(f"gradckpt: unknown LoRA setting {entry.strip()!r}; write {_EXAMPLE}")
        try:
            given[key] = read[key](value)
        except (ValueError, KeyError):
            what = "no dtype" if key == "dtype" else "not a number"
            raise ValueError(f"gradckpt: LoRA setting {key} is {what}: {value!r}; write {_EXAMPLE}") from None
    if given.get("r", 0) < 1:
        raise ValueError(f"gradckpt: a LoRA rank of {given.get('r')}; write {_EXAMPLE}")
    if not 0 <= given.get("dropout", 0) < 1:
        raise ValueError(f"gradckpt: a LoRA dropout of {given['dropout']}; give a probability below 1")
    return Lora(**given)


class _Adapted(nn.Module):
    """A frozen linear layer with an adapter."""

    def __init__(self, base_layer: Any, lora: Lora) -> None:
        super().__init__()
        in_features, out_features = linear_sizes(base_layer)
        self.base_layer = base_layer
        self.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        self.lora_A = nn.Linear(in_features, lora.r, bias=False, dtype=lora.dtype)
        self.lora_B = nn.Linear(lora.r, out_features, bias=False, dtype=lora.dtype)
        self.scaling = lora.alpha / lora.r

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight, which models ask for its dtype; PEFT's layers have it, too."""
        weight: torch.Tensor = self.base_layer.weight
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """The frozen bias."""
        bias: torch.Tensor | None = self.base_layer.bias
        return bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        if not isinstance(result, torch.Tensor):
            name = type(self.base_layer).__name__
            raise ValueError(
                f"gradckpt: {name} returns several values, so PEFT cannot adapt it; name the layers to adapt, as in "
                "--lora r=16,targets=q_proj+v_proj"
            )
        dtype = result.dtype
        if not isinstance(self.base_layer, QuantizedLinear):  # peft/tuners/lora/layer.py
            result = result + self._delta(x.to(self.lora_A.weight.dtype))
            return result.to(dtype)
        if self.base_layer.compute_dtype is not None:  # peft/tuners/lora/bnb.py, its layer of 4 bits
            result = result.clone()
        if torch.is_autocast_enabled("cpu"):
            return result + self._delta(x)
        return result + self._delta(x.to(self.lora_A.weight.dtype)).to(dtype)

    def _delta(self, x: torch.Tensor) -> torch.Tensor:
        delta: torch.Tensor = self.lora_B(self.lora_A(self.lora_dropout(x))) * self.scaling
        return delta


def add_adapters(model: nn.Module, lora: Lora, head: nn.Module | None, of_tokens: bool) -> int:
    """Freeze a model and add adapters to its linear layers, by default to all but the output head;
    return the number of layers.

    Raises:
        ValueError: A target matches no linear layer.
    """
    linear = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) or isinstance(module, QuantizedLinear)
    }
    chosen = {name: module for name, module in linear.items() if module is not head and not lora.targets}
    for target in lora.targets:
        matching = {name: linear[name] for name in linear if name == target or name.endswith(f".{target}")}
        if not matching:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ValueError(f"gradckpt: no linear layer is named {target!r}; choose one of: {known}")
        chosen |= matching
    model.requires_grad_(False)
    for name, module in chosen.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _Adapted(module, lora))
    if of_tokens and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()  # type: ignore[operator]  # as PEFT does under checkpointing
    return len(chosen)
