"""transformers deprecates names from release to release: gradckpt calls none of them."""

import copy
import pickle

import model_families
import pytest
import transformers
import transformers_names

import gradckpt

pytestmark = pytest.mark.filterwarnings("error::FutureWarning", "error::DeprecationWarning")

FLAGS = [
    {"compress": "int8"},
    {"compress": None, "policy": "save_matmuls"},
    {"compress": "int8", "recompute": False},
    {"budget": "1GiB"},
]


def build():
    return model_families.build("llama", "sdpa")


def step(model):
    model(**model_families.FAMILIES["llama"].batch()).loss.backward()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"compress": None, "every_n_layers": 2},
        {"compress": "int8", "recompute": False},
        {"modules": "layer"},
        {"budget": "1GiB"},
    ],
    ids=str,
)
def test_enable(settings):
    model = build()
    handle = gradckpt.enable(model, **settings)
    step(model)
    step(copy.deepcopy(model))
    step(pickle.loads(pickle.dumps(model)))
    transformers_names.turn_off(model)
    step(model)
    repr(handle)
    handle.remove()
    gradckpt.disable(model)


def test_before_a_step():
    model, batch = build(), model_families.FAMILIES["llama"].batch()
    gradckpt.plan(model, batch, memory="1GiB")
    gradckpt.plan(model, batch, budget="1GiB").apply(model)
    gradckpt.disable(model)
    gradckpt.gradient_error(model, batch, "int8")


@pytest.mark.parametrize("kwargs", FLAGS, ids=str)
def test_the_flag(kwargs, tmp_path):
    ids = model_families.FAMILIES["llama"].batch()["input_ids"]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
        **transformers_names.flag(kwargs),
    )  # fmt: skip
    transformers.Trainer(build(), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
