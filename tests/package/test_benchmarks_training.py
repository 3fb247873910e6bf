"""benchmarks/bench_training.py: runs are pairs, what is done is kept, the controls are judged, and
the page says where a format loses."""

import json
import re
import statistics
import sys

import pytest
import torch
from checkout import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("transformers")
pytest.importorskip("sklearn", reason="needs scikit-learn, which ships the images")

import bench_training
import training_report
import training_runs
import training_tasks
import training_ways
from training_report import Comparison
from training_runs import Job


def job(tmp_path, task="resnet", way="exact", seed=0, steps=3):
    return Job(task, way, seed, steps, "cpu", tmp_path)


@pytest.fixture(autouse=True)
def _threads_as_before():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# ---- runs


def test_a_run_repeats_to_the_last_bit(tmp_path):
    first, second = (training_runs.train(job(tmp_path)) for _ in range(2))
    assert first["losses"] == second["losses"]
    assert first["validations"] == second["validations"]


def test_seeds_share_no_batch_and_ways_share_all():
    task, stride = training_tasks.TASKS["resnet"], training_tasks.STRIDE
    batches = [task.batch(seed * stride + step)["pixel_values"] for seed in (0, 1) for step in (0, 1)]
    assert len({x.sum().item() for x in batches}) == 4
    assert torch.equal(task.batch(0)["pixel_values"], batches[0])


def test_what_is_done_is_not_run_again(tmp_path, monkeypatch):
    once = training_runs.run(job(tmp_path))
    monkeypatch.setattr(training_runs, "train", lambda job: pytest.fail("ran again"))
    assert training_runs.run(job(tmp_path)) == once
    file = job(tmp_path).file
    assert json.loads(file.read_text()) == once
    assert not list(file.parent.glob("*part*"))


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(training_tasks, "validate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        training_runs.run(job(tmp_path))
    assert not job(tmp_path).file.exists()


def test_runs_of_other_sources_are_in_another_folder(tmp_path, monkeypatch):
    before = training_runs.folder_of(tmp_path)
    assert training_runs.folder_of(tmp_path) == before
    meaning = training_runs.meaning
    monkeypatch.setattr(training_runs, "meaning", lambda source: meaning(source).replace("0.0001", "0.0002"))
    assert training_runs.folder_of(tmp_path) != before


def test_words_do_not_make_runs_anew():
    one = training_runs.meaning('"""A."""\ndef f():\n    """B."""  # C\n    return 1\n')
    assert one == training_runs.meaning('"""X."""\ndef f():\n    """Y."""\n    return 1\n')
    assert one != training_runs.meaning('"""A."""\ndef f():\n    """B."""\n    return 2\n')


EXACT_WAYS = [
    (task, way)
    for task in ("llama", "resnet", "moe")
    for way in training_ways.of_task(training_tasks.TASKS[task], training_ways.EQUAL)
]


@pytest.mark.parametrize(("task", "way"), EXACT_WAYS)
def test_exact_ways_change_no_bit(task, way, tmp_path):
    assert training_runs.differing(task, way, 2, tmp_path) == []


def test_a_lossy_way_is_seen_to_differ(tmp_path, monkeypatch):
    monkeypatch.setitem(training_ways.EQUAL, "lossless", training_ways.WAYS["int8"])
    assert training_runs.differing("resnet", "lossless", 2, tmp_path)


# ---- controls


@pytest.mark.parametrize("task", ["llama", "resnet", "moe"])
def test_the_bad_codec_has_the_error_that_it_claims(task, tmp_path):
    recipe = training_tasks.TASKS[task]
    gradients, buffers = [], []
    for way in (training_ways.EXACT, training_ways.CUT):
        model, batch = recipe.build(0, tmp_path), recipe.batch(0)
        session = training_ways.Session(way, recipe, model, 0)
        model(**batch).loss.backward()
        session.change_gradients(batch)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        buffers.append(dict(model.named_buffers()))
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error.item() == pytest.approx(training_ways.CUT_ERROR, rel=1e-3)
    floats = [name for name, x in buffers[0].items() if x.is_floating_point()]
    assert all(torch.equal(buffers[0][name], buffers[1][name]) for name in floats)


def compared(way, *differences, task="llama"):
    return Comparison(task, way, len(differences), 1.0, 0.5, 0.01, differences, 1.0)


def test_the_interval_is_students():
    one = compared("int8", *range(1, 11))
    assert one.mean == 5.5
    assert one.half == pytest.approx(2.262 * statistics.stdev(range(1, 11)) / 10**0.5)
    assert not one.contains_zero
    assert compared("int8", -1.0, 1.0, 0.5).contains_zero


def test_controls_that_cannot_be_told_apart_end_the_program():
    good = [compared("noise", -1e-6, 2e-6), compared("cut", 0.1, 0.11)]
    bench_training.check_controls(good)
    with pytest.raises(SystemExit, match=r"llama: a change of 1e-6 is told from 0"):
        bench_training.check_controls([compared("noise", 0.1, 0.11)])
    with pytest.raises(SystemExit, match=r"llama: an error of 25 % is not told from 0 .*; change the task"):
        bench_training.check_controls([compared("cut", -0.1, 0.11)])


# ---- what is shown

FOUND = [
    compared("exact", 0.0, 0.0, 0.0),
    compared("bf16", 0.001, 0.002, 0.003),
    compared("int8", 0.001, -0.001, 0.0005),
    compared("int4", 0.1, 0.11, 0.12),
]


def test_the_first_sentence_names_who_loses():
    assert training_report.first_sentence(FOUND[:3]).startswith("No format ended with a higher")
    assert "`int4` in llama by +0.11" in training_report.first_sentence(FOUND)


def test_int8_is_judged_by_bf16_and_the_seeds():
    assert training_report.bound(FOUND, "llama") == pytest.approx(0.002)
    assert training_report.within(FOUND, "int8") == (["llama"], [])
    assert training_report.within(FOUND, "int4") == ([], ["llama"])


def test_the_page_has_all_tasks_and_ways():
    page = (ROOT / "docs" / "numerics.md").read_text()
    part = page.partition(training_report.MARKS[0])[2].partition(training_report.MARKS[1])[0]
    header = next(line for line in part.splitlines() if line.startswith("| way"))
    assert re.findall(r"[a-z0-9-]+", header)[1:] == list(training_tasks.SMALL)
    for name, way in training_ways.WAYS.items():
        assert name == training_ways.EXACT or f"| {way.about} |" in part
    first = page.partition(training_report.FIRST[0])[2].partition(training_report.FIRST[1])[0].strip()
    assert re.match(r"(No format ended|Beyond chance, )", first)


def test_the_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [training_runs.train(job(tmp_path, way=way, seed=seed)) for way in ("exact", "int8") for seed in (0, 1)]
    training_report.draw(runs, training_report.compare(runs), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


# ---- bad input


def test_missing_images_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    training_tasks.digits.cache_clear()
    with pytest.raises(SystemExit, match="scikit-learn ships them: pip install scikit-learn"):
        bench_training.main(["--tasks", "resnet"])


def test_an_unknown_task_is_named(capsys):
    with pytest.raises(SystemExit):
        bench_training.main(["--tasks", "gpt9"])
    assert "gpt9" in capsys.readouterr().err
