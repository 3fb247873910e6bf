"""What to compress and how: :class:`CompressionConfig`, and the forms ``compress=`` takes."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Mapping
from typing import Any, Union

from gradckpt import _C
from gradckpt._frames import user_frame
from gradckpt.rounding import check_key, get_rounding_state, set_rounding_state

__all__ = ["CompressionConfig", "get_rounding_state", "set_rounding_state"]

#: The codec of ``compress=True``.
DEFAULT_CODEC = "int8"

#: Short names, kept once.
ALIASES = {"fp8": "fp8_e4m3"}

_INCLUDES = ("activations", "floating")


def resolve_codec(name: str, of_activations: bool = False) -> str:
    """The full name of a codec; ``ValueError`` that lists the names when there is none."""
    if not isinstance(name, str):
        raise TypeError(f"gradckpt: a codec is named by a string, not {type(name).__name__}")
    full = ALIASES.get(name, name)
    if full not in _C.codecs():
        near = _near(name)
        names = ", ".join([*(for_activations() if of_activations else _C.codecs()), *ALIASES])
        instead = f"did you mean {near!r}?" if near else f"choose one of: {names}"
        raise ValueError(f"gradckpt: unknown codec {name!r}; {instead}")
    if of_activations and _C.codec_info(full)["dtypes"] == ["bool"]:
        names = ", ".join(for_activations())
        raise ValueError(f"gradckpt: codec {full!r} holds booleans, not activations; choose one of: {names}")
    return full


def _near(name: str) -> str | None:
    """Return the codec that other spellings mean: ``"INT8"``, ``"int-8"``, ``"8bit"``."""

    def plain(text: str) -> str:
        return re.sub(r"[\s_-]", "", text.lower())

    known = {plain(each): each for each in [*_C.codecs(), *ALIASES]}
    return known.get(re.sub(r"^(\d+)bits?$", r"int\1", plain(name)))


def for_activations() -> list[str]:
    """Return the codecs of floating tensors; the others hold booleans."""
    return [name for name in _C.codecs() if _C.codec_info(name)["dtypes"] != ["bool"]]


@dataclasses.dataclass(frozen=True)
class CompressionConfig:
    """How region inputs are kept between forward and recompute.

    Args:
        codec: A name in :func:`gradckpt.codecs` (or ``"fp8"``, short for ``"fp8_e4m3"``).
        replay: ``False`` (*exact* mode): the forward is untouched and only the recompute
            sees the restored values, so the loss is bit-identical to no checkpointing.
            ``True`` (*replay* mode): the forward itself runs on the restored values with a
            straight-through gradient, so the recompute is bit-equal to the forward; for MoE
            routing, top-k and data-dependent shapes. Leaves stay as they are.
        min_numel: Tensors with fewer values are kept as they are.
        include: ``"activations"``: floating tensors that require grad and are not leaves
            (and the leaf of ``enable_input_require_grads``). ``"floating"``: every floating
            tensor that is not a parameter, masks included; only for code that knows that its
            inputs are all activations.
        leaves: Also tensors that require grad and are leaves but no parameters, which by default
            stay as they are, since somebody wants their ``.grad``; :func:`gradckpt.enable` sets it
            for the one leaf that ``enable_input_require_grads`` makes.
        decisions: In exact mode with a codec that rounds: what operators of the region decide (top-k, sort,
            argmax, comparisons: ``gradckpt.policies.decisions``) is kept from the forward and decides again in the
            recompute, so that a mixture-of-experts layer routes the same way twice. ``"casts"``: casts from floating
            to integers and bools, too; they cannot be told from the casts inside other operators, each of which then
            costs some microseconds. ``False``: nothing.
        stochastic: Round up or down at random, in proportion, so that restored values have no bias
            (:func:`gradckpt.config.set_rounding_state` says from which noise). Doubles the error's variance:
            for low bits and short gradients only, measure it. For the codecs whose
            ``codec_info(name)["stochastic"]`` is true.
        seed: Of that noise; 0 to 2^64 - 1. torch's generators are neither read nor advanced.

    Raises:
        ValueError: unknown codec or ``include``, negative ``min_numel``, a ``seed`` out of range,
            ``stochastic`` with a codec that does not round.
        TypeError: a field of the wrong type.
    """

    codec: str = DEFAULT_CODEC
    replay: bool = False
    min_numel: int = 1024
    include: str = "activations"
    leaves: bool = False
    decisions: bool | str = True
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", resolve_codec(self.codec, of_activations=True))
        for flag in ("replay", "leaves", "stochastic"):
            if not isinstance(getattr(self, flag), bool):
                raise TypeError(f"gradckpt: {flag} is True or False, not {getattr(self, flag)!r}")
        if not isinstance(self.decisions, bool) and self.decisions != "casts":
            raise ValueError(f'gradckpt: decisions is True, False or "casts", not {self.decisions!r}')
        if isinstance(self.min_numel, bool) or not isinstance(self.min_numel, int):
            raise TypeError(f"gradckpt: min_numel is an int, not {self.min_numel!r}")
        if self.min_numel < 0:
            raise ValueError(f"gradckpt: min_numel counts values and cannot be {self.min_numel}")
        check_key((self.seed, 0, 0))
        if self.stochastic and not _C.codec_info(self.codec)["stochastic"]:
            raise ValueError(f"gradckpt: codec {self.codec!r} does not round, so stochastic=True would do nothing")
        if self.include not in _INCLUDES:
            raise ValueError(f"gradckpt: include is one of {', '.join(_INCLUDES)}; not {self.include!r}")

    @property
    def lossy(self) -> bool:
        """Restored values may differ from the original ones."""
        return bool(_C.codec_info(self.codec)["max_error"])

    def to_dict(self) -> dict[str, Any]:
        """A plain dict that JSON can carry; :meth:`from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CompressionConfig:
        """The config that :meth:`to_dict` wrote. ``ValueError`` names a field that is not known."""
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = [k for k in fields if k not in known]
        if unknown:
            raise ValueError(
                f"gradckpt: unknown field {unknown[0]!r} in a compression config; the fields are: {', '.join(known)}"
            )
        return cls(**fields)


#: What every ``compress=`` accepts.
Compress = Union[None, bool, str, CompressionConfig, Mapping[str, Any]]


def parse_compress(compress: Compress) -> CompressionConfig | None:
    """``None``/``False``: no compression. ``True``: the default codec. A codec's name, a
    :class:`CompressionConfig`, or the dict of one.

    Raises:
        ValueError: unknown codec or field; the message lists what exists.
        TypeError: anything else.
    """
    if compress is None or compress is False:
        return None
    if isinstance(compress, CompressionConfig):
        return compress
    if compress is True:
        return CompressionConfig()
    if isinstance(compress, str):
        return CompressionConfig(codec=compress)
    if isinstance(compress, Mapping):
        return CompressionConfig.from_dict(compress)
    raise TypeError(
        "gradckpt: compress= takes None, True, a codec name, a CompressionConfig or its dict; "
        f"not {type(compress).__name__}"
    )


class GradckptInactiveWarning(UserWarning):
    """Compression was asked for and nothing was compressed; the message gives the likely reason."""


def warn_inactive(reason: str) -> None:
    """Warn at the line of the user that led here."""
    message, frame = f"gradckpt: {reason}", user_frame()
    if frame is None:
        warnings.warn(message, GradckptInactiveWarning, stacklevel=2)
        return
    where = frame.f_globals
    warnings.warn_explicit(
        message,
        GradckptInactiveWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=where.get("__name__"),
        registry=where.setdefault("__warningregistry__", {}),
    )
