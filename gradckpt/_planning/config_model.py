"""A simulated training set-up: :class:`ConfigModel`; and its LoRA adapters, with the operators of
PEFT, in its order: :func:`add_adapters`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from gradckpt._models.kinds import repeated_blocks
from gradckpt._planning.kernels import cuda_autocast
from gradckpt._planning.libraries import FORMATS, LOSSES, QuantizedLinear, is_linear, linear_sizes, quantize
from gradckpt._planning.model_source import OPTIMIZERS, SHARDS, divide, open_source
from gradckpt._planning.options import find_blocks
from gradckpt._stats import format_bytes
from gradckpt._training_step import loss_of

#: Name -> dtype of the parameters.
STORED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

#: Float32 parameters under autocast, and to which dtype.
MIXED = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}

#: torch's words.
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}

#: transformers' words, of TrainingArguments.optim, and torch's.
_OPTIMIZERS = {
    "adam": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "lion_32bit": "lion",
    "lion_8bit": "lion-8bit",
    "paged_lion_8bit": "lion-8bit",
    "paged_lion_32bit": "lion",
}


def dtype_name(text: str) -> str:
    """Return our name of a dtype or a mixture; one that is not known as it is."""
    return _DTYPES.get(text.removeprefix("torch."), text)


#: Who prepares a quantized model for training: PEFT, by casting what is not quantized, or none.
PREPARE = ("peft", "none")


class ConfigModel:
    """A model without weights, and its training step, which trace_step simulates.

    ``source``: a path of a config.json or of its folder, a hub id, or ``package.module:function``,
    which returns ``(model, batch)``. ``fixed``: bytes of each device during the whole step;
    ``extra``: bytes that sharding adds while the step runs; ``gradient_scale``: the part of a
    gradient's bytes that stays on the device. ``takes``: ``"tokens"``, ``"images"`` or ``"batch"``,
    the unit that the step can be made longer in; ``positions``: the longest sequence, or None.
    ``about``: the assumptions, in sentences. ``accumulate``: gradients exist when the step begins.
    ``flags``: the options of the command that are not at their defaults, among those that need less
    memory.

    Raises:
        ValueError: A value is unknown, or excludes another one.
    """

    def __init__(
        self,
        source: str,
        *,
        dtype: str = "bf16",
        lora: str | None = None,
        weights: str | None = None,
        prepare: str | None = None,
        optimizer: str = "adamw",
        gpus: int = 1,
        shard: str | None = None,
        loss: str = "model",
        accumulate: bool = False,
    ) -> None:
        dtype = _known("dtype", dtype_name(dtype), (*STORED, *MIXED))
        stored, self.autocast = STORED.get(dtype, torch.float32), MIXED.get(dtype)
        optimizer = _known("optimizer", _OPTIMIZERS.get(optimizer.lower(), optimizer), OPTIMIZERS)
        _known("loss", loss, ("model", *LOSSES))
        adapters = None if lora is None else parse_lora(lora)
        if adapters is not None and stored.itemsize == 2:
            self.autocast = stored  # PEFT keeps adapters in float32
        if weights is not None:
            _known("weights", weights, FORMATS)
            if adapters is None:
                raise ValueError(f"gradckpt: weights in {weights} cannot be trained; add --lora, as in --lora r=16")
        if prepare is not None:
            _known("prepare", prepare, PREPARE)
            if weights is None:
                raise ValueError("gradckpt: --prepare is for quantized weights; add them, as in --weights nf4")
        if shard is not None:
            _known("shard", shard, SHARDS)
        if gpus > 1 and shard is None:
            raise ValueError(
                f"gradckpt: {gpus} devices, and nothing says what they share; add --shard with one of: "
                f"{', '.join(SHARDS)}"
            )
        if gpus < 2 and shard is not None:
            raise ValueError(f"gradckpt: {shard} needs more than one device; add their number, as in --gpus 8")

        small = {"--lora": adapters, "--weights": weights, "--shard": shard, "--loss": loss != "model"}
        self.flags = [flag for flag, given in {**small, "--optimizer": optimizer != "adamw"}.items() if given]
        # FSDP gathers weights in the dtype of autocast, so that nothing is left to cast.
        gathers = self.autocast is not None and shard in ("fsdp", "zero3")
        built = open_source(source, (self.autocast or stored) if gathers else stored)
        self.model, self.takes, self.positions = built.model, built.takes, built.positions
        self._arguments, self._head = built.arguments, built.head
        if loss != "model" and not self._is_causal():
            name = type(self.model).__name__
            raise ValueError(f"gradckpt: {name} has no causal language model's head; leave out --loss {loss}")
        size = _count(sum(p.numel() for p in self.model.parameters()))
        self.about = [f"{type(self.model).__name__} with {size} parameters, {_DTYPE_SENTENCES[dtype]}.", *built.about]
        if weights is not None:
            self.about += self._quantize(weights, self.autocast or stored, prepare or "peft")
        if adapters is not None:
            self.about.append(self._adapt(adapters))
        held = divide(self.model, optimizer, gpus, shard, stored if gathers else None)
        self.fixed, self.extra, self.gradient_scale, about = held
        self.about += about
        if accumulate:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            for p in trained:
                p.grad = torch.empty_like(p)
            self.fixed["gradients"] = round(self.gradient_scale * sum(p.nbytes for p in trained))
        attention = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        if attention == "eager" and self.takes == "tokens":
            self.about.append("Attention is transformers' eager one, its choice here: weights of all pairs of tokens.")
        states = f"Optimizer {optimizer}: {format_bytes(self.fixed['optimizer states'])} of states"
        fused = ", and a fused step, the Trainer's default, which needs no other memory" if optimizer == "adamw" else ""
        self.about.append(f"{states}{fused}.")
        if loss != "model":
            self._loss = LOSSES[loss].of
            self.model.forward = self._without_logits  # as Liger and TRL exchange it
            self.about.append(LOSSES[loss].about)
        elif self._is_causal():
            self.about.append("Loss as transformers computes it, which holds the logits of all tokens (--loss model).")

    @property
    def computes_in_16_bits(self) -> bool:
        """Whether matrix products run in 16 bits."""
        return self.autocast is not None or next(self.model.parameters()).element_size() == 2

    def run(self, tokens: int | None, batch: int = 1) -> None:
        """Run forward and backward, for trace_step.

        Raises:
            ValueError: As :meth:`loss`.
        """
        with cuda_autocast() if self.autocast else contextlib.nullcontext():
            self.loss(tokens, batch).backward()

    def loss(self, tokens: int | None, batch: int = 1) -> torch.Tensor:
        """Return the loss of one step.

        Raises:
            ValueError: The model takes no tokens, more tokens are given than it has positions, a
                function gives the batch, or the model returns no loss.
        """
        self._check(tokens, batch)
        args, kwargs = self._arguments(tokens or 0, batch)
        with torch.autocast("cpu", self.autocast) if self.autocast else contextlib.nullcontext():
            output = self.model(*args, **kwargs)
        loss = loss_of(output)
        if loss is None:
            name = type(self.model).__name__
            raise ValueError(
                f"gradckpt: the forward of {name} returned no loss; return a scalar or an object with .loss"
            )
        return loss

    def _check(self, tokens: int | None, batch: int) -> None:
        if self.takes == "tokens":
            if not tokens or tokens < 1:
                raise ValueError("gradckpt: the length of a sequence is missing; add --tokens, as in --tokens 4096")
            if self.positions is not None and tokens > self.positions:
                raise ValueError(
                    f"gradckpt: {tokens:,} tokens, and the model has {self.positions:,} positions; give fewer"
                )
        elif tokens is not None:
            follows = "from the image size" if self.takes == "images" else "from the function's own batch"
            raise ValueError(f"gradckpt: this model's tokens follow {follows}; leave out the number of tokens")
        if self.takes == "batch" and batch != 1:
            raise ValueError("gradckpt: the function gives the batch itself; leave out its size")

    def _is_causal(self) -> bool:
        if self._head is None or not hasattr(self.model, "base_model"):
            return False
        from transformers.models.auto import modeling_auto as auto

        return type(self.model).__name__ in {
            *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
            *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
        }

    def _without_logits(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        base: Any = self.model.base_model
        assert self._head is not None
        return self._loss(base(input_ids=input_ids)[0], self._head, labels)

    @functools.cached_property
    def modules(self) -> list[type[nn.Module]] | None:
        """The classes of the blocks to checkpoint, None: those that enable() chooses.

        Raises:
            ValueError: There are none.
        """
        try:
            find_blocks(self.model)
        except ValueError:
            kinds = [each.kind for each in repeated_blocks(self.model)]
        else:
            return None
        name = type(self.model).__name__
        if not kinds:
            raise ValueError(
                f"gradckpt: {name} has no blocks that repeat; call gradckpt.plan(model, batch, modules=...) in your "
                "script"
            )
        names = ", ".join(kind.__name__ for kind in kinds)
        self.about.append(f"transformers cannot checkpoint {name}: the lines take modules=({names},), too.")
        return kinds

    def _quantize(self, bits: str, compute_dtype: torch.dtype, prepare: str) -> list[str]:
        head = self._head if self._head is not None else list(self.model.modules())[-1]
        with torch.device("meta"):
            n = quantize(self.model, bits, compute_dtype, head)
        left = [p for p in self.model.parameters() if p.dtype.itemsize == 2]
        if prepare == "peft":
            for p in left:
                p.data = p.data.float()
        rest = _count(sum(p.numel() for p in self.model.parameters()))
        text = [f"Frozen weights in {bits}, as bitsandbytes stores them{_STORED_SENTENCES[bits]}: {_count(n)}."]
        if prepare == "peft":
            text.append(
                f"The other {rest} in float32, as PEFT's prepare_model_for_kbit_training casts them; TRL does not "
                "(--prepare none)."
            )
        else:
            text.append(f"The other {rest} as they are loaded, as TRL leaves them (--prepare none).")
        if bits == "int8":
            text.append("Its layers hold their inputs where checkpointing does not free them; no outliers are counted.")
        return text

    def _adapt(self, lora: Lora) -> str:
        with torch.device("meta"):
            layers = add_adapters(self.model, lora, self._head, self.takes == "tokens")
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        where = "+".join(lora.targets) or "all linear layers but the output head"
        dtype = str(lora.dtype).removeprefix("torch.")
        text = f"LoRA of rank {lora.r} on {where} ({layers}): {_count(trained)} trainable parameters in {dtype}"
        if lora.dtype == torch.float32:
            text += ", PEFT's default"
            quantized = any(isinstance(module, QuantizedLinear) for module in self.model.modules())
            text += f" (TRL's here: --lora r={lora.r},dtype=bf16)" if quantized else ""
        return f"{text}; under autocast, as with the Trainer's bf16=True or fp16=True." if self.autocast else f"{text}."


_STORED_SENTENCES = {
    "nf4": " (without nested scales, its default: --weights nf4-nested has them)",
    "nf4-nested": " with bnb_4bit_use_double_quant=True",
    "int8": "",
}

_DTYPE_SENTENCES = {
    "bf16": "all in bfloat16",
    "fp16": "all in float16",
    "fp32": "all in float32",
    "bf16-mixed": "in float32 under autocast to bfloat16",
    "fp16-mixed": "in float32 under autocast to float16",
}


def _count(n: int) -> str:
    return f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.1f} M" if n >= 1e5 else f"{n:,}"


def _known(what: str, value: str, names: Iterable[str]) -> str:
    """Return a value that is one of the names.

    Raises:
        ValueError: It is not; the message lists them.
    """
    names = list(names)
    if value not in names:
        near = difflib.get_close_matches(str(value).lower(), names, 1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"gradckpt: unknown {what} {value!r}; {meant}choose one of: {', '.join(names)}")
    return value


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
