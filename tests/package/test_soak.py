"""Long runs, started by `make soak`: sanitizers, random groups on every instruction set."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from codec_isas import ISAS, forced
from payload_arrays import whole

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
