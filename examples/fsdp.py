"""Trains a small byte-level transformer on several ranks, by DDP, FSDP1 or FSDP2, with our
checkpoints and torch's.

    torchrun --standalone --nproc-per-node 2 examples/fsdp.py --engine fsdp2 --compress int8

Without torchrun it is one rank. One line turns compression on,
`gradckpt.compat.apply_activation_checkpointing(...)`; the engines do not know. On CUDA the ranks
talk through nccl, elsewhere through gloo. Rank 0 prints what was wrapped, the bytes that
checkpoints take, and both losses.
"""

import argparse
import gc
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import gradckpt

MIB = 2**20


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, max(1, width // 32)) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """The mean loss over all bytes but the first of each row, which nothing foretells."""
        x = self.bytes(text) + self.places.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def build(args: argparse.Namespace, ours: bool, device: torch.device) -> tuple[nn.Module, int]:
    """The model in its engine, and the number of blocks in a CheckpointWrapper."""
    torch.manual_seed(args.seed)
    model: nn.Module = Model(args.layers, args.width, args.length).to(device)

    def wrap(model: nn.Module) -> int:
        if ours:
            return gradckpt.compat.apply_activation_checkpointing(model, args.compress, check_fn=is_block)
        torchs.apply_activation_checkpointing(model, check_fn=is_block)
        return args.layers

    if args.engine == "fsdp1":  # wraps first: FSDP(CheckpointWrapper(block))
        policy = ModuleWrapPolicy({Block})
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
        return model, wrap(model)
    wrapped = wrap(model)
    if args.engine == "ddp":
        return DistributedDataParallel(model), wrapped
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh), wrapped


def train(args: argparse.Namespace, ours: bool, device: torch.device) -> tuple[list[float], int]:
    """The ranks' mean loss of each step, and the number of wrapped blocks."""
    text = torch.frombuffer(bytearray(read_text()), dtype=torch.uint8)
    model, wrapped = build(args, ours, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(args.seed + dist.get_rank())  # each rank reads elsewhere
    losses = []
    for _ in range(args.steps):
        starts = torch.randint(0, len(text) - args.length, (args.batch,), generator=generator).tolist()
        rows = torch.stack([text[at : at + args.length] for at in starts]).long().to(device)
        loss = model(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses, wrapped


def read_text() -> bytes:
    """Sources of Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    return b"\n".join(path.read_bytes() for path in sorted(root.glob("*.py"))[:40])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["ddp", "fsdp1", "fsdp2"], default="fsdp2")
    parser.add_argument("--compress", default="int8", help="a codec, or none (default: int8)")
    for name, value in {"layers": 4, "width": 128, "length": 128, "batch": 4, "steps": 10, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--lr", type=float, default=1e-3, help="default: 0.001")
    args = parser.parse_args()
    if min(args.layers, args.batch, args.steps) < 1 or args.width < 32 or args.width % 32 or args.length < 2:
        parser.error("--layers, --batch and --steps are 1 or more, --width is a multiple of 32, --length 2 or more")
    if args.compress == "none":
        args.compress = None
    elif args.compress not in (*gradckpt.codecs.names(), "fp8"):
        parser.error(f"--compress is none or one of {', '.join(gradckpt.codecs.names())}")
    return args


def main() -> None:
    args = arguments()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("nccl" if cuda else "gloo")
    stock, _ = train(args, False, device)
    gradckpt.stats.reset()
    losses, wrapped = train(args, True, device)
    s = gradckpt.stats()
    if dist.get_rank() == 0:
        print(f"{args.engine} on {dist.get_world_size()} ranks, {args.steps} steps: {wrapped} blocks wrapped")
        print(f"compressed on this rank: {s['compressed']} of {s['eligible']} inputs")
        written = f"{s['bytes_in'] / MIB:.3f} -> {s['bytes_out'] / MIB:.3f} MiB"
        print(f"checkpoints: {written}, at most {s['peak_live_bytes'] / MIB:.3f} MiB alive")
        for title, values in (("torch", stock), (f"gradckpt {args.compress}", losses)):
            print(f"loss, {title}: {values[0]:.6f} -> {values[-1]:.6f}")
        same = [a == b for a, b in zip(losses, stock, strict=True)]
        print(f"losses equal to the last bit: {sum(same)} of {len(same)}, the first {'too' if same[0] else 'not'}")
    gc.collect()  # FSDP's models hold the group
    dist.barrier()  # Gloo's threads let go of their last tensors while Python is there to free them
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
