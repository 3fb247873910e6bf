"""benchmarks/gpu.py: a rehearsal of all stages on the virtual device, what fails is counted and
named, what each stage checks, speeds are judged, and the longest sequence is found.
test_gpu_scripts.py has parity, sanitizers and the Makefile."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import gpu
import gpu_device
import gpu_fidelity
import gpu_host
import gpu_kernels
import gpu_llama
import gpu_neighbours
import gpu_parity
import gpu_smoke
import gpu_story
import gpu_streams
import gpu_ways
import pytest
import torch
from checkout import ROOT
from gpu_job import Job, Stage

import gradckpt

# ---- A stage's job on the CPU, for tests of benchmarks/gpu.py.


class Card(gpu_device.Device):
    """A CPU that is judged as a card."""

    @property
    def is_cuda(self):
        return True


def job_of(folder, device=None, small=True):
    options = SimpleNamespace(small=small, out=folder, result=folder / "result.json", stage="test", seconds=600)
    return Job(device or gpu_device.Device("cpu"), options)


NAMES = [stage.name for stage in gpu.STAGES]


# ---- all stages


#: All of it takes as long as a hundred other tests.
STAGES_OF = {"all": NAMES, "some": [name for name in NAMES if name in ("offload", "host", "sanitize")]}
ALL = pytest.param("all", marks=pytest.mark.soak)


@pytest.fixture(scope="module", params=[ALL, "some"])
def rehearsal(request, tmp_path_factory):
    """The stages' names, exit status, what was printed, and the folder."""
    names, out = STAGES_OF[request.param], tmp_path_factory.mktemp("rehearsal")
    command = [sys.executable, ROOT / "benchmarks/gpu.py", "--device", "virtual", "--small", "--out", out]
    ran = subprocess.run([*command, "--stages", ",".join(names)], capture_output=True, text=True)
    return names, ran.returncode, ran.stdout + ran.stderr, out


def test_rehearsal_passes(rehearsal):
    names, status, printed, out = rehearsal
    assert status == 0, printed[-5000:]
    lines = printed.splitlines()
    assert lines[-1] == f"gpu: results in {out}"
    assert lines[-2].startswith(f"gpu: {len(names)} of {len(names)} stages passed in ")
    assert lines[1] == f"sum {sum(stage.estimate for stage in gpu.STAGES if stage.name in names):g} s of 480"
    began = [line.split()[4].rstrip(",") for line in lines if line.startswith("---- ") and " of " in line[:12]]
    assert began == names


def test_rehearsal_as_json(rehearsal):
    names, *_, out = rehearsal
    whole = json.loads((out / "results.json").read_text())
    assert (whole["failures"], whole["failed"], whole["device"], whole["small"]) == (0, [], "virtual", True)
    assert whole["facts"]["torch"] == torch.__version__
    stages = {each["stage"]: each for each in whole["stages"]}
    assert list(stages) == names
    assert {name for name, each in stages.items() if each["status"] != "passed"} == {"sanitize"}
    assert stages["sanitize"]["skipped"] == ["the whole stage: needs CUDA: compute-sanitizer watches kernels of a card"]
    assert all(each["passed"] > 2 for name, each in stages.items() if name != "sanitize")
    for each in whole["stages"]:
        assert each["limit_s"] > each["estimate_s"] > 0
        for table in each["tables"]:
            assert table["rows"]
            assert all(len(row) == len(table["columns"]) for row in table["rows"])


@pytest.mark.parametrize("rehearsal", [ALL], indirect=True)
def test_rehearsal_has_the_story(rehearsal):
    """A row for each way, its figures, and a picture or the reason why not."""
    *_, out = rehearsal
    whole = json.loads((out / "results.json").read_text())
    story = next(each for each in whole["stages"] if each["stage"] == "story")
    rows = next(iter(story["figures"]["story"].values()))
    assert {row["way"] for row in rows} >= {way.name for way in gpu_ways.WAYS} - {"torch_remat"}
    found = {row["way"]: row for row in rows}
    assert found["torch checkpoint"]["peak"] < found["none"]["peak"]
    assert found["none"]["error"] == found["gradckpt lossless"]["error"] == 0 < found["gradckpt int8"]["error"]
    assert found["gradckpt int8"]["longest"] > found["none"]["longest"] > 0
    if story["pictures"]:
        assert (out / "story.png").stat().st_size > 10_000
    else:
        assert any("matplotlib is not installed" in note for note in story["notes"])


# ---- stages that end badly

BREAKS = """
def run(job):
    with job.part("first"):
        raise ValueError("a\\nbroken part")
    with job.part("second"):
        job.check(True, "")
        job.check(False, "a | figure")
"""
PASSES = """
from gpu_job import Skip
def run(job):
    job.check(True, "")
    with job.part("absent"):
        raise Skip("not here")
"""
CRASHES = """
import os
def run(job):
    job.table("kept", ["a"])(1)
    job.check(True, "")
    job.write()
    os.abort()
"""
HANGS = """
import subprocess, time
def run(job):
    child = subprocess.Popen(["sleep", "600"])
    (job.folder / "child").write_text(str(child.pid))
    time.sleep(600)
"""
TEXTS = {"breaks": BREAKS, "crashes": CRASHES, "hangs": HANGS, "passes": PASSES, "empty": "def run(job): pass"}


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_failures_are_counted_and_named(tmp_path, capsys, monkeypatch):
    """The others run; what hangs is ended at its limit, with what it has started; a stage that
    checks nothing has failed."""
    monkeypatch.setattr(gpu, "PATIENCE", 1.0)
    stages = []
    for name, text in TEXTS.items():
        file = tmp_path / f"stage_{name}.py"
        file.write_text(text)
        stages.append(Stage(name, f"a stage that {name}", 1, 20.0 if name == "hangs" else 300.0, file))
    out = tmp_path / "out"
    assert gpu.main(["--device", "cpu", "--small", "--out", str(out), "--seconds", "900"], stages) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].startswith("gpu: 1 of 5 stages passed in ")
    assert lines[-2] == "gpu: 4 failed: breaks crashes hangs empty"
    whole = json.loads((out / "results.json").read_text())
    assert whole["failed"] == ["breaks", "crashes", "hangs", "empty"]
    breaks, crashes, hangs, passes, empty = whole["stages"]
    assert breaks["failures"] == ["first: ValueError: a", "a | figure"]
    assert breaks["passed"] == 1
    assert crashes["failures"][0].startswith("its process ended with status -6")
    assert crashes["tables"][0]["rows"] == [[1]], "what it had is kept"
    assert hangs["status"] == "ended"
    assert hangs["failures"][0].startswith("ended at its limit of 20 s")
    if (out / "child").exists():  # where the start did not take all of its time
        time.sleep(0.5)
        assert not is_alive((out / "child").read_text())
    assert (passes["status"], passes["skipped"]) == ("passed", ["absent: not here"])
    assert empty["status"] == "failed"
    text = (out / "results.md").read_text()
    assert "- FAILED: a | figure" in text
    assert "| breaks | a stage that breaks | failed | 1 | 2 | 0 |" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "smoke,nothing"], "--stages: unknown 'nothing'; choose from smoke, parity"),
        (["--device", "cpu"], "--device cpu is a rehearsal: it needs --small"),
        (["--seconds", "0"], "--seconds is above 0"),
    ],
)
def test_options(arguments, words, capsys):
    with pytest.raises(SystemExit) as left:
        gpu.main(arguments)
    assert left.value.code == 2
    assert words in capsys.readouterr().err


# ---- what stages check


@pytest.fixture
def job(tmp_path):
    return job_of(tmp_path)


def ignore(*cells):
    pass


def as_another_codec(patch, codec, other):
    checkpoint = gradckpt.checkpoint
    change = lambda compress: other if compress == codec else compress  # noqa: E731
    patch.setattr(gradckpt, "checkpoint", lambda *a, compress=None, **k: checkpoint(*a, compress=change(compress), **k))


def encode_another(patch, change):
    encode = gradckpt.codecs.encode
    patch.setattr(gradckpt.codecs, "encode", lambda x, codec, **k: encode(*change(x, codec), **k))


def smoke_lossy_as_exact(patch, job):
    as_another_codec(patch, "lossless", "int4")
    gpu_smoke.regions(job, ignore)


def smoke_nothing_compressed(patch, job):
    as_another_codec(patch, "int8", None)
    gpu_smoke.regions(job, ignore)


def smoke_other_values(patch, job):
    encode_another(patch, lambda x, codec: (x.flip(0), codec))
    gpu_smoke.encode_each(job, ignore)


def streams_out_of_order(patch, job):
    def write_before_backward(chain, call):
        loss = chain.forward(call)
        with torch.no_grad():
            chain.x.mul_(1.5)
        chain.forward(call).backward()
        del loss

    patch.setattr(gpu_streams, "ORDERS", {"out of order": write_before_backward})
    gpu_streams.regions_in_order(job, ignore)


def kernels_encode_zeros(patch, job):
    encode_another(patch, lambda x, codec: (torch.zeros_like(x), codec))
    gpu_kernels.run(job)


def host_twice(patch, job):
    patch.setitem(gpu_host.WAYS, "gradckpt", lambda f, x: gradckpt.checkpoint(f, x) * 2)
    gpu_host.run(job)


def neighbours_differ(patch, job):
    gpu_neighbours.compare(job, "library", ignore, lambda codec: [torch.ones(3) * (1 if codec == "none" else 1.1)])


def parity_other_bytes(patch, job):
    encode = gpu_parity.Side.encode
    patch.setattr(gpu_parity.Side, "encode", lambda side, x, codec, dither: encode(side, x, codec, (1, 2, 3)))
    patch.setattr(gpu_parity, "CODECS", ["int8"])
    gpu_parity.run(job)


def story_nothing_compressed(patch, job):
    ways = (gpu_ways.WAYS[0], gpu_ways.Way("gradckpt int8", gpu_ways.plainly, "int8", lossy=True))
    patch.setattr(gpu_story, "WAYS", ways)
    gpu_story.Story(job, gpu_llama.Sizes(2, 128), 64).run(ways, 0)


def story_over_budget(patch, job):
    story = gpu_story.Story(job, gpu_llama.Sizes(2, 128), 64)
    story.peaks[gpu_ways.PERMITTED] = 10
    story.check_plan(gpu_ways.Way(gpu_ways.PLAN, gpu_ways.plainly), {"peak": 11})


def fidelity_of_nothing(patch, job):
    encode_another(patch, lambda x, codec: (x, "raw"))
    gpu_fidelity.run(job)


BROKEN = [
    (smoke_lossy_as_exact, "lossless: the gradients differ by"),
    (smoke_nothing_compressed, "int8: 0 tensors compressed, expected 4"),
    (smoke_other_values, "the values that come back differ by"),
    (streams_out_of_order, "out of order, None: gradients differ by"),
    (kernels_encode_zeros, "raw, bfloat16, contiguous: what is decoded is not what was encoded"),
    (host_twice, "gradckpt: the gradients differ by"),
    (neighbours_differ, "library, lossless: gradients differ by 0.1"),
    (parity_other_bytes, "int8 bfloat16:"),
    (story_nothing_compressed, "payloads have 0 bytes; arithmetic gives 16,640"),
    (story_over_budget, "a planned step has 11 bytes, its budget is 10"),
    (fidelity_of_nothing, "layer 0, int8: inf dB, expected 35 or more"),
]


@pytest.mark.parametrize(("broken", "words"), BROKEN, ids=[how.__name__ for how, _ in BROKEN])
def test_a_broken_stage_fails(broken, words, job, monkeypatch):
    threads = torch.get_num_threads()
    try:
        broken(monkeypatch, job)
    finally:
        torch.set_num_threads(threads)
        gradckpt.stats.reset()
    assert any(words in sentence for sentence in job.failures), job.failures
    assert json.loads(job.result_file.read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("encode", "words"),
    [(1.0, None), (0.4, "above 1.25: the measurement is wrong"), (2.0, "below 0.61 (0.85 of an H200's)")],
)
def test_kernels_are_judged_on_a_card(encode, words, tmp_path):
    """The share is one of speeds: int8 moves 3.02 of the copy's 4 bytes."""
    job = job_of(tmp_path, Card("cpu"), small=False)
    x = gpu_kernels.values("bfloat16", 1 << 14, job.device)
    clock, seconds = gpu_kernels.Clock(job.device, True), {"copy": 1.0, "encode": encode, "decode": 1.0}
    clock.medians = lambda calls: {name: seconds[name] for name in calls}
    rows = []
    gpu_kernels.measure(job, clock, gpu_kernels.Case("int8", x, "contiguous"), lambda *cells: rows.append(cells))
    share = (16 + 8.125) / 32
    assert [row[7] for row in rows] == [f"{share / encode:.2f}", f"{share:.2f}"]
    assert [row[-1] for row in rows] == ["FAILED" if words else "ok", "ok"]
    assert (not job.failures) if words is None else (words in job.failures[0])


# ---- the story


@pytest.mark.parametrize("each", [70, 90])
def test_the_longest_sequence_is_found(each, tmp_path, monkeypatch):
    """The first guess is below or above what fits."""
    job = job_of(tmp_path)
    story = gpu_story.Story(job, gpu_llama.Sizes(2, 128), 64)
    story.limit, job.small = 100_000, False
    lengths = []

    def noted(count, kind):
        lengths.append(count)
        return torch.zeros(1, 8, dtype=torch.long)

    monkeypatch.setattr(gpu_llama, "batch", noted)
    monkeypatch.setattr(story.device, "fits", lambda run, limit: lengths[-1] * 80 <= limit, raising=False)
    monkeypatch.setattr(gpu_story, "GRAIN", 1)
    found = story.longest({"needed": None, "peak": each * 64, "before": 0})
    assert found in lengths
    assert 1250 / gpu_story.STEP - 1 <= found <= 1250
