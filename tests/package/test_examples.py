"""examples/ as their users run them. Those for Hugging
Face have tests of their own (test_peft.py)."""

import importlib
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


def results(example, *options):
    """Of a run in which all checks of the example held: its JSON."""
    done = run(example, *options, "--json")
    assert done.stderr == ""
    *lines, last = done.stdout.splitlines()
    found = [line.split()[0] for line in lines if line.startswith(("ok ", "FAILED "))]
    assert len(found) >= 5
    assert set(found) == {"ok"}
    return json.loads(last)


def check(stock, none, lossy, steps):
    assert none["losses"] == stock["losses"]
    assert len(none["losses"]) == steps
    assert none["error"] == 0
    assert stock["compressed"] == none["compressed"] == 0
    assert lossy["losses"][0] == stock["losses"][0]
    assert 0 < lossy["bytes_out"] < 0.26 * lossy["bytes_in"]
    assert 0 < lossy["error"] < 0.03


def test_diffusers(monkeypatch, capsys):
    """The UNet as a user runs it; the transformer in this process,
    since importing diffusers takes seconds."""
    options = ["--steps", "2", "--batch", "2"]
    monkeypatch.syspath_prepend(EXAMPLES)
    assert importlib.import_module("diffusers_unet").main(["--model", "sd3", *options, "--json"]) == 0
    sd3 = json.loads(capsys.readouterr().out.splitlines()[-1])
    for found in (sd3, results("diffusers_unet.py", *options)):
        stock, none, int8 = found.values()
        check(stock, none, int8, steps=2)
        assert none["regions"] == int8["regions"] > 0


def test_train_llama(tmp_path):
    """The demo; with the codecs in another order, so that nothing is tied to the default's."""
    options = ["--layers", "3", "--seq", "64", "--steps", "3", "--every", "2", "--codecs", "int4,int8"]
    lines = run("train_llama.py", *options, "--out", tmp_path / "demo.png").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    found = [line.split()[0] for line in lines if line.startswith(("ok ", "FAILED "))]
    assert found == ["ok"] * 11
    assert all(any(line.startswith(word) for line in lines) for word in ("Memory: ", "Time: ", "Gradients: "))
    assert (tmp_path / "demo.png").read_bytes()[1:4] == b"PNG"


def test_timm():
    found = results("timm_vit.py", "--steps", "2", "--layers", "3", "--batch", "4")
    stock, none, patched, applied = found.values()
    check(stock, none, patched, steps=2)
    assert patched == applied
    assert patched["compressed"] == 2 * 3


def test_plain():
    found = results("plain_gpt.py", "--steps", "2", "--layers", "2", "--seq", "64", "--batch", "2")
    plain, stock, none = (found[name] for name in ("no checkpointing", "torch checkpointing", "gradckpt None"))
    check(stock, none, found["gradckpt int8"], steps=2)
    assert plain["losses"] == stock["losses"]
    kept = [
        plain["kept"],
        stock["kept"],
        found["gradckpt int8"]["kept"],
        found["gradckpt int4"]["kept"],
    ]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4
    assert none["kept"] == stock["kept"]


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
