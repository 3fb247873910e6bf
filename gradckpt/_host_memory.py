"""The memory of this machine, or of the control group that the process is in."""

from __future__ import annotations

import contextlib

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
