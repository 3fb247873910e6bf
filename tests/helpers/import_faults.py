"""The operators are registered while the extension is imported:
any answer of torch may be a refusal.

``python import_faults.py LIBRARY EXTENSION``: LIBRARY is call_faults.c, compiled. Each import is
the first one of a process of its own, and is tried twice. Prints, for each answer, what both
attempts said.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
from typing import Any

import torch

#: They return 1 when they fail, and raise nothing.
REGISTERS = (
    "aoti_torch_library_init_fragment",
    "aoti_torch_library_init_impl",
    "aoti_torch_library_def",
    "torch_library_impl",
)


def install(library: str, extension: str) -> Any:
    spec = importlib.util.spec_from_file_location("gradckpt._C", extension)
    assert spec is not None
    importlib.util.module_from_spec(spec)  # is in memory from now on; nothing of it has run
    faults = ctypes.CDLL(library)
    faults.call_faults_begin.argtypes = [ctypes.c_long, ctypes.py_object]
    lists = [(ctypes.c_char_p * (len(names) + 1))(*(name.encode() for name in names), None)
             for names in ((), (), (), REGISTERS)]  # fmt: skip
    faults.call_faults_install(extension.encode(), *lists)
    return faults


def attempt() -> str:
    try:
        import gradckpt  # noqa: F401
    except ImportError as error:
        return str(error)
    x = torch.ones(3)
    payload = torch.ops.gradckpt.encode(x, "raw")
    return "good" if torch.ops.gradckpt.decode(payload, "raw", [3], x.dtype).equal(x) else "other values"


def in_a_child(faults: Any, k: int) -> tuple[int, list[str]]:
    """How many calls there were, and what both attempts said, when call k is refused."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        faults.call_faults_begin(k, None)
        said = [attempt(), attempt()]
        os.write(write, json.dumps([faults.call_faults_end(), said]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        calls, said = json.loads(answer.read() or '[0, ["a crash"]]')
    os.waitpid(child, 0)
    return calls, said


def main() -> None:
    faults = install(*sys.argv[1:])
    calls, said = in_a_child(faults, sys.maxsize)
    print(json.dumps([said, *(in_a_child(faults, k)[1] for k in range(1, calls + 1))]))


if __name__ == "__main__":
    main()
