"""The codecs: their names, their properties, and :func:`encode` for a single tensor."""

from __future__ import annotations

from typing import Any

from gradckpt import _C
from gradckpt._C import Payload
from gradckpt._codec_names import codec_of_id, resolve_codec
from gradckpt._compression import check_key

__all__ = ["Payload", "encode", "info", "names"]


def names() -> list[str]:
    """Return the names of all codecs, which every ``compress=`` takes."""
    return _C.codecs()


def info(codec: str | int) -> dict[str, Any]:
    """Return the properties of a codec.

    Args:
        codec: A name in :func:`names`, ``"fp8"``, or an id. An id names the bytes of a payload:
            store it beside them.

    Returns:
        ``name``, ``id``, ``summary``, ``dtypes``, ``bits_per_value`` (scales included; 0: those of
        the dtype), ``max_error`` (largest |x - x'| over the largest |x| of its group of 128; 0:
        bit-exact), ``cuda`` (this build has kernels for it), ``stochastic`` (it can round
        stochastically), ``may_overflow`` (it cannot hold every value), ``sizes`` ({dtype: (bits per
        value; bytes of codes per value, per group of 128 and per block of 4096; bytes of scales per
        group, and per row where the last dimension is at least 64 and no multiple of 128)}).

    Raises:
        ValueError: The codec is unknown; the message lists the names. Or the id is that of a codec
            before its bytes changed; the message names it.
    """
    return _C.codec_info(codec_of_id(codec) if isinstance(codec, int) else resolve_codec(codec))


def encode(x: Any, codec: str = "int8", *, dither: tuple[int, int, int] | None = None) -> Payload:
    """Encode a tensor.

    Args:
        x: A plain strided tensor, CPU or CUDA, any shape and strides, of a dtype that the codec
            takes.
        codec: A name in :func:`names`, or ``"fp8"``.
        dither: ``(seed, step, tensor)`` rounds stochastically with that noise (see
            :func:`gradckpt.config.get_rounding_state`); the same key gives the same bytes. None
            rounds to nearest.

    Returns:
        A payload: ``.decode()``, ``.nbytes`` (bytes), ``.codec``, ``.shape``, ``.dtype``, and its
        two arrays ``.codes`` and ``.scales`` (uint8).

    Raises:
        ValueError: The codec is unknown; ``dither`` is given for a codec that does not round, or is
            out of range (64, 32 and 32 bits); the codec cannot hold a value of ``x`` (on CUDA the
            host does not wait for this result, and the payload keeps ``x`` instead).
        TypeError: ``x`` is not a tensor, or one that the codec cannot take (dtype, sparse, meta,
            subclass).
    """
    codec = resolve_codec(codec)
    if dither is not None:
        if not _C.codec_info(codec)["stochastic"]:
            raise ValueError(f"gradckpt: codec {codec!r} has no stochastic rounding, so dither= has no effect")
        check_key(dither)
    return _C.encode(x, codec, dither)
