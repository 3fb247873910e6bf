"""The table of `make release`: what passed, what failed, and what could not be had;
its exit status."""

import re
import sys
import threading
import tomllib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import distribution
import fresh_venv
import make_release
import pytest
from checkout import ROOT
from commands import Failed

WITH_CUDA = "built with CUDA: nvcc 12.4 for 7.5;8.0;8.6;8.9;9.0+PTX"


@pytest.fixture
def release(tmp_path, monkeypatch, capsys):
    """Run `make release` with an sdist and a wheel that cost nothing;
    return its exit status and its table's rows."""

    def file(name):
        (tmp_path / name).write_bytes(b"x" * 2048)
        return tmp_path / name

    def run(*options, **replaced):
        for name, function in replaced.items():
            monkeypatch.setattr(distribution, name, function)
        status = make_release.main(["--out", str(tmp_path), *options])
        *progress, table = capsys.readouterr().out.split("\n\n")
        rows = [re.split(r"  +", line, maxsplit=2) for line in table.splitlines()]
        assert [row[0] + " ..." for row in rows[:-1]] == "\n".join(progress).splitlines()
        return status, {row[0]: row[1:] for row in rows[:-1]}, rows[-1][0]

    monkeypatch.setattr(distribution, "build_sdist", lambda out: file("gradckpt-9.tar.gz"))
    monkeypatch.setattr(distribution, "build_wheel", lambda sdist, out: (file("gradckpt-9.whl"), WITH_CUDA))
    monkeypatch.setattr(distribution, "CHECKS", ())
    return run


def test_files_alone(release):
    status, rows, counts = release()
    assert (status, counts) == (0, "3 passed, 0 FAILED, 0 not checked")
    assert rows["wheel"] == ["passed", f"gradckpt-9.whl, 2 KiB; {WITH_CUDA}"]
    assert rows["drivers"] == ["passed", "525 and later"]


@pytest.mark.parametrize(
    ("note", "result", "words"),
    [
        ("built with CUDA: nvcc 13.0 for 8.0;9.0+PTX", "FAILED", "only drivers from 580 on load it; set CUDA_HOME"),
        ("built without CUDA: nvcc not found; the CPU codecs are complete", "not checked", "nvcc not found"),
    ],
)
def test_the_wheel_is_for_the_drivers_of_torch(release, tmp_path, note, result, words):
    def build_wheel(sdist, out):
        (tmp_path / "gradckpt-9.whl").write_bytes(b"x")
        return tmp_path / "gradckpt-9.whl", note

    status, rows, _ = release(build_wheel=build_wheel)
    assert status == (result == "FAILED")
    assert rows["drivers"][0] == result
    assert words in rows["drivers"][1]


def test_an_interpreter_that_is_not_here_is_not_checked_by_name(release):
    status, rows, counts = release("--pythons", "python3.99", "--torches", "2.11", "newest")
    assert (status, counts) == (0, "3 passed, 0 FAILED, 2 not checked")
    for torch in ("2.11", "newest"):
        assert rows[f"python3.99, torch {torch}"] == ["not checked", "python3.99 is not on PATH"]


def test_a_torch_that_cannot_be_had_is_not_checked(release, tmp_path, monkeypatch):
    """The index has torch, in no such version; and there is no index."""
    (tmp_path / "constraints.txt").touch()
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))  # a machine's own name other reasons
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "index.html").write_text("<!DOCTYPE html><html><body></body></html>")
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        index = f"http://127.0.0.1:{server.server_port}"
        for url, expected in (
            (index, "torch 9999: No matching distribution found for torch==9999.*"),
            (f"{index}/nowhere", f"{index}/nowhere (TORCH_INDEX) cannot be read: File not found"),
        ):
            status, rows, counts = release("--pythons", sys.executable, "--torches", "9999", "--torch-index", url)
            assert (status, counts) == (0, "3 passed, 0 FAILED, 1 not checked")
            assert rows[f"{sys.executable}, torch 9999"] == ["not checked", expected]
        server.shutdown()


def test_a_wheel_that_does_not_work_fails(release, monkeypatch):
    """The torch was there; what goes wrong after it is ours."""
    monkeypatch.setattr(fresh_venv.FreshVenv, "add_torch", lambda self, wanted, index: "9")
    status, rows, _ = release("--pythons", sys.executable, "--torches", "newest")
    assert status == 1
    assert rows[f"{sys.executable}, torch newest"][0] == "FAILED"


def test_without_a_wheel_nothing_passes(release):
    def build_wheel(sdist, out):
        raise Failed("gcc was not found")

    status, rows, counts = release("--pythons", sys.executable, "--torches", "2.11", build_wheel=build_wheel)
    assert (status, counts) == (1, "1 passed, 1 FAILED, 2 not checked")
    assert rows[f"{sys.executable}, torch 2.11"] == ["not checked", "there is no wheel"]


def test_what_is_tried_begins_with_the_least_that_is_promised():
    makefile = (ROOT / "Makefile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, torch = (re.search(rf"^{name} \?= (\S+)", makefile, re.MULTILINE)[1] for name in ("PYTHONS", "TORCHES"))
    assert project["requires-python"] == f">={python.removeprefix('python')}"
    assert project["dependencies"] == [f"torch>={torch}"]
