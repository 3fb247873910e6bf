"""Names of codecs: the short ones, those of floating tensors, and what a misspelt one may mean."""

from __future__ import annotations

import difflib
import re

from gradckpt import _C

#: Short names, each defined here only.
ALIASES = {"fp8": "fp8_e4m3"}


#: Ids of bytes that no codec reads any more, since those of the codec have changed.
RETIRED = {3: "int8", 4: "int8_plain", 5: "int6", 6: "int4"}


def codec_of_id(number: int) -> str:
    """Return the name of the codec with this id.

    Raises:
        ValueError: No codec has it, or one had it before its bytes changed.
    """
    if number in RETIRED:
        raise ValueError(
            f"gradckpt: codec id {number} is {RETIRED[number]!r} of an earlier version, whose payloads this one cannot "
            "read; encode the tensor again"
        )
    by_id = {_C.codec_info(name)["id"]: name for name in _C.codecs()}
    if number not in by_id:
        raise ValueError(f"gradckpt: no codec has the id {number}; gradckpt.codecs.names() lists the codecs")
    return by_id[number]


def resolve_codec(name: str, of_activations: bool = False) -> str:
    """Return the full name of a codec.

    Raises:
        ValueError: The codec is unknown; the message lists the names.
        TypeError: ``name`` is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"gradckpt: a codec is named by a string, not {name!r}; to compress nothing pass compress=None")
    full = ALIASES.get(name, name)
    if full not in _C.codecs():
        if name.lower() in _NOTHING:
            raise ValueError(f"gradckpt: {name!r} is no codec; to compress nothing pass compress=None")
        near = _near(name)
        names = ", ".join([*(for_activations() if of_activations else _C.codecs()), *ALIASES])
        meant = f"did you mean {near!r}? " if near else ""
        raise ValueError(f"gradckpt: unknown codec {name!r}; {meant}choose one of: {names}")
    if of_activations and _C.codec_info(full)["dtypes"] == ["bool"]:
        names = ", ".join(for_activations())
        raise ValueError(f"gradckpt: codec {full!r} holds booleans, not activations; choose one of: {names}")
    return full


#: Texts that other libraries take for no compression; here it has one form, None.
_NOTHING = ("", "none", "null", "no", "off", "false")

#: Codecs under the names that they have elsewhere.
_OTHER_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8": "fp8",
    "nf4": "int4",
    "fp4": "int4",
    "float4": "int4",
}


def _near(name: str) -> str | None:
    """Return the codec that another spelling means (``"INT8"``, ``"8bit"``, ``"bfloat16"``), or the
    nearest.
    """

    def plain(text: str) -> str:
        return re.sub(r"[\s_-]", "", text.lower())

    known = {plain(each): each for each in [*_C.codecs(), *ALIASES]} | _OTHER_NAMES
    near = difflib.get_close_matches(re.sub(r"^(\d+)bits?$", r"int\1", plain(name)), known, 1)
    return known[near[0]] if near else None


def for_activations() -> list[str]:
    """Return the codecs of floating tensors; the others hold booleans."""
    return [name for name in _C.codecs() if _C.codec_info(name)["dtypes"] != ["bool"]]
