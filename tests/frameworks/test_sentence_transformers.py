"""sentence-transformers: an embedding model and a cross encoder,
enabled and trained with the flag."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import model_families
import pytest
import torch
import transformers
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from small_models import config_of

import gradckpt

# Of transformers, for the names that sentence-transformers still uses.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

LAYERS, WIDTH, STEPS = 3, 64, 3
WORDS = [f"w{i}" for i in range(91)]
SENTENCES = [" ".join(WORDS[(7 * i + j) % len(WORDS)] for j in range(16)) for i in range(8)]
PAIRS = {"anchor": SENTENCES, "positive": [" ".join(s.split()[::-1]) for s in SENTENCES]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A BERT, one with a classifier, and their tokenizer, in two folders: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("sentences")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    config = transformers.BertConfig(
        vocab_size=len(WORDS) + 5,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=64,
        num_labels=1,
    )
    torch.manual_seed(0)
    for model in (transformers.BertModel(config), transformers.BertForSequenceClassification(config)):
        model.save_pretrained(folder / type(model).__name__)
        transformers.BertTokenizer(str(vocabulary)).save_pretrained(folder / type(model).__name__)
    return folder


@pytest.fixture
def embedder(saved):
    return SentenceTransformer(modules=[Transformer(str(saved / "BertModel")), Pooling(WIDTH)], device="cpu")


@pytest.fixture
def encoder(saved):
    return CrossEncoder(str(saved / "BertForSequenceClassification"), device="cpu")


def train(model, folder, kwargs):
    """Loss of a few steps, and how many tensors they compressed."""
    cross = isinstance(model, CrossEncoder)
    arguments = (CrossEncoderTrainingArguments if cross else SentenceTransformerTrainingArguments)(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        **model_families.flag(kwargs),
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = {**PAIRS, "label": [0.0, 1.0] * 4} if cross else PAIRS
    trainer = (CrossEncoderTrainer if cross else SentenceTransformerTrainer)(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict(data),
        loss=BinaryCrossEntropyLoss(model) if cross else MultipleNegativesRankingLoss(model),
    )
    before = gradckpt.stats()["compressed"]
    torch.manual_seed(1)
    loss = trainer.train().training_loss
    return loss, gradckpt.stats()["compressed"] - before


#: Texts that one step of each trainer puts through the model, one forward each.
FORWARDS = {"embedder": 2, "encoder": 1}


@pytest.mark.parametrize("kind", FORWARDS)
class TestTraining:
    @pytest.fixture
    def model(self, kind, request):
        return request.getfixturevalue(kind)

    @pytest.fixture
    def twin(self, kind, saved):
        if kind == "encoder":
            return CrossEncoder(str(saved / "BertForSequenceClassification"), device="cpu")
        return SentenceTransformer(modules=[Transformer(str(saved / "BertModel")), Pooling(WIDTH)], device="cpu")

    @pytest.mark.parametrize("kwargs", [{"compress": "int8"}, {"use_reentrant": False}, {}, None], ids=str)
    def test_enabled(self, model, kind, kwargs, tmp_path):
        """Not undone by the trainer, which turns checkpointing on in every model inside."""
        handle = gradckpt.enable(model)
        assert len(handle.modules) == LAYERS
        _, count = train(model, tmp_path, kwargs)
        assert count == STEPS * FORWARDS[kind] * LAYERS
        assert len(handle.modules) == LAYERS

    def test_flag_alone(self, model, kind, tmp_path):
        _, count = train(model, tmp_path, {"compress": "int8"})
        assert count == STEPS * FORWARDS[kind] * LAYERS

    def test_trains_like_stock(self, model, twin, kind, tmp_path):
        theirs, none = train(twin, tmp_path, {"use_reentrant": False})
        assert none == 0
        gradckpt.enable(model)
        ours, _ = train(model, tmp_path, {"compress": "int8"})
        assert ours == pytest.approx(theirs, rel=1e-2)
        model_of, same_of = model.named_parameters(), dict(twin.named_parameters())
        assert any(not torch.equal(p, same_of[name]) for name, p in model_of), "the control: they are two runs"

    def test_none_is_stock_to_the_last_bit(self, model, twin, kind, tmp_path):
        theirs, _ = train(twin, tmp_path, {"use_reentrant": False})
        gradckpt.enable(model, compress=None)
        ours, count = train(model, tmp_path, {"use_reentrant": False})
        assert (ours, count) == (theirs, 0)
        same_of = dict(twin.named_parameters())
        assert all(torch.equal(p, same_of[name]) for name, p in model.named_parameters())


def test_enable_reaches_the_model_inside(embedder, encoder):
    assert len(gradckpt.enable(embedder).modules) == LAYERS
    gradckpt.disable(embedder[0].auto_model)
    assert len(gradckpt.enable(embedder[0].auto_model).modules) == LAYERS
    handle = gradckpt.enable(encoder)
    assert len(handle.modules) == LAYERS
    gradckpt.enable(encoder.model, "int4")
    assert config_of(handle).codec == "int4"


def test_encode_is_unchanged(embedder):
    before = embedder.encode(SENTENCES, convert_to_tensor=True)
    gradckpt.enable(embedder)
    assert torch.equal(embedder.encode(SENTENCES, convert_to_tensor=True), before)
