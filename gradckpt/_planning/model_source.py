"""A model without weights, and batches for it, from a config or from the user's function:
:func:`open_source`; and what one device holds during the whole step, and how that is divided among
devices: :func:`divide`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradckpt._engine import torch_private as private
from gradckpt._models.kinds import repeated_blocks
from gradckpt._planning.libraries import QuantizedLinear

#: Positional and keyword arguments of the model's forward.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Source(NamedTuple):
    """A model, and the arguments of its forward for a number of tokens and samples.

    ``takes``: the units of a batch, ``"tokens"``, ``"images"`` or, if the user gives the batch,
    ``"batch"``. ``positions``: the longest sequence, if the model has a table of positions.
    ``head``: the module that makes logits of tokens, if there is one.
    """

    model: nn.Module
    arguments: Callable[[int, int], Arguments]
    takes: str
    positions: int | None
    head: nn.Module | None
    about: list[str]


def open_source(source: str, dtype: torch.dtype) -> Source:
    """Build the model that a path, a hub id or ``package.module:function`` names, with parameters
    of a dtype.

    Raises:
        ValueError: There is no such model, or its config lacks what is needed.
    """
    if ":" in source and not os.path.exists(source):
        return _from_function(source, dtype)
    return _from_config(_read(source), dtype)


class _RealNumbers(TorchFunctionMode):
    """Compute the rates of stochastic depth, which constructors read as numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.linspace and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def _on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors without data, and parameters of a dtype, as from_pretrained does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"), _RealNumbers():
            yield
    finally:
        torch.set_default_dtype(before)


# ---- the user's own model


def _from_function(source: str, dtype: torch.dtype) -> Source:
    module_name, _, name = source.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"gradckpt: cannot import {source!r}: {error}; write package.module:function") from error
    with _on_meta(dtype):
        built = function()
    model, batch = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module) or not (callable(batch) or isinstance(batch, (dict, tuple))):
        raise ValueError(
            f"gradckpt: {source!r} returned no (model, batch); return the model with its arguments: a dict, a tuple, "
            "or a function of (tokens, batch)"
        )

    def arguments(tokens: int, samples: int) -> Arguments:
        given = batch(tokens, samples) if callable(batch) else private.tree_map(_on_cpu, batch)
        return ((), given) if isinstance(given, dict) else (tuple(given), {})

    get_head = getattr(model, "get_output_embeddings", None)
    takes = "tokens" if callable(batch) else "batch"
    return Source(model, arguments, takes, None, get_head() if get_head is not None else None, [])


def _on_cpu(x: Any) -> Any:
    """Return a copy of a tensor, as the step's own; one that was made on meta is zero."""
    if not isinstance(x, torch.Tensor):
        return x
    return torch.zeros_like(x, device="cpu") if x.is_meta else x.cpu().clone()


# ---- a model of transformers


def _read(source: str) -> dict[str, Any]:
    """Return the entries of a config.json: a file's, a folder's, or the hub's."""
    path = os.path.join(source, "config.json") if os.path.isdir(source) else source
    if not os.path.exists(path):
        if os.path.isdir(source) or source.endswith(".json") or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
            raise ValueError(f"gradckpt: there is no file {path!r}; give a config.json, its folder or a hub id")
        folder, _, name = source.partition("/")
        if name and os.path.isdir(folder):
            raise ValueError(
                f"gradckpt: the folder {folder!r} has no {name!r}; correct the path, or leave this directory for a "
                "model of the hub"
            )
        path = _download(source)
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            raise ValueError(
                f"gradckpt: {path!r} is a GGUF file; give the config.json of the model that it was made from"
            )
    with open(path, encoding="utf-8") as file:
        try:
            config = json.load(file)
        except ValueError as error:
            raise ValueError(f"gradckpt: {path!r} is no JSON: {error}; give a model's config.json") from None
    if not isinstance(config, dict) or not config.get("model_type"):
        raise ValueError(f"gradckpt: {path!r} has no 'model_type'; give the config.json of a transformers model")
    return config


def _download(name: str) -> str:
    """Return the path of a hub model's config.json in the local cache."""
    from transformers.utils import cached_file

    hub = logging.getLogger("huggingface_hub")
    level = hub.level
    hub.setLevel(logging.ERROR)  # it warns of each retry
    try:
        path: str = cached_file(name, "config.json")
    except OSError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(f"gradckpt: no config.json of {name!r} on the hub ({reason}); give a local path") from error
    finally:
        hub.setLevel(level)
    return path


def _from_config(entries: dict[str, Any], dtype: torch.dtype) -> Source:
    try:
        import transformers
    except ImportError as error:
        raise ValueError("gradckpt: a config needs transformers; install gradckpt[hf]") from error
    kind = _class_of(entries, transformers)
    config = _config_of(entries, transformers)
    about: list[str] = []
    dropping: list[str] = []
    if entries.get("quantization_config"):
        about.append("The config's quantization_config is ignored; --weights says how frozen weights are stored.")
    for each in _with_parts(config):
        each.dtype = dtype
        each.use_cache = False
        for name in _LAYERDROP:
            if getattr(each, name, 0):
                setattr(each, name, 0.0)
                dropping.append(name)
    if dropping:
        about.append(f"No layer is dropped, which needs most ({', '.join(dict.fromkeys(dropping))} in the config).")
    of_tokens, labels = next((each for name, each in _LABELS.items() if re.search(name, kind.__name__)), (False, ()))
    main = getattr(kind, "main_input_name", "input_ids")
    if not labels or main not in _INPUTS:
        raise ValueError(_unknown(kind, not labels, main, entries, transformers))
    if config.is_encoder_decoder:
        for name in ("pad_token_id", "decoder_start_token_id"):  # the values of tokens have no effect here
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if labels == ("labels",) and not of_tokens:
        config.problem_type = "single_label_classification"
    with _on_meta(dtype):
        model = kind(config)
    model.train()
    takes = _INPUTS[main]
    names = inspect.signature(model.forward).parameters

    def arguments(tokens: int, samples: int) -> Arguments:
        shape: tuple[int, ...] = samples, tokens
        if takes == "images":
            channels = next((each.num_channels for each in _with_parts(config) if hasattr(each, "num_channels")), 3)
            shape = samples, channels, *_image_size(config)
        batch = {main: torch.zeros(shape, dtype=torch.long if takes == "tokens" else model.dtype)}
        of_labels = (samples, tokens) if of_tokens else (samples,)
        batch |= {name: torch.zeros(of_labels, dtype=torch.long) for name in labels}
        if "token_type_ids" in names and getattr(config, "sub_configs", None):  # Gemma3 asks for it in training
            batch["token_type_ids"] = torch.zeros(samples, tokens, dtype=torch.long)
        return (), batch

    if config.is_encoder_decoder:
        about.append("Inputs and labels have the same number of tokens.")
    if takes == "images":
        known = "" if _sizes_of_images(config) else ", since the config does not say (add image_size)"
        about.append("Images of {} x {} pixels{}.".format(*_image_size(config), known))
    if takes == "tokens" and "vision_config" in entries:
        about.append("The batch is text without images.")
    return Source(model, arguments, takes, _positions(model, config), model.get_output_embeddings(), about)


def _unknown(kind: Any, of_loss: bool, main: str, entries: dict[str, Any], transformers: Any) -> str:
    """Return why a class cannot be trained here, and which of the same model type can."""
    what = f"the loss of {kind.__name__}" if of_loss else f"a batch of {main} for {kind.__name__}"
    names = {
        name
        for mapping, each in vars(transformers.models.auto.modeling_auto).items()
        if mapping.endswith("_MAPPING_NAMES")
        for name in _listed(each.get(entries["model_type"]))
    }
    others = [name for name in sorted(names) if any(re.search(ending, name) for ending in _LABELS)]
    others = [name for name in others if getattr(getattr(transformers, name, None), "main_input_name", "") in _INPUTS]
    named = f"name {' or '.join(others[:2])} in 'architectures', or " if others else ""
    return f"gradckpt: {what} is unknown; {named}give package.module:function that returns (model, batch)"


def _listed(names: Any) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _class_of(entries: dict[str, Any], transformers: Any) -> Any:
    names = entries.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ValueError(
            "gradckpt: the config has no 'architectures'; add the class to train, such as [\"LlamaForCausalLM\"]"
        )
    kind = getattr(transformers, names[0], None)
    if kind is None:
        remote = " without remote code" if "auto_map" in entries else ""
        raise ValueError(
            f"gradckpt: transformers {transformers.__version__} has no class {names[0]!r}{remote}; "
            "correct 'architectures' or update transformers"
        )
    return kind


#: Probabilities with which a layer is skipped in a step.
_LAYERDROP = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")

#: Without them a config silently describes the default model of its class.
_NEEDED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
    *("image_size", "patch_size"),
)


def _config_of(entries: dict[str, Any], transformers: Any) -> Any:
    try:
        kind = transformers.CONFIG_MAPPING[entries["model_type"]]
    except KeyError:
        raise ValueError(
            f"gradckpt: transformers {transformers.__version__} knows no model_type {entries['model_type']!r}; "
            "correct the config or update transformers"
        ) from None
    try:
        config = kind.from_dict(entries)
    except Exception as error:  # each version of transformers checks fields in its own way
        reason = " ".join(str(error).split())
        raise ValueError(f"gradckpt: the config has a wrong field: {reason}; correct it") from error
    if not getattr(config, "sub_configs", None):  # the parts of a composed config leave their defaults out
        for name in _NEEDED:
            own = config.attribute_map.get(name, name)
            computed = isinstance(getattr(kind, own, None), property)
            if getattr(config, own, None) is not None and not computed and own not in entries and name not in entries:
                raise ValueError(f"gradckpt: the config has no {own!r}; add it")
    for part in _with_parts(config):
        for name in _NEEDED:
            value = getattr(part, name, None)
            if isinstance(value, int) and (value < 0 or (value == 0 and part is config)):
                raise ValueError(f"gradckpt: the config's {name!r} is {value}; give 1 or more")
    return config


def _with_parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", None) or ():
        part = getattr(config, name, None)
        if hasattr(part, "to_dict"):
            yield from _with_parts(part)


def _positions(model: nn.Module, config: Any) -> int | None:
    """Return the longest sequence of a model with a table of positions, None for rotary ones."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and longest is not None and re.search(r"position|wpe$", name):
            rows, padding = module.num_embeddings, module.padding_idx
            if 0 <= rows - longest <= 2:  # OPT and BART have two rows more
                return longest if padding is None else rows - padding - 1  # RoBERTa counts from there
    return None


def _image_size(config: Any) -> tuple[int, int]:
    size = next(iter(_sizes_of_images(config)), 224)
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _sizes_of_images(config: Any) -> list[Any]:
    """Return what a config or its parts say."""
    return [each.image_size for each in _with_parts(config) if getattr(each, "image_size", None) is not None]


#: Name of a model's main input -> the units of a batch.
_INPUTS = {"input_ids": "tokens", "pixel_values": "images"}

#: How the class of a model ends -> whether each token has a label, and the labels' names.
_LABELS = {
    r"(For(CausalLM|MaskedLM|ConditionalGeneration|TokenClassification)|LMHeadModel|LMHead)$": (True, ("labels",)),
    r"For(Sequence|Image)Classification$": (False, ("labels",)),
    r"ForQuestionAnswering$": (False, ("start_positions", "end_positions")),
}


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


def divide(
    model: nn.Module, optimizer: str, gpus: int, shard: str | None, stored: torch.dtype | None
) -> tuple[dict[str, int], dict[str, int], float, list[str]]:
    """Return the bytes of one of ``gpus`` devices during the whole step, by name, those for the
    communication, the part of a gradient's bytes that stays on the device, and sentences about it.

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
    fixed = {"weights": weights + others, "optimizer states": states}
    extra: dict[str, int] = {}
    about = [] if shard is None else [_SHARD_SENTENCES[shard].format(gpus=gpus)]
    in_16_bits = [p for p in trained if p.dtype.itemsize == 2]
    if shard in ("zero1", "zero2", "zero3") and in_16_bits:  # DeepSpeed steps in float32
        fixed["master weights"] = -(-sum(4 * p.numel() for p in in_16_bits) // gpus)
        states = sum(OPTIMIZERS[optimizer](_like(p, torch.float32)) for p in trained)
        about.append("DeepSpeed keeps float32 copies of the trainable 16-bit weights, in equal parts.")
    if shard == "fsdp" and stored is None and in_16_bits:
        about.append("Weights stay in 16 bits; with bf16=True, accelerate's FSDP has them in float32 (bf16-mixed).")
    if shard == "ddp":
        extra = {"gradient buckets": gradients}
    elif shard is not None:
        fixed["optimizer states"] = -(-states // gpus)
        if shard != "zero1":
            scale /= gpus
    if shard in ("zero3", "fsdp"):
        fixed["weights"] = -(-weights // gpus) + others
        extra = _gathered(model)
    return fixed, extra, scale, about


_SHARD_SENTENCES = {
    "ddp": "DDP on {gpus} devices: each has all weights, gradients and states, and buckets for the gradients.",
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
    largest = max((_bytes_of_block(block) for block in blocks), default=0)
    gradients = max((_nbytes(p for p in block.parameters() if p.requires_grad) for block in blocks), default=0)
    return {
        "gathered blocks": 2 * largest,
        "gathered outside of blocks": _nbytes(outside),
        "whole gradients": 2 * gradients + _nbytes(p for p in outside if p.requires_grad),
    }


def _bytes_of_block(block: nn.Module) -> int:
    packed = [b for m in block.modules() if isinstance(m, QuantizedLinear) for b in m.buffers(recurse=False)]
    return _nbytes([*block.parameters(), *packed])


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(x.nbytes for x in tensors)
