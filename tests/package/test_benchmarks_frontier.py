"""benchmarks/bench_frontier.py and bench_selective.py: a trial run says what is true of a real one,
times left out."""

import contextlib
import io
import json
import sys
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import pytest
import torch
from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("transformers")
import bench_frontier
import bench_selective
import frontier_ways

PAGE = (ROOT / "docs" / "saved.md").read_text()


def printed(benchmark, *options):
    threads = torch.get_num_threads()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            benchmark.main(["--quick", *options])
    finally:
        torch.set_num_threads(threads)
    return output.getvalue()


# ---- bench_frontier


@pytest.fixture(scope="module")
def frontier(tmp_path_factory):
    """(rows, the page, the picture, its output)."""
    folder = tmp_path_factory.mktemp("frontier")
    (folder / "p.md").write_text(PAGE)
    files = [f"--{name}={folder}/{file}" for name, file in (("json", "f.json"), ("page", "p.md"), ("plot", "p.svg"))]
    output = printed(bench_frontier, *files)
    rows = json.loads((folder / "f.json").read_text())["rows"]
    return rows, (folder / "p.md").read_text(), (folder / "p.svg").read_text(), output


def test_exact_ways_have_the_gradients_of_no_checkpointing(frontier):
    lossy = ("int", "fp8", "bf16")
    for row in frontier[0]:
        assert (row["error"] > 0) == (row["ours"] and any(word in row["name"] for word in lossy))


def test_memory_falls_in_the_order_of_what_is_kept(frontier):
    peak = {row["name"]: row["peak"] for row in frontier[0]}
    for order in (
        ("no checkpointing", "SAC {mm, addmm, sdpa}", "SAC {mm}", "checkpoint", "int8", "int4"),
        ("no checkpointing", "saved bf16, linear int8", "saved int8", "saved int6", "saved int4"),
        ("None, matmuls saved", "int8, matmuls int8", "int8, every other matmul int8", "int8"),
    ):
        assert [peak[name] for name in order] == sorted((peak[name] for name in order), reverse=True)


def test_every_peer_that_recomputes_is_judged_and_no_other(frontier):
    for row in frontier[0]:
        assert ("dominated_by" in row) == (row["recomputes"] and not row["ours"])
    names = {row["name"] for row in frontier[0] if "dominated_by" in row}
    assert names >= {"checkpoint", "SAC {mm}", "SAC {mm, addmm}", "SAC {mm, addmm, sdpa}"}
    assert "points of peers that recompute are dominated: gradckpt needs at most their memory" in frontier[3]


def between_marks(page):
    start, end = bench_frontier.MARKS
    return page.partition(start)[2].partition(end)[0].strip()


def test_page_has_what_is_printed_and_the_picture_every_point(frontier):
    rows, page, picture, output = frontier
    between = between_marks(page)
    assert between in output
    assert all(f"| {row['name']} |" in between for row in rows)
    marks = [node.get("class") for node in ElementTree.fromstring(picture).iter()]
    groups = {row["group"] for row in rows} - {"none"}
    assert marks.count("mark") + marks.count("open") == len(rows) + len(groups)


def test_the_page_has_every_way():
    shown = [way.name for way in frontier_ways.all_ways() if not way.compiled]
    assert [name for name in shown if f"| {name} |" not in between_marks(PAGE)] == []


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


@pytest.fixture(scope="module")
def selective(tmp_path_factory):
    """(what it wrote as JSON, the plot's path, its output)."""
    folder = tmp_path_factory.mktemp("selective")
    output = printed(bench_selective, "--markdown", "--plot", f"{folder}/p.png", "--json", f"{folder}/f.json")
    return json.loads((folder / "f.json").read_text()), folder / "p.png", output


def rows_of(found):
    return {row["title"]: row for row in found["models"]["tiny"]["frontier"]}


def test_uncompressed_ways_have_the_gradients_of_no_checkpointing(selective):
    rows = rows_of(selective[0])
    exact = [row for row in rows.values() if row["family"] in ("no checkpointing", "torch", "gradckpt")]
    assert len(exact) == 8
    assert all(row["error"] == 0 for row in exact)
    assert all(row["error"] > 0 for row in rows.values() if row not in exact)


def test_less_is_kept_where_less_is_named_or_more_is_compressed(selective):
    rows = rows_of(selective[0])
    order = ["no checkpointing", "gradckpt, matmuls", "gradckpt, every other matmul", "gradckpt, attention", "gradckpt"]
    kept = [rows[title]["bytes"] for title in order]
    assert kept == sorted(kept, reverse=True)
    for keeps in ("matmuls", "every other matmul"):
        families = ("gradckpt", "gradckpt, saves int8", "gradckpt, inputs and saves int8")
        kept = [rows[f"{family}, {keeps}"]["bytes"] for family in families]
        assert kept == sorted(kept, reverse=True)
        assert len(set(kept)) == 3
    assert [title for title in rows if title.endswith("attention")] == ["torch, attention", "gradckpt, attention"]
    for keeps in ("matmuls", "attention"):
        assert rows[f"gradckpt, {keeps}"]["bytes"] < rows[f"torch, {keeps}"]["bytes"]


def test_saves_in_int8_are_as_large_as_arithmetic_says_and_only_others_run_again(selective):
    for row in selective[0]["models"]["tiny"]["saves"]:
        assert row["bytes"] == pytest.approx(row["arithmetic"], rel=0.02)
        assert row["cosine"] >= 0.999
        assert row["named_full"] > 0
        assert row["named_again"] == 0
        assert row["others_again"] == row["others_full"] > 0


def test_every_table_is_printed_and_the_plot_is_a_picture(selective):
    found, plot, output = selective
    assert plot.read_bytes().startswith(b"\x89PNG")
    for row in found["operators"]:
        assert row["what"] in output
    for title in ("tiny Llama: 2 layers x 64", "saves in int8", "SelectiveRecompute", "torch, reentrant", "floor"):
        assert title in output


def test_alive_bytes_counts_what_the_graph_holds_and_not_what_it_released():
    weight = torch.randn(1000, requires_grad=True)

    def model(input_ids, labels):
        (weight * 2).sum()  # released
        return SimpleNamespace(loss=weight.exp().sum())  # exp keeps its output

    assert bench_selective.alive_bytes(model, None) == 4000 + 4


def test_a_way_that_dominates_has_less_memory_and_is_no_slower():
    def row(family, keeps, size):
        return {"family": family, "keeps": keeps, "bytes": size}

    rows = [row("torch", "inputs", 9), row("torch", "matmuls", 9), row("torch", "attention", 9), row("gradckpt", "", 8)]
    assert bench_selective.dominated(rows, [[1, 1.0, 2.0, 1.5]], 3) == ["attention"]
    assert bench_selective.dominated(rows, [[1, 1.5, 1.5, 1.5]], 3) == ["matmuls", "attention"]
    rows[3]["bytes"] = 9
    assert bench_selective.dominated(rows, [[1, 2.0, 2.0, 1.5]], 3) == []


# ---- both


@pytest.mark.parametrize(
    ("benchmark", "option", "value", "words"),
    [
        (bench_frontier, "--rounds", "0", "1 or more"),
        (bench_frontier, "--groups", "sack", "unknown 'sack'"),
        (bench_selective, "--rounds", "0", "1 or more"),
    ],
)
def test_a_wrong_option_is_named(benchmark, option, value, words, capsys):
    with pytest.raises(SystemExit) as left:
        benchmark.main([option, value])
    assert left.value.code == 2
    assert words in capsys.readouterr().err
