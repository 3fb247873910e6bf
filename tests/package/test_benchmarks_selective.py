"""benchmarks/bench_selective.py: a trial run says what is true of a real one, times left out."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import bench_selective


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """(what it wrote as JSON, the plot's path, its output)."""
    folder = tmp_path_factory.mktemp("selective")
    threads = torch.get_num_threads()
    capture = pytest.MonkeyPatch()
    lines = []
    capture.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
    try:
        bench_selective.main(["--quick", "--markdown", "--plot", f"{folder}/p.png", "--json", f"{folder}/f.json"])
    finally:
        capture.undo()
        torch.set_num_threads(threads)
    return json.loads((folder / "f.json").read_text()), folder / "p.png", "\n".join(lines)


def rows_of(found):
    return {row["title"]: row for row in found["models"]["tiny"]["frontier"]}


def test_uncompressed_ways_have_the_gradients_of_no_checkpointing(trial):
    rows = rows_of(trial[0])
    exact = [row for row in rows.values() if row["family"] in ("no checkpointing", "torch", "gradckpt")]
    assert len(exact) == 8
    assert all(row["error"] == 0 for row in exact)
    assert all(row["error"] > 0 for row in rows.values() if row not in exact)


def test_memory_falls_in_the_order_of_what_is_kept(trial):
    rows = rows_of(trial[0])
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


def test_saves_in_int8_are_as_large_as_arithmetic_says_and_only_others_run_again(trial):
    for row in trial[0]["models"]["tiny"]["saves"]:
        assert row["bytes"] == pytest.approx(row["arithmetic"], rel=0.02)
        assert row["cosine"] >= 0.999
        assert row["named_full"] > 0
        assert row["named_again"] == 0
        assert row["others_again"] == row["others_full"] > 0


def test_every_table_is_printed_and_the_plot_is_a_picture(trial):
    found, plot, output = trial
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


@pytest.mark.parametrize("argv", [["--help"], ["--rounds", "0"]])
def test_help_and_refusal(argv, capsys):
    with pytest.raises(SystemExit) as left:
        bench_selective.main(argv)
    output = capsys.readouterr()
    assert left.value.code == (0 if argv == ["--help"] else 2)
    assert "--quick" in output.out if argv == ["--help"] else "1 or more" in output.err
