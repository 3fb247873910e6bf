"""Models and activations of the tests of compress_saved()."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradckpt

SMALL = {"codec": "int8", "min_numel": 16}


RAW = {"codec": "raw", "min_numel": 16}


EXACT = "backward needs it exactly"


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    gc.collect()  # payloads in the traceback of an expected error
    gradckpt.stats.reset()


def activation(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_() * 1


def payload_of(value):
    return value.value if isinstance(getattr(value, "value", None), gradckpt.codecs.Payload) else None


def int8_bytes(*shapes):
    return sum(gradckpt.codecs.encode(torch.zeros(shape), "int8").nbytes for shape in shapes)


class Block(nn.Module):
    """A residual block as in a ResNet: BatchNorm, in-place ReLU, pooling."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.conv1, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 2)
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.head(self.relu(x + y).mean((2, 3))).square().mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 48, 2, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0].square().mean()


def llama(tokens=64):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = torch.randint(0, 256, (2, tokens))
    model = transformers.LlamaForCausalLM(config)
    return model, lambda: model(ids, labels=ids).loss


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False)
    ids = torch.randint(0, 256, (2, 64))
    model = transformers.GPT2LMHeadModel(config)
    return model, lambda: model(ids, labels=ids).loss


def resnet():
    model, x = Block(), torch.randn(8, 3, 16, 16)
    return model, lambda: model(x)


def lstm():
    model, x = Recurrent(), torch.randn(8, 12, 32)
    return model, lambda: model(x)


def gradients(model, loss_of, context, autocast=False):
    """Loss and gradients of a step whose forward runs in the context."""
    model.zero_grad()
    torch.manual_seed(1)
    with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


class Sentinel:
    pass


def watch(node):
    """A weak reference that dies with the node, of which Python has none."""
    node.metadata["sentinel"] = sentinel = Sentinel()
    return weakref.ref(sentinel)
