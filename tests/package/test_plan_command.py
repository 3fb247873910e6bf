"""gradckpt plan: the command."""

import json
import re

import pytest
import transformers
from small_models import TINY

from gradckpt.__main__ import main
from gradckpt._planning import comparison
from gradckpt._planning.devices import DEVICES
from gradckpt._settings import READY

GIB = 2**30


@pytest.fixture
def tiny(write_config):
    return write_config("LlamaForCausalLM", transformers.LlamaConfig(**TINY))


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


def wrong(run, *arguments):
    status, text, errors = run(*arguments)
    assert (status, text) == (2, "")
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


def test_wrong_usage(run, tiny, write_config):
    unknown = wrong(run, tiny, "--tokens", 64, "--device", "RTX-4091")
    assert "unknown device 'RTX-4091'; did you mean 'RTX-4090'" in unknown
    assert all(device.name in unknown for device in DEVICES)
    assert "'24GiBit' is not a size" in wrong(run, tiny, "--tokens", 64, "--memory", "24GiBit")
    assert "the length of a sequence is missing" in wrong(run, tiny)
    for number in ("0", "-1", "1.5", "many"):
        assert f"argument --tokens: '{number}' is no such number" in wrong(run, tiny, f"--tokens={number}")
    assert "there is no file" in wrong(run, tiny + "/other/config.json", "--tokens", 64)


def test_errors_of_other_libraries_are_a_sentence(run, write_config, monkeypatch):
    """With the status of wrong usage: 1 says that nothing fits."""
    path = write_config("LlamaForCausalLM", transformers.LlamaConfig(**TINY), hidden_act="none")
    said = wrong(run, path, "--tokens", 64)
    assert re.search(r"error: \S+ gives no model \(\w+: .*\); correct it \(--traceback shows where\)$", said)

    def forward(*args, **kwargs):
        raise KeyError("no such\nthing")

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    path = write_config("LlamaForCausalLM", transformers.LlamaConfig(**TINY))
    said = wrong(run, path, "--tokens", 64)
    assert said.endswith(
        "error: LlamaForCausalLM cannot simulate a step of 64 tokens (KeyError: 'no such\\nthing'); call "
        "gradckpt.plan(model, batch) in your script instead (--traceback shows where)"
    )
    with pytest.raises(KeyError):
        run(path, "--tokens", 64, "--traceback")


def test_blocks_that_transformers_cannot_checkpoint(run, write_config, only_int8, monkeypatch):
    """The repeated blocks are planned, and the lines say which."""
    monkeypatch.setattr(transformers.LlamaForCausalLM, "supports_gradient_checkpointing", False)
    status, text, _ = run(write_config("LlamaForCausalLM", transformers.LlamaConfig(**TINY)), "--tokens", 64)
    assert status == 0
    assert "transformers cannot checkpoint LlamaForCausalLM: the lines take modules=(LlamaDecoderLayer,), too." in text


def test_images_have_no_tokens(run, write_config, only_int8):
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    path = write_config("ViTForImageClassification", config)
    assert "leave out the number of tokens" in wrong(run, path, "--tokens", 64)
    status, text, _ = run(path, "--batch", 4)
    assert status == 0
    assert "Images of 32 x 32 pixels." in text


# ---- the answer


def test_a_device_has_a_memory_and_a_speed(run, tiny, write_config, only_int8):
    status, text, _ = run(tiny, "--tokens", "1_024", "--device", "4090", "--json")
    data = json.loads(text)
    assert (status, data["tokens"]) == (0, 1024)
    assert 23 * GIB < data["memory"] < 24 * GIB
    row, in_parts = data["rows"]
    assert (row["name"], in_parts["name"]) == ("int8", "int8 in parts")
    assert in_parts["seconds"] > row["seconds"] > 0
    assert min(in_parts["longest"], row["longest"]) > 1024
    assert row["fits"] is True
    wide = write_config("LlamaForCausalLM", transformers.LlamaConfig(**{**TINY, "intermediate_size": 2048}))
    status, text, _ = run(wide, "--tokens", 16_384, "--device", "4090", "--tiles", 16, "--loss", "liger", "--json")
    tiled = json.loads(text)["rows"][-1]
    assert tiled["name"].endswith(", 16 tiles")
    assert tiled["longest"] > 16_384
    assert tiled["longest"] % 16 == 0


def test_statuses(run, tiny, only_int8):
    status, text, errors = run(tiny, "--tokens", 64, "--memory", "1GiB")
    assert (status, errors) == (0, "")
    assert text.startswith("It fits 1.00 GiB at 64 tokens")
    assert READY[2].line in text
    status, text, errors = run(tiny, "--tokens", 64, "--memory", "1KiB")
    assert (status, errors) == (1, "")
    assert text.startswith("Nothing fits 1.00 KiB at 64 tokens: the least that is needed is")
