"""Long runs, started by `make soak`: sanitizers, and the newest released torch and transformers."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import fresh_venv
import pytest
from checkout import PROGRAMS, ROOT, TESTS
from commands import Failed, last_line

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
