"""What to compress and how: :class:`CompressionConfig`, and the forms ``compress=`` takes."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, Union

import torch

from gradckpt import _C
from gradckpt._codec_names import ALIASES, resolve_codec
from gradckpt._engine.user_lines import user_frame

T = TypeVar("T")

#: The codec of ``compress=True``.
DEFAULT_CODEC = "int8"

_INCLUDES = ("activations", "floating")

#: The operators to which ``operators=`` gives codecs of their own.
OPERATORS = tuple(dict.fromkeys(family for _, _, family, _ in _C.saved_roles() if family is not None))


# ---- unknown keywords ----

#: Keywords of other libraries: the keywords that have their meaning here, or could.
_KEYWORDS = {
    **dict.fromkeys(("layer", "layers", "block", "blocks", "submodules", "target_modules"), ("modules",)),
    **dict.fromkeys(
        ("bits", "nbits", "n_bits", "num_bits", "dtype", "quantize", "quantization"), ("compress", "codec")
    ),
    **dict.fromkeys(("codec", "codecs", "compression"), ("compress", "codec")),
    **dict.fromkeys(("every", "every_n", "every_k", "interval", "stride"), ("every_n_layers",)),
    **dict.fromkeys(("min_size", "min_elements", "threshold"), ("min_numel",)),
}


def written(value: Any) -> str:
    """Return a value as messages show it: a tensor by its type and shape."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)


def instead_of(key: str, value: Any, known: Iterable[str]) -> str | None:
    """Return how a keyword that is not among the known ones is written here, or None."""
    known = tuple(known)
    fields = tuple(field.name for field in dataclasses.fields(CompressionConfig))
    inner = fields if "compress" in known else ()  # what a dict for compress= takes
    wanted = [name for name in _KEYWORDS.get(key, ()) if name in (*known, *inner)]
    wanted = wanted or difflib.get_close_matches(key, [*known, *inner], 1)
    if not wanted:
        return None
    name = wanted[0]
    if key in _KEYWORDS and name in ("compress", "codec"):
        name = name if name in known else "compress"
        text = f"int{value}" if type(value) is int else value
        return f"{name}={text!r}" if isinstance(text, str) and text in (*_C.codecs(), *ALIASES) else repr(name)
    return repr(name) if name in known else f'compress={{"{name}": {value!r}}}'


def advise(key: str, value: Any, known: Iterable[str], where: str) -> str:
    """Return what to write instead of an unknown keyword; ``where``: whose help lists all."""
    instead = instead_of(key, value, known)
    return f"did you mean {instead}? help({where}) lists all" if instead else f"choose one of: {', '.join(known)}"


def explains_keywords(cls: type[T]) -> type[T]:
    """Let a class say which keyword an unknown one means; the signature stays its own."""
    init: Any = cls.__init__
    _, *known = inspect.signature(init).parameters

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for key, value in kwargs.items():
            if key not in known:
                said = advise(key, value, known, f"gradckpt.{cls.__name__}")
                raise TypeError(f"gradckpt: {cls.__name__}() has no keyword {key!r}; {said}")
        init(self, *args, **kwargs)

    setattr(cls, "__init__", __init__)  # noqa: B010  mypy takes an assignment for a mistake
    return cls


@explains_keywords
@dataclasses.dataclass(frozen=True)
class CompressionConfig:
    """How region inputs are stored between forward and recompute.

    Args:
        codec: A name in :func:`gradckpt.codecs.names` (or ``"fp8"``, short for ``"fp8_e4m3"``).
        fake_quantize: ``False`` (*exact* mode): the forward is untouched and only the recompute
            sees the restored values, so the loss is bit-identical to no checkpointing. ``True``
            (*fake-quantize* mode): the forward itself runs on the restored values with a
            straight-through gradient, so the recompute is bit-equal to the forward; for MoE
            routing, top-k and data-dependent shapes. Leaves stay uncompressed.
        min_numel: Tensors with fewer values stay uncompressed.
        include: ``"activations"``: floating tensors that require grad and are not leaves, since
            autograd keeps a leaf until its ``.grad`` is written. ``"floating"``: every floating
            tensor that is not a parameter, masks included; use it only in code whose inputs are
            known to be activations.
        replay_discrete: In exact mode with a codec that rounds, keep the outputs of the region's
            discrete operators (top-k, sort, argmax, comparisons: ``gradckpt.policies.discrete``)
            from the forward and return them again in the recompute, so that a mixture-of-experts
            layer routes the same way twice. ``"casts"`` adds casts from floating to integer and
            bool dtypes; these cannot be told from the casts inside other operators, each of which
            then costs some microseconds. ``False`` keeps nothing.
        stochastic: Round up or down at random, in proportion, so that restored values have no bias
            (:func:`gradckpt.config.get_rounding_state` describes the noise). It doubles the
            variance of the error: use it for low bits and short gradients only, and measure. For
            codecs whose ``gradckpt.codecs.info(name)["stochastic"]`` is true.
        seed: The seed of that noise, 0 to 2^64 - 1. torch's generators are neither read nor
            advanced.
        operators: For :class:`gradckpt.compress_saved`: codecs for what some operators save, in
            place of ``codec``, as ``{"attention": "fp8", "norm": None}``; ``None`` keeps it
            exactly. The operators are ``linear``, ``matmul``,
            ``convolution``, ``product``, ``attention``, ``norm``, ``rnn``, ``activation``,
            ``pooling``, ``softmax`` (``bf16`` if it is not named) and ``log_softmax`` (``fp16``).
            A key may also be a node of the graph, or a node and what it saves, by argument or, of
            an autograd Function, by its place: ``{"MySwiGLUBackward": "int8"}``,
            ``{"MySwiGLUBackward.0": "int8", "MulBackward0.other": None}``.

    Raises:
        ValueError: ``codec``, ``include`` or an operator is unknown, ``min_numel`` is negative,
            ``seed`` is out of range, ``stochastic`` is given for a codec that does not round, or
            together with ``operators``.
        TypeError: A field has the wrong type.
    """

    codec: str = DEFAULT_CODEC
    fake_quantize: bool = False
    min_numel: int = 1024
    include: str = "activations"
    replay_discrete: bool | str = True
    stochastic: bool = False
    seed: int = 0
    operators: Any = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", resolve_codec(self.codec, of_activations=True))
        for flag in ("fake_quantize", "stochastic"):
            if not isinstance(getattr(self, flag), bool):
                raise TypeError(f"gradckpt: {flag} is True or False, not {written(getattr(self, flag))}")
        if not isinstance(self.replay_discrete, bool) and self.replay_discrete != "casts":
            raise ValueError(
                f'gradckpt: replay_discrete is True, False or "casts", not {written(self.replay_discrete)}'
            )
        if isinstance(self.min_numel, bool) or not isinstance(self.min_numel, int):
            raise TypeError(f"gradckpt: min_numel is an int, not {written(self.min_numel)}")
        if self.min_numel < 0:
            raise ValueError(f"gradckpt: min_numel counts values and cannot be {self.min_numel}")
        check_key((self.seed, 0, 0))
        if self.stochastic and not _C.codec_info(self.codec)["stochastic"]:
            raise ValueError(
                f"gradckpt: codec {self.codec!r} has no stochastic rounding, so stochastic=True has no effect"
            )
        if self.include not in _INCLUDES:
            raise ValueError(f"gradckpt: include is one of {', '.join(_INCLUDES)}; not {written(self.include)}")
        object.__setattr__(self, "operators", _parse_operators(self.operators))
        if self.operators and self.stochastic:
            raise ValueError("gradckpt: stochastic=True and operators= exclude each other; leave one of them out")

    @property
    def lossy(self) -> bool:
        """True if restored values may differ from the original ones."""
        return bool(_C.codec_info(self.codec)["max_error"])

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict that JSON can carry; :meth:`from_dict` reads it back."""
        fields = dataclasses.asdict(self) | {"operators": dict(self.operators)}
        return fields if self.operators else {key: fields[key] for key in fields if key != "operators"}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> CompressionConfig:
        """Return the config that :meth:`to_dict` wrote.

        A mapping from operators to codecs, ``{"linear": "int8", "attention": "fp8"}``, keeps what
        other operators save exactly.

        Raises:
            ValueError: A field is unknown; the message names it.
        """
        if fields and all(key in OPERATORS or _NODE.fullmatch(key) for key in fields):
            named = [codec for codec in fields.values() if codec is not None]
            if not named:
                raise ValueError(
                    "gradckpt: operators= names no codec, so nothing would be compressed; give one a codec"
                )
            return cls(named[0], operators=dict.fromkeys(OPERATORS) | dict(fields))
        known = [f.name for f in dataclasses.fields(cls)]
        if not set(known) & fields.keys():
            known += OPERATORS
        for key, value in fields.items():
            if key not in known:
                said = advise(key, value, known, "gradckpt.CompressionConfig")
                raise ValueError(f"gradckpt: unknown field {key!r} in a compression config; {said}")
        return cls(**fields)


def _parse_operators(operators: Any) -> tuple[tuple[str, str | None], ...]:
    try:
        pairs = dict(operators)
    except (TypeError, ValueError):
        raise TypeError(
            f'gradckpt: operators= maps operators to codecs, {{"attention": "fp8"}}; not {operators!r}'
        ) from None
    for operator in pairs:
        if operator not in OPERATORS:
            _check_node(operator)
    return tuple(
        (operator, None if codec is None else resolve_codec(codec, of_activations=True))
        for operator, codec in pairs.items()
    )


#: A node of the graph, and maybe what it saves.
_NODE = re.compile(r"(\w+Backward)(\d*)(?:\.(\w+))?")


def _check_node(rule: Any) -> None:
    """Check a key of ``operators=`` that is no operator: the name of a node, and of an argument.

    Raises:
        ValueError: No node of that name may be encoded, or not this argument.
    """
    found = _NODE.fullmatch(rule) if isinstance(rule, str) else None
    if found is None:
        raise ValueError(
            f"gradckpt: unknown operator {rule!r}; choose one of: {', '.join(OPERATORS)}, or a node, as "
            "'MySwiGLUBackward'"
        )
    node, argument = found[1] + found[2], found[3]
    choice = "give its place, from 0"  # of an autograd Function, which is known when it is used
    wrong = argument is not None and re.fullmatch("0|[1-9][0-9]*", argument) is None
    if found[2]:
        arguments = [of for name, of, family, _ in _C.saved_roles() if name == node and family is not None]
        if not arguments:
            raise ValueError(f"gradckpt: what {node} saves stays exact; leave it out of operators=")
        choice, wrong = f"choose one of: {', '.join(arguments)}", argument is not None and argument not in arguments
    if wrong:
        raise ValueError(f"gradckpt: operators= cannot encode {argument!r} of {node}; {choice}")


def changes(config: CompressionConfig) -> list[str]:
    """Return the fields that differ from the codec's defaults, each as ``key=value``."""
    default = CompressionConfig(config.codec)
    values = {
        f.name: value
        for f in dataclasses.fields(config)
        if (value := getattr(config, f.name)) != getattr(default, f.name)
    }
    if config.operators:
        exact = set(OPERATORS) <= dict(config.operators).keys()
        values["operators"] = {key: codec for key, codec in config.operators if codec or not exact}
    return [f"{key}={value!r}" for key, value in values.items()]


#: What every ``compress=`` accepts.
Compress = Union[None, bool, str, CompressionConfig, Mapping[str, Any]]


def parse_compress(compress: Compress) -> CompressionConfig | None:
    """Return the config that a ``compress=`` means.

    ``None`` and ``False`` mean no compression, ``True`` the default codec; a codec's name, a
    :class:`CompressionConfig` or the dict of one is taken as it is.

    Raises:
        ValueError: A codec or field is unknown; the message lists the known ones.
        TypeError: ``compress`` is anything else.
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


def check_no_operators(config: CompressionConfig | None) -> None:
    """Check that a config is one for the inputs of a region.

    Raises:
        ValueError: It has formats for operators.
    """
    if config is not None and config.operators:
        raise ValueError("gradckpt: operators= applies to what compress_saved() keeps, not to regions; leave it out")


class GradckptInactiveWarning(UserWarning):
    """Compression was requested and nothing was compressed; the message gives the likely reason."""

    __module__ = "gradckpt"


def warn_inactive(reason: str) -> None:
    warn_user(f"gradckpt: {reason}", GradckptInactiveWarning)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the user's line that led here."""
    frame = user_frame()
    if frame is None:
        warnings.warn(message, category, stacklevel=2)
        return
    where = frame.f_globals
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=where.get("__name__"),
        registry=where.setdefault("__warningregistry__", {}),
    )


# ---- the noise of stochastic rounding ----


def check_key(key: tuple[int, int, int]) -> None:
    """Check that a key is (seed, step, tensor), of 64, 32 and 32 bits."""
    if not isinstance(key, tuple) or len(key) != 3 or any(isinstance(n, bool) or not isinstance(n, int) for n in key):
        raise TypeError(f"gradckpt: dither is (seed, step, tensor), three ints, not {key!r}")
    for name, number, bits in zip(("seed", "step", "tensor"), key, (64, 32, 32), strict=True):
        if not 0 <= number < 2**bits:
            raise ValueError(f"gradckpt: {name} is between 0 and 2^{bits} - 1, not {number}")


def get_rounding_state() -> tuple[int, int]:
    """Return ``(step, tensor)`` of the next tensor that a region with ``stochastic=True`` encodes.

    The noise of a value is Philox4x32-10 (Salmon et al. 2011) of (seed, step, tensor, index of the
    value): no generator of torch is read, and the bytes depend neither on threads nor on the
    device. A step ends with the first backward that restores something. ``tensor`` counts the
    regions and the tensors within a step; tensors that are encoded inside a region are counted by
    the region, so that its recompute repeats their numbers. If this state is saved with a
    checkpoint of the training run, a resumed run repeats the same bytes.
    """
    return _C.rounding_state()


def set_rounding_state(state: tuple[int, int]) -> None:
    """Continue from the result of :func:`get_rounding_state`; ``(0, 0)`` starts over.

    Raises:
        ValueError: A number is not between 0 and 2^32 - 1.
        TypeError: ``state`` is not a tuple of two ints.
    """
    if not isinstance(state, tuple) or len(state) != 2:
        raise TypeError(f"gradckpt: a rounding state is (step, tensor), not {state!r}")
    check_key((0, *state))
    _C.set_rounding_state(*state)
