"""What a plan's file carries: :class:`SavedProfile`, what was measured for it; and plain data as
dataclasses whose values were checked: :func:`read_record`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Module

from gradckpt._planning.options import Cost, Option, RegionCosts, find_option
from gradckpt._planning.segments import UNBOUNDED

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


@dataclasses.dataclass(frozen=True)
class Measured:
    """Regions that are alike. ``like``: their parameters and inputs, in words. ``seconds``,
    ``errors``: of each option. ``weight``: what a region's squared error adds to that of the step,
    None if unknown.
    """

    like: str
    seconds: tuple[float, ...]
    errors: tuple[float, ...] = dataclasses.field(metadata=UNBOUNDED)
    weight: float | None


@dataclasses.dataclass(frozen=True)
class KnownPlan:
    """An option for each region, by number. ``peak``: bytes above the start of the step. ``error``:
    of the step's gradients, None if it was not measured.
    """

    options: tuple[int, ...]
    peak: int
    error: float | None = dataclasses.field(metadata=UNBOUNDED)


@dataclasses.dataclass(frozen=True)
class SavedProfile:
    """``step_seconds``: of the step with exact recomputing. ``plain``: bytes that the step adds
    without checkpointing; while these are the same, the peaks of ``known`` are. ``excess``: bytes
    that real steps needed beyond the simulated ones, at most. ``options``: those that plans may
    choose from. ``measured``: what was, and ``regions``: which of it each region is.
    """

    step_seconds: float
    plain: int
    excess: int
    options: tuple[Option, ...]
    measured: tuple[Measured, ...]
    regions: tuple[int, ...]
    known: tuple[KnownPlan, ...]

    def __post_init__(self) -> None:
        options, regions, measured = len(self.options), len(self.regions), len(self.measured)
        for i, each in enumerate(self.measured):
            place = f"profile.measured[{i}]"
            if not len(each.seconds) == len(each.errors) == options:
                raise damaged(place, f"has not one time and one error for each of {options} options")
        for i, number in enumerate(self.regions):
            place = f"profile.regions[{i}]"
            if number >= measured:
                raise damaged(place, f"is {number}, and {measured} were measured")
        for i, known in enumerate(self.known):
            place = f"profile.known[{i}].options"
            if len(known.options) != regions or max(known.options, default=0) >= options:
                raise damaged(place, f"has not one of {options} options for each region")

    def of(self, region: int) -> Measured:
        """Return what was measured of a region."""
        return self.measured[self.regions[region]]

    def costs_of(self, regions: Sequence[Module]) -> RegionCosts:
        """Return the costs of regions, in the order of a plan's."""
        return {
            (id(region), option): Cost(seconds, error)
            for i, region in enumerate(regions)
            for option, seconds, error in zip(self.options, self.of(i).seconds, self.of(i).errors, strict=True)
        }

    def check(self, names: Sequence[str], own: Sequence[str], options: Sequence[Option], like: Sequence[str]) -> None:
        """Check that this was measured in a step with these regions.

        Args:
            names: Of the regions when it was measured.
            own: Of the regions now.
            options: Those that a plan may choose from now.
            like: What each region is now, as in :class:`Measured`.

        Raises:
            ValueError: It was not; the message says what differs first.
        """
        if (name := _in_one_alone(names, own)) is not None:
            where = "is no region here" if name in names else "is a region here alone"
            raise ValueError(
                f"gradckpt: profile= was measured with other modules: {name!r} {where}; pass the same modules=, or "
                "leave profile= out"
            )
        measured, allowed_here = ([(each.name, each.rule) for each in these] for these in (self.options, options))
        if (option := _in_one_alone(measured, allowed_here)) is not None:
            what = "with" if option in measured else "without"
            raise ValueError(
                f"gradckpt: profile= was measured {what} the option {option[0]!r}; pass the same compress= "
                "and error=, or leave profile= out"
            )
        for i, (name, now) in enumerate(zip(names, like, strict=True)):
            then = self.of(i).like
            if then != now:
                raise ValueError(
                    f"gradckpt: profile= was measured in another step, where {name!r} had {then}, and now has {now}; "
                    "leave profile= out"
                )


# ---- what regions are like


def parameters_of(region: Module) -> str:
    """Return what a region's parameters are, in words."""
    parameters = list(region.parameters())
    kinds = sorted({f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}" for p in parameters})
    return f"{sum(p.requires_grad for p in parameters)} of {len(parameters)} parameters trained, {', '.join(kinds)}"


def _in_one_alone(a: Sequence[Any], b: Sequence[Any]) -> Any:
    """Return the first element that is in one of two lists alone, None if there is none."""
    return next((x for x in [*a, *b] if (x in a) != (x in b)), None)
