"""Benchmarks whose figures stand in docs/: the page has what a run prints."""

import contextlib
import io
import json

import bench_offload_simulation as offload
import pytest
from checkout import ROOT

import gradckpt
from gradckpt._gradient_report import GradientError, GradientErrors

NUMERICS = (ROOT / "docs" / "numerics.md").read_text()
OFFLOAD = (ROOT / "docs" / "offload.md").read_text()
RERUN = "run python benchmarks/bench_offload_simulation.py --page docs/offload.md"


def parts_of(page, marks):
    """What is before the marks, between them and behind them."""
    before, _, rest = page.partition(marks[0])
    between, _, after = rest.partition(marks[1])
    return before, between, after


# ---- bench_gradient_error


@pytest.fixture
def errors():
    pytest.importorskip("transformers")
    import bench_gradient_error

    return bench_gradient_error


def rows_of(text):
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_table_page_and_picture(errors, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page, picture, file = tmp_path / "page.md", tmp_path / "errors.png", tmp_path / "errors.json"
    page.write_text(NUMERICS)
    options = ["--page", str(page), "--picture", str(picture), "--json", str(file)]
    errors.main(["--families", "llama,gemma2", "--seeds", "1", *options])
    printed = rows_of(capsys.readouterr().out)
    before, between, after = parts_of(page.read_text(), errors.MARKS)
    assert rows_of(between) == printed
    assert (before, after) == parts_of(NUMERICS, errors.MARKS)[::2]
    assert [row.split(" | ")[0] for row in printed[2:]] == ["| llama", "| gemma2"]
    llama = json.loads(file.read_text())["rows"][0]
    assert 0 < llama["int8"] < llama["int6"] < llama["int4"] < 1 < 10 * llama["samples"]
    assert errors.percent(llama["int8"]) in printed[2]
    assert picture.read_bytes()[1:4] == b"PNG"


def test_the_page_has_all_families(errors):
    names = [row.split(" | ")[0][2:] for row in rows_of(parts_of(NUMERICS, errors.MARKS)[1])[2:]]
    assert names == list(errors.FAMILIES)


def test_what_was_not_measured_is_no_error_of_zero(errors, monkeypatch):
    def measured(*_):
        nothing = GradientError("int8", "", None, None, (), 0.0, "compressed nothing: too small")
        return GradientErrors("Net", 1.0, (nothing,), ())

    monkeypatch.setattr(gradckpt, "gradient_error", measured)
    with pytest.raises(SystemExit, match="int8: compressed nothing"):
        errors.main(["--families", "llama"])


# ---- bench_offload_simulation


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """(the page without its tables, written again; what is exposed, by case)."""
    page = tmp_path_factory.mktemp("offload") / "offload.md"
    before, _, after = parts_of(OFFLOAD, offload.MARKS)
    page.write_text(f"{before}{offload.MARKS[0]}\n{offload.MARKS[1]}{after}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        offload.main(["--page", str(page)])
    return page.read_text(), json.loads(printed.getvalue().splitlines()[-1])["exposed"]


def test_the_page_has_what_the_simulation_finds(trial):
    assert trial[0] == OFFLOAD, RERUN


def test_every_cell_is_on_the_page_and_what_it_concludes_is_so(trial):
    """A copy that is shorter than a forward is hidden; others are not with a ring of two."""
    page, found = trial
    cells = [
        case for rows in (offload.BOUNDARIES, offload.SAVES) for case in offload.cases(rows, rows is offload.BOUNDARIES)
    ]
    assert len(cells) == len(found) == 6 * 3 + 8 * 4
    for case in cells:
        row = [line for line in page.splitlines() if line.startswith(f"| {case.place} |")]
        assert any(f" {case.copy:.2f}: {offload.percent(found[case.name][0])}" in line for line in row)
        assert (case.copy <= 1) == (found[case.name][0] == 0)
