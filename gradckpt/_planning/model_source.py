"""A model without weights, and batches for it: from a config, or from the user's function."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gradckpt._engine import torch_private as private

__all__ = ["Source", "open_source"]

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
    labels = next((labels for name, labels in _LABELS.items() if re.search(name, kind.__name__)), None)
    main = getattr(kind, "main_input_name", "input_ids")
    if labels is None or main not in _INPUTS:
        raise ValueError(_unknown(kind, labels is None, main, entries, transformers))
    if config.is_encoder_decoder:
        for name in ("pad_token_id", "decoder_start_token_id"):  # the values of tokens have no effect on paper
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
    if labels is _one_label:
        config.problem_type = "single_label_classification"
    with _on_meta(dtype):
        model = kind(config)
    model.train()
    takes, make_input = _INPUTS[main]
    names = inspect.signature(model.forward).parameters

    def arguments(tokens: int, samples: int) -> Arguments:
        batch = {main: make_input(config, tokens, samples, model.dtype), **labels(tokens, samples)}
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


def _ids(config: Any, tokens: int, samples: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(samples, tokens, dtype=torch.long)


def _images(config: Any, tokens: int, samples: int, dtype: torch.dtype) -> torch.Tensor:
    channels = next((each.num_channels for each in _with_parts(config) if hasattr(each, "num_channels")), 3)
    return torch.zeros(samples, channels, *_image_size(config), dtype=dtype)


def _image_size(config: Any) -> tuple[int, int]:
    size = next(iter(_sizes_of_images(config)), 224)
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def _sizes_of_images(config: Any) -> list[Any]:
    """Return what a config or its parts say."""
    return [each.image_size for each in _with_parts(config) if getattr(each, "image_size", None) is not None]


#: Name of a model's main input -> the units of a batch, and a function that makes it.
_INPUTS: dict[str, tuple[str, Callable[[Any, int, int, torch.dtype], torch.Tensor]]] = {
    "input_ids": ("tokens", _ids),
    "pixel_values": ("images", _images),
}


def _label_of_each_token(tokens: int, samples: int) -> dict[str, torch.Tensor]:
    return {"labels": torch.zeros(samples, tokens, dtype=torch.long)}


def _one_label(tokens: int, samples: int) -> dict[str, torch.Tensor]:
    return {"labels": torch.zeros(samples, dtype=torch.long)}


def _span(tokens: int, samples: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(samples, dtype=torch.long) for name in ("start_positions", "end_positions")}


#: How the class of a model ends -> its labels.
_LABELS: Mapping[str, Callable[[int, int], dict[str, torch.Tensor]]] = {
    r"(For(CausalLM|MaskedLM|ConditionalGeneration|TokenClassification)|LMHeadModel|LMHead)$": _label_of_each_token,
    r"For(Sequence|Image)Classification$": _one_label,
    r"ForQuestionAnswering$": _span,
}
