"""benchmarks/bench_offload_simulation.py: docs/offload.md has what the simulation finds."""

import contextlib
import io
import json
import sys

import pytest
from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import bench_offload_simulation as bench

PAGE = ROOT / "docs" / "offload.md"
RERUN = "run python benchmarks/bench_offload_simulation.py --page docs/offload.md"


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """(the page without its tables, written again; what is exposed, by case)."""
    page = tmp_path_factory.mktemp("offload") / "offload.md"
    start, end = bench.MARKS
    before, _, rest = PAGE.read_text().partition(start)
    page.write_text(f"{before}{start}\n{end}{rest.partition(end)[2]}")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench.main(["--page", str(page)])
    return page.read_text(), json.loads(printed.getvalue().splitlines()[-1])["exposed"]


def test_the_page_has_what_the_simulation_finds(trial):
    assert PAGE.read_text() == trial[0], RERUN


def test_every_cell_is_on_the_page(trial):
    page, found = trial
    cells = [case for rows in (bench.BOUNDARIES, bench.SAVES) for case in bench.cases(rows, rows is bench.BOUNDARIES)]
    assert len(cells) == len(found) == 6 * 3 + 8 * 4
    for case in cells:
        row = [line for line in page.splitlines() if line.startswith(f"| {case.place} |")]
        assert any(f" {case.copy:.2f}: {bench.percent(found[case.name][0])}" in line for line in row)


def test_what_the_page_concludes(trial):
    """A copy that is shorter than a forward is hidden; others are not with a ring of two."""
    for rows in (bench.BOUNDARIES, bench.SAVES):
        for case in bench.cases(rows, rows is bench.BOUNDARIES):
            assert (case.copy <= 1) == (trial[1][case.name][0] == 0)


def test_a_page_needs_all_rows(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--quick", "--page", "missing.md"])
    assert "only with all rows" in capsys.readouterr().err


def test_a_page_without_marks():
    with pytest.raises(SystemExit, match="lacks the marks"):
        bench.page_with([[], []], "page")
