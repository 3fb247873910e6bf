"""benchmarks/: each in its small form, and with a guard broken it fails with one sentence. What
else a trial says is in test_benchmarks_*.py, test_gpu.py and test_gpu_scripts.py."""

import contextlib
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
sys.path.insert(0, str(EXAMPLES))
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
    "bench_frontier": [""],
    "bench_gradient_error": [""],
    "bench_import": [""],
    "bench_needed": [""],
    "bench_overhead": [""],
    "bench_plan": [""],
    "bench_planner": ["", "ways --peers"],
    "bench_saved": ["", "--host", "--functions"],
    "bench_selective": [""],
    "bench_sharing": [""],
    "bench_training": [""],
    "bench_working_set": ["parts", "tiles", "budgets"],
}
#: What runs in a test file of its own, dry or small.
ELSEWHERE = {
    "bench_offload_simulation": "test_benchmarks_pages.py",
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


@pytest.mark.parametrize("name", [*SMALL, *ELSEWHERE, "train_llama"])
def test_help(name, capsys):
    assert run(name, "--help") == 0
    assert "usage: " in capsys.readouterr().out


# ---- guards

encode, simulate, enable = gradckpt.codecs.encode, _C.simulate_offload, gradckpt.enable
checkpoint, saved = gradckpt.checkpoint, gradckpt.compress_saved


#: What is replaced, by its full name, and by what.
REPLACED = {
    "no time": ("timing.seconds", lambda run, clock=None: (run(), 0.0)[1]),
    "other values": ("gradckpt.codecs.encode", lambda x, *a, **k: encode(torch.flip(x, [0]), *a, **k)),
    "other codec": ("gradckpt.codecs.encode", lambda x, codec, **k: encode(x, "raw", **k)),
    "nothing decoded": ("bench_codecs.decode_into", lambda packed, codec, out: -2),
    "no recompute": ("bench_overhead.theirs", lambda f, *args, **kwargs: f(*args, **kwargs)),
    "nothing compressed": ("gradckpt.checkpoint", lambda *args, compress=None, **k: checkpoint(*args, **k)),
    "nothing saved": ("gradckpt.compress_saved", lambda config: contextlib.nullcontext()),
    "another codec saves": ("gradckpt.compress_saved", lambda config: saved("int8" if config == "raw" else "raw")),
    "peers recompute nothing": ("frontier_ways.by_torch", lambda operators: sys.modules["frontier_ways"].nothing),
    "no gradient error": ("bench_gradient_error.total_of", lambda one: 0.0),
    "nothing imported": (
        "bench_import.interpreter",
        lambda *_: SimpleNamespace(
            stdout=json.dumps({"torch": [1.0, 1.0], "gradckpt": [0.0, 0.0], "versions": ["", ""]})
        ),
    ),
    "a slower link": (
        "gradckpt._C.simulate_offload",
        lambda rows, *, rate_out, **step: simulate(rows, rate_out=rate_out // 2, **step),
    ),
    "plan of nothing": ("bench_plan.planned_peak", lambda *_: SimpleNamespace(size=1, position="")),
    "a slower plan": (
        "bench_budget.choice_of",
        lambda profile, plan: (profile.options.index(RECOMPUTE),) * len(profile.calls),
    ),
    "over budget": ("budget_models.Case.peak", lambda case, setting: 2**40),
    "wrong gradients": ("bench_budget.measured_error", lambda *_: 0.95),
    "another transform": ("candidate_formats.hadamard", lambda: torch.ones(16, 16) / 4),
    "no page is seen": ("bench_disk.cached_pages", lambda fd: 0),
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


WRONG = "the measurement is wrong"
#: Benchmark, options, what is broken, words of the sentence.
BROKEN = [
    ("bench_budget", "holds", "over budget", "above"),
    ("bench_budget", "holds", "wrong gradients", "the gradients differ"),
    ("bench_budget", "error", "wrong gradients", "its error budget"),
    ("bench_budget", "times", "no time", WRONG),
    ("bench_candidates", "", "another transform", "from an orthonormal one"),
    ("bench_codecs", "--codecs int8", "no time", WRONG),
    ("bench_codecs", "--codecs int8", "other values", "relative error"),
    ("bench_codecs", "--codecs int8 --isa avx2", "other codec", "bytes of payload; its format has"),
    ("bench_codecs", "--codecs lossless", "nothing decoded", "other bits are decoded"),
    ("bench_compile", "", nothing_enabled, "nothing was compressed"),
    ("bench_disk", "", "no page is seen", "seen by mincore"),
    ("bench_disk", "", "a store that beats the disk", "the ceiling"),
    ("bench_disk", "--directory /proc", lambda patch: None, "cannot use the directory /proc"),
    ("bench_fidelity", "--codecs int8", "other codec", "bits for each value"),
    ("bench_frontier", "--groups torch", "peers recompute nothing", "norms of"),
    ("bench_gradient_error", "", "no gradient error", "nothing was compressed"),
    ("bench_import", "", "nothing imported", "was not imported"),
    ("bench_needed", "", no_payloads, "payloads of"),
    ("bench_offload_simulation", "", "a slower link", "the closed form"),
    ("bench_overhead", "", "no recompute", "runs of 5 regions, not 10"),
    ("bench_overhead", "", "no time", WRONG),
    ("bench_plan", "", "plan of nothing", "all checkpoints"),
    ("bench_planner", "ways", "over budget", "the budget"),
    ("bench_planner", "ways", "a slower plan", "time of the exact plan"),
    ("bench_saved", "", "nothing saved", "0 bytes are kept"),
    ("bench_saved", "", "another codec saves", "by plain autograd"),
    ("bench_selective", "", other_policy, "arithmetic says"),
    ("bench_sharing", "", "nothing compressed", "nothing was compressed"),
    ("bench_working_set", "tiles", "no tiles", "16 tiles"),
    ("train_llama", DEMO, "demo compresses nothing", "gradients differ"),
]


@pytest.mark.parametrize(
    ("name", "options", "how", "words"),
    BROKEN,
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
