"""gradckpt.plan: what a user relies on beside the figures, which test_plan_peaks.py compares."""

import contextlib
import json
import logging

import pytest
import torch
import transformers
from small_models import Untouched

import gradckpt
from gradckpt._planning import comparison
from gradckpt._planning.comparison import compare_source
from gradckpt._planning.config_model import ConfigModel
from gradckpt._planning.config_profile import shortened
from gradckpt._planning.options import find_blocks
from gradckpt._planning.report import IN_PYTHON, Comparison, Row, as_flags
from gradckpt._planning.segments import KINDS, WORKING, Peak, held_blocks, memory_use
from gradckpt._planning.step_trace import trace_step
from gradckpt._settings import READY
from gradckpt._stats import format_bytes

transformers.utils.logging.set_verbosity_error()

DECODER = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
    "use_cache": False,
}
INT8 = READY[2]
GIB = 2**30


def llama(**fields):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**DECODER, **fields})).train()


def ids(length=64, samples=2):
    x = torch.randint(0, 96, (samples, length))
    return {"input_ids": x, "labels": x}


class Net(torch.nn.Module):
    """Blocks with a loss; ``ask`` is called with an activation."""

    def __init__(self, ask=lambda x: None, width=64, layers=3):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(layers)
        )
        self.ask = ask

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        self.ask(x)
        return x.square().mean()


BATCH = torch.ones(2048, 64)
#: Of random states of a few regions in host memory, which a simulated step does not count.
STATES = 4 * torch.get_rng_state().nbytes


@pytest.fixture
def only_int8(monkeypatch):
    monkeypatch.setattr(comparison, "READY", (INT8,))


# ---- fewer blocks stand for all of them


def kept(model):
    """The numbers of the blocks that each block of a shorter model stands for."""
    with shortened(model, find_blocks(model)) as blocks:
        assert len(find_blocks(model)) == len(blocks.copies)
        return [list(each) for each in blocks.copies]


def test_blocks_that_differ_stay():
    model = llama()
    for i in (0, 4, 5, 9, 11):
        model.model.layers[i].mlp.act_fn = torch.nn.ReLU()
    assert kept(model) == [[i] for i in range(12)]
    fields = {key: value for key, value in DECODER.items() if key != "attention_dropout"}
    types = ["full_attention"] * 2 + ["sliding_attention"] * 8 + ["full_attention"] * 2
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields, layer_types=types)).train()
    assert kept(model) == [[i] for i in range(12)], "the model reads the types of its last layers at their places"


def test_patterns_of_blocks_repeat():
    model = llama()
    for i in range(0, 12, 2):
        model.model.layers[i].requires_grad_(False)
    assert kept(model) == [[0], [1], [2], [3], [4, 6, 8], [5, 7, 9], [10], [11]]
    fields = {key: value for key, value in DECODER.items() if key != "attention_dropout"}
    gemma = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**fields, head_dim=16)).train()
    assert len(set(gemma.config.layer_types)) == 2
    assert kept(gemma) == kept(model)


def test_a_shorter_model_is_whole_again_after_an_error():
    model = llama()
    before = list(model.model.layers)
    with pytest.raises(RuntimeError, match="stop"), shortened(model, find_blocks(model)):
        assert len(model.model.layers) == 6
        raise RuntimeError("stop")
    assert list(model.model.layers) == before


# ---- the longest sequence


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(attention, write_config):
    """Eager attention keeps its weights, whose size is quadratic."""
    config = transformers.LlamaConfig(**{**DECODER, "attention_dropout": 0.0, "num_hidden_layers": 5})
    source = ConfigModel(write_config("LlamaForCausalLM", config), dtype="fp32")
    source.model.config._attn_implementation = attention
    limit = 2**28
    plan = compare_source(source, 256, memory=limit)
    held = held_blocks(source.model, plan.fixed)
    for setting in READY:
        longest = plan[setting.name].longest

        def total(tokens, setting=setting):
            with setting.active(source.model):
                trace = trace_step(source.model, lambda _: source.run(tokens), cuda=True)
            return memory_use(trace.segments, held)["needed"]

        assert total(longest) <= limit < total(int(1.3 * longest) + 1)  # segments are 20 MiB
    assert plan["none"].longest < plan["int8"].longest
    assert all(row.fits == (row.longest >= 256) for row in plan.rows)


# ---- nothing of the model changes


class Noisy(Net):
    """With running statistics, dropout, and gradients of some parameters."""

    def __init__(self, **given):
        super().__init__(**given)
        self.norm, self.drop = torch.nn.BatchNorm1d(64), torch.nn.Dropout(0.1)

    def forward(self, x):
        return super().forward(self.drop(self.norm(x)))


def fail(x):
    raise ZeroDivisionError


def ask_number(x):
    return x.sum().item()


@pytest.mark.parametrize(
    ("ask", "error"), [(lambda x: None, None), (ask_number, None), (fail, ZeroDivisionError)], ids=["", "real", "error"]
)
@pytest.mark.parametrize("enabled", [False, True])
def test_nothing_changes(ask, error, enabled):
    model = Noisy(ask=ask).train()
    handle = gradckpt.enable(model, "int4", modules="blocks.1") if enabled else None
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    model.drop.eval()
    settings = repr(handle)
    with Untouched(model), pytest.raises(error) if error else contextlib.nullcontext():
        gradckpt.plan(model, BATCH)
    assert repr(handle) == settings
    if enabled:
        handle.remove()


# ---- steps that ask for values


def test_a_step_that_asks_for_values_is_measured(caplog):
    model = Net(ask_number).train()
    with caplog.at_level(logging.INFO, "gradckpt"):
        plan = gradckpt.plan(model, BATCH)
    sentence = [text for text in plan.about if "real steps were measured" in text]
    assert len(sentence) == 1
    assert sentence[0] in caplog.text
    assert [row.name for row in plan.rows] == [setting.name for setting in READY]
    quiet = gradckpt.plan(Net().train(), BATCH)
    for row in plan.rows:
        assert row.peak.size == pytest.approx(quiet[row.name].peak.size, abs=STATES)
    assert not any("measured" in text for text in quiet.about)


# ---- what is planned


def peak(model, batch, **given):
    return gradckpt.plan(model, batch, **given)["int8"].peak.size


def test_chosen_modules(only_int8):
    """One block alone is recomputed; the others keep what they save."""
    model = Net(layers=6).train()
    with READY[0].active(model):
        plain = trace_step(model, lambda x: model(x).backward(), BATCH).peak().size
    assert peak(model, BATCH) < peak(model, BATCH, modules="blocks.1") < plain


def test_a_function_with_autocast(only_int8):
    model = Net(width=64).train()

    def step(dtype):
        def run():
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = model(BATCH)
            loss.backward()

        return run

    whole = gradckpt.plan(model, step(None))["int8"]
    half = gradckpt.plan(model, step(torch.bfloat16))["int8"]
    assert half.peak.size < whole.peak.size
    assert peak(model, BATCH) == whole.peak.size


def test_forms_of_a_batch(only_int8):
    model = Net().train()
    assert peak(model, BATCH) == peak(model, (BATCH,)) == peak(model, {"x": BATCH})


def test_frozen_parts_have_no_gradients(only_int8):
    model = Net(layers=6, width=512).train()
    batch = torch.ones(8, 512)
    full = gradckpt.plan(model, batch)["int8"].peak
    for block in model.blocks[:4]:
        block.requires_grad_(False)
    part = gradckpt.plan(model, batch)["int8"].peak
    one = 4 * (512 * 512 + 512)
    assert (full.parts[KINDS[2]], part.parts[KINDS[2]]) == (6 * one, 2 * one)


# ---- the answer


def test_verdicts():
    model = Net(layers=12, width=64).train()
    batch = torch.ones(4096, 64)
    rows = gradckpt.plan(model, batch).rows
    totals = {row.name: row.total for row in rows}

    def verdict(memory):
        return gradckpt.plan(model, batch, memory=memory)

    fits = verdict(2 * totals["none"])
    assert fits.verdict.startswith("It fits ")
    assert "without checkpointing" in fits.verdict
    assert all(row.fits for row in fits.rows)
    assert "barely" not in str(fits).lower()
    just = verdict(totals["none"])
    assert f"with none ({format_bytes(totals['none'])}, barely), torch (" in just.verdict
    assert str(just).count("barely") == 2  # in the table, too
    assert "\nBarely: less than 1 GiB is left" in str(just)
    some = verdict(totals["torch"])
    assert some.verdict.startswith("It fits ")
    assert "without" not in some.verdict
    assert [row.name for row in some.rows if row.fits] == [name for name in totals if totals[name] <= totals["torch"]]
    assert all(row.name in some.verdict for row in some.rows if row.fits)
    none = verdict("1KiB")
    least = min(totals, key=totals.get)
    assert none.verdict.startswith("Nothing fits 1.00 KiB: the smallest peak is")
    assert f"with {least}. " in none.verdict
    assert none["int8"].fits is False
    table = gradckpt.plan(model, batch)
    assert table["int8"].fits is None
    assert lines_to_paste(table) == list(totals)
    assert lines_to_paste(fits) == list(totals)
    assert lines_to_paste(some) == [row.name for row in some.rows if row.fits]
    assert "To train so" not in str(none)
    assert not lines_to_paste(none)


def lines_to_paste(plan):
    """The names in "To train so:", each of which has a line."""
    lines = str(plan).partition("To train so:\n")[2].partition("\n\n")[0].splitlines()
    assert all("gradckpt." in line or line.split()[0] == "none" for line in lines)
    return [row.name for line in lines for row in plan.rows if line.startswith(f"  {row.name}  ")]


def advice(position, hints=IN_PYTHON, fixed=None, **parts):
    """The verdict of a plan whose peak has these parts, in GiB."""
    names = {"kept": KINDS[0], "logits": KINDS[1], "gradients": KINDS[2], "working": KINDS[3]}
    sizes = {names[name]: size * GIB for name, size in parts.items()}
    row = Row("int8", "", Peak(sum(sizes.values()), position, sizes), 99 * GIB)
    return Comparison((row,), {name: size * GIB for name, size in (fixed or {}).items()}, None, (), hints=hints).verdict


def test_advice_is_about_what_binds():
    assert "Loss binds: logits and loss, 9.00 GiB; compute the loss in chunks" in advice("loss", logits=9, kept=2)
    assert "Loss binds: working set, 9.00 GiB; compute the loss in chunks" in advice("loss", working=9, kept=2)
    layer = advice("backward of layer 3", working=9, kept=2)
    assert "Backward of layer 3 binds: working set, 9.00 GiB; checkpoint smaller modules (modules=)" in layer
    assert "kept for the backward, 9.00 GiB; train on a smaller batch" in advice("backward of layer 3", kept=9)
    assert "gradients, 9.00 GiB; train adapters" in advice("backward of layer 0", gradients=9)
    weights = advice("loss", fixed={"parameters and buffers": 20}, logits=2)
    assert "there all the time: parameters and buffers, 20.00 GiB; freeze the weights in 4 bits" in weights


def test_advice_of_python_names_no_flags():
    assert "--" not in str(IN_PYTHON)
    assert "modules=" not in str(as_flags((), "tokens"))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ([], "freeze the weights in 4 bits (--lora r=16 --weights nf4), or shard (--gpus 8 --shard fsdp)."),
        (["--lora"], "freeze the weights in 4 bits (--lora r=16 --weights nf4), or shard (--gpus 8 --shard fsdp)."),
        (["--shard"], "freeze the weights in 4 bits (--lora r=16 --weights nf4)."),
        (["--weights", "--lora"], "shard (--gpus 8 --shard fsdp)."),
        (["--weights", "--lora", "--shard"], "train on fewer tokens."),
    ],
)
def test_advice_of_the_command_leaves_out_what_it_was_given(given, hint):
    assert advice("loss", as_flags(given, "tokens"), {"weights": 20}).endswith(f"20.00 GiB; {hint}")
    chunked = advice("loss", as_flags(["--loss"], "images"), logits=9)
    assert chunked.endswith("9.00 GiB; train on a smaller batch.")


def test_results_can_be_read():
    plan = gradckpt.plan(Net().train(), BATCH, memory="1GiB")
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["verdict"] == plan.verdict
    assert [row["name"] for row in data["rows"]] == [setting.name for setting in READY]
    assert data["rows"][2]["peak"]["size"] == plan["int8"].peak.size
    assert "hints" not in data
    with pytest.raises(KeyError):
        plan["int9"]
    text = str(plan)
    assert text.startswith(plan.verdict)
    assert all(setting.line in text for setting in READY)


def test_errors():
    model = Net()
    with pytest.raises(ValueError, match=r"^gradckpt: plan\(\) needs a model in training mode; call model\.train\(\)"):
        gradckpt.plan(model.eval(), BATCH)
    model.train()
    with pytest.raises(ValueError, match=r"^gradckpt: 'much' is not a size"):
        gradckpt.plan(model, BATCH, memory="much")
    with pytest.raises(ValueError, match="without a scalar loss"):
        gradckpt.plan(torch.nn.Sequential(torch.nn.Linear(64, 64)).train(), BATCH, modules="0")


def test_no_row_begins_where_a_failed_one_ended(monkeypatch):
    """Each row is a trial of its own, after which the model is as before."""
    state, ran = {"failed": False}, []

    def row_of(setting):
        assert not state["failed"], "the failed step's state is there"
        ran.append(setting.name)
        if "parts" in setting.options:
            state["failed"] = True
            raise RuntimeError("no parts")
        size = 100 if "tiles" in setting.options else 1000
        return Row(setting.name, "", Peak(size, "", {KINDS[WORKING]: size}), size)

    def run_all(trials, settings):
        rows = []
        for trial in trials:
            rows.append(trial())
            state["failed"] = False  # as a trial's end restores it
        return rows

    monkeypatch.setattr(comparison, "have_parts", lambda blocks: True)
    names = [row.name for row in comparison.with_parts(row_of, run_all, [torch.nn.Linear(1, 1)], 2)]
    assert "torch, 2 tiles" in names
    assert "torch in parts" in ran
    assert "torch in parts" not in names
