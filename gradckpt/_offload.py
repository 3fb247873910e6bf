"""Where payloads live while the backward does not need them: :class:`Offload`; sizes of memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from gradckpt._compression import advise, explains_keywords, written

#: The file's directory: kept across reboots, so hardly ever in memory.
_DIRECTORY = "/var/tmp"
PLACES = ("cpu", "disk")
_BUDGETS = {"cpu": "80%", "disk": "1GiB"}
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_FALLBACKS = ("device", "error")


@explains_keywords
@dataclasses.dataclass(frozen=True)
class Offload:
    """The place of payloads between forward and backward; the argument ``offload=`` of
    :func:`gradckpt.enable`, :func:`gradckpt.checkpoint` and the others.

    Payloads of a device are written into a ring, a part of its memory of fixed size. Streams beside
    the training copy them from there to pinned host memory, and back before the backward needs
    them. What is not compressed moves as it is (the codec ``raw``).

    Args:
        place: ``"cpu"``: host memory; for what is in host memory already, nothing is done.
            ``"disk"``: host memory up to the budget, and a file without a name, which threads write
            and read without the page cache. What comes back from it is checked.
        host_budget: Bytes of host memory: ``"64GiB"``, a number, or a part of what is free now,
            ``"80%"``, which ranks of torchrun on one machine share (the default of ``"cpu"``; of
            ``"disk"`` it is ``"1GiB"``, of which half is used before anything is written). It is
            taken as it is needed, and never given back before the end.
        ring: Bytes of the ring of a device; ``"auto"``: three times the largest payload of a
            region, 16 times that of :class:`gradckpt.compress_saved`.
        prefetch: How many payloads come back ahead of the one that is read.
        keep_last: The newest bytes in the ring that are not copied, since the backward reads them
            first; ``"auto"``: a third of it.
        min_bytes: Smaller payloads stay where they are; 0: all move.
        directory: Of ``"disk"``: where the file is (``/var/tmp``); not in a tmpfs, which is memory.
        fallback: What happens where the host or the ring has no room, or a device refuses:
            ``"device"``: the payload stays where it is, which is said once and counted in
            ``stats()["offload"]``; ``"error"``.

    Raises:
        ValueError, TypeError: The place is unknown, a size is none, or an option is not of this
            place.
    """

    place: Literal["cpu", "disk"] = "cpu"
    _: dataclasses.KW_ONLY
    host_budget: int | str | None = None
    ring: int | str = "auto"
    prefetch: int = 4
    keep_last: int | str = "auto"
    min_bytes: int | str = "1MiB"
    directory: str | os.PathLike[str] | None = None
    fallback: Literal["device", "error"] = "device"

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise ValueError(f"gradckpt: offload={self.place!r} is no place; pass 'cpu' or 'disk'")
        if self.fallback not in _FALLBACKS:
            raise ValueError(f"gradckpt: fallback={self.fallback!r} is unknown; pass 'device' or 'error'")
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"gradckpt: prefetch={self.prefetch!r} is no count of payloads; pass 0 or more")
        if self.place == "cpu" and self.directory is not None:
            raise ValueError("gradckpt: only Offload('disk') has a directory; leave it out")
        budget = _BUDGETS[self.place] if self.host_budget is None else self.host_budget
        sizes = {"host_budget": _host_budget(budget)}
        for name, forms in _FORMS.items():
            sizes[name] = _own_bytes(name, getattr(self, name), forms)
        for name, size in sizes.items():
            object.__setattr__(self, name, size)
        if isinstance(self.host_budget, int) and int(self.min_bytes) > self.host_budget:
            raise ValueError(
                f"gradckpt: min_bytes={self.min_bytes} is more than host_budget={self.host_budget}, so nothing could "
                "move; lower min_bytes"
            )
        directory = None if self.directory is None else self._path()
        object.__setattr__(self, "directory", directory or (_DIRECTORY if self.place == "disk" else None))

    def host_bytes(self) -> int:
        """Return the host budget in bytes, where it is a percentage of what is free now."""
        if isinstance(self.host_budget, int):
            return self.host_budget
        ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)  # of this machine, which share its memory
        return int(free_host_memory() * float(str(self.host_budget).rstrip("%")) / 100 / ranks)

    def _path(self) -> str:
        if not isinstance(self.directory, (str, os.PathLike)) or not (
            path := os.path.expanduser(os.fsdecode(self.directory))
        ):
            raise TypeError(f"gradckpt: directory={self.directory!r} is no path; pass the name of a folder")
        return path


def _host_budget(size: int | str) -> int | str:
    """Return the bytes of a size; a percentage stays one, since the free memory changes."""
    percent = _PERCENT.fullmatch(size.strip()) if isinstance(size, str) else None
    if percent is None:
        return parse_bytes(size, f"host_budget={size!r}", '"64GiB", "64GB", "80%" or a number of bytes')
    if not 0 < float(percent[1]) <= 100:
        raise ValueError(f"gradckpt: host_budget={size!r} is no part of the memory; write 1% to 100%")
    return f"{percent[1]}%"


#: The sizes that may be 0, and what messages list.
_FORMS = {
    "ring": '"auto", "2GiB", 0 or a number of bytes',
    "keep_last": '"auto", "2GiB", 0 or a number of bytes',
    "min_bytes": '"1MiB", 0 or a number of bytes',
}


def _own_bytes(name: str, size: int | str, forms: str) -> int | str:
    """Return the bytes of a size; "auto" stays."""
    if (size == "auto" and "auto" in forms) or (size == 0 and not isinstance(size, bool)):
        return size
    return parse_bytes(size, f"{name}={size!r}", forms)


def plain_data(offload: Offload) -> dict[str, Any]:
    """Return plain data, which ``offload=`` takes."""
    return {key: value for key, value in dataclasses.asdict(offload).items() if value is not None}


#: What ``offload=`` may be.
OffloadLike: TypeAlias = "bool | str | Mapping[str, Any] | Offload | None"


def parse_offload(offload: Any) -> Offload | None:
    """Return what the argument ``offload=`` means: ``False`` or ``None``, ``True`` (host memory), a
    place, an :class:`Offload`, or a dict of its arguments.

    Raises:
        ValueError, TypeError: None of these.
    """
    if offload is None or offload is False:
        return None
    if offload is True:
        return Offload()
    if isinstance(offload, str):
        return Offload(offload)  # type: ignore[arg-type]
    if isinstance(offload, Mapping):
        known = [field.name for field in dataclasses.fields(Offload)]
        for key, value in offload.items():
            if key not in known:
                said = advise(str(key), value, known, "gradckpt.Offload")
                raise ValueError(f"gradckpt: unknown key {key!r} in offload=; {said}")
        return Offload(**offload)
    if not isinstance(offload, Offload):
        given = written(offload)
        raise TypeError(f"gradckpt: offload is True, False, 'cpu', 'disk' or a gradckpt.Offload, not {given}")
    return offload


# ---- sizes as people write them ----

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?:(?P<prefix>[KMGTP])(?P<binary>I?))?B?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_bytes(size: Any, given: str | None = None, forms: str = "24GiB, 24GB or a number of bytes") -> int:
    """Return the bytes of ``"24GiB"`` (binary units), ``"24GB"`` (decimal), or a number of bytes.

    Case and spaces have no meaning; ``"24G"`` is decimal, too. ``given``: what messages call the
    size, if not by its value; ``forms``: what they list as possible.

    Raises:
        ValueError: It is not a size, or less than one byte, or a unit was forgotten.
    """
    given = repr(size) if given is None else given
    bare = isinstance(size, int) and not isinstance(size, bool)
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is not None:
        whole, _, decimals = match["number"].partition(".")
        unit: int = (1024 if match["binary"] else 1000) ** _POWERS[(match["prefix"] or "").lower()]
        parsed: int = int(whole + decimals) * unit // 10 ** len(decimals)  # exact, unlike a float
        bare = size.strip()[-1] in "0123456789."
    elif bare:
        parsed = size
    else:
        raise ValueError(f"gradckpt: {given} is not a size; write it as {forms}")
    if parsed < 1:
        raise ValueError(f"gradckpt: {given} is less than one byte; write it as {forms}")
    if bare and parsed < 1024:
        raise ValueError(f"gradckpt: {given} is {parsed} bytes; give a unit, as in 24GiB")
    return parsed


# ---- the memory of this machine, or of the control group that the process is in ----

#: What a control group may use, and what it uses; version 2, then 1.
_CGROUP = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_host_memory() -> int:
    """Return the bytes that new tensors can have now."""
    left = [_meminfo("MemAvailable")]
    for limit, used in _CGROUP:
        with contextlib.suppress(OSError, ValueError):  # "max", or no such file
            left.append(_number_in(limit) - _number_in(used))
    return max(min(left), 0)


def total_host_memory() -> int:
    """Return the bytes of all memory."""
    totals = [_meminfo("MemTotal")]
    for limit, _ in _CGROUP:
        with contextlib.suppress(OSError, ValueError):
            totals.append(_number_in(limit))
    return min(totals)


def _number_in(path: str) -> int:
    with open(path) as file:
        return int(file.read())


def _meminfo(name: str) -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise ValueError(f"gradckpt: /proc/meminfo has no {name}; pass a size in bytes")
