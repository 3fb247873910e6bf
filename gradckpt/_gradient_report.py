"""The result of :func:`gradckpt.gradient_error`: errors, what they compare with, and a verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from gradckpt._stats import columns

#: Without the error of bf16 for the same step, an error above this is called large: bf16's is 0.3
#: to 5 % (docs/numerics.md).
_LIMIT = 0.01


@dataclasses.dataclass(frozen=True)
class GradientError:
    """What one setting does to the gradients of one step.

    ``name``: of the setting; ``line``: what to write for it. ``total``: the L2 norm of the
    difference from the exact gradients, over all parameters, relative to theirs; None if it was not
    measured. ``cosine``: of the angle between the two. ``worst``: the parameters with the largest
    relative errors of their own, largest first. ``loss_difference``: from the exact loss; None if
    the step returns no loss. ``note``: why nothing was measured, or what did not take place.
    ``amplified``: sentences on operators that amplify the error of the codec, and what to write.
    """

    name: str
    line: str
    total: float | None
    cosine: float | None
    worst: tuple[tuple[str, float], ...]
    loss_difference: float | None
    note: str = ""
    amplified: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Floor:
    """A change of the gradients that training has anyway: ``total`` as in :class:`GradientError`.

    If it is None, ``note`` says why.
    """

    name: str
    what: str
    total: float | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class GradientErrors:
    """The errors of all candidates; ``str()`` is a table with the verdict below it.

    ``loss``: the exact one, if the step returns one. ``problem``: why the exact gradients cannot be
    compared with; then there are no errors. ``precision``: the dtypes of the trained parameters,
    and the autocast under which the model ran, in words.
    """

    model: str
    loss: float | None
    errors: tuple[GradientError, ...]
    floors: tuple[Floor, ...]
    problem: str = ""
    precision: str = ""

    def __len__(self) -> int:
        return len(self.errors)

    def __iter__(self) -> Iterator[GradientError]:
        return iter(self.errors)

    def __getitem__(self, name: str | int) -> GradientError:
        """Return the error of a candidate by its name, or by its index."""
        if isinstance(name, int):
            return self.errors[name]
        return {each.name: each for each in self.errors}[name]

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can carry."""
        return dataclasses.asdict(self) | {"verdict": self.verdict}

    @property
    def verdict(self) -> str:
        """One sentence on the first candidate, and if its error is large, what to try instead."""
        if self.problem:
            return self.problem
        first = self.errors[0]
        if first.total is None:
            return f"{first.name} {first.note}."
        said = f"{first.name} changes the gradients by {percent(first.total)}"
        if first.total == 0:
            return f"{first.name} changes no gradient."
        known = [floor for floor in self.floors if floor.total is not None]
        said += _beside(first.total, known)
        if first.total <= self._limit:
            return said + "."
        name, worst = first.worst[0] if first.worst else ("", 0.0)
        where = f"; {name} is the worst parameter ({percent(worst)})" if name else ""
        return f"{said}{where}; try {self._better(first)}."

    @property
    def _limit(self) -> float:
        """The error up to which the verdict asks for nothing else."""
        found = (floor.total for floor in self.floors if floor.total is not None and floor.name == BF16)
        return next(found, _LIMIT)

    def _better(self, bad: GradientError) -> str:
        known = (each for each in self.errors if each is not bad)
        good = [each for each in known if each.total is not None and each.total <= self._limit]
        return f"{good[0].name} ({percent(good[0].total)})" if good else '"lossless", which changes none'

    def table(self) -> str:
        """Return plain text: a line for each candidate and each floor, and the verdict."""
        head = ("setting", "error", "cosine", "loss", "worst parameter")
        rows = [
            (
                *(each.name, percent(each.total), "" if each.cosine is None else f"{each.cosine:.6f}"),
                "" if each.loss_difference is None else f"{each.loss_difference:+.1e}" if each.loss_difference else "=",
                " ".join(
                    [f"{percent(error)} {name}" for name, error in each.worst[:1]] + [each.note] * bool(each.note)
                ),
            )
            for each in self.errors
        ]
        rows += [(floor.what, percent(floor.total), "", "", floor.note) for floor in self.floors]
        title = [f"gradients of one step of {self.model}, beside exact recomputing", *filter(None, [self.precision])]
        amplified = [
            f"{each.name}: {text.removeprefix('gradckpt: ')}" for each in self.errors for text in each.amplified
        ]
        return "\n".join([*title, *(columns([head, *rows], right=(1, 2, 3)) if rows else []), self.verdict, *amplified])

    __str__ = table


#: The floors by name, and what they change.
BF16, SAMPLES, TOKENS = "bf16", "samples", "tokens"
FLOORS = {BF16: "computing in bf16", SAMPLES: "choosing other samples", TOKENS: "choosing other tokens"}


def _beside(total: float, floors: list[Floor]) -> str:
    said, before = "", ""
    for floor in floors:
        word = "less" if total <= (floor.total or 0.0) else "more"
        said += f" and {word}" if before not in ("", word) else f", {word}" if not before else " and"
        said += f" than {floor.what} ({percent(floor.total)})"
        before = word
    return said


def percent(share: float | None) -> str:
    """Return ``0.31 %``, with two digits, or more above 100."""
    if share is None:
        return ""
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 or not value else f"{value:#.2g} %"
