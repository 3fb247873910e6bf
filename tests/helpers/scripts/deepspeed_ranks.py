"""Trains a tiny Llama and a stack of blocks under ZeRO 1, 2, 3, each with several ways of
checkpointing. By torchrun.

    torchrun --standalone --nproc-per-node 2 deepspeed_ranks.py OUT

Rank 0 writes OUT: losses, how the parameters moved, whole, and what was compressed, by stage,
model and way.
"""

import sys

import deepspeed
import torch
from deepspeed import checkpointing as theirs
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import gradckpt
from gradckpt.integrations import deepspeed as ours

LAYERS, WIDTH, ROWS, STEPS = 3, 64, 32, 3


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Stack(torch.nn.Module):
    """Calls the checkpoint function of ``checkpointing`` for each block,
    as code for DeepSpeed does."""

    def __init__(self, checkpointing):
        super().__init__()
        self.checkpointing = checkpointing
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.checkpointing.checkpoint(block, x)
        return x.square().mean()


class Torchs:
    @staticmethod
    def checkpoint(function, x):
        return torch_checkpoint(function, x, use_reentrant=False)


def llama(way, frozen=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "embed" in name)
    if way == "stock":
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        gradckpt.enable(model, compress=None if way == "None" else way)
    return model


def stack(way):
    torch.manual_seed(0)
    if way in ("stock", "theirs"):
        return Stack(Torchs if way == "stock" else theirs).train()
    ours.configure(None, compress=None if way == "None" else "int8", checkpoint_in_cpu=way == "in host memory")
    return Stack(ours).train()


def train(model, stage, batch):
    gradckpt.stats.reset()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=0.1), config=config)
    torch.manual_seed(5 + torch.distributed.get_rank())
    losses = []
    for _ in range(STEPS):
        loss = batch(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    moved = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], enabled=stage == 3):
            moved[name] = parameter.detach() - before[name]
    stats = gradckpt.stats()
    return {
        "losses": losses,
        "moved": moved,
        "regions": stats["regions"],
        "compressed": stats["compressed"],
        "same keys": list(before) == list(model.state_dict()),
    }


def text(engine):
    ids = torch.randint(0, 64, (1, ROWS))
    return engine(input_ids=ids, labels=ids).loss


def rows(engine):
    return engine(torch.randn(1, ROWS, WIDTH))


def main(out):
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled now, for inference
    deepspeed.init_distributed(dist_backend="gloo")
    found = {}
    for stage in (1, 2, 3):
        for way in ("stock", "None", "int8"):
            found[stage, "llama", way] = train(llama(way), stage, text)
            found[stage, "frozen", way] = train(llama(way, frozen=True), stage, text)
        for way in ("stock", "theirs", "None", "int8", "in host memory"):
            found[stage, "stack", way] = train(stack(way), stage, rows)
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)
    torch.distributed.barrier()  # Gloo's threads let go of their last tensors while Python is there to free them
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
