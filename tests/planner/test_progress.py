"""gradckpt._planning.step_trace.late_progress: what takes long says so, on a terminal alone."""

import io
import sys

import pytest

from gradckpt._planning import step_trace


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


def written(monkeypatch, seconds, terminal=True, shown=True):
    """What is written in a block that is told of two things after so many seconds."""
    now = iter([0.0, seconds, seconds])
    monkeypatch.setattr(step_trace.time, "monotonic", lambda: next(now))
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with step_trace.late_progress("plan", shown) as show:
        show("int8")
        show("int4")
    return stream.getvalue()


def test_from_the_third_second_on(monkeypatch):
    text = written(monkeypatch, 3.0)
    assert "gradckpt: plan: int8 ..." in text
    assert text.endswith("\r\x1b[K"), "the line remains"


@pytest.mark.parametrize(("seconds", "terminal", "shown"), [(2.9, True, True), (9, False, True), (9, True, False)])
def test_silence(monkeypatch, seconds, terminal, shown):
    assert written(monkeypatch, seconds, terminal, shown) == ""


def test_without_a_stream(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with step_trace.late_progress("plan") as show:
        show("int8")
