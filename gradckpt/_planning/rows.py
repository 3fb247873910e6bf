"""The rows of a comparison: :class:`Row`, and which of them there are: :func:`with_parts`."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from torch.nn import Module

from gradckpt._models.working_set import have_parts
from gradckpt._planning.hints import LESS
from gradckpt._planning.step_trace import KINDS, WORKING, Peak
from gradckpt._settings import READY, TORCH, Setting, in_parts, in_tiles
from gradckpt._stats import format_bytes

__all__ = ["Row", "is_less", "of_tiles", "with_parts"]

logger = logging.getLogger("gradckpt")


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting. ``peak``: bytes above the start of the step, and where; ``total``: with what is
    there during the whole step. ``at_most``: ``total`` if nearly all tokens choose the same
    experts, None if sizes do not depend on that. ``needed``: bytes with which the allocator of the
    device can run the larger of the two, None on a CPU and for real steps. ``longest``: tokens of
    the longest sequence that fits, 0 if none does, None if unknown. ``seconds``: estimate for a
    step. ``problem``: why there are no figures.
    """

    name: str
    line: str
    peak: Peak | None
    total: int | None
    at_most: int | None = None
    fits: bool | None = None
    longest: int | None = None
    seconds: float | None = None
    problem: str | None = None
    needed: int | None = None

    @property
    def size(self) -> int | None:
        """The bytes that have to fit."""
        return next((size for size in (self.needed, self.at_most, self.total) if size is not None), None)

    @property
    def binds(self) -> str:
        """What the largest part of the peak is, with its bytes."""
        if self.peak is None:
            return self.problem or ""
        name, size = max(self.peak.parts.items(), key=lambda part: part[1])
        return f"{self.peak.position}: {name} {format_bytes(size)}"


def of_tiles(rows: Sequence[Row], tiles: int | None) -> list[str]:
    """Return a sentence where tiles were asked for and no row has them."""
    is_shown = tiles is None or any(f"{tiles} tiles" in row.name for row in rows)
    return [] if is_shown else [f"No setting needs less with tiles={tiles}: MLPs are not what binds."]


#: Of the bytes of a step: how large a working set must be for rows in parts.
_LARGE = 0.05


def with_parts(
    rows_of: Callable[[Sequence[Setting]], list[Row]], blocks: Sequence[Module], tiles: int | None
) -> list[Row]:
    """Return the rows of the ready settings, each followed by those of the same in parts, and in
    tiles as well, if these need less.
    """
    rows = rows_of(READY)
    can = have_parts(blocks)
    more: dict[str, list[Setting]] = {}
    for row, setting in zip(rows, READY, strict=True) if can or tiles is not None else ():
        is_large = row.peak is not None and row.peak.parts.get(KINDS[WORKING], 0) > _LARGE * (row.total or 0)
        if is_large or (tiles is not None and setting == TORCH):  # one at least tells whether tiles can be
            found = [in_parts(setting)] * can
            found += [] if tiles is None else [in_parts(setting, tiles) if can else in_tiles(setting, tiles)]
            more[row.name] = [each for each in found if each is not None]
    known = _rows_that_work(rows_of, {each: setting for setting in READY for each in more.get(setting.name, ())})
    result = []
    for row in rows:
        result.append(row)
        for setting in more.get(row.name, ()):
            other = known.get(setting.name)
            if other is not None and is_less(other, result[-1]):
                result.append(other)
    return result


def _rows_that_work(
    rows_of: Callable[[Sequence[Setting]], list[Row]], settings: Mapping[Setting, Setting]
) -> dict[str, Row]:
    """Return the rows of settings in parts or tiles, each of which is made of a ready one, by name.
    Not every module can be recomputed in parts: such rows are left out, and are in tiles alone.

    Raises:
        Exception: What tiles raise.
    """
    try:
        return {row.name: row for row in rows_of(list(settings))}
    except Exception as error:
        logger.debug("gradckpt: a row in parts does not work (%s); it is left out", error)
    found = {}
    for setting, ready in settings.items():
        try:
            found[setting.name] = rows_of([setting])[0]
        except Exception:
            tiled = in_tiles(ready, setting.options["tiles"]) if "tiles" in setting.options else None
            if tiled is not None:
                found[setting.name] = rows_of([tiled])[0]
    return found


def is_less(row: Row, other: Row) -> bool:
    return (row.size or math.inf) < (1 - LESS) * (other.size or math.inf)
