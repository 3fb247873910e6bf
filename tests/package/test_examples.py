"""examples/ as their users run them. Those for Hugging
Face have tests of their own (test_peft.py)."""

import json
import os
import runpy
import subprocess
import sys

import processes
import pytest
from checkout import EXAMPLES, PROGRAMS, ROOT

#: The program that runs programs which import torchvision.
OPERATORS = PROGRAMS / "torchvision_operators.py"


def run(example, *options, status=0):
    """What the example printed."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [EXAMPLES / example]
    if example.startswith("timm"):
        env, program = processes.environment(), [OPERATORS, *program]
    env |= {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, [*program, *options])]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    ("example", "options"),
    [
        ("diffusers_unet.py", "--steps 2 --batch 2"),
        ("diffusers_unet.py", "--steps 2 --batch 2 --model sd3"),
        ("timm_vit.py", "--steps 2 --layers 3 --batch 4"),
        ("plain_gpt.py", "--steps 2 --layers 2 --seq 64 --batch 2"),
    ],
)
def test_what_the_example_checks_holds(example, options):
    """Losses and gradients beside the framework's own checkpointing."""
    done = run(example, *options.split(), "--json")
    assert done.stderr == ""
    *lines, last = done.stdout.splitlines()
    found = [line.split()[0] for line in lines if line.startswith(("ok ", "FAILED "))]
    assert len(found) >= 5
    assert set(found) == {"ok"}
    assert json.loads(last)


def test_train_llama(tmp_path):
    """The demo; with the codecs in another order, so that nothing is tied to the default's."""
    options = ["--layers", "3", "--seq", "64", "--steps", "3", "--every", "2", "--codecs", "int4,int8"]
    lines = run("train_llama.py", *options, "--out", tmp_path / "demo.png").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    found = [line.split()[0] for line in lines if line.startswith(("ok ", "FAILED "))]
    assert found == ["ok"] * 11
    assert all(any(line.startswith(word) for line in lines) for word in ("Memory: ", "Time: ", "Gradients: "))
    assert (tmp_path / "demo.png").read_bytes()[1:4] == b"PNG"


def test_fsdp_on_one_rank():
    """Without torchrun."""
    lines = run("fsdp.py", "--steps", "2", "--layers", "2", "--compress", "none").stdout.splitlines()
    assert lines[0] == "fsdp2 on 1 ranks, 2 steps: 2 blocks wrapped"
    assert lines[-1] == "losses equal to the last bit: 2 of 2, the first too"


def test_wrong_options_are_said_in_one_sentence():
    assert "--compress is none or one of" in run("fsdp.py", "--compress", "int9", status=2).stderr.splitlines()[-1]
    assert "1 or more" in run("plain_gpt.py", "--steps", "0", status=2).stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("example", "package"),
    [
        ("deepspeed_zero", "deepspeed"),
        ("diffusers_unet", "diffusers"),
        ("lightning_ddp", "lightning"),
        ("lora_trainer", "peft"),
        ("timm_vit", "timm"),
        ("torchtitan_blocks", "torchtitan"),
        ("train_llama", "transformers"),
    ],
)
def test_a_missing_package_is_said_in_one_sentence(example, package, monkeypatch):
    for key in (
        "DS_ACCELERATOR",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_VERBOSITY",
        "KINETO_LOG_LEVEL",
        "TORCH_CPP_LOG_LEVEL",
    ):
        monkeypatch.setenv(key, os.environ.get(key, ""))  # what the example sets ends with the test
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=rf"{package}.*; pip install .*{package}"):
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
