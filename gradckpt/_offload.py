"""Where checkpoints live while the backward does not need them: :class:`Offload`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, Literal

from gradckpt._sizes import parse_bytes

__all__ = ["Offload", "parse_offload"]

#: The file's directory: kept across reboots, so hardly ever in memory.
_DIRECTORY = "/var/tmp"
_PLACES = ("cpu", "disk")
_SIZES = ("host_budget", "min_bytes")


@dataclasses.dataclass(frozen=True)
class Offload:
    """The place of checkpoints between forward and backward; the argument ``offload=`` of
    :func:`gradckpt.enable`.

    Args:
        place: ``"cpu"``: host memory, by torch's ``save_on_cpu``. ``"disk"``: a file without a
            name, written and read by threads beside the training, without the page cache; what is
            read next is asked for ahead. Its bytes are checked when they come back.
        host_budget: Of ``"disk"``: bytes of host memory for what goes to the file or comes back,
            ``"1GiB"`` or a number. As long as half of it is enough, nothing is written.
        prefetch: Of ``"disk"``: how many payloads are read ahead.
        min_bytes: Of ``"disk"``: smaller payloads stay where they are.
        directory: Of ``"disk"``: where the file is (``/var/tmp``); not in a tmpfs, which is memory.

    Raises:
        ValueError, TypeError: The place is unknown, a size is none, or an option is not of this
            place.
    """

    place: Literal["cpu", "disk"] = "cpu"
    _: dataclasses.KW_ONLY
    host_budget: int | str = "1GiB"
    prefetch: int = 2
    min_bytes: int | str = "1MiB"
    directory: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.place not in _PLACES:
            raise ValueError(f"gradckpt: offload={self.place!r} is no place; pass 'cpu' or 'disk'")
        for name in _SIZES:
            object.__setattr__(self, name, parse_bytes(getattr(self, name)))
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"gradckpt: prefetch={self.prefetch!r} is no number of tensors; pass 0 or more")
        directory = None if self.directory is None else self._path()
        object.__setattr__(self, "directory", directory or (_DIRECTORY if self.place == "disk" else None))
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        defaults |= {name: parse_bytes(defaults[name]) for name in _SIZES}
        if self.place == "cpu" and vars(self) != defaults:
            raise ValueError("gradckpt: only Offload('disk') has a budget, a prefetch and a directory; leave them out")

    def _path(self) -> str:
        if not isinstance(self.directory, (str, os.PathLike)) or not (path := os.fsdecode(self.directory)):
            raise TypeError(f"gradckpt: directory={self.directory!r} is no path; pass the name of a folder")
        return path


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
        unknown = sorted(map(str, offload.keys() - {field.name for field in dataclasses.fields(Offload)}))
        if unknown:
            raise ValueError(f"gradckpt: offload= has no {', '.join(unknown)}; gradckpt.Offload has its arguments")
        return Offload(**offload)
    if not isinstance(offload, Offload):
        raise TypeError(f"gradckpt: offload is True, False, 'cpu', 'disk' or a gradckpt.Offload, not {offload!r}")
    return offload
