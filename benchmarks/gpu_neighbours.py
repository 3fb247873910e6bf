"""Libraries beside gradckpt, each where it is installed: flash-attn, Liger, bitsandbytes, FSDP2 on
one rank, two ranks.

Gradients of exact settings are equal to those without checkpointing, lossy ones are near.
gpu_streams.py has GradScaler.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import gpu_llama
import torch
import torch.distributed as dist
from gpu_device import Device
from gpu_job import Job, Skip, cell, difference, gradients

import gradckpt

CODECS = (None, "int8", "lossless")
#: Of int8, relative.
MOST = 0.2
#: Of exact settings in float32, whose kernels may not be deterministic.
NEAR = 1e-5
#: Seconds that ranks wait for each other.
PATIENCE = 60


def needs(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Skip(f"{module} is not installed ({error})") from None


def needs_card(job: Job, what: str) -> None:
    if not job.device.is_cuda:
        raise Skip(f"needs CUDA: {what} has kernels for cards only")


def compare(job: Job, name: str, row: Callable[..., None], run: Callable[[str | None], list[torch.Tensor]]) -> None:
    """``run``: the gradients with a codec; "none" is without checkpointing. A repeated run without
    it is the floor of what is equal."""
    wanted = run("none")
    floor = 2 * max(difference(run("none"), wanted) for _ in range(3))
    for codec in CODECS:
        error = difference(run(codec), wanted)
        good = 0 < error < MOST if codec == "int8" else error <= floor
        job.check(good, f"{name}, {codec}: gradients differ by {error:.3g}; twice that of repeated runs is {floor:.3g}")
        row(name, str(codec), cell(error, 6), cell(floor, 6))


def called(codec: str | None, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args) if codec == "none" else gradckpt.checkpoint(function, *args, compress=codec)


# ---- libraries


def bitsandbytes(job: Job, row: Callable[..., None]) -> None:
    """Layers whose weights have four bits, and an optimizer whose states have eight."""
    needs_card(job, "bitsandbytes")
    bnb = needs("bitsandbytes")
    torch.manual_seed(1)
    frozen = [bnb.nn.Linear4bit(1024, 1024, compute_dtype=torch.bfloat16).to(job.device.kind) for _ in range(3)]
    adapters = [torch.nn.Linear(1024, 1024).to(job.device.kind, torch.bfloat16) for _ in range(3)]
    x = torch.randn(64, 1024).to(job.device.kind, torch.bfloat16)
    parameters = [p for adapter in adapters for p in adapter.parameters()]

    def run(codec: str | None) -> list[torch.Tensor]:
        for p in parameters:
            p.grad = None
        h = x.clone().requires_grad_() * 1.0
        for base, adapter in zip(frozen, adapters, strict=True):
            h = called(codec, lambda y, base=base, adapter=adapter: (base(y) + adapter(y)).tanh(), h)
        h.float().square().mean().backward()
        return gradients(parameters)

    compare(job, "bitsandbytes Linear4bit", row, run)
    optimizer = bnb.optim.AdamW8bit(parameters, lr=1e-3)
    run("int8")
    optimizer.step()
    job.check(all(bool(p.isfinite().all()) for p in parameters), "AdamW8bit after int8: weights are not finite")


def flash_attention(job: Job, row: Callable[..., None]) -> None:
    needs_card(job, "flash-attn")
    flash = needs("flash_attn")
    torch.manual_seed(1)
    linear = torch.nn.Linear(512, 1536).to(job.device.kind, torch.bfloat16)
    x = torch.randn(2, 256, 512).to(job.device.kind, torch.bfloat16)

    def attend(h: torch.Tensor) -> torch.Tensor:
        q, k, v = linear(h).view(2, 256, 3, 8, 64).unbind(2)
        out: torch.Tensor = flash.flash_attn_func(q, k, v, causal=True, deterministic=True)
        return h + out.reshape(2, 256, 512)

    def run(codec: str | None) -> list[torch.Tensor]:
        linear.zero_grad()
        h = x.clone().requires_grad_() * 1.0
        for _ in range(3):
            h = called(codec, attend, h)
        h.float().square().mean().backward()
        return gradients(linear.parameters())

    compare(job, "flash-attn", row, run)


def liger(job: Job, row: Callable[..., None]) -> None:
    needs_card(job, "Liger")
    transformers = needs("liger_kernel.transformers")
    model = gpu_llama.hugging_face(job.device.kind, job.small)
    transformers.apply_liger_kernel_to_llama(model=model)
    of_hugging_face(job, row, "Hugging Face Llama with Liger", model)


def of_hugging_face(job: Job, row: Callable[..., None], name: str, model: Any) -> None:
    """As the Trainer does it: the model's own flag, under patched()."""
    ids = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(1)).to(job.device.kind)

    def run(codec: str | None) -> list[torch.Tensor]:
        model.zero_grad()
        if codec == "none":
            model(input_ids=ids, labels=ids).loss.backward()
        else:
            with gradckpt.enable(model, codec):
                model(input_ids=ids, labels=ids).loss.backward()
        return gradients(model.parameters())

    compare(job, name, row, run)


def sdpa(job: Job, row: Callable[..., None]) -> None:
    """torch's fused attention, whose backward may not be deterministic."""
    model = gpu_llama.hugging_face(job.device.kind, job.small, attn_implementation="sdpa")
    of_hugging_face(job, row, "Hugging Face Llama with SDPA", model)


# ---- ranks


def backend_of(device: Device) -> str:
    if device.is_cuda:
        if not dist.is_nccl_available():
            raise Skip("this torch has no NCCL")
        return "nccl"
    if device.kind != "cpu":
        raise Skip(f"torch has no collectives for {device.kind}")
    if not dist.is_gloo_available():
        raise Skip("this torch has no gloo")
    return "gloo"


@contextlib.contextmanager
def group(backend: str, folder: pathlib.Path, rank: int, ranks: int) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fsdp2(job: Job, row: Callable[..., None]) -> None:
    """fully_shard on a group of this process alone; gradients as whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    backend = backend_of(job.device)
    sizes = gpu_llama.Sizes(3, 128 if job.small else 512)
    ids = gpu_llama.batch(64, job.device.kind)
    with tempfile.TemporaryDirectory() as folder, group(backend, pathlib.Path(folder), 0, 1):
        mesh = init_device_mesh(job.device.kind, (1,))
        model = gpu_llama.build(sizes, job.device.kind)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

        def run(codec: str | None) -> list[torch.Tensor]:
            model.zero_grad()
            if codec == "none":
                model(ids).loss.backward()
            else:
                with gradckpt.enable(model, codec, modules=gpu_llama.Layer):
                    model(ids).loss.backward()
            return [p.grad.full_tensor().clone() for p in model.parameters()]  # type: ignore[union-attr]

        compare(job, "FSDP2 on one rank", row, run)


def rank_gradients(kind: str, rank: int, codec: str | None) -> list[torch.Tensor]:
    """Of DistributedDataParallel, each rank with a batch of its own."""
    model = gpu_llama.build(gpu_llama.Sizes(2, 128), kind, torch.float32)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    ids = gpu_llama.batch(64, kind, seed=rank)
    with contextlib.ExitStack() as stack:
        if codec != "none":
            stack.enter_context(gradckpt.enable(model, codec, modules=gpu_llama.Layer))
        wrapped(ids)[0].backward()
    return gradients(model.parameters())


def rank_main(rank: int, kind: str, backend: str, folder: str) -> None:
    """One of two: its gradients, which the job compares."""
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    with group(backend, pathlib.Path(folder), rank, 2):
        found = {str(codec): [g.cpu() for g in rank_gradients(kind, rank, codec)] for codec in ("none", *CODECS)}
    torch.save(found, f"{folder}/rank{rank}")


def two_ranks(job: Job, row: Callable[..., None]) -> None:
    """On NCCL with a card for each rank; gloo is for two ranks on one card, or on the CPU."""
    backend = backend_of(job.device)
    if job.device.is_cuda and torch.cuda.device_count() < 2:
        job.skip("two NCCL ranks", "one card: NCCL needs one for each rank; gloo moves the gradients instead")
        backend = "gloo"
    elif not job.device.is_cuda:
        job.skip("two NCCL ranks", "needs CUDA")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (job.device.kind, backend, folder), nprocs=2)
        first, second = (torch.load(f"{folder}/rank{rank}") for rank in range(2))
    wanted = first["none"]
    for codec in map(str, CODECS):
        name = f"two ranks ({backend}), {codec}"
        same = all(torch.equal(a, b) for a, b in zip(first[codec], second[codec], strict=True))
        job.check(same, f"{name}: the ranks have different gradients")
        error = difference(first[codec], wanted)
        good = 0 < error < MOST if codec == "int8" else error < NEAR
        job.check(good, f"{name}: gradients differ by {error:.3g} from those without checkpointing")
        row(f"two ranks, DistributedDataParallel on {backend}", codec, cell(error, 6), "-")


PARTS = {
    "torch's fused attention": sdpa,
    "flash-attn": flash_attention,
    "Liger": liger,
    "bitsandbytes": bitsandbytes,
    "FSDP2 on one rank": fsdp2,
    "two ranks": two_ranks,
}


def run(job: Job) -> None:
    row = job.table(
        "gradients beside no checkpointing", ["with", "codec", "relative error", "twice that of repeated runs"]
    )
    for name, part in PARTS.items():
        with job.part(name):
            part(job, row)
