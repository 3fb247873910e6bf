"""What each rank does in the tests of torch's engines: the same steps with torch's
checkpoint_wrapper and ours."""

import contextlib
import functools
import hashlib
import math
import time

import torch
import torch.distributed as dist
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as torchs
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from worlds import FOLDER, RANK

import gradckpt
from gradckpt._models.regions import region_of
from gradckpt.integrations.torch_distributed import CheckpointWrapper

UNUSED = "find_unused_parameters"
WIDTH, HEADS, LAYERS, LENGTH, ROWS, WORDS = 64, 4, 4, 64, 2, 61
VALUES = ROWS * LENGTH * WIDTH  # of the input of a block


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.after(x)))))


class Model(nn.Module):
    def __init__(self, unused=None):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)
        if unused:
            self.unused = nn.Linear(4, 4)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


#: What wraps the blocks: torch's function, ours, and enable(model, modules=...). "disk": offloaded.
def wrap(model, how, values=VALUES, payloads=2):
    offloaded, how = how.startswith("disk "), how.removeprefix("disk ")
    place = disk(how, values, payloads) if offloaded else None
    way, _, codec = how.rpartition(" ")
    if how == "torch":
        torchs.apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    elif way == "saves":
        gradckpt.enable(model, COMPRESS[codec], recompute=False, offload=place)
    elif way == "apply":
        gradckpt.enable(model, COMPRESS[codec], modules=Block, offload=place)
    elif way == "policy":
        policy = gradckpt.policies.save_matmuls
        policy = policy.offloaded(place) if offloaded else policy
        gradckpt.compat.apply_activation_checkpointing(model, COMPRESS[codec], check_fn=is_block, policy=policy)
    elif how != "plain":
        assert gradckpt.compat.apply_activation_checkpointing(model, COMPRESS[how], check_fn=is_block) == LAYERS
    return model


def is_block(module):
    return isinstance(module, Block)


COMPRESS = {
    "None": None,
    "lossless": "lossless",
    "int8": "int8",
    "stochastic": {"codec": "int8", "stochastic": True},
}


def disk(how, values, payloads):
    """A place on the disk with host memory for so many of the largest payloads; all move."""
    way, codec = how.split()
    largest = values * (1 if way == "apply" else 4) * (8.25 / 8 if codec == "int8" else 4)
    memory = max(payloads * math.ceil(largest / 4096), 1) * 4096
    return gradckpt.Offload("disk", directory=FOLDER, min_bytes="1B", host_budget=memory)


def figures():
    """Of stats(), once the threads of the disk are done with what was dropped."""
    until = time.monotonic() + 10
    while True:
        found = gradckpt.stats()["offload"]
        if not (found["memory_used"] or found["file_used"]) or time.monotonic() > until:
            return found
        time.sleep(0.01)


def batch(step, same):
    generator = torch.Generator().manual_seed(100 * step + (0 if same else dist.get_rank()))
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator)


class Hashes:
    """Of all payloads: what outer saved-tensor hooks see of a region are the payload's bytes."""

    def __init__(self):
        self.digest, self.n = hashlib.sha256(), 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda x: x)

    def pack(self, x):
        if x.dtype == torch.uint8:
            self.digest.update(x.numpy().tobytes())
            self.n += 1
        return x


def gradients(model):
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {clean(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    full = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {clean(n): (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in full.items()}


def clean(name):
    for part in ("_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module."):
        name = name.replace(part, "")
    return name


def train(make, how, *, same=False, micro=2, steps=1):
    """Steps of several micro-batches, of which only the last communicates: losses, gradients of the
    last step, counters, hashes."""
    torch.manual_seed(7)
    model = make(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1000)
    gradckpt.stats.reset()
    gradckpt.config.set_rounding_state((3, 0))
    hashes, losses = Hashes(), []
    for step in range(steps * micro):
        if step and step % micro == 0:
            optimizer.step()
            optimizer.zero_grad()
        last = (step + 1) % micro == 0 or getattr(model, "static_graph", False)  # refuses no_sync() in its first step
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
            quiet = contextlib.nullcontext()
        else:
            quiet = contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()
        with quiet:
            with hashes.hooks if same else contextlib.nullcontext():
                loss = model(batch(step, same))
            loss.backward()
        losses.append(loss.item())
    return {"model": model, "losses": losses, "gradients": gradients(model), "stats": gradckpt.stats(), "hash": hashes}


def compare(mine, stock):
    assert mine.keys() == stock.keys()
    dot = norm = other = difference = 0.0
    for name, g in stock.items():
        a, b = mine[name].double(), g.double()
        dot, norm, other = dot + (a * b).sum(), norm + b.square().sum(), other + a.square().sum()
        difference += (a - b).square().sum()
    return {
        "equal": all(torch.equal(mine[name], g) for name, g in stock.items()),
        "error": float((difference / norm).sqrt()),
        "cosine": float(dot / (norm * other).sqrt()),
    }


COUNTED = ("regions", "recomputes", "eligible", "compressed", "bytes_in", "bytes_out", "compiled_tensors")


def beside(mine, stock):
    """What two runs have in common, and what the first counted."""
    return {
        **compare(mine["gradients"], stock["gradients"]),
        "same losses": mine["losses"] == stock["losses"],
        **{key: mine["stats"][key] for key in COUNTED},
    }


def assert_as_torchs(r, how, count):
    """Equal without a codec; else with the error of int8, and so many tensors compressed."""
    assert r["same losses"]
    if how.endswith("None"):
        assert r["equal"], "a gradient differs from that of torch's checkpointing"
        assert r["compressed"] == 0
    else:
        assert r["compressed"] == r["eligible"] == count
        assert 0 < r["error"] < 0.01
        assert r["cosine"] > 0.9998


def examine(make, ours=("None", "int8")):
    """What the tests assert of one engine."""
    stock = train(make, "torch")
    found = {}
    for how in ours:
        mine = train(make, how)
        found[how] = {
            **beside(mine, stock),
            "wrapped": count(mine["model"]),
            "keys": full_state(mine["model"]).keys()
            == Model(getattr(make, "keywords", {}).get(UNUSED)).state_dict().keys(),
        }
    return found


def count(model):
    return sum(isinstance(m, CheckpointWrapper) or region_of(m) is not None for m in model.modules())


def full_state(model):
    if isinstance(model, DistributedDataParallel):
        return get_model_state_dict(model)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


# ---- engines ----


def ddp(how, room=None, **options):
    return DistributedDataParallel(wrap(Model(options.get(UNUSED)), how, **room or {}), **options)


def fsdp1(how, inside=True, **options):
    """``inside``: FSDP(CheckpointWrapper(block)),
    as torch's documentation and accelerate have it; or the reverse."""
    model, device = Model(), torch.device("cpu")
    policy = ModuleWrapPolicy({Block})
    if not inside:
        wrap(model, how)
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True, **options)
    return wrap(model, how) if inside else model


def fsdp2(how, inside=True, mesh=None, room=None, **options):
    """``inside``: fully_shard of the wrapped block; or of the block in the wrapper."""
    model = Model()
    blocks = list(model.layers)
    wrap(model, how, **room or {})
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.layers if inside else blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def torch_engines():
    partial = functools.partial
    bf16 = torch.bfloat16
    both = ("None", "int8", "saves lossless", "saves int8")
    found = {
        "ddp": examine(ddp, (*both, "apply None", "apply int8")),
        "ddp unused": examine(partial(ddp, find_unused_parameters=True)),
        "ddp static": examine(partial(ddp, static_graph=True)),
        "fsdp1": examine(fsdp1, both),
        "fsdp1 outside": examine(partial(fsdp1, inside=False)),
        "fsdp1 bf16": examine(partial(fsdp1, mixed_precision=MixedPrecision(bf16, bf16, bf16))),
        "fsdp2": examine(fsdp2, (*both, "apply None", "apply int8")),
        "fsdp2 outside": examine(partial(fsdp2, inside=False)),
        "fsdp2 kept": examine(partial(fsdp2, reshard_after_forward=False)),
        "fsdp2 bf16": examine(partial(fsdp2, mp_policy=MixedPrecisionPolicy(bf16, torch.float32)), both),
        "hsdp": examine(partial(fsdp2, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))),
    }
    found["hashes"] = {
        f"{name} {how}": [run["hash"].n, run["hash"].digest.hexdigest()]
        for name, make in (("ddp", ddp), ("fsdp1", fsdp1), ("fsdp2", fsdp2))
        for how in ("int8", "stochastic")
        for run in [train(make, how, same=True)]
    }
    return found


# ---- offload ----

ALL = tuple(f"{way} {codec}" for way in ("apply", "saves") for codec in ("None", "lossless", "int8"))
OFFLOADED = {
    "ddp": (ddp, ALL),
    "fsdp1": (fsdp1, (*ALL[:3], "saves int8")),
    "fsdp2": (fsdp2, (*ALL, "policy None")),
    "fsdp2 kept": (functools.partial(fsdp2, reshard_after_forward=False), ("apply int8", "saves None")),
}
#: Also where no payload of a block's input fits into the memory of rank 0.
WITHOUT_ROOM = {"ddp": ("apply None", "apply int8"), "fsdp2": ("apply None", "saves int8")}


def offloaded_engines():
    """Two steps of two micro-batches, without and with offload."""
    found = {}
    for name, (make, hows) in OFFLOADED.items():
        for how in hows:
            plain = train(make, "plain" if how == "saves None" else how, steps=2)
            found[f"{name} {how}"] = offloaded(make, how, plain)
            if how in WITHOUT_ROOM.get(name, ()):
                without_room = functools.partial(make, room={"payloads": 2 * RANK})
                found[f"{name} {how} without room"] = offloaded(without_room, how, plain)
    return found


def offloaded(make, how, plain):
    mine = train(make, f"disk {how}", steps=2)
    return {
        **beside(mine, plain),
        "figures": figures(),
        "live_bytes": gradckpt.stats()["live_bytes"],
        "budget": disk(how, VALUES, 2).host_budget,
    }
