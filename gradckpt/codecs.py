"""The codecs: their names, what each of them is, and :func:`encode` for a tensor of your own."""

from __future__ import annotations

from typing import Any

from gradckpt import _C
from gradckpt._C import Payload
from gradckpt.config import resolve_codec
from gradckpt.rounding import check_key

__all__ = ["Payload", "encode", "info", "names"]


def names() -> list[str]:
    """Return the names of all codecs, which every ``compress=`` takes."""
    return _C.codecs()


def info(codec: str) -> dict[str, Any]:
    """Return what a codec is.

    Args:
        codec: A name in :func:`names`, or ``"fp8"``.

    Returns:
        ``name``, ``id``, ``summary``, ``dtypes``, ``bits_per_value`` (scales included; 0: those of the dtype),
        ``max_error`` (largest |x - x'| over the largest |x| of its group of 128; 0: bit-exact), ``cuda`` (this build
        has kernels for it), ``stochastic`` (it can round so), ``refuses`` (there are values that it cannot hold) and
        ``sizes`` ({dtype: (bits per value, and the bytes per value, per group of 128 and per block of 4096)}).

    Raises:
        ValueError: unknown codec; the message lists the names.
    """
    return _C.codec_info(resolve_codec(codec))


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
            raise ValueError(f"gradckpt.codecs.encode: codec {codec!r} does not round, so dither= would do nothing")
        check_key(dither)
    return _C.encode(x, codec, dither)
