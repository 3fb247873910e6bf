"""Fits the stack of blocks under three strategies, each with torch's checkpointing, gradckpt's
None, int8. By torchrun.

    torchrun --standalone --nproc-per-node 2 lightning_ranks.py OUT

Each rank writes OUT.<rank>: losses, gradients of the first step and
final parameters of each fit, as it holds them.
"""

import gc
import sys

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning_modules import LAYERS, Block, LateStack, data
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import gradckpt
from gradckpt.integrations.lightning import GradckptCallback


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
    def __init__(self):
        self.gradients = []

    def on_after_backward(self, trainer, pl_module):
        if not self.gradients:
            self.gradients = [local(p.grad) for p in pl_module.parameters() if p.grad is not None]

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
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy(how),
        max_epochs=1,
        callbacks=[record] + ([callback] if callback else []),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(3)
    trainer.fit(module, data(module, batches=6))
    stats = gradckpt.stats()
    return {
        "losses": module.losses,
        "gradients": record.gradients,
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
