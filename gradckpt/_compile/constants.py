"""Settings in code that Dynamo traces: constants, on whose content it guards."""

from __future__ import annotations

import dataclasses
from typing import Any

from gradckpt._compression import CompressionConfig
from gradckpt._engine import torch_private as private

_FIELDS = tuple(field.name for field in dataclasses.fields(CompressionConfig))


def contents(compress: Any) -> Any:
    """Return ``compress=`` so that Dynamo guards on the content, keys and numbers included, and not
    on the object.
    """
    if isinstance(compress, CompressionConfig):
        return {field: _constant(getattr(compress, field)) for field in _FIELDS}
    if isinstance(compress, dict):
        return {key: _constant(compress[key]) for key in compress}
    return compress


def _constant(value: Any) -> Any:
    """Return the value as a constant: Dynamo makes a symbol of a number that changes."""
    if type(value) is not int:
        return value
    return private.dynamo.guard_scalar(value)


def refusal(message: str) -> Exception:
    """Return an error that breaks the graph, so that the call runs uncompiled and may fail there.

    With ``fullgraph=True`` it is raised.
    """
    kind = private.dynamo.UserErrorType.INVALID_INPUT
    refusal: Exception = private.dynamo.UserError(kind, message)
    return refusal
