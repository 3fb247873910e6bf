"""The places of payloads: one C object for equal settings of ``offload=``."""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from typing import Any

from gradckpt import _C
from gradckpt._compression import GradckptInactiveWarning, warn_user
from gradckpt._offload import Offload, parse_offload

#: For how many payloads a ring of no given size has room: of regions, of compress_saved().
REGIONS, SAVED = 3, 16

_places: weakref.WeakValueDictionary[tuple[Offload, int], _C.Place] = weakref.WeakValueDictionary()
_offloads: weakref.WeakKeyDictionary[_C.Place, Offload] = weakref.WeakKeyDictionary()
#: The latest ones stay open between steps, when no payload holds them.
_latest: dict[int, _C.Place] = {}
_lock = threading.Lock()


def place_of(offload: Any, payloads: int = REGIONS) -> _C.Place | None:
    """Return the place of these settings, which all regions of the process share.

    Raises:
        ValueError, TypeError: They mean nothing, or the directory cannot be used.
        MemoryError: There is not enough memory.
    """
    parsed = parse_offload(offload)
    if parsed is None:
        return None
    with _lock:
        found = _places.get((parsed, payloads))
        if found is None:
            found = _made(parsed, payloads)
            _places[parsed, payloads] = found
            _offloads[found] = parsed
        _latest[payloads] = found
        return found


def _made(offload: Offload, payloads: int) -> _C.Place:
    def size(value: Any) -> int:
        return -1 if value == "auto" else int(value)

    return _C.Place(
        offload.directory,  # type: ignore[arg-type]  # a string, since an Offload is made of it
        offload.host_bytes(),
        size(offload.ring),
        size(offload.keep_last),
        offload.prefetch,
        size(offload.min_bytes),
        payloads,
    )


def apart_from_others(offload: Offload) -> _C.Place:
    """Return a place of these settings that nothing else shares, for trials."""
    found = _made(offload, SAVED)
    _offloads[found] = offload
    return found


def offload_of(place: _C.Place) -> Offload:
    """Return the settings of a place."""
    return _offloads[place]


def place_again(place: _C.Place) -> tuple[Any, ...]:
    """Return how copies and pickles of models make a place again: they share it."""
    return place_of, (_offloads[place], next(key[1] for key, found in _places.items() if found is place))


@functools.cache
def _say(place: str, why: str) -> None:
    warn_user(
        f"gradckpt: offload={place!r} leaves payloads where they are: {why}; see stats()['offload'] for how many",
        GradckptInactiveWarning,
    )


def stays_on_device(place: _C.Place, why: str, refused: int) -> None:
    """Say once why a payload stays where it is. ``refused``: it should not have to.

    Raises:
        RuntimeError: The settings have ``fallback="error"``, and it was refused.
    """
    offload = offload_of(place)
    if refused and offload.fallback == "error":
        raise RuntimeError(
            f"gradckpt: offload={offload.place!r} cannot take a payload: {why}; raise host_budget= or ring=, or pass "
            'fallback="device"'
        )
    _say(offload.place, why)


def pinning_refused(place: _C.Place) -> None:
    """Say once that a device has refused to pin host memory."""
    _say_pinned(offload_of(place).place, place.figures()["pinned"])


@functools.cache
def _say_pinned(place: str, pinned: int) -> None:
    warn_user(
        f"gradckpt: the system pins only {pinned >> 20} MiB for offload={place!r}, so other copies are slower; "
        "lower host_budget= (WSL2 allows 1 to 2 GB in all)",
        GradckptInactiveWarning,
    )


def figures(restart: bool = False) -> dict[str, int]:
    """Return the sums over all places; of those that ended, what they counted. ``restart``: count
    from here.
    """
    found = collections.Counter(_C.figures_of_ended_places(restart))
    for place in list(_places.values()):
        found.update(place.figures(restart))
    return dict(found)
