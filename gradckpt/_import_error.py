"""What is said when the extension cannot be loaded: one sentence, and the command that helps."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

_BUILD = "pip install --force-reinstall --no-deps . in a checkout of it"


def of(error: BaseException) -> BaseException:
    """What to raise for it: ImportError, or under ``python -m gradckpt`` the end of the program without a traceback."""
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
    if not any(Path(__file__).parent.glob("_C*.so")):
        return f"gradckpt: the extension gradckpt._C was not built here; build it: {_BUILD}"
    if "GRADCKPT_ISA" in text:
        return f"{text}; to let the CPU decide: unset GRADCKPT_ISA"
    if "pip install" in text:
        return text
    if "needs torch" in text:
        return f'{text}; to update it: pip install --upgrade "torch>=2.10"'
    try:
        importlib.import_module("torch")
    except Exception as broken:
        return (
            f"gradckpt: torch itself cannot be imported ({type(broken).__name__}); to put it right: pip install "
            "--force-reinstall torch"
        )
    return f"gradckpt: the extension gradckpt._C cannot be loaded ({text}); build it again: {_BUILD}"


def _program_arguments() -> list[str] | None:
    """Of ``python -m gradckpt ...``, which imports this package before it runs; None: this is not that.

    Meanwhile ``sys.argv`` is ``["-m", *arguments]``, and the name is what stands before them in the command line.
    """
    argv = list(getattr(sys, "argv", None) or [])
    if argv[:1] != ["-m"] or len(sys.orig_argv) < len(argv):
        return None
    module = sys.orig_argv[-len(argv)]
    return argv[1:] if re.fullmatch(r"(-\w*m)?gradckpt(\.\w+)*", module) else None
