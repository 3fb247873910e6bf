"""LightningModules for the tests: a stack of blocks, and a tiny Llama."""

import gc
import os
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn import functional

import gradckpt
from gradckpt.integrations.lightning import GradckptCallback

os.environ["HF_HUB_OFFLINE"] = "1"

LAYERS, WIDTH, ROWS = 3, 64, 32
#: What all Trainers are given.
QUIET = {
    **{"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False},
    **{"enable_progress_bar": False, "enable_model_summary": False},
}


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


# ---- Fits the stack of blocks under three strategies, each with torch's checkpointing,
# gradckpt's None, int8. By torchrun.
#
# torchrun --standalone --nproc-per-node 2 lightning_modules.py OUT
#
# Each rank writes OUT.<rank>: losses, gradients of the first step and final parameters of each
# fit, as it holds them.


class FsdpOnCpu(FSDPStrategy):
    """The Trainer refuses FSDPStrategy itself without a GPU."""


class Sharded(LateStack):
    def __init__(self, how, wrap):
        super().__init__()
        self.how, self.wrap = how, wrap

    def configure_model(self):
        super().configure_model()
        for i in range(LAYERS):
            self.blocks[i] = self.shard(self.wrap(self.blocks[i]))
        self.blocks = self.shard(self.blocks)

    def shard(self, module):
        if self.how == "fsdp":
            return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
        return fully_shard(module, mesh=self.device_mesh["data_parallel"]) if self.how == "fsdp2" else module


class Record(pl.Callback):
    """Gradients of the first step and the parameters at the end, as this rank holds them."""

    def __init__(self):
        self.gradients = {}

    def on_after_backward(self, trainer, pl_module):
        if not self.gradients:
            named = pl_module.named_parameters()
            self.gradients = {name: local(p.grad) for name, p in named if p.grad is not None}

    def on_train_end(self, trainer, pl_module):
        self.parameters = [local(p) for p in pl_module.parameters()]


def local(tensor):
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


def strategy(how):
    if how == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return FsdpOnCpu(process_group_backend="gloo") if how == "fsdp" else DDPStrategy(process_group_backend="gloo")


def fit(how, wrap=lambda block: block, callback=None):
    gradckpt.stats.reset()
    module, record = Sharded(how, wrap), Record()
    callbacks = [record] + ([callback] if callback else [])
    trainer = pl.Trainer(**QUIET, devices=2, strategy=strategy(how), callbacks=callbacks)
    torch.manual_seed(3)
    trainer.fit(module, data(module, batches=6))
    stats = gradckpt.stats()
    return {
        "losses": module.losses,
        "gradients": [*record.gradients.values()],
        "parameters": record.parameters,
        "compressed": stats["compressed"],
        "regions": stats["regions"],
    }


def fits(how):
    return {
        "stock": fit(how, checkpoint_wrapper),
        "None": fit(how, callback=GradckptCallback(None, {Block})),
        "int8": fit(how, callback=GradckptCallback("int8", {Block})),
        "wrapped": fit(how, lambda block: gradckpt.compat.checkpoint_wrapper(block, compress="int8")),
    }


def main(out):
    found = {how: fits(how) for how in ("ddp", "fsdp", "fsdp2")}
    torch.save(found, f"{out}.{torch.distributed.get_rank()}")
    gc.collect()  # no DistributedDataParallel may outlive the group: torch waits for gloo's threads with the GIL held
    torch.distributed.barrier()  # Gloo's threads let go of their last tensors while Python is there to free them
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
