"""Activation checkpointing that keeps its checkpoints compressed.

``gradckpt.checkpoint(function, *args, compress="int8")`` is ``torch.utils.checkpoint.checkpoint``
with compressed region inputs; ``gradckpt.enable(model)`` turns it on in a Hugging Face model.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

try:
    from gradckpt import _C
    from gradckpt._C import Payload, SelectiveRecompute, checkpoint, codecs, is_recomputing
except (ImportError, OSError) as error:
    from gradckpt import _import_error

    raise _import_error.of(error) from error

from gradckpt import _ops as _ops
from gradckpt import buffers, compat, compile, policies
from gradckpt._memory import track_memory
from gradckpt.apply import apply, unapply
from gradckpt.config import CompressionConfig, GradckptInactiveWarning, resolve_codec
from gradckpt.integrations import trainer_flag
from gradckpt.integrations.huggingface import disable, enable
from gradckpt.patched import patched
from gradckpt.residuals import Residual, Residuals, residuals
from gradckpt.rounding import check_key, get_rounding_state, set_rounding_state
from gradckpt.saved import compress_saved
from gradckpt.selective import create_selective_checkpoint_contexts, name, save
from gradckpt.selectors import every, m_of_n
from gradckpt.sequential import checkpoint_sequential
from gradckpt.stats import stats

if TYPE_CHECKING:
    from gradckpt.integrations.wrapper import apply_activation_checkpointing, checkpoint_wrapper

__version__ = "0.1.0"

__all__ = [
    "CompressionConfig",
    "GradckptInactiveWarning",
    "Payload",
    "Residual",
    "Residuals",
    "SelectiveRecompute",
    "apply",
    "apply_activation_checkpointing",
    "buffers",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "codec_info",
    "codecs",
    "compat",
    "compress_saved",
    "create_selective_checkpoint_contexts",
    "disable",
    "enable",
    "encode",
    "every",
    "get_rounding_state",
    "is_recomputing",
    "m_of_n",
    "name",
    "patched",
    "policies",
    "residuals",
    "save",
    "set_rounding_state",
    "stats",
    "track_memory",
    "unapply",
]

#: Names that are loaded when they are first asked for: they need torch.distributed.
_LAZY = dict.fromkeys(["apply_activation_checkpointing", "checkpoint_wrapper"], "gradckpt.integrations.wrapper")

logging.getLogger("gradckpt").addHandler(logging.NullHandler())
trainer_flag.watch()
compile.watch()


if not TYPE_CHECKING:  # for whom every name would exist then

    def __getattr__(name: str) -> Any:
        if name not in _LAZY:
            raise AttributeError(f"module 'gradckpt' has no attribute {name!r}")
        return getattr(importlib.import_module(_LAZY[name]), name)


def encode(x: Any, codec: str = "int8", *, dither: tuple[int, int, int] | None = None) -> Payload:
    """Encode a tensor.

    Args:
        x: A plain strided tensor, CPU or CUDA, any shape and strides, of a dtype that the codec takes.
        codec: A name in :func:`codecs`, or ``"fp8"``.
        dither: ``(seed, step, tensor)``: round stochastically with that noise (see
            :func:`get_rounding_state`); the same key gives the same bytes. None: to nearest.

    Returns:
        A payload: ``.decode()``, ``.nbytes`` (bytes), ``.codec``, ``.shape``, ``.dtype``, ``.data`` (uint8).

    Raises:
        ValueError: unknown codec; ``dither`` for a codec that does not round, or out of range (64, 32 and 32 bits);
            values that the codec cannot hold (on CUDA nobody waits to know: the payload keeps ``x`` then).
        TypeError: not a tensor, or one the codec cannot take (dtype, sparse, meta, subclass).
    """
    codec = resolve_codec(codec)
    if dither is not None:
        if not _C.codec_info(codec)["stochastic"]:
            raise ValueError(f"gradckpt.encode: codec {codec!r} does not round, so dither= would do nothing")
        check_key(dither)
    return _C.encode(x, codec, dither)


def codec_info(codec: str) -> dict[str, Any]:
    """What a codec is: name, id, summary, dtypes, ``bits_per_value`` (scales included; 0: those of the
    dtype), ``max_error`` (largest |x - x'| over the largest |x| of its group of 128; 0: bit-exact), ``cuda`` (this
    build has kernels for it), ``stochastic`` (it can round so), ``refuses`` (there are values that it
    cannot hold) and ``sizes`` ({dtype: (bits per value, and the bytes per value, per group of 128 and per block
    of 4096)}). ``ValueError`` for an unknown name."""
    return _C.codec_info(resolve_codec(codec))
