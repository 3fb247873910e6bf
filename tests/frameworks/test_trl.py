"""TRL: SFTTrainer with the flag, with adapters,
and checkpointing off and on again around generation."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import accelerate
import model_families
import peft
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from model_families import FAMILIES, VOCAB
from small_models import config_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trl.models.utils import disable_gradient_checkpointing, unwrap_model_for_generation

import gradckpt
from gradckpt._engine import selective
from gradckpt.policies import as_policy

# Of transformers, for the names that TRL still uses.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LAYERS = FAMILIES["llama"].layers
STEPS = 3


@pytest.fixture
def model():
    return model_families.build("llama", "sdpa")


def tokenizer():
    words = Tokenizer(WordLevel({f"<{i}>": i for i in range(VOCAB)}, unk_token="<0>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<0>", eos_token="<1>", bos_token="<2>"
    )


def finetune(model, folder, kwargs, adapters=None):
    """Losses of a few steps, and how many tensors they compressed."""
    ids = torch.randint(1, VOCAB, (8, 32), generator=torch.Generator().manual_seed(0)).tolist()
    config = trl.SFTConfig(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        **model_families.flag(kwargs),
        logging_steps=1,
        max_length=32,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": ids}),
        processing_class=tokenizer(),
        peft_config=adapters,
    )
    before = gradckpt.stats()["compressed"]
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, gradckpt.stats()["compressed"] - before


def step(model):
    """How many tensors a training step compresses."""
    before = gradckpt.stats()["compressed"]
    model_families.gradients("llama", model)
    return gradckpt.stats()["compressed"] - before


@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("enabled", [True, False], ids=["enabled", "flag alone"])
def test_sft_with_the_flag(model, adapters, enabled, tmp_path):
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
    theirs, none = finetune(
        model_families.build("llama", "sdpa"),
        tmp_path,
        {"use_reentrant": False},
        peft.LoraConfig(**lora) if adapters else None,
    )
    assert none == 0
    if enabled:
        gradckpt.enable(model)
    losses, count = finetune(model, tmp_path, {"compress": "int8"}, peft.LoraConfig(**lora) if adapters else None)
    assert count == STEPS * (LAYERS - adapters)  # with a frozen base, the first layer gets a leaf
    assert losses[0] == theirs[0], "exact mode leaves the forward alone"
    assert losses == pytest.approx(theirs, rel=1e-3)


@pytest.mark.parametrize("selective", [True, False])
def test_sft_takes_its_own_key_out(model, selective, tmp_path):
    """``selective`` keeps the outputs of attention, by a context_fn of TRL's,
    which our function gets, too."""
    _, count = finetune(model, tmp_path, {"compress": "int8", "selective": selective})
    assert count == STEPS * LAYERS
    function = next(f for m in model.modules() if (f := vars(m).get("_gradient_checkpointing_func")))
    assert ("context_fn" in function.keywords) is selective


@pytest.mark.parametrize("kwargs", [None, {"compress": "int8"}, {"use_reentrant": False}], ids=str)
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
def test_generation_between_steps(model, adapters, kwargs):
    """What TRL's online trainers do in every step."""
    handle = gradckpt.enable(model)
    if adapters:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"])).train()
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(model)
    for _ in range(3):
        with unwrap_model_for_generation(model, accelerator, gradient_checkpointing_kwargs=kwargs) as unwrapped:
            assert not model_families.is_on(unwrapped)
            with torch.no_grad():
                unwrapped.generate(
                    input_ids=torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, do_sample=False, pad_token_id=0
                )
        with disable_gradient_checkpointing(model, kwargs):
            assert step(model) == 0
        assert step(model) == LAYERS - adapters
    assert config_of(handle).codec == "int8"
    handle.remove()
    assert step(model) == 0


@pytest.mark.filterwarnings("ignore::gradckpt.GradckptInactiveWarning")  # attention with such a mask is other operators
def test_selective_is_a_policy(tmp_path, model):
    """TRL makes contexts of its key; a region gets a policy in their place, which knows what a
    codec rounds."""
    torchs, _ = finetune(model_families.build("llama", "sdpa"), tmp_path / "torch", {"selective": True})
    gradckpt.stats.reset()
    losses, compressed = finetune(model, tmp_path / "ours", {"selective": True, "compress": "int8"})
    assert losses == pytest.approx(torchs, rel=2e-3)
    assert compressed == STEPS * LAYERS
    assert selective.latest is as_policy("save_attention")


def test_selective_and_a_policy(tmp_path, model):
    with pytest.raises(ValueError, match='"selective" means policy="save_attention"; leave "selective" or "policy"'):
        finetune(model, tmp_path, {"selective": True, "compress": "int8", "policy": "save_matmuls"})
