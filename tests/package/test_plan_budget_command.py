"""gradckpt plan --budget: the command chooses an option for each region."""

import json
import logging
import re

import pytest
import torch
import transformers
from small_models import TINY

import gradckpt
from gradckpt.__main__ import main
from gradckpt._planning import command, model_and_batch
from gradckpt._planning.comparison import compare_source
from gradckpt._planning.config_model import ConfigModel
from gradckpt._planning.config_profile import ConfigProfile, shortened
from gradckpt._planning.devices import find, rates_of
from gradckpt._planning.options import find_blocks

LAYERS = 9
RATES = rates_of(find("A100-80GB"), in_16_bits=True)
CONFIG = transformers.LlamaConfig(**{**TINY, "num_hidden_layers": LAYERS})
STEP = ("--tokens", 256, "--batch", 2)
#: So large that segments of 20 MiB do not hide what a setting saves.
LARGE = ("--tokens", 256, "--batch", 128)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    text = json.dumps({**CONFIG.to_dict(), "architectures": ["LlamaForCausalLM"]}, default=str)
    (path / "config.json").write_text(text)
    return str(path)


@pytest.fixture
def run(capsys, folder):
    """Runs the command, and returns its status, what it printed, and its errors."""

    def run(*arguments):
        try:
            status = main(["plan", folder, *map(str, arguments)])
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def profile(folder):
    return ConfigProfile(ConfigModel(folder), 256, 2, compress=["int8"], rates=RATES)


_answers = {}


def answer(run, *arguments):
    """What a command answers; the same one runs once."""
    if arguments not in _answers:
        status, text, _ = run(*arguments, "--json")
        _answers[arguments] = status, json.loads(text)
    return _answers[arguments]


def smallest(run, *arguments, step=STEP):
    """The smallest budget, from the refusal of a smaller one."""
    status, data = answer(run, *step, "--budget", 2000, *arguments)
    assert status == 1
    return data["smallest_budget"]


# ---- usage


def wrong(run, *arguments):
    status, text, errors = run(*arguments)
    assert (status, text) == (2, "")
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


def test_wrong_usage(run):
    assert "--budget 2GiB is above --memory" in wrong(run, *STEP, "--budget", "2GiB", "--memory", "1GiB")
    assert "--compress needs a budget" in wrong(run, *STEP, "--compress", "int8")
    assert "--save needs a budget" in wrong(run, *STEP, "--save", "plan.json")
    assert "90% of which device is unknown; add --device" in wrong(run, *STEP, "--budget", "90%")
    assert "'much' is not a size" in wrong(run, *STEP, "--budget", "much")
    assert "budget='0.9' is a fraction, and of what is unknown; write \"90%\"" in wrong(run, *STEP, "--budget", "0.9")
    assert "is no part of a device" in wrong(run, *STEP, "--budget", "101%", "--device", "4090")
    saved = wrong(run, *STEP, "--budget", "1GiB", "--lora", "r=4", "--save", "plan.json")
    assert "--save needs the plain model" in saved


@pytest.fixture
def unplanned(monkeypatch):
    """Fails a test that builds a model."""

    def build(*arguments, **options):
        raise AssertionError("the model was built")

    monkeypatch.setattr(command, "ConfigModel", build)


def test_wrong_usage_is_found_before_the_model_is_built(run, tmp_path, monkeypatch, unplanned):
    budget = (*STEP, "--budget", "1GiB")
    assert "unknown codec 'int9'" in wrong(run, *budget, "--compress", "int8,int9")
    assert "holds booleans" in wrong(run, *budget, "--compress", "mask")
    assert f"--save has no folder '{tmp_path / 'no'}'" in wrong(run, *budget, "--save", tmp_path / "no" / "plan.json")
    assert "is a folder; add the name of a file" in wrong(run, *budget, "--save", tmp_path)
    built = wrong(run, *budget, "--save", tmp_path / "plan.json", "--compress", "int8, int4")
    assert "(AssertionError: the model was built" in built
    monkeypatch.setattr(command.os, "access", lambda path, mode: False)
    assert "cannot be written; choose another folder" in wrong(run, *budget, "--save", tmp_path / "plan.json")


def test_a_wrong_path_is_not_looked_up_on_the_hub(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cfg").mkdir()
    monkeypatch.setattr(model_and_batch, "_download", None)
    for name in ("cfg/nothere", "./nothere", "../nothere/config.json"):
        with pytest.raises(SystemExit):
            main(["plan", name, "--tokens", "64"])
        assert re.search(r"the folder 'cfg' has no 'nothere'|there is no file", capsys.readouterr()[1])


def test_the_hub_is_asked_in_silence(capsys, caplog, monkeypatch):
    def cached_file(*arguments):
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 8s [Retry 5/5].")
        raise OSError("no connection")

    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)
    with pytest.raises(SystemExit):
        main(["plan", "someone/nothing", "--tokens", "64"])
    assert "no config.json of 'someone/nothing' on the hub (no connection)" in capsys.readouterr()[1]
    assert "Retrying" not in caplog.text


# ---- the answer


def test_a_large_budget_needs_nothing(run):
    status, text, errors = run(*STEP, "--budget", "90%", "--device", "4090")
    assert (status, errors) == (0, "")
    assert text.startswith("It fits 21.15 GiB (90%) without checkpointing")
    assert "binds" not in text
    assert "Times are estimates by the data sheet of RTX-4090." in text


def test_a_small_budget(run):
    least = smallest(run)
    status, text, errors = run(*STEP, "--budget", least)
    assert (status, errors) == (0, "")
    for words in ("by estimate", "regions", " binds", "Smallest budget:", "During the whole step:"):
        assert words in text
    for words in ("int8", "int4", "Errors of gradients"):  # no codec is permitted
        assert words not in text
    assert "model.layers.0 " in text
    assert "LlamaDecoderLayer)" in text
    assert "name another device with --device" in text
    status, text, errors = run(*STEP, "--budget", least - 1)
    assert (status, errors) == (1, "")
    assert text.startswith(f"No plan stays within {least - 1:,} bytes; the smallest budget is")
    assert f"({least} bytes)" in text


def test_codecs_are_permitted_one_by_one(run):
    permitted = ((), ("--compress", "int8"), ("--compress", "int8,int4"))
    exact, int8, both = (smallest(run, *each, step=LARGE) for each in permitted)
    assert both <= int8 < exact
    _, text, _ = run(*LARGE, "--budget", int8, "--compress", "int8")
    assert "int8" in text
    assert "Errors of gradients need weights" in text


def test_no_ready_setting_needs_less(run, folder):
    table = compare_source(ConfigModel(folder), 256, 2)
    exact = [row.needed for row in table.rows if row.name in ("none", "torch", "lossless")]
    assert smallest(run) <= min(exact)
    assert smallest(run, "--compress", "int8,int4") <= min(row.needed for row in table.rows)


def test_json(run):
    status, data = answer(run, *STEP, "--budget", smallest(run))
    assert status == 0
    assert data["estimated"] is True
    assert data["peak"] <= data["budget"]
    assert data["verdict"].startswith("Peak ")
    assert len(data["regions"]) == LAYERS
    status, data = answer(run, *STEP, "--budget", 2000)
    assert (status, data["verdict"].startswith("No plan stays within")) == (1, True)


def test_a_faster_device_changes_times_alone(run):
    budget = smallest(run) * 11 // 10
    slow, fast = (answer(run, *STEP, "--budget", budget, "--device", name)[1] for name in ("T4", "B200"))
    assert slow["seconds"] > 5 * fast["seconds"]
    assert slow["smallest_budget"] == fast["smallest_budget"]
    assert slow["plain"] == fast["plain"]


def test_a_saved_plan_is_applied_to_the_live_model(run, tmp_path):
    path = tmp_path / "plan.json"
    status, text, _ = run(*STEP, "--budget", smallest(run), "--save", path)
    assert status == 0
    assert text.endswith(f'Saved to {path}, for gradckpt.enable(model, plan="{path}").\n')
    plan = gradckpt.Plan.load(path)
    model = transformers.LlamaForCausalLM(CONFIG).train()
    ids = torch.randint(0, CONFIG.vocab_size, (2, 16))
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    names = list(plan.apply(model).modules)
    assert names == [region.name for region in plan.regions if region.option.name != "keep"]
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    model = transformers.LlamaForCausalLM(CONFIG).train()
    gradckpt.enable(model, plan=str(path))
    assert list(gradckpt.config.Handle(model).modules) == names


def test_a_plan_that_cannot_be_saved_is_printed(run, tmp_path, monkeypatch):
    def save(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gradckpt.Plan, "save", save)
    status, text, errors = run(*STEP, "--budget", "1GiB", "--save", tmp_path / "plan.json")
    assert (status, text.startswith("It fits 1.00 GiB without")) == (2, True)
    assert "plan.json cannot be written: No space left on device" in errors


# ---- fewer blocks stand for all


def test_blocks_with_other_options_are_not_equal(profile):
    source = profile._steps._source
    blocks = find_blocks(source.model)
    with shortened(source.model, blocks, ["a"] * 8 + ["b"]) as short:
        assert [list(each) for each in short.copies] == [[0], [1], [2], [3, 4, 5], [6], [7], [8]]
    with shortened(source.model, blocks, ["a", "b", "c"] * 3) as short:
        assert len(short.modules) == LAYERS  # a pattern that repeats too seldom
    assert len(source.model.model.layers) == LAYERS


def test_estimates_add_up(profile):
    for option in profile.options:
        regions = sum(profile.cost(block, option).seconds for block in range(LAYERS))
        outside = sum(RATES.of_segment(segment) for segment in profile.traces[option].segments if segment.block is None)
        assert RATES.of_step(profile.traces[option]) == pytest.approx(regions + outside)
