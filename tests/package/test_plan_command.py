"""gradckpt plan: the command."""

import json
import re
import subprocess
import sys

import pytest
import transformers
from small_models import SHAPE_8B, SHAPE_70B, TINY

from gradckpt.__main__ import main
from gradckpt._planning import comparison
from gradckpt._planning.devices import DEVICES
from gradckpt._settings import READY

GIB = 2**30


@pytest.fixture
def write(tmp_path):
    """Writes a config.json, and returns its folder."""

    def write(config, name="LlamaForCausalLM", **entries):
        given = {**config.to_dict(), "architectures": [name], **entries}
        text = json.dumps({key: value for key, value in given.items() if value is not ...}, default=str)
        (tmp_path / "config.json").write_text(text)
        return str(tmp_path)

    return write


@pytest.fixture
def tiny(write):
    return write(transformers.LlamaConfig(**TINY))


@pytest.fixture
def run(capsys):
    """Runs the command, and returns its status, what it printed, and its errors."""

    def run(*arguments):
        try:
            status = main(["plan", *map(str, arguments)])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def only_int8(monkeypatch):
    monkeypatch.setattr(comparison, "READY", (READY[2],))


# ---- usage


def test_help(run):
    status, text, errors = run("--help")
    assert (status, errors) == (0, "")
    assert text.startswith("usage: gradckpt plan")
    flags = ("--tokens", "--batch", "--lora", "--weights", "--shard", "--loss", "--memory", "--device", "--json")
    for flag in (*flags, "--budget", "--compress", "--save"):
        assert flag in text
    assert "Exit status" in " ".join(text.split())


def wrong(run, *arguments):
    status, text, errors = run(*arguments)
    assert (status, text) == (2, "")
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


def test_wrong_usage(run, tiny, write):
    unknown = wrong(run, tiny, "--tokens", 64, "--device", "RTX-4091")
    assert "unknown device 'RTX-4091'; did you mean 'RTX-4090'" in unknown
    assert all(device.name in unknown for device in DEVICES)
    assert "'24GiBit' is not a size" in wrong(run, tiny, "--tokens", 64, "--memory", "24GiBit")
    assert "the length of a sequence is missing" in wrong(run, tiny)
    for number in ("0", "-1", "1.5", "many"):
        assert f"argument --tokens: '{number}' is no such number" in wrong(run, tiny, f"--tokens={number}")
    assert "unknown dtype 'fp8'" in wrong(run, tiny, "--tokens", 64, "--dtype", "fp8")
    assert "weights in nf4 cannot be trained; add --lora" in wrong(run, tiny, "--tokens", 64, "--weights", "nf4")
    assert "there is no file" in wrong(run, tiny + "/other/config.json", "--tokens", 64)
    assert "8 devices, and nothing says what they share" in wrong(run, tiny, "--tokens", 64, "--gpus", 8)


def test_a_missing_field_is_named(run, write):
    path = write(transformers.LlamaConfig(**TINY), num_hidden_layers=...)
    assert wrong(run, path, "--tokens", 64).endswith("error: the config has no 'num_hidden_layers'; add it")


def test_errors_of_other_libraries_are_a_sentence(run, write, monkeypatch):
    """With the status of wrong usage: 1 says that nothing fits."""
    path = write(transformers.LlamaConfig(**TINY), hidden_act="none")
    said = wrong(run, path, "--tokens", 64)
    assert re.search(r"error: \S+ gives no model \(\w+: .*\); correct it \(--traceback shows where\)$", said)

    def forward(*args, **kwargs):
        raise KeyError("no such\nthing")

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    path = write(transformers.LlamaConfig(**TINY))
    said = wrong(run, path, "--tokens", 64)
    assert said.endswith(
        "error: LlamaForCausalLM cannot simulate a step of 64 tokens (KeyError: 'no such\\nthing'); call "
        "gradckpt.plan(model, batch) in your script instead (--traceback shows where)"
    )
    with pytest.raises(KeyError):
        run(path, "--tokens", 64, "--traceback")


def test_blocks_that_transformers_cannot_checkpoint(run, write, only_int8, monkeypatch):
    """The repeated blocks are planned, and the lines say which."""
    monkeypatch.setattr(transformers.LlamaForCausalLM, "supports_gradient_checkpointing", False)
    status, text, _ = run(write(transformers.LlamaConfig(**TINY)), "--tokens", 64)
    assert status == 0
    assert "transformers cannot checkpoint LlamaForCausalLM: the lines take modules=(LlamaDecoderLayer,), too." in text


def test_images_have_no_tokens(run, write, only_int8):
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    path = write(config, "ViTForImageClassification")
    assert "leave out the number of tokens" in wrong(run, path, "--tokens", 64)
    status, text, _ = run(path, "--batch", 4)
    assert status == 0
    assert "Images of 32 x 32 pixels." in text


# ---- the answer


@pytest.mark.parametrize(("size", "number"), [("24GiB", 24 * GIB), ("24GB", 24 * 10**9), ("25769803776", 24 * GIB)])
def test_sizes_of_memory(run, tiny, only_int8, size, number):
    status, text, _ = run(tiny, "--tokens", 64, "--memory", size, "--json")
    assert (status, json.loads(text)["memory"]) == (0, number)


def test_a_device_has_a_memory_and_a_speed(run, tiny, write, only_int8):
    status, text, _ = run(tiny, "--tokens", "1_024", "--device", "4090", "--json")
    data = json.loads(text)
    assert (status, data["tokens"]) == (0, 1024)
    assert 23 * GIB < data["memory"] < 24 * GIB
    row, in_parts = data["rows"]
    assert (row["name"], in_parts["name"]) == ("int8", "int8 in parts")
    assert in_parts["seconds"] > row["seconds"] > 0
    assert min(in_parts["longest"], row["longest"]) > 1024
    assert row["fits"] is True
    wide = write(transformers.LlamaConfig(**{**TINY, "intermediate_size": 2048}))
    status, text, _ = run(wide, "--tokens", 16_384, "--device", "4090", "--tiles", 16, "--loss", "liger", "--json")
    tiled = json.loads(text)["rows"][-1]
    assert tiled["name"].endswith(", 16 tiles")
    assert tiled["longest"] > 16_384
    assert tiled["longest"] % 16 == 0


def test_statuses(run, tiny):
    status, text, errors = run(tiny, "--tokens", 64, "--memory", "1GiB")
    assert (status, errors) == (0, "")
    assert text.startswith("It fits 1.00 GiB at 64 tokens without checkpointing")
    assert all(setting.line in text for setting in READY)
    status, text, errors = run(tiny, "--tokens", 64, "--memory", "1KiB")
    assert (status, errors) == (1, "")
    assert text.startswith("Nothing fits 1.00 KiB at 64 tokens: the least that is needed is")
    status, text, _ = run(tiny, "--tokens", 64)
    assert status == 0
    assert text.startswith("The least that is needed at 64 tokens is")


def test_advice_leaves_out_what_was_given(run, tiny, only_int8):
    sharded = ("--gpus", 2, "--shard", "fsdp")
    _, text, _ = run(tiny, "--tokens", 8)
    assert "--shard fsdp" in text.partition("\n")[0]
    _, text, _ = run(tiny, "--tokens", 8, *sharded)
    assert "--shard" not in text.partition("\n")[0]


def test_the_same_twice(run, tiny, only_int8):
    assert run(tiny, "--tokens", 64, "--json") == run(tiny, "--tokens", 64, "--json")


# ---- figures


@pytest.mark.parametrize(
    ("given", "gib", "position"),
    [
        ((), 67.2, "loss"),
        (("--loss", "trl"), 30.5, "backward of layer 31"),
        (("--loss", "trl", "--weights", "nf4"), 26.4, "backward of layer 31"),
        (("--loss", "trl", "--weights", "nf4", "--prepare", "none"), 17.8, "backward of layer 31"),
    ],
    ids=["model's loss", "trl", "nf4 by PEFT", "nf4 by TRL"],
)
def test_8_billion_parameters_at_32768_tokens(run, write, only_int8, given, gib, position):
    path = write(transformers.LlamaConfig(**SHAPE_8B, max_position_embeddings=131072))
    status, text, _ = run(path, "--tokens", 32768, "--lora", "r=16", "--memory", "24GiB", "--json", *given)
    row = json.loads(text)["rows"][0]
    assert row["total"] / GIB == pytest.approx(gib, rel=0.01)
    assert row["peak"]["position"] == position
    assert status == (0 if gib < 24 else 1)


MEASURED = """
import resource, sys
from gradckpt.__main__ import main
status = main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
sys.exit(status)
"""


def test_70_billion_parameters_take_no_memory(write):
    path = write(transformers.LlamaConfig(**SHAPE_70B))
    arguments = ["plan", path, "--tokens", "8192", "--gpus", "8", "--shard", "fsdp", "--memory", "80GB"]
    out = subprocess.run([sys.executable, "-c", MEASURED, *arguments], capture_output=True, text=True)
    assert out.returncode in (0, 1), out.stderr
    assert "70.55 B parameters" in out.stdout
    assert int(out.stderr.split()[-1]) < 2 * 2**20  # KiB
