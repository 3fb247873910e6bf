"""What was measured for a plan, as its file carries it: :class:`SavedProfile`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.nn import Module

from gradckpt._engine import torch_private as private
from gradckpt._planning.block_times import Cost
from gradckpt._planning.options import Option
from gradckpt._planning.plan_reader import UNBOUNDED, damaged

__all__ = ["KnownPlan", "Measured", "SavedCosts", "SavedProfile", "inputs_noted", "parameters_of"]


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

    @property
    def costs(self) -> list[Cost]:
        """What each option costs."""
        return list(map(Cost, self.seconds, self.errors))


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
    that real steps needed beyond the paper, at most. ``options``: those that plans may choose from.
    ``measured``: what was, and ``regions``: which of it each region is.
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
        measured, allowed_here = ([each.to_dict() for each in these] for these in (self.options, options))
        if (option := _in_one_alone(measured, allowed_here)) is not None:
            what = "with" if option in measured else "without"
            raise ValueError(
                f"gradckpt: profile= was measured {what} the option {option['name']!r}; pass the same compress= "
                "and error=, or leave profile= out"
            )
        for i, (name, now) in enumerate(zip(names, like, strict=True)):
            then = self.of(i).like
            if then != now:
                raise ValueError(
                    f"gradckpt: profile= was measured in another step, where {name!r} had {then}, and now has {now}; "
                    "leave profile= out"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which JSON can carry."""
        return {
            "step_seconds": self.step_seconds,
            "plain": self.plain,
            "excess": self.excess,
            "options": [option.to_dict() for option in self.options],
            "measured": [dataclasses.asdict(each) for each in self.measured],
            "regions": list(self.regions),
            "known": [dataclasses.asdict(each) for each in self.known],
        }

    @classmethod
    def of_regions(
        cls,
        step_seconds: float,
        plain: int,
        excess: int,
        options: Sequence[Option],
        regions: Sequence[Measured],
        known: Sequence[KnownPlan],
    ) -> SavedProfile:
        """Return the profile of these regions, in the order of a plan's."""
        distinct = {each: i for i, each in enumerate(dict.fromkeys(regions))}
        return cls(
            step_seconds,
            plain,
            excess,
            tuple(options),
            tuple(distinct),
            tuple(distinct[each] for each in regions),
            tuple(known),
        )


class SavedCosts:
    """The costs of regions, in the order of a plan's, from its profile."""

    def __init__(self, regions: Sequence[Module], saved: SavedProfile) -> None:
        self._of = {
            (id(region), option): cost
            for i, region in enumerate(regions)
            for option, cost in zip(saved.options, saved.of(i).costs, strict=True)
        }

    def of(self, block: Module, option: Option) -> Cost | None:
        """Return the cost of a region in an option."""
        return self._of.get((id(block), option))


# ---- what regions are like


def parameters_of(region: Module) -> str:
    """Return what a region's parameters are, in words."""
    parameters = list(region.parameters())
    kinds = sorted({f"{str(p.dtype).removeprefix('torch.')} on {p.device.type}" for p in parameters})
    return f"{sum(p.requires_grad for p in parameters)} of {len(parameters)} parameters trained, {', '.join(kinds)}"


@contextlib.contextmanager
def inputs_noted(regions: Sequence[Module]) -> Iterator[dict[int, str]]:
    """Yield what the first call of each region in the ``with`` block gets, in words, by id."""
    found: dict[int, str] = {}

    def hook(region: Module, args: Any, kwargs: Any) -> None:
        if id(region) not in found:
            leaves = private.tree_leaves((args, kwargs))
            found[id(region)] = ", ".join(_words(x) for x in leaves if isinstance(x, Tensor))

    with contextlib.ExitStack() as stack:
        for region in regions:
            stack.callback(region.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield found


def _words(x: Tensor) -> str:
    size = "x".join(map(str, x.shape))
    return f"{size} {str(x.dtype).removeprefix('torch.')}{' with a gradient' if x.requires_grad else ''}"


def _in_one_alone(a: Sequence[Any], b: Sequence[Any]) -> Any:
    """Return the first element that is in one of two lists alone, None if there is none."""
    return next((x for x in [*a, *b] if (x in a) != (x in b)), None)
