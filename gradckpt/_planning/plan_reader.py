"""Plain data of a plan's file, as dataclasses whose values were checked: :func:`read_record`."""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any

from gradckpt._planning.options import Option, find_option

__all__ = ["SIGNED", "UNBOUNDED", "damaged", "read_record"]

#: Metadata of fields whose numbers may be negative, and of errors, which may be infinite or NaN.
SIGNED, UNBOUNDED = {"signed": True}, {"unbounded": True}

#: Numbers are smaller: the planner has 64 bits for bytes.
_LIMIT = 2**63


def read_record(kind: Any, data: Any, place: str = "") -> Any:
    """Return the dataclass ``kind`` that plain data has: its fields that count in comparisons, by
    their annotations.

    Raises:
        ValueError: The message begins with the name of a field, and says what is wrong with it.
    """
    if not isinstance(data, Mapping):
        raise _wrong(place or "it", data, "an object")
    fields = {each.name: each for each in dataclasses.fields(kind) if each.compare}
    prefix = place and f"{place}."
    for name in data:
        if name not in fields:
            raise damaged(prefix + str(name), "is unknown")
    for name, each in fields.items():
        if name not in data and each.default is each.default_factory is dataclasses.MISSING:
            raise damaged(prefix + name, "is missing")
    hints = _hints(kind)
    given = [name for name in fields if name in data]
    return kind(**{name: _read(hints[name], data[name], prefix + name, fields[name].metadata) for name in given})


_hints = functools.cache(typing.get_type_hints)


def _read(kind: Any, value: Any, place: str, metadata: Mapping[str, Any]) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _read(inner[0], value, place, metadata)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _wrong(place, value, "a list")
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise damaged(place, f"has {len(value)} values instead of {len(kinds)}")
        return tuple(_read(k, x, f"{place}[{i}]", metadata) for i, (k, x) in enumerate(zip(kinds, value, strict=True)))
    if origin is not None:
        if not isinstance(value, Mapping):
            raise _wrong(place, value, "an object")
        return {key: _read(inner[1], x, f"{place}.{key}", metadata) for key, x in value.items()}
    if kind is Option:
        return _option(value, place)
    if dataclasses.is_dataclass(kind):
        return read_record(kind, value, place)
    if kind in (int, float):
        return _number(kind, value, place, metadata)
    if type(value) is not kind:
        raise _wrong(place, value, {str: "text", bool: "true or false"}[kind])
    return value


def _number(kind: type, value: Any, place: str, metadata: Mapping[str, Any]) -> Any:
    signed = bool(metadata.get("signed"))
    if type(value) is int or (kind is float and type(value) is float):
        if (-_LIMIT if signed else 0) <= value < _LIMIT:
            return value
        if metadata.get("unbounded") and (math.isnan(value) or value == math.inf):
            return value
    what = "an integer" if kind is int else "a finite number"
    raise _wrong(place, value, what if signed else f"{what} of at least 0")


def _option(value: Any, place: str) -> Option:
    if not isinstance(value, Mapping) or value.keys() != {"name", "rule"}:
        raise _wrong(place, value, "an option with its name and rule")
    name, rule = value["name"], value["rule"]
    name_place, rule_place = f"{place}.name", f"{place}.rule"
    if not isinstance(name, str):
        raise _wrong(name_place, name, "text")
    if rule != "skip" and not isinstance(rule, Mapping):
        raise _wrong(rule_place, rule, '"skip" or an object')
    try:
        return find_option(name, rule)
    except (TypeError, ValueError) as error:
        raise damaged(rule_place, "is no option: " + str(error).removeprefix("gradckpt: ")) from None


def _wrong(place: str, value: Any, expected: str) -> ValueError:
    return damaged(place, f"is {reprlib.repr(value)}, not {expected}")


def damaged(place: str, what: str) -> ValueError:
    """Return the error of a field, to which who reads the plan adds where the plan is from."""
    return ValueError(f"{place} {what}")
