"""Long runs, started by `make soak`: sanitizers, random groups on every instruction set, and the
newest released torch and transformers."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import fresh_venv
import numpy as np
import pytest
import torch
from checkout import PROGRAMS, ROOT, TESTS
from codec_libraries import ISAS, forced, whole
from commands import Failed, last_line

import gradckpt
from gradckpt import _C

pytestmark = pytest.mark.soak


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "files",
    [
        ["test_checkpoint.py"],
        ["test_compress.py", "test_late_overflow.py"],
        ["test_threads.py", "test_questions.py", "test_interrupts.py"],
        ["test_codec_tensors.py", "test_codec_hostile.py", "test_stochastic.py"],
        ["test_selective.py", "test_selective_surroundings.py", "test_selective_saves.py", "test_naming.py"],
        ["test_selective_function.py", "test_policies.py", "test_batch.py"],
        ["test_compress_saved.py", "test_saved_sharing.py", "test_residuals.py"],
    ],
    ids=["checkpoint", "compress", "threads", "codecs", "selective", "one node", "saved"],
)
def test_under_sanitizers(sanitized, files):
    tree, env = sanitized
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "not soak", *[str(next((tree / "tests").rglob(f))) for f in files]]
    out = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout[-3000:] + out.stderr[-5000:]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("codec", [c for c in _C.codecs() if c != "raw"])
def test_random_groups_on_every_instruction_set(codec):
    """Those that a codec may refuse have ordinary values, of every size that its payload has."""
    info = gradckpt.codecs.info(codec)
    low, high = (-10, 10) if codec == "fp16" else (-60, 60)
    rng = np.random.default_rng(7)
    for _ in range(60):
        bits = torch.from_numpy(rng.integers(0, 1 << 32, 128 * 2000, dtype=np.uint32).view(np.int32))
        scale = torch.from_numpy(np.ldexp(1.0, rng.integers(low, high, (2000, 1))).astype(np.float32))
        values = [bits.view(torch.float32), torch.randn(2000, 128) * scale]
        for x in values[1 if info["may_overflow"] else 0 :]:
            for dtype in (getattr(torch, name) for name in info["dtypes"]):
                with forced("scalar"):
                    expected = gradckpt.codecs.encode(x.to(dtype), codec)
                    decoded = expected.decode()
                for isa in ISAS:
                    with forced(isa):
                        assert torch.equal(whole(gradckpt.codecs.encode(x.to(dtype), codec)), whole(expected)), (
                            isa,
                            dtype,
                        )
                        assert torch.equal(expected.decode().view(torch.uint8), decoded.view(torch.uint8)), (isa, dtype)


# ---- the canary: it reports, and fails no run

#: What an update of torch or transformers is most likely to break.
PART = (
    "engine/test_checkpoint.py",
    "engine/test_compress.py",
    "equivalence/test_gradients.py",
    "models/test_enable.py",
    "models/test_trainer_flag.py",
    "package/test_torch_private.py",
)


def packages():
    """What the tests import, transformers in any version."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [name.partition("==")[0] for name in extras["test"] if not name.startswith(("ruff", "mypy"))]


def venv_with_the_newest(folder):
    index = os.environ.get("TORCH_INDEX")
    if index is None:
        pytest.skip("TORCH_INDEX is not set; `make soak` sets it to torch's index of CPU builds")
    venv = fresh_venv.FreshVenv(folder, Path(sys.executable))
    venv.env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    try:
        venv.add_torch("newest", index)
        venv.pip_install(*packages())
    except fresh_venv.Unavailable as reason:
        pytest.skip(str(reason))
    except Failed as failed:
        pytest.skip(f"pip: {last_line(str(failed))}")
    return venv


def doctor(venv):
    lost = re.findall(r"^torch lacks +(.+)$", venv.doctor(), re.MULTILINE)
    return [f"torch lacks {name}" for name in lost]


def trainer_step(venv):
    venv.run(PROGRAMS / "trainer_step.py")
    return []


def part_of_the_suite(venv):
    options = ["-q", "--tb=no", "-m", "not soak", "-p", "no:cacheprovider", "-p", "no:xdist"]
    venv.run("-m", "pytest", *options, *[TESTS / file for file in PART])
    return []


def findings(check, venv):
    """Return what is wrong, and the tests that failed, at most five."""
    try:
        return check(venv)
    except Failed as failed:
        ids = re.findall(r"^(?:FAILED|ERROR) (\S+)", str(failed), re.MULTILINE)
        return [f"{check.__name__}: {'; '.join([last_line(str(failed)), *ids[:5]])}"]


@pytest.mark.timeout(3600)
def test_newest_torch_and_transformers(tmp_path):
    venv = venv_with_the_newest(tmp_path)
    ask = "import torch, transformers; print(f'torch {torch.__version__}, transformers {transformers.__version__}')"
    versions = last_line(venv.run("-c", ask))
    found = [line for check in (doctor, trainer_step, part_of_the_suite) for line in findings(check, venv)]
    if found:
        pytest.xfail(f"{versions}: {' | '.join(found)}")
