"""A training set-up on paper: :class:`ConfigModel`."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradckpt._models.kinds import repeated_blocks
from gradckpt._planning.adapters import Lora, add_adapters, parse_lora
from gradckpt._planning.autocast import cuda_autocast
from gradckpt._planning.blocks import find_blocks
from gradckpt._planning.frozen_weights import FORMATS, QuantizedLinear, quantize
from gradckpt._planning.losses import LOSSES
from gradckpt._planning.model_source import open_source
from gradckpt._planning.shards import OPTIMIZERS, SHARDS, divide
from gradckpt._planning.words import MIXED, STORED, dtype_name, optimizer_name
from gradckpt._stats import format_bytes
from gradckpt._training_step import loss_of

__all__ = ["PREPARE", "ConfigModel"]

#: Who prepares a quantized model for training: PEFT, by casting what is not quantized, or none.
PREPARE = ("peft", "none")


class ConfigModel:
    """A model without weights, and its training step, which trace_step runs on paper.

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
        optimizer = _known("optimizer", optimizer_name(optimizer), OPTIMIZERS)
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
        self.about = [self._headline(dtype), *built.about]
        if weights is not None:
            self.about += self._quantize(weights, self.autocast or stored, prepare or "peft")
        if adapters is not None:
            self.about.append(self._adapt(adapters))
        held = divide(self.model, optimizer, gpus, shard, stored if gathers else None)
        self.fixed, self.extra, self.gradient_scale = held.fixed, held.extra, held.gradient_scale
        self.about += held.about
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

    def _headline(self, dtype: str) -> str:
        n = sum(p.numel() for p in self.model.parameters())
        return f"{type(self.model).__name__} with {_count(n)} parameters, {_DTYPE_SENTENCES[dtype]}."

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
