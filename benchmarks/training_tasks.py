"""The tasks of bench_training.py: models of 0.1 to 0.5 M parameters, the order of their data, and
what they are validated on.

A seed decides the weights at the start and the order of the data; what is validated is the same for
each seed. ``llama-5m`` is for a card: 5 M parameters, 3,000 steps.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import torch
import train_llama
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

Batch = dict[str, Tensor]
#: Batches of a seed begin at a multiple of this, so that no two seeds share one.
STRIDE = 1_000_003


class MissingPackageError(Exception):
    """Names the package that ships the data or the model."""


class Task(NamedTuple):
    about: str
    build: Callable[[int, Path], nn.Module]  # of a seed; the folder keeps what is trained before
    batch: Callable[[int], Batch]  # of a number
    held_out: Callable[[], list[Batch]]
    block: str  # the class that is a region
    lr: float
    steps: int = 1000
    products: bool = True  # its blocks have matrix products


# ---- text


class Text(NamedTuple):
    train: Tensor
    held_out: Tensor


@functools.cache
def sources() -> Text:
    return Text(*train_llama.read_text())


@functools.cache
def help_texts() -> Text:
    """What Python's help() prints on its topics; every tenth is held out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise MissingPackageError(
            "lora: the texts of help() are missing; Debian's package libpython3-stdlib ships pydoc_data"
        ) from None
    parts = ["\n".join(text for i, text in enumerate(topics.values()) if (i % 10 == 0) == held) for held in (0, 1)]
    return Text(*(torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8) for part in parts))


def windows(text: Tensor, batch: int, seq: int, seed: int) -> Batch:
    ids = train_llama.take(text, argparse.Namespace(seq=seq, batch=batch), seed)
    return {"input_ids": ids, "labels": ids}


def next_byte(text: Callable[[], Text], number: int, batch: int = 8, seq: int = 48) -> Batch:
    return windows(text().train, batch, seq, number)


def held_out_text(text: Callable[[], Text], seq: int = 64) -> list[Batch]:
    return [windows(text().held_out, 128, seq, -1 - number) for number in range(2)]


def llama(seed: int, folder: Path, layers: int = 3, hidden: int = 64, seq: int = 64) -> nn.Module:
    return train_llama.build(argparse.Namespace(layers=layers, hidden=hidden, seq=seq, seed=seed))


def mixture(seed: int, folder: Path) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config).train()


#: Of peft.LoraConfig.
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def base(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a Llama after 600 steps of its task; trains it at the first call.
    A second process waits for the first."""
    file = folder / "base.pt"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "base.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            task = TASKS["llama"]
            model = task.build(10**6, folder)
            optimizer, schedule = optimizer_of(model, 600, task.lr)
            for step in range(600):
                train_step(model, task.batch(-1 - step), optimizer, schedule)
            part = file.with_suffix(".part")
            torch.save(model.state_dict(), part)
            part.replace(file)
    return torch.load(file, weights_only=True)


def adapters(seed: int, folder: Path) -> nn.Module:
    """Return the Llama of ``base`` with LoRA on all linear layers; the seed decides these."""
    try:
        import peft
    except ImportError:
        raise MissingPackageError("lora: LoRA is missing; peft ships it: pip install peft") from None
    model = llama(0, folder)
    model.load_state_dict(base(folder))
    torch.manual_seed(seed)
    return peft.get_peft_model(model, peft.LoraConfig(**LORA)).train()


# ---- images


class Images(NamedTuple):
    train: Batch
    held_out: Batch


@functools.cache
def digits() -> Images:
    """1,797 handwritten digits of 8 x 8 pixels; every fifth is held out."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingPackageError(
            "vit, resnet: handwritten digits are missing; scikit-learn ships them: pip install scikit-learn"
        ) from None
    found = load_digits()
    pixels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(found.target)
    held = torch.arange(len(labels)) % 5 == 0
    return Images(*({"pixel_values": pixels[part], "labels": labels[part]} for part in (~held, held)))


def noisy(images: Batch, seed: int, noise: float, shift: bool) -> Batch:
    """Shift each image by up to a pixel each way, and add noise to pixels between -1 and 1."""
    g = torch.Generator().manual_seed(seed)
    pixels, labels = images.values()
    if shift:
        padded = F.pad(pixels, (1, 1, 1, 1), value=-1.0)
        shifts = torch.randint(0, 3, (len(pixels), 2), generator=g).tolist()
        pixels = torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, shifts, strict=True)])
    return {"pixel_values": pixels + noise * torch.randn(pixels.shape, generator=g), "labels": labels}


def noisy_digits(number: int, batch: int = 32, noise: float = 0.2, shift: bool = True) -> Batch:
    chosen = torch.randint(0, len(digits().train["labels"]), (batch,), generator=torch.Generator().manual_seed(number))
    return noisy({name: x[chosen] for name, x in digits().train.items()}, number, noise, shift)


@functools.cache
def held_out_digits(noise: float = 0.2, shift: bool = True) -> list[Batch]:
    """Each of the images that were held out, in four ways."""
    return [noisy(digits().held_out, -1 - number, noise, shift) for number in range(4)]


def vit(seed: int, folder: Path) -> nn.Module:
    torch.manual_seed(seed)
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        hidden_size=64,
        num_attention_heads=4,
        intermediate_size=256,
        num_hidden_layers=3,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.ViTForImageClassification(config).train()
    # With 0.02, patches and positions are not told apart for hundreds of steps.
    nn.init.normal_(model.vit.embeddings.position_embeddings, std=0.5)
    nn.init.normal_(model.vit.embeddings.patch_embeddings.projection.weight, std=0.25)
    return model


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """The form for small images: a stem of 3 x 3, and three stages of two blocks."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
        ins = (widths[0], *widths)
        self.blocks = nn.ModuleList(
            BasicBlock(ins[i] if first else width, width, 2 if first and i else 1)
            for i, width in enumerate(widths)
            for first in (True, False)
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Output:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return Output(F.cross_entropy(logits, labels), logits)


def resnet(seed: int, folder: Path) -> nn.Module:
    torch.manual_seed(seed)
    return ResNet().train()


# ---- one step


def optimizer_of(model: nn.Module, steps: int, lr: float) -> tuple[torch.optim.Optimizer, Any]:
    """Return AdamW and its schedule: a tenth of the steps to warm up, then half a cosine to 0."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    warm = max(1, steps // 10)
    rate = lambda step: min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))  # noqa: E731
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def train_step(
    model: nn.Module,
    batch: Batch,
    optimizer: Any,
    schedule: Any,
    autocast: bool = False,
    after_backward: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return the loss. Gradients are there until the next step."""
    optimizer.zero_grad()
    device = next(iter(batch.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model(**batch).loss
    loss.backward()
    after_backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    return loss.detach()


@torch.no_grad()
def validate(model: nn.Module, batches: list[Batch]) -> tuple[float, float]:
    """Return the mean loss in float32 and the share of right answers."""
    model.eval()
    losses, right, asked = [], 0, 0
    for batch in batches:
        found = model(**batch)
        logits, labels = found.logits, batch["labels"]
        if logits.dim() == 3:  # the next byte
            logits, labels = logits[:, :-1], labels[:, 1:]
        losses.append(F.cross_entropy(logits.flatten(0, -2), labels.flatten()).double())
        right += int((logits.argmax(-1) == labels).sum())
        asked += labels.numel()
    model.train()
    return float(torch.stack(losses).mean()), right / asked


def of_text(
    about: str, build: Any, text: Callable[[], Text], block: str, lr: float, steps: int = 1000, **sizes: int
) -> Task:
    """Return a task of the next byte; the sizes are those of next_byte."""
    seq = {"seq": sizes["seq"]} if "seq" in sizes else {}
    batch = functools.partial(next_byte, text, **sizes)
    return Task(about, build, batch, functools.partial(held_out_text, text, **seq), block, lr, steps)


TASKS = {
    "llama": of_text(
        "Llama, 3 x 64, bytes of Python's sources",
        llama,
        sources,
        "LlamaDecoderLayer",
        5e-4,
    ),
    "vit": Task(
        "ViT, 3 x 64, handwritten digits",
        vit,
        functools.partial(noisy_digits, noise=0.5, shift=False),
        functools.partial(held_out_digits, noise=0.5, shift=False),
        "ViTLayer",
        2e-4,
    ),
    "resnet": Task(
        "ResNet of 6 blocks, ReLU and BatchNorm, handwritten digits",
        resnet,
        functools.partial(noisy_digits, batch=64),
        held_out_digits,
        "BasicBlock",
        5e-5,
        products=False,
    ),
    "lora": of_text(
        "LoRA of rank 8 of that Llama, texts of Python's help()",
        adapters,
        help_texts,
        "LlamaDecoderLayer",
        1e-3,
    ),
    "moe": of_text(
        "Mixtral, 2 x 64, 2 of 4 experts, bytes of Python's sources",
        mixture,
        sources,
        "MixtralDecoderLayer",
        2.5e-4,
    ),
    "llama-5m": of_text(
        "Llama, 6 x 256, 3,000 steps, bytes of Python's sources",
        functools.partial(llama, layers=6, hidden=256, seq=256),
        sources,
        "LlamaDecoderLayer",
        1e-3,
        steps=3000,
        batch=32,
        seq=256,
    ),
}
#: Those that a core trains in at most a minute.
SMALL = tuple(name for name in TASKS if name != "llama-5m")
