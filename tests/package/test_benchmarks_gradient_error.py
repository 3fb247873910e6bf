"""benchmarks/bench_gradient_error.py: what it prints is what the page then has, and the picture."""

import json
import sys

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("transformers")
import bench_gradient_error

import gradckpt
from gradckpt._gradient_report import GradientError, GradientErrors

PAGE = (ROOT / "docs" / "numerics.md").read_text()


def rows_of(text):
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_table_page_and_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page, picture, file = tmp_path / "page.md", tmp_path / "errors.png", tmp_path / "errors.json"
    page.write_text(PAGE)
    options = ["--page", str(page), "--picture", str(picture), "--json", str(file)]
    bench_gradient_error.main(["--families", "llama,gemma2", "--seeds", "1", *options])
    printed = rows_of(capsys.readouterr().out)
    start, end = bench_gradient_error.MARKS
    before, _, rest = page.read_text().partition(start)
    between, _, after = rest.partition(end)
    assert rows_of(between) == printed
    assert (before, after) == (PAGE.partition(start)[0], PAGE.partition(start)[2].partition(end)[2])
    assert [row.split(" | ")[0] for row in printed[2:]] == ["| llama", "| gemma2"]
    llama = json.loads(file.read_text())["rows"][0]
    assert 0 < llama["int8"] < llama["int6"] < llama["int4"] < 1 < 10 * llama["samples"]
    assert bench_gradient_error.percent(llama["int8"]) in printed[2]
    assert picture.read_bytes()[1:4] == b"PNG"


def test_the_page_has_all_families():
    start, end = bench_gradient_error.MARKS
    names = [row.split(" | ")[0][2:] for row in rows_of(PAGE.partition(start)[2].partition(end)[0])[2:]]
    assert names == list(bench_gradient_error.FAMILIES)


def test_what_was_not_measured_is_no_error_of_zero(monkeypatch):
    def measured(*_):
        nothing = GradientError("int8", "", None, None, (), 0.0, "compressed nothing: too small")
        return GradientErrors("Net", 1.0, (nothing,), ())

    monkeypatch.setattr(gradckpt, "gradient_error", measured)
    with pytest.raises(SystemExit, match="int8: compressed nothing"):
        bench_gradient_error.main(["--families", "llama"])


def test_a_page_without_marks():
    with pytest.raises(SystemExit, match="lacks the marks"):
        bench_gradient_error.page_with("table", "page")


def test_unknown_family(capsys):
    with pytest.raises(SystemExit):
        bench_gradient_error.main(["--families", "llamo"])
    assert "unknown 'llamo'" in capsys.readouterr().err
