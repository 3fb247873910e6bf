"""Tests that need the virtual device run in a process of their own, one for each file.

torch starts a thread for each device at the first backward, so the device must be there before; and
other tests must not find it."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

FOLDER = Path(__file__).parent
#: Where the process of the tests writes what became of them.
OUTCOMES = os.environ.get("GRADCKPT_VIRTUAL_DEVICE_OUTCOMES")


if OUTCOMES:
    import virtual_device

    virtual_device.load()
    virtual_device.introduce()

    def pytest_runtest_logreport(report):
        if report.when == "call" or report.outcome != "passed":
            with open(OUTCOMES, "a", encoding="utf-8") as file:
                file.write(json.dumps([report.nodeid, report.outcome, str(report.longrepr or "")]) + "\n")

    @pytest.fixture(autouse=True)
    def _nothing_unordered_is_left():
        """A test takes the reports that it expects."""
        with virtual_device.in_order():
            yield


@functools.cache
def _outcomes(path, nodeids):
    """What becomes of these tests of a file, and what their process printed."""
    written = ROOT / "build" / f"virtual_device_outcomes.{os.getpid()}"
    written.unlink(missing_ok=True)
    written.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = {**os.environ, "GRADCKPT_VIRTUAL_DEVICE_OUTCOMES": str(written), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    made = subprocess.run([*command, *nodeids], cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = written.read_text(encoding="utf-8").splitlines() if written.exists() else []
    written.unlink(missing_ok=True)
    found = {}
    for nodeid, outcome, text in map(json.loads, lines):
        if found.get(nodeid, ("passed",))[0] == "passed":
            found[nodeid] = outcome, text
    return found, (made.stdout + made.stderr)[-4000:]


if not OUTCOMES:

    def _named(item):
        """Its name without the group that xdist appends."""
        return item.nodeid.removesuffix(f"@{item.path.stem}")

    def pytest_collection_modifyitems(session, items):
        for item in items:
            if item.path.parent == FOLDER:
                item.add_marker(pytest.mark.xdist_group(item.path.stem))
                item.fixturenames.clear()  # they are made where the test runs

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem):
        if pyfuncitem.path.parent != FOLDER:
            return None
        mine = [_named(item) for item in pyfuncitem.session.items if item.path == pyfuncitem.path]
        found, printed = _outcomes(pyfuncitem.path, tuple(mine))
        outcome, text = found.get(_named(pyfuncitem), ("failed", f"it did not end:\n{printed}"))
        if outcome == "skipped":
            pytest.skip(text)
        if outcome != "passed":
            pytest.fail(text, pytrace=False)
        return True
