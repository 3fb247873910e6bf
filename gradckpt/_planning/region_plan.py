"""What is done with each region of a model, to stay within a budget: :class:`Plan`; and that no
plan does: :class:`NoPlan`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Module

from gradckpt._apart import shown_as_base
from gradckpt._models.switch import BUDGET, Handle, NothingToDo, disable, enable
from gradckpt._planning.device_memory import Budget, class_of, named_modules, parameters_before
from gradckpt._planning.devices import Link
from gradckpt._planning.options import KEEP, Option
from gradckpt._planning.plan_files import SavedProfile, damaged, read_record
from gradckpt._planning.report import IN_PYTHON, Hints, advice, aligned, is_smallest, with_a_smaller_budget
from gradckpt._planning.segments import SIGNED, UNBOUNDED, Peak
from gradckpt._stats import format_bytes

logger = logging.getLogger("gradckpt")


@shown_as_base
class NoPlan(ValueError):
    """No plan stays within the budget. ``smallest_budget``: bytes of the one that needs least, what
    the step adds if the budget was of activations.
    """

    def __init__(self, message: str, smallest_budget: int) -> None:
        super().__init__(message)
        self.smallest_budget = smallest_budget

    @classmethod
    def within(cls, budget: Budget, smallest: int, hint: str) -> NoPlan:
        """Return the error of a budget; ``smallest``: bytes; ``hint``: a sentence."""
        of = " of activations" if budget.step_only else ""
        return cls(
            f"gradckpt: no plan stays within {budget.text}; the smallest budget is {format_bytes(smallest)} "
            f"({smallest} bytes){of}. {hint}",
            smallest,
        )


#: Of plan files.
_VERSION = 1

#: A list of numbers, which takes one line of a file.
_NUMBERS = re.compile(r"\[\n[-+.,\w\s]+\n\s*\]")


@dataclasses.dataclass(frozen=True)
class PlannedRegion:
    """One region. ``name``, ``kind``: of its module. ``kept``: bytes from its forward to its
    backward. ``seconds``: more than without checkpointing. ``error``: the relative L2 error of the
    region's own gradients. ``digest``: of what the module must look like.
    """

    name: str
    kind: str
    option: Option
    kept: int = dataclasses.field(metadata=SIGNED)
    seconds: float = dataclasses.field(metadata=SIGNED)
    error: float = dataclasses.field(metadata=UNBOUNDED)
    digest: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """What a plan that may offload does. ``place``: ``"cpu"`` or ``"disk"``. ``bytes``: of payloads
    that are there when the backward begins. ``room``: bytes of the budget that their ring, or their
    host memory, takes. ``seconds``: how long the step waits for them, by simulation. ``link``: its
    rates. ``why``: a sentence about offload and this plan, or "".
    """

    place: str
    bytes: int
    room: int
    seconds: float
    link: Link
    why: str = ""

    def __str__(self) -> str:
        if not self.bytes:
            return f"Nothing is offloaded; the link: {self.link}."
        return (
            f"Offloaded to {self.place!r}: {format_bytes(self.bytes)}, through {format_bytes(self.room)} that count in "
            f"the budget. The step waits {self.seconds * 1e3:.3g} ms for them, by simulation; the link: {self.link}."
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """An option for each region of a model, within a budget; ``print(plan)`` shows a table.

    ``regions``: one :class:`PlannedRegion` for each module. ``budget``: bytes, of all tensors on
    the device, and ``budget_text`` as it was written. ``peak``: bytes that the step reaches;
    ``at_most``: the same if nearly all tokens choose the same experts, None if sizes do not depend
    on that. ``needed``: bytes with which the device's allocator can run the larger of the two; the
    budget is kept by it, or by the larger peak where it is None, on a CPU. ``plain``: the peak
    without checkpointing. ``binds``: where the larger peak is. ``fixed``: bytes that are there
    during the whole step, by name. ``seconds``: of the step; ``plain_seconds``: without
    checkpointing; ``bound``: no plan within the budget is faster. ``estimated``: times come from a
    data sheet. ``smallest_budget``: bytes; none below it has a plan. ``error``: the measured
    relative L2 error of the step's gradients, None if all options are exact; ``error_budget``.
    ``about``: the assumptions, in sentences. ``outside``: the
    shapes of the parameters that no region has, by name. ``profile``: what was measured for it,
    with which ``gradckpt.plan(..., profile=plan)`` plans for another budget; None with estimated
    times. ``offloaded``: what goes to another place; None: nothing may.
    """

    model: str
    regions: tuple[PlannedRegion, ...]
    budget: int
    budget_text: str
    peak: int
    plain: int
    binds: Peak
    fixed: Mapping[str, int]
    seconds: float
    plain_seconds: float
    bound: float
    smallest_budget: int
    estimated: bool = False
    error: float | None = dataclasses.field(default=None, metadata=UNBOUNDED)
    error_budget: float | None = None
    front: tuple[tuple[int, float], ...] = dataclasses.field(default=(), repr=False)
    about: tuple[str, ...] = ()
    at_most: int | None = None
    needed: int | None = None
    outside: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict, repr=False)
    profile: SavedProfile | None = dataclasses.field(default=None, repr=False)
    offloaded: Offloaded | None = None
    hints: Hints = dataclasses.field(default_factory=lambda: IN_PYTHON, repr=False, compare=False)

    # ---- use

    def apply(self, model: Module) -> Handle:
        """Checkpoint the model as planned, instead of how it is now.

        Returns:
            As :func:`gradckpt.enable`.

        Raises:
            ValueError: The model is another one than the plan was made for; the message says what
                differs first.
        """
        rules = self.rules_for(model)
        if all(rule == KEEP.rule for rule in rules.values()):
            disable(model)
            vars(model)[BUDGET] = NothingToDo()
            logger.info("gradckpt: %r", Handle(model))
            return Handle(model)
        return enable(model, None, modules=rules)

    def rules_for(self, model: Module) -> dict[Module, Any]:
        """Return ``modules=`` of :func:`gradckpt.enable` for a model.

        Raises:
            ValueError: As :meth:`apply`.
        """
        modules, parameters = named_modules(model), parameters_before(model)
        rules = {}
        for region in self.regions:
            module = modules.get(region.name)
            if module is None:
                raise ValueError(
                    f"gradckpt: this plan is for another model: {class_of(model).__name__} has no module "
                    f"{region.name!r}; make a new plan"
                )
            kind = class_of(module).__name__
            if kind != region.kind or digest_of(module, parameters) != region.digest:
                what = f"is {kind}, not {region.kind}" if kind != region.kind else "has other parameters"
                raise ValueError(f"gradckpt: this plan is for another model: {region.name!r} {what}; make a new plan")
            rules[module] = region.option.rule
        for name, shape in outside_of(model, list(rules)).items():
            if self.outside.get(name) != shape:
                was = "is not in it" if name not in self.outside else f"was {_size_of(self.outside[name])}"
                raise ValueError(
                    f"gradckpt: this plan is for another model: {name!r}, {_size_of(shape)}, {was}; make a new plan"
                )
        return rules

    def pareto(self) -> list[dict[str, float]]:
        """Return budgets in bytes and the step's seconds of the best plan for each, by bytes.

        With ``offload``, of the plans that were simulated, waits included: with
        ``profile=plan``, planning for one of these budgets gives that plan or a faster one.
        """
        fixed = sum(self.fixed.values())
        found = {max(size + fixed, self.smallest_budget): seconds for size, seconds in self.front}
        return [{"budget": size, "seconds": seconds} for size, seconds in found.items()]

    # ---- files

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, which JSON can carry."""
        return {"version": _VERSION, **dataclasses.asdict(self, dict_factory=_plain)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file, for :meth:`load` and ``enable(model, plan=path)``."""
        text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), json.dumps(self.to_dict(), indent=1))
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file.

        Raises:
            OSError: The file cannot be read.
            TypeError: It is no path.
            ValueError: It is no plan, or one of another version.
        """
        name = os.fspath(path)
        try:
            with open(name, encoding="utf-8") as file:
                given = json.load(file)
            version = given.pop("version")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"gradckpt: {name} is no plan; write one with plan.save(path)") from None
        if version != _VERSION:
            raise ValueError(
                f"gradckpt: {name} is a plan of version {version}, and this gradckpt reads version "
                f"{_VERSION}; make a new plan"
            )
        return cls._read(given, name)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan whose :meth:`to_dict` this is.

        Raises:
            ValueError: A value is missing, or none that a plan has; the message names it.
        """
        return cls._read({key: value for key, value in data.items() if key != "version"}, "this")

    @classmethod
    def _read(cls, data: Mapping[str, Any], source: str) -> Plan:
        try:
            found: Plan = read_record(cls, data)
            if found.profile is not None and len(found.profile.regions) != len(found.regions):
                place = "profile.regions"
                raise damaged(place, f"has {len(found.profile.regions)} of {len(found.regions)} regions")
        except ValueError as error:
            raise ValueError(f"gradckpt: {source} is a damaged plan: {error}; make a new plan") from None
        return found

    # ---- text

    @property
    def is_plain(self) -> bool:
        """True if nothing needs to be done: the step fits as it is."""
        return all(region.option == KEEP for region in self.regions)

    @property
    def gap(self) -> float:
        """How much faster the best possible plan could be, as a part of this one's step."""
        return (self.seconds - self.bound) / self.seconds if self.seconds else 0.0

    @property
    def verdict(self) -> str:
        """The answer in a few sentences."""
        limit = self._limit()
        if self.is_plain:
            return f"It fits {limit} without checkpointing: {self._peak()}. Nothing to do within the budget."
        slower = self.seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0
        times = "by estimate" if self.estimated else "as measured"
        comma = "" if self.needed is None else ","
        certificate = "no plan is faster" if self.gap < 5e-5 else f"within {self.gap:.2%} of the best possible"
        said = [
            f"Peak {self._peak()}{comma} of {limit}; without checkpointing {format_bytes(self.plain)}.",
            f"The step takes {slower:.1%} more time than without, {times}; {certificate}.",
        ]
        if self.error is not None:
            allowed = f" of {self.error_budget:.2%}" if self.error_budget is not None else ""
            said.append(f"Gradients differ by {self.error:.2%}{allowed}, measured on this batch.")
        if self.offloaded is not None and self.offloaded.why:
            said.append(self.offloaded.why)
        return " ".join(said)

    def _limit(self) -> str:
        """Return the budget in bytes, and as it was written if that says more."""
        size = format_bytes(self.budget)
        number, unit = size.split()
        same = f"{float(number):g}{unit}".lower() == self.budget_text.replace(" ", "").lower()
        return size if same else f"{size} ({self.budget_text})"

    def _peak(self) -> str:
        said = format_bytes(self.peak)
        if self.at_most is not None:
            said += f" (at most {format_bytes(self.at_most)}, if tokens choose the same experts)"
        return said if self.needed is None else f"{said} allocated, {format_bytes(self.needed)} needed"

    def __str__(self) -> str:
        lines = [self.verdict, "", *_table(self.regions), ""]
        held = sum(self.fixed.values())
        if not self.is_plain:
            is_least = is_smallest(self.smallest_budget - held, self.peak - held)
            hints = self.hints if is_least else with_a_smaller_budget(self.hints)
            lines.append(advice(self.binds, self.fixed, hints))
        smallest = format_bytes(self.smallest_budget)
        if self.budget_text.startswith("activations:"):
            smallest += f", of which the step adds {format_bytes(self.smallest_budget - held)}"
        lines.append(f"Smallest budget: {smallest}.")
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.fixed.items() if size)
        lines.append(f"During the whole step: {format_bytes(held)} ({parts}).")
        if self.offloaded is not None:
            lines.append(str(self.offloaded))
        return "\n".join([*lines, *self.about])


def _plain(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return what a file has of a record: an option's rule tells the codec, and who prints the plan
    the hints.
    """
    return {name: value for name, value in fields if name not in ("codec", "hints")}


def plan_of(plan: Any, keyword: str) -> Plan:
    """Return the plan that a keyword has, or whose file it names.

    Raises:
        TypeError: It is neither a plan nor a path.
        ValueError: The file cannot be read, or has no plan.
    """
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, os.PathLike)):
        raise TypeError(
            f"gradckpt: {keyword}= takes a Plan or the path of its file, not {type(plan).__name__}; write a file with "
            "plan.save(path)"
        )
    try:
        return Plan.load(plan)
    except OSError as error:
        raise ValueError(
            f"gradckpt: {keyword}={os.fspath(plan)!r} cannot be read ({error.strerror}); write it with plan.save(path)"
        ) from None


def digest_of(module: Module, parameters: Mapping[int, Mapping[str, Any]]) -> str:
    """Return a digest of a module's parts: their names, classes, and shapes of parameters, which
    :func:`parameters_before` has.
    """
    parts = [
        (
            name,
            class_of(part).__name__,
            sorted((key, shape) for key, (_, shape) in parameters[id(part)].items()),
        )
        for name, part in named_modules(module).items()
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def outside_of(model: Module, regions: Sequence[Module]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters that are not of these modules, by name."""
    parameters = parameters_before(model)
    seen = {key for region in regions for part in region.modules() for key, _ in parameters[id(part)].values()}
    found = {}
    for place, part in named_modules(model).items():
        for name, (key, shape) in parameters[id(part)].items():
            if key not in seen:
                found[f"{place}.{name}" if place else name] = shape
                seen.add(key)
    return found


def _size_of(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def _table(regions: Sequence[PlannedRegion]) -> list[str]:
    rows = [["regions", "option", "kept each", "time each", "error each"]]
    for first, last, n in _runs(regions):
        name = first.name if n == 1 else f"{first.name} to {_rest(first.name, last.name)}"
        rows.append(
            [
                f"{name} ({n} {first.kind})" if n > 1 else f"{name} ({first.kind})",
                first.option.name,
                format_bytes(max(first.kept, 0)),
                f"+{first.seconds * 1e3:.3g} ms" if first.seconds > 0 else "",
                f"{first.error:.2%}" if first.error else "",
            ]
        )
    if not any(row[4] for row in rows[1:]):
        rows = [row[:4] for row in rows]
    return aligned(list(zip(*rows, strict=True)), (2, 3, 4))


def _rest(first: str, last: str) -> str:
    """Return a module's name from where it differs from another one's."""
    ours, theirs = last.split("."), first.split(".")
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
    return ".".join(ours[same:])


def _runs(regions: Sequence[PlannedRegion]) -> list[tuple[PlannedRegion, PlannedRegion, int]]:
    """Return the first, the last and the number of neighbours with the same option."""
    runs = [list(run) for _, run in itertools.groupby(regions, lambda region: (region.option, region.digest))]
    return [(run[0], run[-1], len(run)) for run in runs]
