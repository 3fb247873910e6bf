"""benchmarks/: each in its small form, and each with its guards broken, one at a time: it fails
with one sentence. What else a trial says is in test_benchmarks_*.py, test_gpu.py and
test_gpu_scripts.py."""

import array
import contextlib
import dataclasses
import importlib
import json
import logging
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from checkout import EXAMPLES, ROOT

import gradckpt
from gradckpt import _C
from gradckpt._engine.places import place_of
from gradckpt._planning.options import RECOMPUTE

BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(EXAMPLES)]
pytest.importorskip("transformers")

DEMO = "--layers 1 --seq 32 --steps 1 --codecs int8"
#: Their small forms.
SMALL = {
    "bench_budget": ["peaks", "times", "holds", "error", "monotone", "deterministic", "torch", "places"],
    "bench_candidates": [""],
    "bench_codecs": ["", "--dtype float32 --isa avx2", "--dtype bool", "--stochastic --isa avx2"],
    "bench_compile": [""],
    "bench_disk": [""],
    "bench_fidelity": [""],
    "bench_gradient_error": [""],
    "bench_import": [""],
    "bench_needed": [""],
    "bench_overhead": [""],
    "bench_plan": [""],
    "bench_planner": ["", "ways --peers"],
    "bench_saved": ["", "--host", "--functions"],
    "bench_sharing": [""],
    "bench_training": [""],
    "bench_working_set": ["parts", "tiles", "budgets"],
}
#: What runs in a test file of its own, dry or small.
ELSEWHERE = {
    "bench_frontier": "test_benchmarks_frontier.py",
    "bench_offload_simulation": "test_benchmarks_pages.py",
    "bench_selective": "test_benchmarks_frontier.py",
    "gpu": "test_gpu.py",
    "gpu_parity": "test_gpu_scripts.py",
    "gpu_sanitize": "test_gpu_scripts.py",
}
#: Programs that measure nothing.
OTHERS = {"budget_profiles", "gpu_python", "trained_models"}


@pytest.fixture(autouse=True)
def _a_process_as_before():
    """A benchmark sets what a program may: threads, warnings, logging, a clock."""
    threads, level = torch.get_num_threads(), logging.getLogger("transformers").level
    limits = torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit
    models = sys.modules.get("budget_models")
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()
    logging.getLogger("transformers").setLevel(level)
    torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit = limits
    if models is not None:
        models.use_clock(models.time.perf_counter)


#: Packages that not every environment of the tests has.
NEEDS = {"bench_candidates": "peft", "bench_plan": "peft", "bench_training": "sklearn", "train_llama": "matplotlib"}


def needs_a_disk(directory):
    try:
        place_of(gradckpt.Offload("disk", directory=directory, host_budget=1 << 20))
    except ValueError as error:
        pytest.skip(str(error))


def run(name, options, broken=None):
    """The exit status, a sentence or 0."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    if name == "bench_disk":
        needs_a_disk("/var/tmp")
    module = importlib.import_module(name)
    if broken is not None:
        broken()
    form = [] if name == "train_llama" else ["--device", "cpu"] if name.startswith("gpu") else ["--quick"]
    try:
        return module.main([*options.split(), *form]) or 0
    except SystemExit as left:
        return left.code
    finally:
        gradckpt.stats.reset()


@pytest.mark.parametrize(("name", "options"), [(name, each) for name, forms in SMALL.items() for each in forms])
def test_small_form(name, options, capsys):
    assert run(name, options) == 0
    assert capsys.readouterr().out.strip()


def test_every_benchmark_is_run():
    programs = {path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert programs == {*SMALL, *ELSEWHERE, *OTHERS}
    for name, file in ELSEWHERE.items():
        assert name in (ROOT / "tests" / "package" / file).read_text()
    assert {*SMALL, *ELSEWHERE} - {"gpu", "gpu_parity", "gpu_sanitize"} <= {name for name, *_ in BROKEN}


@pytest.mark.parametrize("name", [*SMALL, *ELSEWHERE, "train_llama"])
def test_help(name, capsys):
    assert run(name, "--help") == 0
    assert "usage: " in capsys.readouterr().out


# ---- guards

encode, simulate, enable = gradckpt.codecs.encode, _C.simulate_offload, gradckpt.enable
checkpoint, saved = gradckpt.checkpoint, gradckpt.compress_saved


def imported(seconds):
    found = {"torch": [1.0, 1.0], "gradckpt": [seconds, seconds], "versions": ["", ""]}
    return SimpleNamespace(stdout=json.dumps(found))


#: What is replaced, by its full name, and by what.
REPLACED = {
    "no time": ("timing.seconds", lambda run, clock=None: (run(), 0.0)[1]),
    "other values": ("gradckpt.codecs.encode", lambda x, *a, **k: encode(torch.flip(x, [0]), *a, **k)),
    "other codec": ("gradckpt.codecs.encode", lambda x, codec, **k: encode(x, "raw", **k)),
    "nothing decoded": ("bench_codecs.decode_into", lambda packed, codec, out: -2),
    "no recompute": ("bench_overhead.theirs", lambda f, *args, **kwargs: f(*args, **kwargs)),
    "nothing compressed": ("gradckpt.checkpoint", lambda *args, compress=None, **k: checkpoint(*args, **k)),
    "functions stay exact": ("fused_functions.compress_saved", lambda config: lambda function: function),
    "nothing saved": ("gradckpt.compress_saved", lambda config: contextlib.nullcontext()),
    "another codec saves": ("gradckpt.compress_saved", lambda config: saved("int8" if config == "raw" else "raw")),
    "peers recompute nothing": ("frontier_ways.by_torch", lambda operators: sys.modules["frontier_ways"].nothing),
    "exact codec": ("bench_fidelity.round_trip", lambda codec: lambda x: x),
    "no gradient error": ("bench_gradient_error.total_of", lambda one: 0.0),
    "imports take long": ("bench_import.interpreter", lambda *_: imported(0.6)),
    "nothing imported": ("bench_import.interpreter", lambda *_: imported(0.0)),
    "a slower link": (
        "gradckpt._C.simulate_offload",
        lambda rows, *, rate_out, **step: simulate(rows, rate_out=rate_out // 2, **step),
    ),
    "no ring": ("gradckpt._C.simulate_offload", lambda rows, *, ring, **step: simulate(rows, ring=0, **step)),
    "steps take no time": ("gradckpt._C.simulate_offload", lambda rows, **step: simulate(rows, **step) | {"time": 0}),
    "larger rings first": ("bench_offload_simulation.RINGS", (4, 3, 2)),
    "plan of nothing": ("bench_plan.planned_peak", lambda *_: SimpleNamespace(size=1, position="")),
    "a slower plan": (
        "bench_budget.choice_of",
        lambda profile, plan: (profile.options.index(RECOMPUTE),) * len(profile.calls),
    ),
    "over budget": ("budget_models.Case.peak", lambda case, setting: 2**40),
    "wrong gradients": ("bench_budget.measured_error", lambda *_: 0.95),
    "another transform": ("candidate_formats.hadamard", lambda: torch.ones(16, 16) / 4),
    "deltas of nothing": (
        "candidate_formats.Deltas.restored",
        lambda self, layer: self.kept[layer][1].decode().float(),
    ),
    "no page is seen": ("bench_disk.cached_pages", lambda fd: 0),
    "each page is seen": ("bench_disk.cached_pages", lambda fd: os.fstat(fd).st_size // 4096),
    "a store that beats the disk": (
        "bench_disk.Saved.directions",
        lambda self: (sys.modules["bench_disk"].Moved(2**40, 1.0),) * 2,
    ),
    "no tiles": ("gradckpt.enable", lambda model, compress, *, tiles=None, **k: enable(model, compress, **k)),
    "demo compresses nothing": ("gradckpt.enable", lambda model, compress: enable(model, None)),
}


def nothing_enabled(patch):
    import bench_compile

    patch.setitem(bench_compile.KINDS, "int8", lambda model: None)


def other_policy(patch):
    import bench_selective

    patch.setitem(bench_selective.KEEPS, "matmuls", gradckpt.policies.every_other_matmul)


def no_payloads(patch):
    import bench_needed

    patch.setitem(bench_needed.SETTINGS, "int8", bench_needed.SETTINGS["torch"])


def a_plan_that_needs_other(patch):
    import bench_needed

    def more_of(segment):
        return dataclasses.replace(segment, changes=array.array("q", [2**40, 2**40]))

    unrolled = bench_needed.unrolled
    patch.setattr(bench_needed, "unrolled", lambda *shorter: [*unrolled(*shorter), more_of(unrolled(*shorter)[-1])])


def wrong_choice(patch):
    choose = _C.choose_options

    def choose_another(*args):
        found = choose(*args)
        return found if found["time"] is None else found | {"time": found["time"] - 1}

    patch.setattr(_C, "choose_options", choose_another)


def another_plan(patch):
    import budget_profiles

    write = budget_profiles.plan_from

    def write_more(case, saved, path, codecs):
        write(case, saved, path, codecs)
        with open(path, "a") as file:
            file.write(" ")

    patch.setattr(budget_profiles, "plan_from", write_more)


def no_cut(patch):
    import candidate_formats

    def whole(self, layer, x):
        self.count(x.nbytes // 8, x)
        return x

    patch.setattr(candidate_formats.Cut, "__call__", whole)


def each_run_has_its_own_weights(patch):
    import training_tasks

    build = iter(range(100))
    task = training_tasks.TASKS["llama"]
    patch.setitem(
        training_tasks.TASKS, "llama", task._replace(build=lambda seed, folder: task.build(next(build), folder))
    )


def zeros_come_back(patch):
    import bench_disk

    step = bench_disk.Net.step

    def without_gradients(self, way):
        step(self, way)
        if way == "disk":
            self.x.grad.zero_()

    patch.setattr(bench_disk.Net, "step", without_gradients)


def payloads_stay(patch):
    """Beside those that go."""
    import bench_disk

    step, held = bench_disk.Net.step, []

    def beside(self, way):
        keep = self.blocks[0].register_forward_pre_hook(lambda *_: held.extend(b * 1 for b in [self.x] * 32))
        if way != "disk":
            keep.remove()
        step(self, way)
        keep.remove()

    patch.setattr(bench_disk.Net, "step", beside)


def steps_that_keep_more(patch):
    import budget_models

    peak = budget_models.Case.peak
    patch.setattr(budget_models.Case, "peak", lambda case, setting: 2 * peak(case, setting))


def parts_raise_budgets(patch):
    import budget_models

    plan, sizes = budget_models.Case.plan, iter((2**20, 2**21))
    patch.setattr(
        budget_models.Case,
        "plan",
        lambda *args, **k: dataclasses.replace(plan(*args, **k), smallest_budget=next(sizes), fixed={}),
    )


def demo_takes_no_time(patch):
    import train_llama

    step = train_llama.step
    patch.setattr(train_llama, "step", lambda model, ids: step(model, ids)._replace(seconds=1e-9))


WRONG = "the measurement is wrong"
#: Benchmark, options, what is broken, words of the sentence.
BROKEN = [
    ("bench_budget", "holds", "over budget", "above"),
    ("bench_budget", "holds", "wrong gradients", "the gradients differ"),
    ("bench_budget", "error", "wrong gradients", "its error budget"),
    ("bench_budget", "times", "no time", WRONG),
    ("bench_budget", "torch", "no time", WRONG),
    ("bench_budget", "deterministic", another_plan, "different plans of one profile"),
    ("bench_candidates", "", "another transform", "from an orthonormal one"),
    ("bench_candidates", "", "deltas of nothing", "is not what the encoder had"),
    ("bench_candidates", "", no_cut, "the gradients are exact"),
    ("bench_codecs", "--codecs int8", "no time", WRONG),
    ("bench_codecs", "--codecs int8", "other values", "relative error"),
    ("bench_codecs", "--codecs int8 --isa avx2", "other codec", "bytes of payload; its format has"),
    ("bench_codecs", "--codecs lossless", "nothing decoded", "other bits are decoded"),
    ("bench_compile", "", "no time", WRONG),
    ("bench_compile", "", nothing_enabled, "nothing was compressed"),
    ("bench_disk", "", "no time", WRONG),
    ("bench_disk", "", zeros_come_back, "the gradients differ"),
    ("bench_disk", "", payloads_stay, "the budget"),
    ("bench_disk", "", "no page is seen", "seen by mincore"),
    ("bench_disk", "", "each page is seen", "in the page cache"),
    ("bench_disk", "", "a store that beats the disk", "the ceiling"),
    ("bench_disk", "--directory /proc", lambda patch: None, "cannot use the directory /proc"),
    ("bench_fidelity", "--codecs int8", "other codec", "bits for each value"),
    ("bench_fidelity", "--codecs int8", "exact codec", "int8 is exact"),
    ("bench_frontier", "--groups torch", "no time", WRONG),
    ("bench_frontier", "--groups torch", "peers recompute nothing", "norms of"),
    ("bench_gradient_error", "", "no gradient error", "nothing was compressed"),
    ("bench_import", "", "imports take long", "the ceiling"),
    ("bench_import", "", "nothing imported", "was not imported"),
    ("bench_needed", "", no_payloads, "payloads of"),
    ("bench_needed", "", a_plan_that_needs_other, "the whole step"),
    ("bench_offload_simulation", "", "steps take no time", "its copies out"),
    ("bench_offload_simulation", "", "a slower link", "the closed form"),
    ("bench_offload_simulation", "", "no ring", "beside its estimate"),
    ("bench_offload_simulation", "", "larger rings first", "a smaller one"),
    ("bench_overhead", "", "no recompute", "runs of 5 regions, not 10"),
    ("bench_overhead", "", "no time", WRONG),
    ("bench_plan", "", "plan of nothing", "all checkpoints"),
    ("bench_planner", "", wrong_choice, "are not the sums"),
    ("bench_planner", "", "no time", WRONG),
    ("bench_planner", "ways", "over budget", "the budget"),
    ("bench_planner", "ways", "a slower plan", "time of the exact plan"),
    ("bench_saved", "", "nothing saved", "0 bytes are kept"),
    ("bench_saved", "", "another codec saves", "by plain autograd"),
    ("bench_saved", "", "no time", WRONG),
    ("bench_saved", "--host", "no time", WRONG),
    ("bench_saved", "--functions", "functions stay exact", "int8 and what stays exact"),
    ("bench_selective", "", other_policy, "arithmetic says"),
    ("bench_selective", "", "no time", WRONG),
    ("bench_sharing", "", "nothing compressed", "nothing was compressed"),
    ("bench_sharing", "", "no time", WRONG),
    ("bench_training", "", each_run_has_its_own_weights, "differ from those of exact"),
    ("bench_working_set", "parts", steps_that_keep_more, "what a plan promises"),
    ("bench_working_set", "parts", "no time", WRONG),
    ("bench_working_set", "tiles", "no tiles", "16 tiles"),
    ("bench_working_set", "tiles", "no time", WRONG),
    ("bench_working_set", "budgets", parts_raise_budgets, "that without"),
    ("train_llama", DEMO, demo_takes_no_time, "no step is faster"),
    ("train_llama", DEMO, "demo compresses nothing", "gradients differ"),
]


#: Of the many that a timer of nothing breaks, these run in `make test_all`.
TIMED = ("bench_budget", "bench_codecs", "bench_overhead")


def unless_like_others(row):
    name, options, how, _ = row
    like_others = how == "no time" and (name not in TIMED or options == "torch")
    return pytest.param(*row, marks=pytest.mark.soak) if like_others else row


@pytest.mark.parametrize(
    ("name", "options", "how", "words"),
    map(unless_like_others, BROKEN),
    ids=[" ".join([name, *options.split()[:1], getattr(how, "__name__", how)]) for name, options, how, _ in BROKEN],
)
def test_a_broken_benchmark_fails(name, options, how, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    status = run(name, options, lambda: how(monkeypatch) if callable(how) else monkeypatch.setattr(*REPLACED[how]))
    if name == "train_llama":
        assert status == 1
        failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
        assert any(words in line for line in failed)
    else:
        assert isinstance(status, str)
        assert words in status
        assert "\n" not in status
