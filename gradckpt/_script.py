"""The script of ``gradckpt run``: which one a command names, and that as ``__main__``."""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import importlib.util
import os
import pkgutil
import re
import runpy
import shutil
import sys
import types
from typing import Any

#: Modules and programs that start the script in processes of their own, which the patch does not
#: reach; and what to write instead.
_LAUNCHERS = {
    "torch.distributed.run": "torchrun ... -m",
    "torch.distributed.launch": "torchrun ... -m",
    "torchrun": "torchrun ... -m",
    "accelerate.commands.launch": "accelerate launch ... -m",
    "accelerate.commands.accelerate_cli": "accelerate launch ... -m",
    "accelerate": "accelerate launch ... -m",
    "accelerate-launch": "accelerate launch ... -m",
    "deepspeed": "deepspeed ... --module",
    "deepspeed.launcher.runner": "deepspeed ... --module",
}

#: Programs that start their training scripts, which are modules, in processes of their own.
_FRONT_ENDS = {"axolotl": "axolotl.cli.train", "trl": "trl.scripts.sft"}


# ---- which one ----


def find(given: argparse.Namespace) -> str:
    """Return the script's path, or the module's name.

    Raises:
        ValueError: it cannot be run from here; the message has the line to write.
    """
    script: str = given.script
    name = script if given.module else os.path.basename(script)
    if name in _LAUNCHERS and (given.module or not _is_users(script)):
        raise ValueError(
            f"{script} starts the script in processes of its own, which this one cannot reach; put it first:\n"
            f"  {_LAUNCHERS[name]} gradckpt.run --compress {given.compress} script.py [arguments of the script]"
        )
    if given.module:
        wrong = _wrong_module(script)
        if wrong is not None:
            raise ValueError(wrong)
        return script
    if script == "-" or os.path.exists(script):
        return script
    if name in _FRONT_ENDS:
        raise ValueError(
            f"{script} trains in processes of its own, which this one cannot reach; run its module:\n"
            f"  gradckpt run --compress {given.compress} -m {_FRONT_ENDS[name]} [arguments]"
        )
    return _find_program(script)


#: What the console script of a launcher says.
_LAUNCHES = re.compile(rf"from ({'|'.join(map(re.escape, _LAUNCHERS))}) import main\b|console_scripts")


def _is_users(path: str) -> bool:
    """Return whether something called like a launcher is there, and is not that launcher."""
    path = os.path.join(path, "__main__.py") if os.path.isdir(path) else path
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return _LAUNCHES.search(os.fsdecode(file.read())) is None


def _wrong_module(name: str) -> str | None:
    """Say why a module cannot be run; nothing is imported for that."""
    package, _, rest = name.partition(".")
    spec = importlib.util.find_spec(package) if package else None
    if spec is None:
        return f"there is no module {name!r}"
    folders = spec.submodule_search_locations
    if folders and not rest and importlib.machinery.PathFinder.find_spec(f"{name}.__main__", folders) is None:
        return f"{name} is a package without __main__; name one of its modules: -m {name}.MODULE"
    return None


#: The first line of a script in Python, and the first two that
#: installers write where its path is too long for one.
_SHEBANG = re.compile(
    r"#!\s*(?:\S*/env\s+(?:-S\s+)?)?(\S*python[\d.]*)\s|#!/bin/sh\n'''exec' \"?([^\"\n]*?python[\d.]*)[\" ]"
)


def _find_program(name: str) -> str:
    """Return the path of a console script in Python.

    Raises:
        ValueError: there is none, or it belongs to another interpreter.
    """
    path = shutil.which(name) if os.path.basename(name) == name else None
    if path is None:
        module = name.isidentifier() and _wrong_module(name) is None
        instead = f"; for the module: gradckpt run -m {name}" if module else ""
        raise ValueError(f"there is no script {name!r} (from {os.getcwd()}){instead}")
    with open(path, "rb") as file:
        found = _SHEBANG.match(os.fsdecode(file.read(1024)))
    if found is None:
        raise ValueError(f"{path} is no Python script; run the module that it starts: gradckpt run -m MODULE")
    interpreter = found[1] or found[2]
    folder = os.path.dirname(interpreter)
    if folder and os.path.realpath(folder) != os.path.realpath(os.path.dirname(sys.executable)):
        raise ValueError(f"{path} runs in another Python; install gradckpt there: {interpreter} -m gradckpt run {name}")
    return path


# ---- the script as __main__ ----


#: What Python itself calls for ``-m``, and for a folder or an archive. runpy's public functions put
#: the former ``__main__`` back when the code has run.
_run_as_main: Any = runpy._run_module_as_main  # type: ignore[attr-defined]


def _new_main() -> dict[str, Any]:
    """Return the globals of a new ``__main__``.

    It stays: exit handlers, threads and pickles of the script need it when the script has run.
    """
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    vars(main)["__builtins__"] = builtins
    return vars(main)


def run_module(name: str, arguments: list[str]) -> None:
    """Run the module as ``python -m name`` does, in an interpreter that is already running."""
    sys.argv[:] = ["-m", *arguments]
    _new_main()
    _run_as_main(name)


def run_script(script: str, arguments: list[str]) -> None:
    """Run the script as ``python script`` does, in an interpreter that is already running."""
    sys.argv[:] = [script, *arguments]
    path = os.path.join(os.getcwd(), script)
    folder = os.path.dirname(os.path.realpath(path))
    loader: Any
    if script == "-":
        path, folder, loader = "<stdin>", "", importlib.machinery.BuiltinImporter
        code = compile(sys.stdin.buffer.read(), path, "exec", dont_inherit=True)
    elif pkgutil.get_importer(path) is not None:  # a folder or an archive, whatever its name
        sys.path[: not sys.flags.safe_path] = [path]
        _new_main()
        _run_as_main("__main__", alter_argv=False)
        return
    elif path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    if not sys.flags.safe_path:
        sys.path[0] = folder
    space = _new_main()
    space.update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, space)


def hide_own_frames() -> None:
    """Start the traceback of an exception that ends the script in the script.

    Frames before ours belong to the command or to Python's ``-m``.
    """
    own, runpys = run_script.__code__.co_filename, runpy.run_module.__code__.co_filename
    show = sys.excepthook  # possibly the script's own

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        inner = each = traceback
        while each is not None:
            inner = each.tb_next if each.tb_frame.f_code.co_filename == own else inner
            each = each.tb_next
        while inner is not None and inner.tb_frame.f_code.co_filename == runpys:
            inner = inner.tb_next  # not the script's own calls of runpy, further in
        show(kind, error.with_traceback(inner), inner)

    sys.excepthook = excepthook
