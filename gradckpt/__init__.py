"""Activation checkpointing that keeps its checkpoints compressed.

``gradckpt.checkpoint(function, *args, compress="int8")`` is ``torch.utils.checkpoint.checkpoint``
with compressed region inputs; ``gradckpt.enable(model)`` turns it on in a Hugging Face model.
"""

from __future__ import annotations

import logging
from typing import Any

from gradckpt import _C, buffers, compat
from gradckpt import _ops as _ops
from gradckpt._C import Payload, checkpoint, codecs, is_recomputing
from gradckpt.config import CompressionConfig, GradckptInactiveWarning, resolve_codec
from gradckpt.integrations import trainer_guard
from gradckpt.integrations.huggingface import disable, enable
from gradckpt.sequential import checkpoint_sequential
from gradckpt.stats import reset_stats, stats

__version__ = "0.1.0"

__all__ = [
    "CompressionConfig",
    "GradckptInactiveWarning",
    "Payload",
    "buffers",
    "checkpoint",
    "checkpoint_sequential",
    "codec_info",
    "codecs",
    "compat",
    "disable",
    "enable",
    "encode",
    "is_recomputing",
    "reset_stats",
    "stats",
]

logging.getLogger("gradckpt").addHandler(logging.NullHandler())
trainer_guard.watch()


def encode(x: Any, codec: str = "int8") -> Payload:
    """Encode a tensor.

    Args:
        x: A plain strided float32, float16 or bfloat16 tensor, CPU or CUDA, any shape and strides.
        codec: A name in :func:`codecs`, or ``"fp8"``.

    Returns:
        A payload: ``.decode()``, ``.nbytes`` (bytes), ``.codec``, ``.shape``, ``.dtype``, ``.data`` (uint8).

    Raises:
        ValueError: unknown codec.
        TypeError: not a tensor, or one the codec cannot take (dtype, sparse, meta, subclass).
    """
    return _C.encode(x, resolve_codec(codec))


def codec_info(codec: str) -> dict[str, Any]:
    """What a codec is: name, id, summary, dtypes, ``bits_per_value`` (scales included; 0: those of the
    dtype), ``max_error`` (largest |x - x'| over the largest |x| of its group of 128; 0: bit-exact) and
    ``cuda`` (this build has kernels for it). ``ValueError`` for an unknown name."""
    return _C.codec_info(resolve_codec(codec))
