"""The codecs without loss as the default of every call:
what runs with them must be what runs without.

``WAYS`` are replacements for ``checkpoint(function, *args, **kwargs)``: each with every floating
tensor as a payload, and the same without compression, to the last bit the same."""

from __future__ import annotations

import functools
import re
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


# ---- Which tests of tests/equivalence come out otherwise with a codec without loss as the
# default of every call, and why.
#
# All others have to pass, and these have to fail (``pytest tests/equivalence --codec raw``,
# conftest.py there): with what they return, the gradients, as torch's nevertheless, unless
# ``values`` says that these differ as well.


class Difference(NamedTuple):
    why: str
    tests: dict[str, str]  # name: a regular expression for the parameters
    values: bool = False


ALL = ".*"

DIFFERENCES = (
    Difference(
        # test_exact_codecs.py compares with no checkpoint and no write.
        "an input that is written to after the region's function, or by it, has the values of the forward again",
        {
            # What does not change values: .grad, and flags that torch lets pass.
            "test_changed_input": "[^-]*-(?!grad-|detach_-(no grad|view of one)|requires_grad_-(non|view)).*",
            "test_changed_input_under_anomaly_mode": ALL,
            "test_input_changed_by_the_function_itself": ALL,
            "test_input_that_needs_no_gradient_changed_by_the_function": ALL,
            "test_a_list_changed_after_the_forward_is_seen_by_the_recompute": ALL,
        },
        values=True,
    ),
    Difference(
        "what a payload restores is as in the forward: a change of the argument since is none",
        {
            "test_what_torch_does_not_notice_raises": "requires_grad_-no grad",
            "test_changes_are_named": "of a tensor-by reference",
            "test_changes_of_several_arguments_are_named": ALL,
            "test_what_a_region_has_copies_of_does_not_count": ALL,
            "test_without_debug_and_in_compat_changes_are_silent_as_in_torch": ALL,
        },
        values=True,
    ),
    Difference(
        "compat has no compress=, which is what the default turns on",
        {"test_only_gradckpts_own_checkpoint_knows_warn": ALL},
        values=True,
    ),
    Difference(
        "an input that is a payload is no saved tensor: autograd does not refuse inference tensors",
        {"test_inference_tensor_as_an_argument": ALL},
        values=True,
    ),
    Difference(
        "hooks around the region must return the bytes that they are given",
        {"test_outer_hooks": ".*-change the (values|shape)"},
        values=True,
    ),
    Difference(
        "hooks around the region are given bytes, those of tensors in keywords and containers, too",
        {"test_hooks_around_the_forward_see_the_inputs": ALL},
    ),
    Difference(
        "the recompute's input is another tensor, no view, and no result of an operator of the caller's",
        {"test_identity_and_metadata_of_an_argument": ".*-(leaf|non-leaf|view)"},
    ),
    Difference(
        "inputs that are payloads are free after the forward",
        {"test_graph_dies": ALL, "test_inputs_are_freed_part_by_part": ALL},
    ),
    Difference(
        "modes see the operator that makes room for bytes and values",
        {"test_mode_around_everything": ALL},
    ),
    Difference(
        "what is traced is kept, and its size asked for stats(): the values of the graph have other numbers",
        {"test_jit_trace": ALL},
    ),
)


def difference_of(name: str) -> Difference | None:
    """`name`: ``test_name[parameters]``."""
    test, _, parameters = name.removesuffix("]").partition("[")
    found = [d for d in DIFFERENCES if test in d.tests and re.fullmatch(d.tests[test], parameters)]
    return found[0] if found else None
