"""Tests that need the virtual device run in three processes of their own, which tell what
becomes of each.

torch starts a thread for each device at the first backward, so the device must be there before; and
other tests must not find it."""

import atexit
import functools
import json
import os
import re
import subprocess
import sys
import time
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
        if report.when == "teardown" or report.outcome != "passed":
            with open(OUTCOMES, "a", encoding="utf-8") as file:
                told = [report.nodeid, report.when, report.outcome, str(report.longrepr or "")]
                file.write(json.dumps(told) + "\n")

    @pytest.fixture(autouse=True)
    def _nothing_unordered_is_left():
        """A test takes the reports that it expects."""
        with virtual_device.in_order():
            yield

    @pytest.fixture
    def host_codecs():
        with virtual_device.host_codecs():
            yield


@functools.cache
def _process_of(nodeids):
    """The process that runs these tests, and the files of their outcomes and of what it prints."""
    written = ROOT / "build" / f"virtual_device_outcomes.{os.getpid()}.{len(nodeids)}"
    printed = written.with_suffix(".printed")
    written.unlink(missing_ok=True)
    written.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    environment = {**os.environ, "GRADCKPT_VIRTUAL_DEVICE_OUTCOMES": str(written), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    with printed.open("w") as out:
        process = subprocess.Popen([*command, *nodeids], cwd=ROOT, env=environment, stdout=out, stderr=out)
    atexit.register(lambda: (process.kill(), written.unlink(missing_ok=True), printed.unlink(missing_ok=True)))
    return process, written, printed


def _outcome_of(nodeid, nodeids):
    """What became of a test, as soon as its process has told."""
    process, written, printed = _process_of(nodeids)
    while True:
        ended = process.poll() is not None
        text = written.read_text(encoding="utf-8") if written.exists() else ""
        told = [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]
        mine = [report for name, *report in told if name == nodeid]
        if any(when == "teardown" for when, *_ in mine):
            return next((report[1:] for report in mine if report[1] != "passed"), ("passed", ""))
        if ended:
            return "failed", f"it did not end:\n{printed.read_text()[-4000:]}"
        time.sleep(0.05)


if not OUTCOMES:

    def _process_for(item):
        if "peers" in item.path.stem:
            return "device: peers"  # whose streams are not ours to order
        return "device: graphs, offload" if re.search("graphs|offload", item.path.stem) else "device"

    def _named(item):
        """Its name without the group that xdist appends."""
        return item.nodeid.removesuffix(f"@{_process_for(item)}")

    def pytest_collection_modifyitems(session, items):
        for item in items:
            if item.path.parent == FOLDER:
                item.add_marker(pytest.mark.xdist_group(_process_for(item)))
                item.fixturenames.clear()  # they are made where the test runs

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem):
        if pyfuncitem.path.parent != FOLDER:
            return None
        together = [
            _named(item)
            for item in pyfuncitem.session.items
            if item.path.parent == FOLDER and _process_for(item) == _process_for(pyfuncitem)
        ]
        outcome, text = _outcome_of(_named(pyfuncitem), tuple(together))
        if outcome == "skipped":
            pytest.skip(text)
        if outcome != "passed":
            pytest.fail(text, pytrace=False)
        return True
