"""benchmarks/: each in its small form, and each with its guards broken, one at a time: it fails
with one sentence. What else a trial says is in test_benchmarks_*.py, test_gpu.py and
test_gpu_scripts.py."""

import array
import contextlib
import dataclasses
import importlib
import json
import logging
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
    "bench_offload_simulation": "test_benchmarks_offload_simulation.py",
    "bench_selective": "test_benchmarks_selective.py",
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


def no_time(patch):
    """A timer that claims that nothing takes any time."""
    import timing

    patch.setattr(timing, "seconds", lambda run, clock=None: (run(), 0.0)[1])


def other_values(patch):
    """The payload of something else."""
    encode = gradckpt.codecs.encode
    patch.setattr(gradckpt.codecs, "encode", lambda x, *a, **k: encode(torch.flip(x, [0]), *a, **k))


def other_codec(patch):
    encode = gradckpt.codecs.encode
    patch.setattr(gradckpt.codecs, "encode", lambda x, codec, **k: encode(x, "raw", **k))


def nothing_decoded(patch):
    import bench_codecs

    patch.setattr(bench_codecs, "decode_into", lambda packed, codec, out: -2)


def no_recompute(patch):
    import bench_overhead

    patch.setattr(bench_overhead, "theirs", lambda f, *args, **kwargs: f(*args, **kwargs))


def nothing_compressed(patch):
    checkpoint = gradckpt.checkpoint
    patch.setattr(gradckpt, "checkpoint", lambda *args, compress=None, **k: checkpoint(*args, **k))


def nothing_enabled(patch):
    import bench_compile

    patch.setitem(bench_compile.KINDS, "int8", lambda model: None)


def functions_stay_exact(patch):
    import fused_functions

    patch.setattr(fused_functions, "compress_saved", lambda config: lambda function: function)


def nothing_saved(patch):
    patch.setattr(gradckpt, "compress_saved", lambda config: contextlib.nullcontext())


def another_codec_saves(patch):
    saved = gradckpt.compress_saved
    patch.setattr(gradckpt, "compress_saved", lambda config: saved("int8" if config == "raw" else "raw"))


def other_policy(patch):
    import bench_selective

    patch.setitem(bench_selective.KEEPS, "matmuls", gradckpt.policies.every_other_matmul)


def peers_recompute_nothing(patch):
    import frontier_ways

    patch.setattr(frontier_ways, "by_torch", lambda operators: frontier_ways.nothing)


def exact_codec(patch):
    import bench_fidelity

    patch.setattr(bench_fidelity, "round_trip", lambda codec: lambda x: x)


def no_gradient_error(patch):
    import bench_gradient_error

    patch.setattr(bench_gradient_error, "total_of", lambda one: 0.0)


def imports_take(seconds):
    def broken(patch):
        import bench_import

        found = {"torch": [1.0, 1.0], "gradckpt": [seconds, seconds], "versions": ["", ""]}
        patch.setattr(bench_import, "interpreter", lambda *_: SimpleNamespace(stdout=json.dumps(found)))

    return broken


def no_payloads(patch):
    import bench_needed

    patch.setitem(bench_needed.SETTINGS, "int8", bench_needed.SETTINGS["torch"])


def a_slower_link(patch):
    simulate = _C.simulate_offload

    def slower(rows, *, rate_out, **step):
        return simulate(rows, rate_out=rate_out // 2, **step)

    patch.setattr(_C, "simulate_offload", slower)


def no_ring(patch):
    simulate = _C.simulate_offload
    patch.setattr(_C, "simulate_offload", lambda rows, *, ring, **step: simulate(rows, ring=0, **step))


def steps_take_no_time(patch):
    simulate = _C.simulate_offload
    patch.setattr(_C, "simulate_offload", lambda rows, **step: simulate(rows, **step) | {"time": 0})


def larger_rings_first(patch):
    import bench_offload_simulation

    patch.setattr(bench_offload_simulation, "RINGS", (4, 3, 2))


def a_plan_that_needs_other(patch):
    import bench_needed

    unrolled = bench_needed.unrolled
    patch.setattr(bench_needed, "unrolled", lambda *shorter: [*unrolled(*shorter), more_of(unrolled(*shorter)[-1])])


def more_of(segment):
    return dataclasses.replace(segment, changes=array.array("q", [2**40, 2**40]))


def plan_of_nothing(patch):
    import bench_plan

    patch.setattr(bench_plan, "planned_peak", lambda *_: SimpleNamespace(size=1, position=""))


def wrong_choice(patch):
    choose = _C.choose_options

    def choose_another(*args):
        found = choose(*args)
        return found if found["time"] is None else found | {"time": found["time"] - 1}

    patch.setattr(_C, "choose_options", choose_another)


def a_slower_plan(patch):
    import bench_budget

    patch.setattr(
        bench_budget, "choice_of", lambda profile, plan: (profile.options.index(RECOMPUTE),) * len(profile.calls)
    )


def over_budget(patch):
    import budget_models

    patch.setattr(budget_models.Case, "peak", lambda case, setting: 2**40)


def wrong_gradients(patch):
    import bench_budget

    patch.setattr(bench_budget, "measured_error", lambda *_: 0.95)


def another_plan(patch):
    import budget_profiles

    write = budget_profiles.plan_from

    def write_more(case, saved, path, codecs):
        write(case, saved, path, codecs)
        with open(path, "a") as file:
            file.write(" ")

    patch.setattr(budget_profiles, "plan_from", write_more)


def another_transform(patch):
    import candidate_formats

    patch.setattr(candidate_formats, "hadamard", lambda: torch.ones(16, 16) / 4)


def deltas_of_nothing(patch):
    import candidate_formats

    patch.setattr(candidate_formats.Deltas, "restored", lambda self, layer: self.kept[layer][1].decode().float())


def no_cut(patch):
    import candidate_formats

    def whole(self, layer, x):
        self.count(x.nbytes // 8, x)
        return x

    patch.setattr(candidate_formats.Cut, "__call__", whole)


def exact_ways_round(patch):
    import training_ways

    patch.setitem(training_ways.EQUAL, "lossless", training_ways.WAYS["int4"])


def no_way_enables(patch):
    enable = gradckpt.enable
    exact = lambda codec: codec if codec == "lossless" else None  # noqa: E731
    patch.setattr(gradckpt, "enable", lambda model, compress=None, **k: enable(model, exact(compress), **k))


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


def no_page_is_seen(patch):
    import bench_disk

    patch.setattr(bench_disk, "cached_pages", lambda fd: 0)


def each_page_is_seen(patch):
    import os

    import bench_disk

    patch.setattr(bench_disk, "cached_pages", lambda fd: os.fstat(fd).st_size // 4096)


def a_store_that_beats_the_disk(patch):
    import bench_disk

    patch.setattr(bench_disk.Saved, "directions", lambda self: (bench_disk.Moved(2**40, 1.0),) * 2)


def steps_that_keep_more(patch):
    import budget_models

    peak = budget_models.Case.peak
    patch.setattr(budget_models.Case, "peak", lambda case, setting: 2 * peak(case, setting))


def no_tiles(patch):
    enable = gradckpt.enable
    patch.setattr(gradckpt, "enable", lambda model, compress, *, tiles=None, **k: enable(model, compress, **k))


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


def demo_compresses_nothing(patch):
    enable = gradckpt.enable
    patch.setattr(gradckpt, "enable", lambda model, compress: enable(model, None))


WRONG = "the measurement is wrong"
#: Benchmark, options, what is broken, words of the sentence.
BROKEN = [
    ("bench_budget", "holds", over_budget, "above"),
    ("bench_budget", "holds", wrong_gradients, "the gradients differ"),
    ("bench_budget", "error", wrong_gradients, "its error budget"),
    ("bench_budget", "times", no_time, WRONG),
    ("bench_budget", "torch", no_time, WRONG),
    ("bench_budget", "deterministic", another_plan, "different plans of one profile"),
    ("bench_candidates", "", another_transform, "from an orthonormal one"),
    ("bench_candidates", "", deltas_of_nothing, "is not what the encoder had"),
    ("bench_candidates", "", no_cut, "the gradients are exact"),
    ("bench_codecs", "--codecs int8", no_time, WRONG),
    ("bench_codecs", "--codecs int8", other_values, "relative error"),
    ("bench_codecs", "--codecs int8 --isa avx2", other_codec, "bytes of payload; its format has"),
    ("bench_codecs", "--codecs lossless", nothing_decoded, "other bits are decoded"),
    ("bench_compile", "", no_time, WRONG),
    ("bench_compile", "", nothing_enabled, "nothing was compressed"),
    ("bench_disk", "", no_time, WRONG),
    ("bench_disk", "", zeros_come_back, "the gradients differ"),
    ("bench_disk", "", payloads_stay, "the budget"),
    ("bench_disk", "", no_page_is_seen, "seen by mincore"),
    ("bench_disk", "", each_page_is_seen, "in the page cache"),
    ("bench_disk", "", a_store_that_beats_the_disk, "the ceiling"),
    ("bench_disk", "--directory /proc", lambda patch: None, "cannot use the directory /proc"),
    ("bench_fidelity", "--codecs int8", other_codec, "bits for each value"),
    ("bench_fidelity", "--codecs int8", exact_codec, "int8 is exact"),
    ("bench_frontier", "--groups torch", no_time, WRONG),
    ("bench_frontier", "--groups torch", peers_recompute_nothing, "norms of"),
    ("bench_gradient_error", "", no_gradient_error, "nothing was compressed"),
    ("bench_import", "", imports_take(0.6), "the ceiling"),
    ("bench_import", "", imports_take(0.0), "was not imported"),
    ("bench_needed", "", no_payloads, "payloads of"),
    ("bench_needed", "", a_plan_that_needs_other, "the whole step"),
    ("bench_offload_simulation", "", steps_take_no_time, "its copies out"),
    ("bench_offload_simulation", "", a_slower_link, "the closed form"),
    ("bench_offload_simulation", "", no_ring, "beside its estimate"),
    ("bench_offload_simulation", "", larger_rings_first, "a smaller one"),
    ("bench_overhead", "", no_recompute, "runs of 5 regions, not 10"),
    ("bench_overhead", "", no_time, WRONG),
    ("bench_plan", "", plan_of_nothing, "all checkpoints"),
    ("bench_planner", "", wrong_choice, "are not the sums"),
    ("bench_planner", "", no_time, WRONG),
    ("bench_planner", "ways", over_budget, "the budget"),
    ("bench_planner", "ways", a_slower_plan, "time of the exact plan"),
    ("bench_saved", "", nothing_saved, "0 bytes are kept"),
    ("bench_saved", "", another_codec_saves, "by plain autograd"),
    ("bench_saved", "", no_time, WRONG),
    ("bench_saved", "--host", no_time, WRONG),
    ("bench_saved", "--functions", functions_stay_exact, "int8 and what stays exact"),
    ("bench_selective", "", other_policy, "arithmetic says"),
    ("bench_selective", "", no_time, WRONG),
    ("bench_sharing", "", nothing_compressed, "nothing was compressed"),
    ("bench_sharing", "", no_time, WRONG),
    ("bench_training", "", exact_ways_round, "differ from those of exact"),
    ("bench_training", "", no_way_enables, "nothing differs from exact"),
    ("bench_training", "", each_run_has_its_own_weights, "differ from those of exact"),
    ("bench_working_set", "parts", steps_that_keep_more, "what a plan promises"),
    ("bench_working_set", "parts", no_time, WRONG),
    ("bench_working_set", "tiles", no_tiles, "16 tiles"),
    ("bench_working_set", "tiles", no_time, WRONG),
    ("bench_working_set", "budgets", parts_raise_budgets, "that without"),
    ("train_llama", DEMO, demo_takes_no_time, "no step is faster"),
    ("train_llama", DEMO, demo_compresses_nothing, "gradients differ"),
]


#: Of the many that a timer of nothing breaks, these run in `make test_all`.
TIMED = ("bench_budget", "bench_codecs", "bench_overhead")


def unless_like_others(row):
    name, options, broken, _ = row
    like_others = broken is no_time and (name not in TIMED or options == "torch")
    return pytest.param(*row, marks=pytest.mark.soak) if like_others else row


@pytest.mark.parametrize(
    ("name", "options", "broken", "words"),
    map(unless_like_others, BROKEN),
    ids=[" ".join([name, *options.split()[:1], how.__name__]) for name, options, how, _ in BROKEN],
)
def test_a_broken_benchmark_fails(name, options, broken, words, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    status = run(name, options, lambda: broken(monkeypatch))
    if name == "train_llama":
        assert status == 1
        failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
        assert any(words in line for line in failed)
    else:
        assert isinstance(status, str)
        assert words in status
        assert "\n" not in status
