"""Imports gradckpt and runs regions without a private name of torch:
one forked child for each name.

Arguments: the names, as JSON. Prints for each, as JSON, what import and regions said: "ok",
or the exception."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import traceback
from typing import Any

import torch
import torch._dynamo  # once, for all children
import torch.utils.checkpoint

TORCH = os.path.dirname(torch.__file__)


def remove(path):
    parts = path.split(".")
    owner = torch
    for i, name in enumerate(parts[1:-1], start=2):
        if not hasattr(owner, name):
            importlib.import_module(".".join(parts[:i]))
        owner = getattr(owner, name)
    getattr(owner, parts[-1])
    sys.modules.pop(path, None)  # of a module
    holders = [owner, *getattr(owner, "__mro__", ())]
    delattr(next(holder for holder in holders if parts[-1] in vars(holder)), parts[-1])


def gradients(call):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 64))
    x = torch.randn(32, 64, requires_grad=True)
    call(net, x * 1).square().mean().backward()
    return [x.grad, *(p.grad for p in net.parameters()), net[1].running_mean]


def said(call, expected=None):
    try:
        found = call()
    except BaseException as error:
        where = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1]
        of_torch = isinstance(error, (AttributeError, ImportError, NameError)) and where.startswith((TORCH, __file__))
        return f"{'torch itself: ' if of_torch else ''}{type(error).__name__}: {error}"
    if expected is None:
        return "ok"
    good = all(torch.allclose(a, b, rtol=0.1, atol=1e-3) for a, b in zip(found, expected, strict=True))
    return "ok" if good else "wrong gradients"


def checks(path):
    answers = {"import": said(lambda: importlib.import_module("gradckpt"))}
    try:
        expected = gradients(lambda net, x: net(x))
    except AttributeError:  # torch itself cannot without it
        return answers
    if answers["import"] != "ok":
        return answers
    import gradckpt

    def under_torchs_name(net, x):
        with gradckpt.patched("int8"):
            return torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)

    def saved(net, x):
        with gradckpt.compress_saved("int8"):
            return net(x)

    def in_device(net, x):
        with torch.device("cpu"):
            return gradckpt.checkpoint(net, x, compress="int8")

    def in_autocast(net, x):
        with torch.autocast("cpu", enabled=False):
            return gradckpt.checkpoint(net, x, compress="int8")

    def by_function(net, x):
        def contexts():
            return gradckpt.compat.create_selective_checkpoint_contexts(
                lambda ctx, op, *args, **kwargs: "mm" in str(op)
            )

        return gradckpt.checkpoint(net, x, context_fn=contexts)

    def by_name(net, x):
        def contexts():
            return gradckpt.compat.create_selective_checkpoint_contexts("save_matmuls:int8")

        return gradckpt.checkpoint(net, x, context_fn=contexts)

    calls = {
        "plain": gradckpt.checkpoint,
        "int8": lambda net, x: gradckpt.checkpoint(net, x, compress="int8"),
        "containers": lambda net, x: gradckpt.checkpoint(lambda d: net(d["x"]), {"x": x}, buffers=net),
        "reentrant": lambda net, x: gradckpt.checkpoint(net, x, use_reentrant=True),
        "one node": lambda net, x: gradckpt.SelectiveRecompute.apply(net, None, x, compress="int8"),
        "function": by_function,
        "name": by_name,
        "saved": saved,
        "device": in_device,
        "autocast": in_autocast,
    }
    if "debug" in path:  # slow
        calls["debug"] = lambda net, x: gradckpt.checkpoint(net, x, debug=True)
    answers |= {name: said(lambda call=call: gradients(call), expected) for name, call in calls.items()}
    found = gradients(lambda net, x: net(x))[:-1]
    answers["patched"] = said(lambda: gradients(under_torchs_name)[:-1], found)  # running statistics as torch's
    return answers


def in_child(function, otherwise):
    """What a function returns in a forked child; ``otherwise``: where the child dies."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else otherwise


def without(path):
    try:
        remove(path)
        return checks(path)
    except BaseException as error:
        return {"script": f"{type(error).__name__}: {error}"}


def run_without_names():
    torch.set_num_threads(1)
    gradients(lambda net, x: net(x))
    for path in json.loads(sys.argv[1]):
        print(json.dumps({path: in_child(lambda path=path: without(path), {"script": "died"})}), flush=True)


# ---- The operators are registered while the extension is imported: any answer of torch may be a
# refusal.
#
# ``python first_imports.py import_faults LIBRARY EXTENSION``: LIBRARY is call_faults.c, compiled.
# Each import
# is the first one of a process of its own, and is tried twice. Prints, for each answer, what both
# attempts said.

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


def refused(faults: Any, k: int) -> tuple[int, list[str]]:
    """How many calls there were, and what both attempts said, when call k is refused."""
    faults.call_faults_begin(k, None)
    said = [attempt(), attempt()]
    return faults.call_faults_end(), said


def run_import_faults() -> None:
    faults = install(*sys.argv[1:])
    crash = (0, ["a crash"])
    calls, said = in_child(lambda: refused(faults, sys.maxsize), crash)
    print(json.dumps([said, *(in_child(lambda k=k: refused(faults, k), crash)[1] for k in range(1, calls + 1))]))


if __name__ == "__main__":
    globals()[f"run_{sys.argv.pop(1)}"]()
