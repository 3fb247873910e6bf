"""Regions of models, and the place of what they keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gradckpt._C import checkpoint
from gradckpt._engine.arguments import unbound
from gradckpt._engine.places import place_of
from gradckpt._offload import Offload


def of_layer(function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    """Run ``gradckpt.checkpoint`` on a layer whose keywords are bound."""
    function, tensors = unbound(function)
    return checkpoint(function, *args, **options, **tensors)


def region_at(offload: Offload | None) -> Callable[..., Any]:
    """Return ``gradckpt.checkpoint``, with the inputs in this place."""
    return checkpoint if offload is None else functools.partial(checkpoint, offload=place_of(offload))
