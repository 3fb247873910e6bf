"""Find ranks that store their checkpoints in different formats: :class:`RankCheck`, in the first
training call.

Each rank leaves a note in the store of the default process group, and compares it with the note of
the rank that came first. No collective is used: ranks that never train, or train other parts, delay
no other rank.

The cost is one note and a few reads per rank and model; without a process group, or in one of size
one, it is nothing.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from gradckpt._compression import CompressionConfig, changes
from gradckpt._engine import torch_private as private
from gradckpt._models import inactivity_warning

logger = logging.getLogger("gradckpt")

#: An environment variable: "0" lets ranks differ.
SWITCH = "GRADCKPT_CHECK_RANKS"

#: Seconds that one rank waits for the others' notes in all, for each process group. If ranks meet
#: in every step, this costs nothing: the first all-reduce would have waited for the same rank.
#: Otherwise it is this much, once.
PATIENCE = 1.0

#: The number of reads for each model after which silent ranks are taken to train other models.
LOOKS = 256

#: Added to the number of ranks that have written a note once two of them disagree.
_DISAGREED = 1 << 32

#: The formats of a model, by the name of a module or class: all that were noted so far.
Uses = Mapping[str, list[str]]


def spell(config: CompressionConfig | None) -> str:
    """Return a config in a few words, the same on every rank."""
    if config is None:
        return "no compression"
    changed = changes(config)
    return f"{config.codec} ({', '.join(changed)})" if changed else config.codec


class RankCheck:
    """The checkpoint formats of some regions of this process, for the other ranks to compare.

    Args:
        label: The name of these regions among the ranks.
        uses: The formats, by the name of a module or class; may grow until the first
            :meth:`compare`.
        of_class: The label is that of all such regions of a process, and not of one model.
            Otherwise the ranks compare their first models of this label with each other, their
            second ones, and so on, in the order in which they train; the checks of one model have
            the same ``uses``.
    """

    def __init__(self, label: str, uses: Uses, of_class: bool = False) -> None:
        self.label = label
        self.uses = uses
        self.of_class = of_class
        self._settled_in: Callable[[], Any] = _unsettled

    @property
    def called(self) -> bool:
        """True after the first training call."""
        return self._settled_in is not _unsettled

    def settled(self) -> bool:
        """Return whether the comparison in this process group is complete, or not needed.

        Every training call asks this.
        """
        return self._settled_in() is _default_group()

    def compare(self) -> None:
        """Write our note, and compare it with those of the others. A setting that is only tried has
        none: each rank tries its own.

        Raises:
            ValueError: Another rank disagrees.
        """
        if inactivity_warning.is_unobserved():
            return
        group = _default_group()
        if group is None:
            self._settled_in = _nothing
        elif dist.get_world_size() == 1 or os.environ.get(SWITCH) == "0" or _table_of(group).settle(self):
            self._settled_in = weakref.ref(group)

    def __reduce__(self) -> Any:
        return RankCheck, (self.label, self.uses, self.of_class)


def _unsettled() -> Any:
    return _unsettled  # no group is this


def _nothing() -> None:
    return None


def _default_group() -> Any:
    """Return the default group, or None without one or in a torch without distributed."""
    return dist.group.WORLD if dist.is_available() else None


class _Table:
    """The notes of one process group."""

    def __init__(self, group: Any, generation: int) -> None:
        self.group = weakref.ref(group)
        self.prefix = f"gradckpt/{generation}"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.models: dict[str, list[Uses]] = {}  # those that trained, by label, in order
        self.said: dict[str, dict[str, list[str]]] = {}
        self.looks: dict[str, int] = {}
        self.patience = PATIENCE
        self.lock = threading.Lock()

    def settle(self, check: RankCheck) -> bool:
        """Return whether the comparison is complete."""
        # This is looked up each time: a stored reference would keep the server of a destroyed group
        # alive.
        store = dist.distributed_c10d.PrefixStore(self.prefix, private.default_store())
        with self.lock:
            try:
                label = self._name(check)
                self._say(store, label, check)
                return self._hear(store, label)
            except (RuntimeError, json.JSONDecodeError) as error:  # the store is gone, or is none
                logger.info("gradckpt: the ranks' codecs were not compared: %s", error)
                return True

    def _name(self, check: RankCheck) -> str:
        """Return the name of the check in the store, which has the number of its model."""
        if check.of_class:
            return check.label
        models = self.models.setdefault(check.label, [])
        number = next((i for i, uses in enumerate(models) if uses is check.uses), len(models))
        if number == len(models):
            models.append(check.uses)
        return f"{check.label} (number {number + 1} that trained)" if number else check.label

    def _say(self, store: Any, label: str, check: RankCheck) -> None:
        before, added = self.said.get(label, {}), check.uses
        uses = {name: sorted({*before.get(name, ()), *added.get(name, ())}) for name in sorted({*before, *added})}
        if uses == before:
            return
        note = json.dumps({"rank": self.rank, "uses": uses})
        first = json.loads(store.compare_set(label, "", note))
        self.said[label] = uses
        if first["rank"] != self.rank:
            text = _difference(label, check.label, self.rank, uses, first["rank"], first["uses"])
            if text is not None:
                store.set(f"{label}/difference", text)
                store.add(f"{label}/count", _DISAGREED)
                raise ValueError(text)
        elif first["uses"] != uses:
            store.set(label, note)
        if not before:
            self.looks[label] = LOOKS
            store.add(f"{label}/count", 1)

    def _hear(self, store: Any, label: str) -> bool:
        pause = 0.001
        while True:
            count = store.add(f"{label}/count", 0)
            if count >= _DISAGREED:
                raise ValueError(store.get(f"{label}/difference").decode())
            if count >= self.world:
                return True
            if self.patience <= 0:
                break
            time.sleep(pause)
            self.patience -= pause
            pause = min(2 * pause, 0.125)
        self.looks[label] -= 1
        return self.looks[label] <= 0


def _difference(label: str, whole: str, rank: int, uses: Uses, first: int, theirs: Uses) -> str | None:
    """Return what two ranks have in one place; ``whole``: the name of what is a whole model."""
    for name, mine in uses.items():
        other = theirs.get(name)
        if other and not set(mine) & set(other):
            where = label if name == whole else f"{name!r} of {label}"
            return (
                f"gradckpt: the ranks disagree about {where}: rank {rank} has {' and '.join(mine)}, rank {first} has "
                f"{' and '.join(other)}; give all the same compress=, or set {SWITCH}=0"
            )
    return None


_tables: list[_Table] = []  # of the current group, or empty
_tables_lock = threading.Lock()
_generations = 0


def _table_of(group: Any) -> _Table:
    global _generations
    with _tables_lock:
        if not _tables or _tables[0].group() is not group:
            _generations += 1
            _tables[:] = [_Table(group, _generations)]
        return _tables[0]
