"""The error when the extension cannot be loaded: one sentence, and the command that helps."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path

_BUILD = "pip install --force-reinstall --no-deps . in a checkout of it"


def of(error: BaseException) -> BaseException:
    """Return what to raise: ImportError, or in the command
    ``gradckpt`` the end of the program without a traceback."""
    sentence = explain(error)
    arguments = _program_arguments()
    if arguments is None:
        return ImportError(sentence, name="gradckpt._C")
    if "--json" in arguments:
        print(json.dumps({"ok": False, "error": sentence}))
        return SystemExit(1)
    return SystemExit(sentence)


def explain(error: BaseException) -> str:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    text = re.sub(r"(?:/[^/\s:'\"()]+)+/", "", text)  # no paths of this machine
    if not any(Path(__file__).parents[1].glob("_C*.so")):
        return f"gradckpt: the extension gradckpt._C was not built here; build it: {_BUILD}"
    if text.startswith("gradckpt: "):
        return text
    try:
        importlib.import_module("torch")
    except Exception as broken:
        return (
            f"gradckpt: torch itself cannot be imported ({type(broken).__name__}); reinstall it: pip install "
            "--force-reinstall torch"
        )
    return f"gradckpt: the extension gradckpt._C cannot be loaded ({text}); build it again: {_BUILD}"


def _program_arguments() -> list[str] | None:
    """Return the arguments of ``gradckpt`` and ``python -m gradckpt``,
    which import this package first; else None.

    Under ``-m``, ``sys.argv`` is meanwhile ``["-m", *arguments]``,
    and the name stands before them in the command line.
    """
    argv = list(getattr(sys, "argv", None) or [])
    if os.path.basename("".join(argv[:1])) == "gradckpt":
        return argv[1:]
    if argv[:1] != ["-m"] or len(sys.orig_argv) < len(argv):
        return None
    module = sys.orig_argv[-len(argv)]
    return argv[1:] if re.fullmatch(r"(-\w*m)?gradckpt(\.\w+)*", module) else None
