"""The codecs without loss as the default of every call:
what runs with them must be what runs without.

``WAYS`` are replacements for ``checkpoint(function, *args, **kwargs)``: each with every floating
tensor as a payload, and the same without compression, to the last bit the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint

import gradckpt

CODECS = ("raw", "lossless")
CONFIGS = {
    f"{codec}, fake_quantize" if fake_quantize else codec: gradckpt.CompressionConfig(
        codec, min_numel=0, include="floating", fake_quantize=fake_quantize
    )
    for codec in CODECS
    for fake_quantize in (False, True)
}


class Way(NamedTuple):
    """A way to run a region, and what it is to be compared with."""

    ours: Callable[..., Any]
    reference: Callable[..., Any]


_checkpoint, _compat = gradckpt.checkpoint, gradckpt.compat.checkpoint


def by_default(config: Any, *args: Any, **options: Any) -> Any:
    """``gradckpt.checkpoint`` with `config`; the reentrant form refuses compression,
    and runs without."""
    reentrant = options.get("use_reentrant", False)
    if reentrant is not None and not reentrant:
        options.setdefault("compress", config)
    return _checkpoint(*args, **options)


def compat_by_default(config: Any, *args: Any, **options: Any) -> Any:
    """The same for ``gradckpt.compat.checkpoint``, where it can be: it is reentrant unless told
    otherwise, and the keywords of ours are the function's."""
    otherwise = {"compress", "buffers"} & {*options} or options.get("context_fn", _compat) is None
    if not args or options.get("use_reentrant") is not False or otherwise:
        return _compat(*args, **options)
    return by_default(config, *args, buffers="torch", **options)


def exchange_defaults(config: Any) -> None:
    """Replace the functions for all later look-ups in this process."""
    gradckpt.checkpoint = functools.wraps(_checkpoint)(functools.partial(by_default, config))
    gradckpt.compat.checkpoint = functools.wraps(_compat)(functools.partial(compat_by_default, config))


def _patched(config: Any, function: Any, *args: Any, **options: Any) -> Any:
    with gradckpt.patched(config):
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **options)


def _saved(config: Any, function: Any, *args: Any, **options: Any) -> Any:
    with gradckpt.compress_saved(config):
        return function(*args, **options)


class _Module(torch.nn.Module):
    """SelectiveRecompute knows the leaves of a module, and allows autograd.grad."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)


def _selective(config: Any, function: Any, *args: Any, **options: Any) -> Any:
    return gradckpt.SelectiveRecompute.apply(_Module(function), None, *args, compress=config, **options)


def _nested(checkpoint: Callable[..., Any], function: Any, *args: Any, **options: Any) -> Any:
    """A region in a region that hands its arguments on."""
    return checkpoint(functools.partial(checkpoint, function), *args, **options)


def _plain(function: Any, *args: Any, **options: Any) -> Any:
    return function(*args, **options)


_theirs = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)
WAYS: dict[str, Way] = {}
for _name, _config in CONFIGS.items():
    _ours = functools.partial(by_default, _config)
    _none = functools.partial(by_default, None)
    WAYS[_name] = Way(_ours, _theirs)
    WAYS[f"nested {_name}"] = Way(functools.partial(_nested, _ours), functools.partial(_nested, _none))
for _codec in CODECS:
    _config = CONFIGS[_codec]
    _kept = gradckpt.CompressionConfig(_codec, min_numel=0)
    WAYS[f"patched {_codec}"] = Way(functools.partial(_patched, _config), _theirs)
    WAYS[f"saved {_codec}"] = Way(functools.partial(_saved, _kept), _plain)
    WAYS[f"selective {_codec}"] = Way(functools.partial(_selective, _config), functools.partial(_selective, None))
