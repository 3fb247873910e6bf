"""benchmarks/bench_training.py: runs are pairs, the controls are judged, and the page says where a
format loses."""

import re
import statistics

import pytest
import torch
from checkout import ROOT

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


@pytest.mark.parametrize("way", ["exact", "int8", "saved"])
def test_a_run_repeats_to_the_last_bit(way, tmp_path):
    """Also after other runs in this process."""
    task = "llama" if training_ways.WAYS[way].needs_products else "resnet"
    first, second = (training_runs.train(job(tmp_path, task, way, steps=2)) for _ in range(2))
    assert first["losses"] == second["losses"]
    assert first["validations"] == second["validations"]


def test_ways_of_a_seed_see_the_same_batches_and_seeds_others(tmp_path, monkeypatch):
    seen = {}
    step = training_tasks.train_step

    def noted(model, batch, *args):
        seen.setdefault(key, []).append(batch["pixel_values"].sum().item())
        return step(model, batch, *args)

    monkeypatch.setattr(training_tasks, "train_step", noted)
    for key in (("exact", 0), ("int8", 0), ("cut", 0), ("exact", 1)):
        training_runs.train(job(tmp_path, way=key[0], seed=key[1]))
    assert seen["exact", 0] == seen["int8", 0] == seen["cut", 0]
    assert len({*seen["exact", 0], *seen["exact", 1]}) == 6


GOOD = training_runs.Pair(["loss"], {"int8"}, 3, 3)


@pytest.mark.parametrize(
    ("way", "found", "words"),
    [
        ("int8", GOOD._replace(differing=[]), "nothing differs"),
        ("int8", GOOD._replace(compressed=0), "0 tensors compressed"),
        ("int8", GOOD._replace(codecs={"int6"}), "its codecs are int6, not int8"),
        ("int8", GOOD._replace(recomputes=0), "0 recomputes"),
        ("saved", GOOD, "3 recomputes"),
        ("bf16", GOOD, "3 tensors compressed"),
        ("lossless", GOOD._replace(codecs={"lossless"}), "loss differ from those of exact"),
    ],
)
def test_a_way_that_is_another_ends_the_program(way, found, words):
    with pytest.raises(SystemExit, match=words):
        bench_training.check_way("llama", way, found)


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
    return Comparison(task, way, len(differences), 1.0, 0.5, 0.01, differences)


def test_the_interval_is_students():
    one = compared("int8", *range(1, 11))
    assert one.mean == 5.5
    assert one.half == pytest.approx(2.2622 * statistics.stdev(range(1, 11)) / 10**0.5, rel=1e-4)
    assert not one.contains_zero
    assert compared("int8", -1.0, 1.0, 0.5).contains_zero
    assert [round(training_report.quantile(0.05, n), 3) for n in (1, 2, 20)] == [12.706, 4.303, 2.086]
    assert training_report.outside(2.2622, 9) == pytest.approx(0.05, abs=1e-5)


def test_controls_that_cannot_be_told_apart_end_the_program():
    good = [compared("noise", -1e-6, 2e-6), compared("cut", 0.1, 0.11)]
    bench_training.check_controls(good)
    with pytest.raises(SystemExit, match=r"llama: a change of 1e-6 is told from 0"):
        bench_training.check_controls([compared("noise", 0.1, 0.1001)])
    with pytest.raises(SystemExit, match=r"llama: a change of 1e-6 grows to 0.14; lower the learning rate"):
        bench_training.check_controls([compared("noise", -0.1, 0.1)])  # of runs that are no pairs
    with pytest.raises(SystemExit, match=r"llama: an error of 25 % is not told from 0 .*; change the task"):
        bench_training.check_controls([compared("cut", -0.1, 0.11)])


# ---- what is shown

FOUND = [
    compared("exact", 0.0, 0.0, 0.0),
    compared("bf16", 0.001, 0.002, 0.003),
    compared("int8", 0.0001, -0.0001, 0.00005),
    compared("int6", 0.0003, -0.0001, 0.0001),
    compared("int4", 0.11, 0.1101, 0.1102),
    compared("fp8", -0.11, -0.1101, -0.1102),
]


def test_the_first_sentence_names_who_ends_elsewhere():
    assert training_report.first_sentence(FOUND[:4]).startswith("No difference from exact training could be told")
    words = training_report.first_sentence(FOUND)
    assert "`int4` in llama +11" in words
    assert "`fp8` in llama -11" in words
    assert "int8" not in words
    assert "`int4` has the higher mean in all 1 tasks, by 11 to 11. Other differences" in words


def test_one_interval_of_many_is_chance():
    """3 of 100 by chance alone is too many to name one of 20."""
    some = compared("int8", 1.0, 2.0, 3.0, 4.0, 0.5)
    assert not some.contains_zero
    others = [compared("int6", -1.0, 1.0, 0.1, task=f"{n}") for n in range(19)]
    assert training_report.beyond_chance([some])
    assert not training_report.beyond_chance([some, *others])


def test_the_page_has_all_tasks_and_ways():
    page = (ROOT / "docs" / "numerics.md").read_text()
    part = page.partition(training_report.MARKS[0])[2].partition(training_report.MARKS[1])[0]
    header = next(line for line in part.splitlines() if line.startswith("| way"))
    assert re.findall(r"[a-z0-9-]+", header)[1:] == list(training_tasks.SMALL)
    for name, way in training_ways.WAYS.items():
        assert name == training_ways.EXACT or f"\n| {way.about} " in part
    first = page.partition(training_report.FIRST[0])[2].partition(training_report.FIRST[1])[0].strip()
    assert re.match(r"(No difference from exact|Validation losses that differ from)", first)
