"""LightningModules for the tests: a stack of blocks, and a tiny Llama."""

import os

import lightning.pytorch as pl
import torch
from torch.nn import functional

os.environ["HF_HUB_OFFLINE"] = "1"

LAYERS, WIDTH, ROWS = 3, 64, 32


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


def stack():
    """First layer and blocks, always the same, with no trace in the random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Linear(WIDTH, WIDTH), torch.nn.Sequential(*(Block() for _ in range(LAYERS)))


class Base(pl.LightningModule):
    """Adam; the losses of all training steps in ``losses``."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Stack(Base):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = stack()

    def loss(self, batch):
        return self.blocks(self.first(batch)).square().mean()


class LateStack(Base):
    """Built where Lightning wants models that strategies shard."""

    def configure_model(self):
        if not hasattr(self, "blocks"):
            self.first, self.blocks = stack()

    loss = Stack.loss


class Llama(Base):
    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=2
        )
        self.model = LlamaForCausalLM(config).train()

    def loss(self, batch):
        return self.model(input_ids=batch, labels=batch).loss


def data(module, batches=4, batch_size=1):
    """``batch_size`` equal shares for each rank, the same everywhere."""
    torch.manual_seed(1)
    if isinstance(module, Llama):
        items = torch.randint(0, 64, (batches * batch_size, ROWS))
    else:
        items = torch.randn(batches * batch_size, ROWS, WIDTH)
    return torch.utils.data.DataLoader(items, batch_size=batch_size)
