"""PyTorch's own tests of checkpointing, with our function put in place: a tool to be run by hand.

    python tests/equivalence/run_upstream.py TEST_FILE_OR_FOLDER ... [-k EXPR]

PyTorch's test files are not part of this repository: give the path of a checkout that fits the
installed torch (its ``test`` folder, or single files such as ``test/test_autograd.py``,
``test/test_utils.py`` and ``test/distributed/fsdp/test_checkpoint_wrapper.py``). Every test that
has to do with checkpointing is run twice, in separate processes: with torch's own function, and
with ``torch.utils.checkpoint.checkpoint`` and ``checkpoint_sequential`` replaced by those of
``gradckpt.compat`` before the test file is imported. Printed is what passes with both, what fails
only with ours, and what fails with both (then the reason is the environment: no GPU, another
version of torch). Exit code: 1 if anything fails only with ours, 2 if nothing was run, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import traceback
import types
import unittest
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# A test is taken when its name, its class or its source says that it is about checkpointing.
SELECTED_NAME = re.compile(r"checkpoint|early_stop|_ac_|recompute", re.IGNORECASE)
SELECTED_SOURCE = re.compile(
    r"\b(checkpoint|checkpoint_sequential|checkpoint_wrapper|apply_activation_checkpointing)\("
)

# What is left out although it matches, and why: by the path of the file, and by "Class.test".
EXCLUDED_FILES = {
    r"/(dynamo|inductor|export|functorch|higher_order_ops|compile)/": "torch.compile: a milestone of its own",
    r"/distributed/(checkpoint|_shard)/": "the other checkpoints: files on disk",
    r"/distributed/_composable/test_checkpoint\.py$": "calls a private generator of torch, not the public function",
}
EXCLUDED_TESTS = {
    r"[Dd]ynamo|_compile": "torch.compile: a milestone of its own",
    r"state_dict|load_checkpoint|save_checkpoint": "the other checkpoints: files on disk",
}

PASSED, SKIPPED, EXCLUDED, CRASHED = "pass", "skip", "excluded", "crash"
IMPORT, REPLACED = "(import)", "(imports of the file)"
MAX_REPLACED = 20


# ---- in the child: one file, one implementation ----


def stub_expecttest() -> None:
    """torch's test classes derive from one class of a package that torch does not depend on."""
    if importlib.util.find_spec("expecttest") is not None:
        return

    class ExpectTestCase(unittest.TestCase):
        longMessage = True

        def assertExpectedInline(self, actual: str, expect: str, skip: int = 0) -> None:
            assert actual.strip() == inspect.cleandoc(expect).strip()

    module: Any = types.ModuleType("expecttest")
    module.TestCase = ExpectTestCase
    module.ACCEPT = False
    sys.modules["expecttest"] = module


def replace_missing(name: str) -> None:
    """A module that has every name: for imports that the selected tests do not use."""

    def attribute(wanted: str) -> Any:
        if wanted.startswith("__"):
            raise AttributeError(wanted)
        return type(wanted, (), {})

    for i in range(name.count(".") + 1):
        package = name.rsplit(".", i)[0]
        if package not in sys.modules:
            module: Any = types.ModuleType(package)
            module.__path__ = []
            module.__getattr__ = attribute
            sys.modules[package] = module


def put_ours_in_place(codec: str) -> Callable[[], int]:
    """Replace torch's functions wherever torch already holds them.
    Returns a counter of our regions."""
    import torch.utils.checkpoint as torch_checkpoint

    import gradckpt
    import gradckpt.compat

    ours = {name: getattr(gradckpt.compat, name) for name in ("checkpoint", "checkpoint_sequential")}
    if codec:
        from exact_codecs import CONFIGS, by_default

        ours["checkpoint"] = functools.partial(by_default, CONFIGS[codec], buffers="torch")
    theirs = {id(getattr(torch_checkpoint, name)): name for name in ours}
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").split(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if id(value) in theirs:
                setattr(module, attribute, ours[theirs[id(value)]])
    return lambda: int(gradckpt.stats()["regions"])


def import_test_file(path: Path) -> tuple[types.ModuleType, list[str]]:
    """The file as a module; what it imports and is not there is replaced,
    and named in the list."""
    missing: list[str] = []
    folders = [path.parent, *(p for p in path.parents if p.name == "test")]
    sys.path[:0] = [str(folder) for folder in folders]
    sys.argv = [str(path)]
    for _ in range(MAX_REPLACED):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
            return module, missing
        except ModuleNotFoundError as error:
            if not error.name or error.name.split(".")[0] in ("torch", "gradckpt"):
                raise
            replace_missing(error.name)
            missing.append(error.name)
    raise ImportError(f"{path}: more than {MAX_REPLACED} modules are missing")


def source_of(method: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(method)
    except (OSError, TypeError):
        return ""


def selected_tests(module: types.ModuleType) -> Iterator[tuple[str, unittest.TestCase]]:
    """("Class.test", the test) for every test about checkpointing, excluded ones too."""
    for case in list(vars(module).values()):
        if not (isinstance(case, type) and issubclass(case, unittest.TestCase) and case.__module__ == module.__name__):
            continue
        for name in unittest.defaultTestLoader.getTestCaseNames(case):
            label = f"{case.__name__}.{name}"
            if SELECTED_NAME.search(label) or SELECTED_SOURCE.search(source_of(getattr(case, name))):
                yield label, case(name)


class Outcome(unittest.TestResult):
    """Of one test: pass, skip, or the traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome, self.detail = PASSED, ""

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self.outcome, self.detail = SKIPPED, reason

    def _failed(self, error: Any) -> None:
        self.outcome, self.detail = "fail", "".join(traceback.format_exception(*error))

    def addError(self, test: Any, error: Any) -> None:
        super().addError(test, error)
        self._failed(error)

    def addFailure(self, test: Any, error: Any) -> None:
        super().addFailure(test, error)
        self._failed(error)

    def addSubTest(self, test: Any, subtest: Any, error: Any) -> None:
        super().addSubTest(test, subtest, error)
        if error is not None:
            self._failed(error)

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        super().addUnexpectedSuccess(test)
        self.outcome, self.detail = "fail", "unexpected success"


def run_one(test: unittest.TestCase) -> Outcome:
    result = Outcome()
    unittest.TestSuite([test]).run(result)
    return result


def child(path: Path, ours: bool, results: Path, expression: str, codec: str) -> None:
    """Run what is not in `results` yet, writing a line before and one after each test."""
    done = {line["test"] for line in read_lines(results)}
    with results.open("a", buffering=1) as file:

        def write(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")

        stub_expecttest()
        regions = put_ours_in_place(codec) if ours else lambda: 0
        try:
            module, missing = import_test_file(path)
        except Exception:
            write(test=IMPORT, outcome="fail", detail=traceback.format_exc(), regions=0)
            return
        if missing:
            write(test=REPLACED, outcome=EXCLUDED, detail="not installed: " + ", ".join(missing), regions=0)
        for label, test in selected_tests(module):
            if label in done or not re.search(expression, label):
                continue
            reason = next((why for pattern, why in EXCLUDED_TESTS.items() if re.search(pattern, label)), None)
            if reason is not None:
                write(test=label, outcome=EXCLUDED, detail=reason, regions=0)
                continue
            write(test=label)
            before = regions()
            result = run_one(test)
            write(test=label, outcome=result.outcome, detail=result.detail, regions=regions() - before)


# ---- in the parent ----


def read_lines(results: Path) -> list[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in results.read_text().splitlines()]
    return []


def unfinished(results: Path) -> str | None:
    """The test that was running when the child ended."""
    lines = read_lines(results)
    return lines[-1]["test"] if lines and "outcome" not in lines[-1] else None


def run_file(path: Path, ours: bool, expression: str, timeout: float, codec: str) -> dict[str, dict[str, Any]]:
    """Outcome of each test of one file with one implementation. A crash costs one test,
    not the file."""
    environment = {**os.environ, "PYTORCH_TEST_WITH_SLOW": "1", "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        command = [sys.executable, __file__, str(path), "--child", str(results), "-k", expression, "--codec", codec]
        command += ["--ours"] if ours else []
        while True:
            detail = ""
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
                detail = f"exit code {done.returncode}\n{done.stderr[-2000:]}"
                code = done.returncode
            except subprocess.TimeoutExpired:
                detail, code = f"not done after {timeout:.0f} s", -1
            running = unfinished(results)
            lines = {line["test"]: line for line in read_lines(results) if "outcome" in line}
            if code == 0:
                return lines
            lost = {"test": running or IMPORT, "outcome": CRASHED, "detail": detail, "regions": 0}
            if running is None:
                return {**lines, lost["test"]: lost}
            with results.open("a") as file:
                file.write(json.dumps(lost) + "\n")


VERDICTS = {
    "both": "passed with both",
    "only ours fails": "FAILS ONLY WITH OURS",
    "only torch's fails": "fails only with torch's",
    "neither": "fails with both: the environment",
    SKIPPED: "skipped by the test itself",
    EXCLUDED: "left out",
}


def verdict(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    outcomes = (theirs["outcome"], ours["outcome"])
    if EXCLUDED in outcomes:
        return EXCLUDED
    if outcomes == (SKIPPED, SKIPPED):
        return SKIPPED
    good = [outcome in (PASSED, SKIPPED) for outcome in outcomes]
    return {
        (True, True): "both",
        (True, False): "only ours fails",
        (False, True): "only torch's fails",
        (False, False): "neither",
    }[good[0], good[1]]


def last_line(detail: str) -> str:
    lines = [line for line in detail.strip().splitlines() if line.strip()]
    return lines[-1].strip()[:160] if lines else ""


def test_files(paths: list[Path]) -> Iterator[tuple[Path, str | None]]:
    """(file, None), or (file, why it is left out), for every file that mentions checkpointing."""
    for root in paths:
        for path in sorted(root.rglob("test_*.py")) if root.is_dir() else [root]:
            if root.is_dir() and not SELECTED_SOURCE.search(path.read_text(errors="replace")):
                continue
            name = path.resolve().as_posix()
            reason = next((why for pattern, why in EXCLUDED_FILES.items() if re.search(pattern, name)), None)
            yield path, reason


def report(path: Path, theirs: dict[str, Any], ours: dict[str, Any], verbose: bool) -> Counter[str]:
    """Print the rows of one file."""
    counts: Counter[str] = Counter()
    missing = {"outcome": CRASHED, "detail": "was not run", "regions": 0}
    print(f"\n{path}: {len({*theirs, *ours} - {REPLACED})} tests")
    for label in sorted({*theirs, *ours}):
        a, b = theirs.get(label, missing), ours.get(label, missing)
        row = verdict(a, b)
        counts[row] += 1
        counts["no region"] += row == "both" and b["regions"] == 0
        if row != "both" or verbose:
            why = f"{b['regions']} regions" if row == "both" else last_line(b["detail"] or a["detail"])
            print(f"  {VERDICTS[row]:34}{label}\n{'':36}{why}")
        if row == "only ours fails":
            print("    | " + "\n    | ".join(b["detail"].strip().splitlines()[-25:]))
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="test files of PyTorch, or folders of them")
    parser.add_argument("-k", dest="expression", default="", help="only tests whose Class.test matches this regex")
    parser.add_argument("-v", dest="verbose", action="store_true", help="list what passes with both, too")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one file and function (default: 900)")
    parser.add_argument(
        "--codec", default="", help='of ours: "raw", "lossless, fake_quantize" and so on, see exact_codecs.py'
    )
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for path in options.paths:
        if not path.exists():
            parser.error(f"no such file or folder: {path}")
    if options.child:
        child(options.paths[0], options.ours, options.child, options.expression, options.codec)
        return 0
    total: Counter[str] = Counter()
    for path, reason in test_files(options.paths):
        if reason is not None:
            print(f"\n{path}\n  left out: {reason}")
            continue
        theirs, ours = (
            run_file(path, which, options.expression, options.timeout, options.codec) for which in (False, True)
        )
        total += report(path, theirs, ours, options.verbose)
    print()
    for row, text in VERDICTS.items():
        print(f"{total[row]:5}  {text}")
    print(f"{total['no region']:5}  of those passed with both called none of ours")
    if not any(total[row] for row in ("both", "only ours fails", "only torch's fails")):
        return 2
    return 1 if total["only ours fails"] else 0


if __name__ == "__main__":
    sys.exit(main())
