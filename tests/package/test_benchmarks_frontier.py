"""benchmarks/bench_frontier.py: a trial run says what is true of a real one, times left out."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("transformers")
import bench_frontier
import frontier_picture
import frontier_ways

PAGE = (ROOT / "docs" / "saved.md").read_text()


@pytest.fixture(scope="module")
def trial(tmp_path_factory):
    """(what it wrote as JSON, the page, the picture, its output)."""
    folder = tmp_path_factory.mktemp("frontier")
    (folder / "p.md").write_text(PAGE)
    threads = torch.get_num_threads()
    capture = pytest.MonkeyPatch()
    lines = []
    capture.setattr("builtins.print", lambda *words, **_: lines.append(" ".join(map(str, words))))
    files = [f"--{name}={folder}/{file}" for name, file in (("json", "f.json"), ("page", "p.md"), ("plot", "p.svg"))]
    try:
        bench_frontier.main(["--quick", *files])
    finally:
        capture.undo()
        torch.set_num_threads(threads)
    found = json.loads((folder / "f.json").read_text())
    return found, (folder / "p.md").read_text(), (folder / "p.svg").read_text(), "\n".join(lines)


def rows_of(trial):
    return {row["name"]: row for row in trial[0]["rows"]}


def test_exact_ways_have_the_gradients_of_no_checkpointing(trial):
    lossy = ("int", "fp8", "bf16")
    for row in trial[0]["rows"]:
        assert (row["error"] > 0) == (row["ours"] and any(word in row["name"] for word in lossy))


def test_memory_falls_in_the_order_of_what_is_kept(trial):
    peak = {name: row["peak"] for name, row in rows_of(trial).items()}
    for order in (
        ("no checkpointing", "SAC {mm, addmm, sdpa}", "SAC {mm}", "checkpoint", "int8", "int4"),
        ("no checkpointing", "saved bf16, linear int8", "saved int8", "saved int6", "saved int4"),
        ("None, matmuls saved", "int8, matmuls int8", "int8, every other matmul int8", "int8"),
    ):
        assert [peak[name] for name in order] == sorted((peak[name] for name in order), reverse=True)


def test_every_peer_that_recomputes_is_judged_and_no_other(trial):
    for row in trial[0]["rows"]:
        assert ("dominated_by" in row) == (row["recomputes"] and not row["ours"])
    names = {row["name"] for row in trial[0]["rows"] if "dominated_by" in row}
    assert names >= {"checkpoint", "SAC {mm}", "SAC {mm, addmm}", "SAC {mm, addmm, sdpa}"}
    assert "points of peers that recompute are dominated: gradckpt needs at most their memory" in trial[3]


def test_page_has_what_is_printed_and_the_picture_every_point(trial):
    found, page, picture, output = trial
    start, end = bench_frontier.MARKS
    between = page.partition(start)[2].partition(end)[0].strip()
    assert between in output
    assert all(f"| {row['name']} |" in between for row in found["rows"])
    marks = [node.get("class") for node in ElementTree.fromstring(picture).iter()]
    groups = {row["group"] for row in found["rows"]} - {"none"}
    assert marks.count("mark") + marks.count("open") == len(found["rows"]) + len(groups)


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


def test_what_is_claimed():
    near = [{"name": "near", "exact": True, "memory": 1.2, "time": 1.0}]
    judged = [{"name": "a", "dominated_by": ["x"], "beside": near}, {"name": "b", "dominated_by": [], "beside": near}]
    first, second = bench_frontier.claim(judged, 0.01)
    assert first.startswith("1 of 2 points")
    assert second == "b is not dominated. Nearest is `near`: 1.20 of its memory, 1.00 of its time."


def test_stairs_leave_out_what_is_worse():
    assert frontier_picture.stairs([(3, 1), (1, 3), (2, 4), (4, 2)]) == [(1, 3), (3, 1)]


def test_a_model_for_each_way_shares_the_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    other = frontier_ways.twin(model)
    assert other[0] is not model[0]
    assert other[0].weight is model[0].weight


@pytest.mark.parametrize(
    ("argv", "words"), [(["--rounds", "0"], "1 or more"), (["--groups", "sack"], "unknown 'sack'"), (["--help"], "")]
)
def test_help_and_refusal(argv, words, capsys):
    with pytest.raises(SystemExit) as left:
        bench_frontier.main(argv)
    assert left.value.code == (2 if words else 0)
    assert words in capsys.readouterr().err


def test_the_page_has_every_way():
    start, end = bench_frontier.MARKS
    between = PAGE.partition(start)[2].partition(end)[0]
    shown = [way.name for way in frontier_ways.all_ways() if not way.compiled]
    assert [name for name in shown if f"| {name} |" not in between] == []
