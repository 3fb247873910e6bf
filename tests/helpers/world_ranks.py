"""What each rank does in the tests of ranks that disagree, and of DTensors."""

import os

import torch
import torch.distributed as dist
import worlds
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate
from torch.nn.parallel import DistributedDataParallel
from world_torch import Block, Model, compare, wrap
from worlds import RANK

import gradckpt
from gradckpt._models import ranks


def model_of(name, layers=2):
    """Of a class of its own, which the ranks know it by."""
    kind = type(f"{name}Block", (Block,), {})
    return type(name, (nn.Sequential,), {})(*(kind() for _ in range(layers)))


def step(model):
    x = torch.randn(2, 8, 64).requires_grad_()
    model(x * 1).sum().backward()


def error_of(action, *args):
    """Of a rank that has all the time it needs to hear the other."""
    dist.barrier()
    if ranks._tables:
        ranks._tables[0].patience = 30.0
    try:
        action(*args)
    except ValueError as error:
        return str(error)
    return None


def mine(*codecs):
    return codecs[RANK]


def by_wrapper(codec, name):
    model = model_of(name)
    for i, block in enumerate(model):
        model[i] = gradckpt.compat.checkpoint_wrapper(block, codec)
    step(model)


def by_many(codec, name):
    model = model_of(name)
    gradckpt.compat.apply_activation_checkpointing(model, codec, check_fn=lambda m: isinstance(m, Block))
    step(model)


def by_apply(codec, name):
    model = model_of(name)
    gradckpt.enable(model, codec, modules=Block)
    step(model)


def by_enable(codec, name):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, use_cache=False
    )
    model = type(name, (LlamaForCausalLM,), {})(config).train()
    gradckpt.enable(model, codec)
    ids = torch.arange(32).view(1, 32)
    model(input_ids=ids, labels=ids).loss.backward()


def by_ways(*ways):
    found = {}
    for way in ways:
        found[way.__name__] = error_of(way, mine("int8", "int4"), f"Codec{way.__name__}")
        found[f"{way.__name__} None"] = error_of(way, mine("int8", None), f"Nothing{way.__name__}")
        found[f"{way.__name__} agreed"] = error_of(way, "int8", f"Agreed{way.__name__}")
    return found


def quarrels():
    found = by_ways(by_wrapper, by_many, by_apply)
    found["tensors"] = tensors()
    os.environ["GRADCKPT_CHECK_RANKS"] = "0"
    found["switched off"] = error_of(by_apply, mine("int8", "int4"), "Off")
    del os.environ["GRADCKPT_CHECK_RANKS"]
    found["settled"] = settled()
    found["a field"] = error_of(by_wrapper, mine("int8", {"codec": "int8", "fake_quantize": True}), "Field")
    found["one layer"] = error_of(one_layer)
    found["per layer"] = error_of(per_layer)
    found["two models"] = error_of(two_models)
    found["the second model"] = second_models()
    found["the first is late"] = error_of(later)
    found["alone"] = alone()
    found["made again"] = again()
    return found


def settled():
    """Once every rank has spoken, nothing asks again."""
    model = model_of("Settled")
    gradckpt.enable(model, "int8", modules=Block)
    model[1] = gradckpt.compat.checkpoint_wrapper(Block(), "int8")
    dist.barrier()
    ranks._tables[0].patience = 30.0
    step(model)
    saved, ranks._table_of = ranks._table_of, None
    try:
        step(model)
    finally:
        ranks._table_of = saved
    return "settled"


def one_layer():
    model = model_of("One")
    gradckpt.enable(model, None, modules={"0": "int8", "1": mine("int8", "int4")})
    step(model)


def per_layer():
    model = model_of("PerLayer")
    for i, block in enumerate(model):
        model[i] = gradckpt.compat.checkpoint_wrapper(block, ["int8", None][i])
    step(model)


def two_models():
    """Draft and target, of the same class; the ranks train them in the same order."""
    draft, target = model_of("Two"), model_of("Two")
    gradckpt.enable(draft, "int4", modules=Block)
    gradckpt.enable(target, "int8", modules=Block)
    step(draft)
    step(target)


def second_models():
    """Models of a class that trained before, or whose ranks have disagreed; by each way."""
    found = [error_of(by_apply, mine(*codecs), "Second") for codecs in (("int8",) * 2, ("int8", "int4"), ("int4",) * 2)]
    names = ["int8", mine("int8", "int6"), "int8"]
    return [*found, *(error_of(by_enable, codec, "SecondLlama") for codec in names)]


def later():
    """The one that came first hears it in a later call, without a wait."""
    model = model_of("Late")
    gradckpt.enable(model, mine("int8", "int4"), modules=Block)
    dist.barrier()
    if RANK == 0:
        ranks._tables[0].patience = 0.0
        step(model)  # no rank disagrees
    dist.barrier()
    try:
        if RANK == 1:
            step(model)
    finally:
        dist.barrier()
    if RANK == 0:
        step(model)


def alone():
    """A rank that trains what the other does not is held up once:
    the others' patience with it is spent then."""
    dist.barrier()
    table = ranks._tables[0]
    table.patience = ranks.PATIENCE
    if RANK == 0:
        by_apply("int8", "Alone")
        by_apply("int8", "AloneAgain")
        return [table.patience, *(table.looks[name] for name in ("Alone", "AloneAgain"))]
    return None


def again():
    """In the next process group everything is said anew."""
    dist.barrier()
    dist.destroy_process_group()
    worlds.join(worlds.FOLDER, "second")
    model = model_of("Codecby_apply")
    gradckpt.enable(model, "fp8", modules=Block)
    agreed = error_of(step, model)
    dist.barrier()
    dist.destroy_process_group()
    step(model)  # without a group
    worlds.join(worlds.FOLDER, "third")
    gradckpt.disable(model)
    gradckpt.enable(model, mine("fp8", "int8"), modules=Block)
    return [agreed, error_of(step, model)]


def training():
    """As a user's script: the first training forward raises, in each rank."""
    model = DistributedDataParallel(wrap(Model(), mine("int8", "None")))
    ids = torch.arange(60).view(1, 60)
    for _ in range(3):
        model(ids).backward()
    return "trained"


# ---- DTensors ----


class Sequenced(nn.Module):
    """Between its blocks the hidden states are DTensors, sharded along the sequence."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x, scale=None):
        y = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y if scale is None else y * scale


def sequenced(how, mesh):
    torch.manual_seed(5)
    model = nn.Sequential(*(Sequenced() for _ in range(3)))
    plan = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    if how.startswith("apply"):
        gradckpt.enable(model, how.split()[1], modules=Sequenced)
    else:
        for i, block in enumerate(model):
            model[i] = torch_wrapper(block) if how == "torch" else gradckpt.compat.checkpoint_wrapper(block, MODES[how])
    return model


def torch_wrapper(block):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(block)


MODES = {
    "None": None,
    "int8": "int8",
    "lossless": "lossless",
    "fake_quantize": {"codec": "int8", "fake_quantize": True},
}


def tensors():
    mesh = init_device_mesh("cpu", (2,))
    found, stock = {}, None
    for how in ("torch", "None", "lossless", "int8", "fake_quantize", "apply int8"):
        model = sequenced(how, mesh)
        generator = torch.Generator().manual_seed(3)
        whole = torch.randn(2, 63, 64, generator=generator)  # shards of 32 and 31
        gradckpt.stats.reset()
        x = distribute_tensor(whole, mesh, [Shard(1)]).requires_grad_()
        y = model(x * 1)
        loss = y.square().mean()
        loss.backward()
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters()} | {"x": x.grad.full_tensor()}
        grads = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in grads.items()}
        stats = gradckpt.stats()
        if how == "torch":
            stock = grads, loss.full_tensor().item()
        found[how] = {
            **compare(grads, stock[0]),
            "same loss": loss.full_tensor().item() == stock[1],
            **{key: stats[key] for key in ("regions", "compressed", "bytes_in", "bytes_out")},
            "uncompressed": stats["uncompressed"],
            "placements": str(y.placements),
        }
    found["partial"] = partial(mesh)
    found["keyword"] = keyword(mesh)
    found["leaves"] = [leaf(mesh, fake_quantize) for fake_quantize in (False, True)]
    found["late"] = [late(mesh, layout, local) for layout in (Replicate(), Shard(0)) for local in (True, False)]
    return found


def partial(mesh):
    """A sum that is spread over the ranks stays as it is."""
    gradckpt.stats.reset()
    x = DTensor.from_local(torch.randn(4, 512), mesh, [Replicate()]).requires_grad_()
    sums = DTensor.from_local(x.to_local(), mesh, [Partial()])
    gradckpt.compat.checkpoint_wrapper(nn.Identity(), "int8")(sums).to_local().sum().backward()
    return gradckpt.stats()


def keyword(mesh):
    gradckpt.stats.reset()
    block = sequenced("int8", mesh)[0]
    x = distribute_tensor(torch.randn(2, 64, 64), mesh, [Shard(1)]).requires_grad_()
    block(x * 1, scale=x * 2).sum().backward()
    return gradckpt.stats()


def leaf(mesh, fake_quantize):
    gradckpt.stats.reset()
    x = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]).requires_grad_()
    compress = {"codec": "int8", "include": "floating", "fake_quantize": fake_quantize}
    gradckpt.compat.checkpoint_wrapper(nn.Tanh(), compress)(x).sum().backward()
    return gradckpt.stats()["compressed"]


def late(mesh, layout, local):
    """A region right after a parallel layer, the collective of which is under way."""

    def gradient(*codec):
        torch.manual_seed(0)
        last = gradckpt.compat.checkpoint_wrapper(nn.GELU(), *codec) if codec else nn.GELU()
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), last)
        rowwise = RowwiseParallel(output_layouts=layout, use_local_output=local)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": rowwise})
        y = model(torch.randn(64, 64))
        (y if local else y.to_local()).square().sum().backward()
        return model[0].weight.grad.to_local()

    expected = gradient()
    gradckpt.stats.reset()
    return torch.equal(gradient("lossless"), expected), gradckpt.stats()["compressed"], gradckpt.stats()["uncompressed"]
