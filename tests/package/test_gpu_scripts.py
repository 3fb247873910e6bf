"""Parity and sanitizers of `make gpu`, run dry on the CPU, and the Makefile's part.

test_gpu.py has the program and its stages.
"""

import os
import re
import shutil
import subprocess
import sys

import gpu_device
import gpu_inputs
import gpu_parity
import gpu_sanitize
import machine
import numpy as np
import pytest
import torch
from checkout import ROOT

import gradckpt

SCRIPTS = {m.__name__: m for m in (gpu_parity, gpu_sanitize)}
PAIRS = [(c, d) for c in gradckpt.codecs.names() for d in gradckpt.codecs.info(c)["dtypes"] if c != "sparse_int8"]
every_script = pytest.mark.parametrize("name", SCRIPTS)


# ---- all of them ----


@every_script
def test_help_and_refusal(name, monkeypatch, capsys):
    """One sentence that says why, and no traceback."""
    with pytest.raises(SystemExit) as left:
        SCRIPTS[name].main(["--help"])
    assert left.value.code == 0
    assert f"benchmarks/{name}.py" in capsys.readouterr().out
    monkeypatch.setattr(machine, "why_no_cuda", lambda: "torch sees no CUDA device")
    with pytest.raises(SystemExit) as left:
        SCRIPTS[name].main([])
    assert left.value.code == f"{name}: torch sees no CUDA device; --device cpu makes a dry run"


@pytest.mark.parametrize(
    ("version", "available", "info", "words"),
    [
        (None, False, {}, "built without CUDA"),
        ("13.0", False, {}, "sees no CUDA device"),
        ("13.0", True, {"cuda_archs": "", "build": "built without CUDA: nvcc not found"}, "nvcc not found"),
        ("13.0", True, {"cuda_archs": "9.0", "cuda_usable": False}, "driver"),
        ("13.0", True, {"cuda_archs": "8.0;10.0", "cuda_usable": True}, "built for 8.0;10.0, and the card is 9.0"),
        ("13.0", True, {"cuda_archs": "9.0", "cuda_usable": True}, None),
    ],
)
def test_why_no_cuda(monkeypatch, version, available, info, words):
    class Built:
        @staticmethod
        def build_info():
            return {"cuda_driver": 12080, "cuda_runtime": 13000, **info}

    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(machine, "_C", Built)
    reason = machine.why_no_cuda()
    assert reason is None if words is None else words in reason


# ---- parity ----


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    """Exit status and lines of a dry run of everything."""
    ran = subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu_parity.py", "--device", "cpu"], capture_output=True, text=True
    )
    return ran.returncode, ran.stdout.splitlines()


def test_parity_compares_every_pair(parity):
    """One line each, and one more for the 2^32 values; no difference."""
    status, lines = parity
    assert status == 0
    compared = [line.split() for line in lines if line.endswith(" 0 differences")]
    assert [tuple(words[:2]) for words in compared] == PAIRS + [p for p in PAIRS if p[1] == "float32"]
    assert all(int(words[2].replace(",", "")) > 30000 for words in compared)


def changed_payload(x, codec, dither):
    payload = gpu_parity_host_encode(x, codec, dither)
    if payload is None or payload.nbytes < 1000:
        return payload

    class Changed:
        codes, scales = payload.codes.clone(), payload.scales
        decode = payload.decode

    Changed.codes[777] ^= 1
    return Changed


def changed_value(x, codec, dither):
    payload = gpu_parity_host_encode(x, codec, dither)

    class Changed:
        codes, scales = (None, None) if payload is None else (payload.codes, payload.scales)

        @staticmethod
        def decode():
            y = payload.decode().contiguous()
            if y.numel() > 1000:
                y.view(-1).view(gpu_inputs.WORDS[y.dtype.itemsize])[700] ^= 1
            return y

    return None if payload is None else Changed


gpu_parity_host_encode = gpu_parity.host_encode


@pytest.mark.parametrize(
    ("codec", "host", "words"),
    [
        ("fp8_e4m3", changed_payload, r"value 777 = 0x[0-9a-f]+: payload byte 777 is 0x.. on the device, 0x.. on the "),
        ("bf16", changed_payload, r"value 388 = 0x[0-9a-f]{8}: payload byte 777"),
        ("raw", changed_value, r"value 700 = 0x[0-9a-f]+ is decoded to 0x[0-9a-f]+ on the device, 0x"),
        ("fp16", lambda *args: None, "refused by the host alone"),
    ],
)
def test_parity_finds_a_difference(monkeypatch, capsys, codec, host, words):
    monkeypatch.setattr(gpu_parity, "host_encode", host)
    assert gpu_parity.main(["--device", "cpu", "--codecs", codec, "--sanitize"]) == 1
    out = capsys.readouterr().out
    assert re.search(words, out), out


def test_parity_looks_at_what_is_refused(monkeypatch, capsys):
    """It comes back from the original, and there must be a reason to refuse."""
    arguments = ["--device", "cpu", "--codecs", "lossless", "--sanitize"]
    decode = gpu_parity.Side.decode

    def wrong_if_refused(device, payload):
        try:
            assert payload.codes is not None
        except RuntimeError:
            return decode(device, payload).neg()
        return decode(device, payload)

    monkeypatch.setattr(gpu_parity.Side, "decode", wrong_if_refused)
    assert gpu_parity.main(arguments) == 1
    assert "a refused tensor is not restored from the original" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(gpu_parity, "unholdable", lambda codec, host, x: torch.zeros(x.numel(), dtype=torch.bool))
    assert gpu_parity.main(arguments) == 1
    assert "refused, but there is no value that the codec cannot hold" in capsys.readouterr().out


def test_every_16_bit_pattern_is_compared():
    for dtype in ("float16", "bfloat16"):
        case = next(c for c in gpu_inputs.many(dtype) if c.name == "every pattern")
        assert len(case.base.view(torch.int16).unique()) == 65536


def test_cases_reach_what_kernels_tell_apart():
    cases = list(gpu_inputs.few("bfloat16"))
    views = [c.view(c.base) for c in cases]
    assert any(v.numel() == 0 for v in views)
    assert any(v.dim() == 8 and not v.is_contiguous() for v in views)
    assert any(v.storage_offset() * 2 % 16 for v in views)
    assert any(v.numel() % 128 for v in views)
    assert {c.dither for c in cases} == {None, *gpu_inputs.DITHERS}


def test_parity_compares_each_float32_value_once(monkeypatch):
    """The pieces lie side by side; each is whole when the fraction is 1."""
    assert gpu_parity.PIECE * gpu_parity.PIECES == 2**32
    monkeypatch.setattr(gpu_parity, "PIECE", 1024)
    made, seen = gpu_inputs.float32_of, []

    def float32_of(order, first, count, device):
        seen.append((order, *range(first, first + count)))
        return made(order, first, count, device)

    monkeypatch.setattr(gpu_inputs, "float32_of", float32_of)
    tallies = gpu_parity.compare_float32(gpu_parity.Side(gpu_device.Device("cpu")), ["raw"], 1.0)
    assert tallies["raw", "float32"].values == 2 * 64 * 1024
    for order in gpu_inputs.ORDERS:
        assert [i for o, *piece in seen if o == order for i in piece] == list(range(64 * 1024))


@pytest.mark.parametrize("order", gpu_inputs.ORDERS)
def test_orders_have_every_value_once(order):
    """Bits are moved, none is lost: 32 different bits, and no carry between them."""
    place = gpu_inputs.ORDERS[order]
    images = [int(place(torch.tensor(1 << bit))) for bit in range(32)]
    assert sorted(images) == [1 << bit for bit in range(32)]
    i = torch.from_numpy(np.random.default_rng(1).integers(0, 2**32, 5000))
    total = sum(((i >> bit & 1) * image for bit, image in enumerate(images)), torch.zeros_like(i))
    assert torch.equal(place(i), total)
    x = gpu_inputs.float32_of(order, 2**32 - 256, 256, "cpu")
    assert (x.view(torch.int32).long() % 2**32).tolist() == place(torch.arange(2**32 - 256, 2**32)).tolist()


# ---- sanitizers ----


TOOL = """#!/bin/sh
# stands in for compute-sanitizer: says what it was told, and how it ended
echo "TOLD $@"
echo "CACHING $PYTORCH_NO_CUDA_MEMORY_CACHING"
echo "========= ERROR SUMMARY: 3 errors"
exit {status}
"""


@pytest.mark.parametrize(
    ("status", "verdict", "ended"), [(0, "ok", 0), (86, "it reports errors", 1), (3, "(status 3)", 1)]
)
def test_sanitize(monkeypatch, capsys, tmp_path, status, verdict, ended):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(status=status))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_sanitize.main(["--device", "cpu"]) == ended
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if any(t in line for t in gpu_sanitize.TOOLS) and "3 errors" in line]
    assert len(rows) == 4
    assert all(verdict in row for row in rows)
    if status:
        for name in gpu_sanitize.TOOLS:
            assert f"TOLD --tool {name} --error-exitcode 86" in out
        assert out.count("CACHING 1") == 4
        assert out.count("--sanitize --device cpu") == 4


# ---- make ----


@pytest.fixture
def make(tmp_path):
    """make(target, ...) with the Makefile in a tree of its own,
    whose tools write down what they are called with."""
    (tmp_path / "Makefile").write_bytes((ROOT / "Makefile").read_bytes())
    (tmp_path / "csrc").mkdir()
    (tmp_path / "setup.py").touch()
    (tmp_path / "pyproject.toml").touch()
    tools, venv = tmp_path / "tools", tmp_path / ".venv"
    smi = 'case "$1" in -L) echo "GPU 0: a card";; *) echo 9.0; echo 8.6; echo 9.0;; esac'
    scripts = {tools / "nvidia-smi": smi, tools / "nvcc": ""}
    scripts[venv / "bin" / "python"] = 'echo "$@" >> log'
    for path, text in scripts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (venv / ".torch").touch()

    def run(*arguments):
        """Exit status, stdout, stderr, and the lines written down."""
        log = tmp_path / "log"
        log.write_text("")
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "CUDA_HOME": ""}
        ran = subprocess.run(["make", "-s", *arguments], cwd=tmp_path, capture_output=True, text=True, env=env)
        return ran.returncode, ran.stdout, ran.stderr, log.read_text().splitlines()

    run.tools, run.venv = tools, venv
    return run


def test_make_gpu_without_a_device(make):
    """Exit status 0, one sentence, nothing is run."""
    (make.tools / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    said = "make gpu: no CUDA device is visible here (nvidia-smi lists none), so nothing was run.\n"
    assert make("gpu") == (0, said, "", [])


def runs_of(log):
    """Of the program: what it is called with."""
    return [line.partition("benchmarks/gpu.py")[2].split() for line in log if "benchmarks/gpu.py" in line]


def test_make_gpu_runs_the_program(make):
    """Once, with what is passed on; its exit status is that of make."""
    status, stdout, _, log = make("gpu", "GPU_ARGS=--stages smoke,kernels")
    assert status == 0
    assert runs_of(log) == [["--stages", "smoke,kernels"]]
    assert stdout.splitlines()[0] == "make gpu: with a .venv, whose packages pip installs"
    fails = 'case "$*" in *benchmarks/gpu.py*) exit 1;; esac'
    (make.venv / "bin/python").write_text(f'#!/bin/sh\necho "$@" >> log\n{fails}\n')
    status, _, _, log = make("gpu")
    assert status == 2
    assert runs_of(log) == [[]]


# ---- make gpu with an interpreter of the machine ----


@pytest.fixture
def own_python(make):
    """An interpreter that is no venv's and writes down what it is called with."""
    path = make.tools / "own-python"
    path.write_text('#!/bin/sh\necho own "[$PYTHONPATH]" "[$GRADCKPT_CUDA_ARCHS]" "$@" >> log\n')
    path.chmod(0o755)
    return path.name


def test_make_gpu_with_the_machines_own_python(make, own_python):
    """No venv, no pip: what it has is asked, the extension is built in the tree,
    everything runs with it."""
    shutil.rmtree(make.venv)
    status, stdout, stderr, log = make("gpu", f"GPU_PYTHON={own_python}")
    assert (status, stderr) == (0, "")
    assert stdout.splitlines()[0] == f"make gpu: with {own_python} and its torch"
    assert not make.venv.exists()
    assert all(line.startswith("own ") and "pip" not in line for line in log)
    assert log[0].endswith("benchmarks/gpu_python.py")
    assert log[1] == "own [] [8.6,9.0] setup.py -q build_ext --inplace"
    assert runs_of(log) == [[]]
    assert all(line.startswith(f"own [{make.tools.parent}] ") for line in log[2:])
    assert not [line for line in make("gpu", f"GPU_PYTHON={own_python}")[3] if "setup.py" in line], "built once"
