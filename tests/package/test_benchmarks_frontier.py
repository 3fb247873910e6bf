"""benchmarks/bench_frontier.py and bench_selective.py: every way is on the page; what dominates."""

import pytest
from checkout import ROOT

pytest.importorskip("transformers")
import bench_frontier
import bench_selective
import frontier_ways

# ---- bench_frontier


def test_the_page_has_every_way():
    start, end = bench_frontier.MARKS
    table = (ROOT / "docs" / "saved.md").read_text().partition(start)[2].partition(end)[0]
    shown = [way.name for way in frontier_ways.all_ways() if not way.compiled]
    assert [name for name in shown if f"| {name} |" not in table] == []


def row(name, peak, ours=True, error=0.0, compiled=False):
    return {"name": name, "peak": peak, "ours": ours, "error": error, "compiled": compiled}


def test_what_dominates():
    peer = row("peer", 100, ours=False)
    rows = [row("small", 50), row("equal", 104), row("wrong", 50, error=0.02), row("compiled", 50, compiled=True)]
    times = [{"peer": 1.0, "small": 1.2, "equal": 1.04, "wrong": 0.5, "compiled": 0.5}]
    found = {each["name"]: each for each in bench_frontier.beside(peer, [peer, *rows], times, 0.01)}
    assert found["small"] == {"name": "small", "exact": True, "memory": 0.5, "time": 1.2}
    assert set(found) == {"small", "equal"}  # the others err, or are compiled
    peer["compiled"] = True
    assert len(bench_frontier.beside(peer, [peer, *rows], times, 0.01)) == 3


# ---- bench_selective


def test_a_way_that_dominates_has_less_memory_and_is_no_slower():
    def row(family, keeps, size):
        return {"family": family, "keeps": keeps, "bytes": size}

    rows = [row("torch", "inputs", 9), row("torch", "matmuls", 9), row("torch", "attention", 9), row("gradckpt", "", 8)]
    assert bench_selective.dominated(rows, [[1, 1.0, 2.0, 1.5]], 3) == ["attention"]
    assert bench_selective.dominated(rows, [[1, 1.5, 1.5, 1.5]], 3) == ["matmuls", "attention"]
    rows[3]["bytes"] = 9
    assert bench_selective.dominated(rows, [[1, 2.0, 2.0, 1.5]], 3) == []
