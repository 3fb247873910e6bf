"""Every entry point of gradckpt with every codec: losses and gradients beside no checkpointing.

Exact settings are equal to the last bit, or as near as a repeated run without checkpointing where
the device's own kernels are not deterministic. Lossy ones differ, and by no more than their format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import gpu_llama
import torch
from gpu_job import Job, cell, difference, gradients, lossy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import gradckpt

CODECS = gradckpt.codecs.names()
#: The most that a format's error changes these gradients by, relative.
MOST = 0.35


class Run(NamedTuple):
    loss: torch.Tensor
    gradients: list[torch.Tensor]


class Subject:
    """A model and what runs one step of it, and its gradients without checkpointing."""

    def __init__(self, job: Job, parameters: list[Any], step: Callable[[], torch.Tensor]) -> None:
        self.job, self.parameters, self.step = job, parameters, step
        self.wanted = self.run()
        self.floor = 2 * max(difference(self.run().gradients, self.wanted.gradients) for _ in range(2))
        if self.floor:
            job.note(f"repeated runs without checkpointing differ by {self.floor / 2:.2g}: exact settings may, too")

    def run(self) -> Run:
        for p in self.parameters:
            p.grad = None
        torch.manual_seed(3)
        loss = self.step()
        loss.backward()
        self.job.device.synchronize()
        return Run(loss.detach().clone(), gradients(self.parameters))

    def compare(self, what: str, is_lossy: bool, row: Callable[..., None], compressed: int | None = None) -> None:
        """A step under the setting that is on; ``compressed``: at least so many tensors."""
        gradckpt.stats.reset()
        found = self.run()
        stats = gradckpt.stats()
        error = difference(found.gradients, self.wanted.gradients)
        same = bool(torch.equal(found.loss, self.wanted.loss))
        self.job.check(same, f"{what}: the loss is {found.loss.item()}, without {self.wanted.loss.item()}")
        if is_lossy:
            good, words = 0 < error < MOST, f"between 0 and {MOST}"
        else:
            good, words = error <= self.floor, f"at most {self.floor:.2g}"
        self.job.check(good, f"{what}: the gradients differ by {error:.3g}, expected {words}")
        if compressed is not None:
            self.job.check(
                stats["compressed"] >= compressed,
                f"{what}: {stats['compressed']} tensors compressed, expected {compressed}; "
                f"uncompressed: {dict(stats['uncompressed'])}",
            )
        row(what, "lossy" if is_lossy else "exact", cell(error, 6), stats["compressed"], cell(stats["ratio"]))


# ---- one region, and a chain of them


def chain(job: Job, dtype: torch.dtype, call: list[Callable[..., torch.Tensor]]) -> Subject:
    """Four small regions in a row, each called by what stands in call[0]."""
    width = 128 if job.small else 512
    torch.manual_seed(1)
    kind = job.device.kind
    layers = [
        torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Dropout(0.1)).to(kind, dtype)
        for _ in range(4)
    ]
    x = torch.randn(64, width).to(kind, dtype).requires_grad_()

    def step() -> torch.Tensor:
        h = x * 1.0
        for layer in layers:
            h = call[0](layer, h)
        return h.float().square().mean()

    parameters = [x, *(p for layer in layers for p in layer.parameters())]
    return Subject(job, parameters, step)


def plainly(function: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = function(x)
    return out


def regions(job: Job, row: Callable[..., None]) -> None:
    """checkpoint() and SelectiveRecompute with every codec."""
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        call: list[Callable[..., torch.Tensor]] = [plainly]
        subject = chain(job, dtype, call)
        taking = [c for c in CODECS if name in gradckpt.codecs.info(c)["dtypes"] and c not in ("sparse", "sparse_int8")]
        for codec in [None, *taking]:
            count = 4 if codec is not None else None
            if codec == "lossless" and dtype == torch.float32:
                count = None  # it may refuse values, which then stay as they are
            call[0] = lambda f, x, codec=codec: gradckpt.checkpoint(f, x, compress=codec)
            with job.part(f"checkpoint, {name}, {codec}"):
                subject.compare(f"checkpoint, {name}, {codec}", lossy(codec, name), row, count)
        call[0] = lambda f, x: gradckpt.checkpoint(f, x, compress="int8", policy="save_matmuls:int8")
        with job.part(f"policy, {name}"):
            subject.compare(f"checkpoint, {name}, int8, policy save_matmuls:int8", True, row, 4)
        for codec in (None, "int8"):
            call[0] = lambda f, x, codec=codec: gradckpt.SelectiveRecompute.apply(f, None, x, compress=codec)
            with job.part(f"SelectiveRecompute, {name}, {codec}"):
                subject.compare(f"SelectiveRecompute, {name}, {codec}", lossy(codec, name), row, 4 if codec else None)


def sequential(job: Job, row: Callable[..., None]) -> None:
    width = 128 if job.small else 512
    torch.manual_seed(1)
    kind = job.device.kind
    layers = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(4))
    ).to(kind, torch.bfloat16)
    x = torch.randn(64, width).to(kind, torch.bfloat16).requires_grad_()
    codec: list[str | None] = []

    def step() -> torch.Tensor:
        h = x * 1.0
        h = gradckpt.checkpoint_sequential(layers, 4, h, compress=codec[0]) if codec else layers(h)
        return h.float().square().mean()

    subject = Subject(job, [x, *layers.parameters()], step)
    for each in (None, "int8", "lossless"):
        codec[:] = [each]
        # The last segment is no region.
        subject.compare(f"checkpoint_sequential, {each}", lossy(each), row, 3 if each else None)


def refused_and_broken(job: Job) -> None:
    """Values that a codec cannot hold stay exact and are counted; a truncated payload is named."""
    kind = job.device.kind
    for codec in ("fp16", "bf16", "lossless"):
        gradckpt.stats.reset()
        torch.manual_seed(2)
        layer = torch.nn.Linear(4096, 16).to(kind)
        x = torch.randn(8, 4096)
        if codec == "lossless":
            x *= 2.0 ** torch.randint(-60, 60, x.shape)
        else:
            x[0, 0] = torch.finfo(torch.float32).max
        x = x.to(kind).requires_grad_()
        found = []
        for compress in (None, codec):
            layer.zero_grad()
            y = gradckpt.checkpoint(layer, x * 1.0, compress=compress)
            job.device.synchronize()
            stats = gradckpt.stats()  # reads the late answers
            y.sum().backward()
            found.append(layer.weight.grad.clone())
        counted = (stats["compressed"], dict(stats["uncompressed"]))
        wanted = (0, {"values the codec cannot hold": 1})
        job.check(counted == wanted, f"{codec}: refused inputs are counted as {counted}, not {wanted}")
        job.check(torch.equal(found[0][:, 0], found[1][:, 0]), f"{codec}: a refused input did not stay exact")
    x = torch.randn(1000).to(kind)
    payload = torch.ops.gradckpt.encode(x, "int8")
    try:
        torch.ops.gradckpt.decode(payload[:-1], "int8", [1000], x.dtype)
        job.fail("a truncated payload was decoded")
    except RuntimeError as error:
        job.check("bytes, not" in str(error), f"a truncated payload is reported as: {error}")


def encode_each(job: Job, row: Callable[..., None]) -> None:
    """codecs.encode and .decode for each dtype: the size of the format, and its error."""
    for codec in CODECS:
        for dtype in gradckpt.codecs.info(codec)["dtypes"]:
            torch.manual_seed(5)
            x = torch.randn(257, 96)
            x = (
                x > 0 if dtype == "bool" else x.relu() if codec.startswith("sparse") else x.to(getattr(torch, dtype))
            ).to(job.device.kind)
            if codec.startswith("sparse"):
                x = x.to(getattr(torch, dtype))
            restored = gradckpt.codecs.encode(x, codec).decode()
            exact = not gradckpt.codecs.info(codec)["max_error"] and codec not in ("bf16", "fp16")
            wrong = (restored.double() - x.double()).norm().item() / x.double().norm().item()
            good = wrong == 0 if exact else wrong < 0.2
            job.check(good, f"encode {codec} {dtype}: the values that come back differ by {wrong:.3g}")
            row(f"codecs.encode, {dtype}, {codec}", "exact" if exact else "lossy", cell(wrong, 6), 1, "-")


# ---- whole models


def model_ways(model: Any, modules: Any) -> list[tuple[str, bool, Callable[[], Any], int]]:
    """(name, lossy, context, least number of compressed tensors)"""
    where = {} if modules is None else {"modules": modules}
    ways: list[tuple[str, bool, Callable[[], Any], int]] = []
    for codec in (None, "int8", "int4", "lossless", "fp8"):
        ways.append(
            (
                f"enable, {codec}",
                codec not in (None, "lossless"),
                lambda codec=codec: gradckpt.enable(model, codec, **where),
                3 if codec else 0,
            )
        )
    ways.append(
        (
            "enable, int8, recompute=False",
            True,
            lambda: gradckpt.enable(model, "int8", recompute=False, **where),
            3,
        )
    )
    ways.append(
        (
            "enable, policy save_attention",
            False,
            lambda: gradckpt.enable(model, None, policy="save_attention", **where),
            0,
        )
    )
    ways.append(("compress_saved, int8", True, lambda: gradckpt.compress_saved("int8"), 3))
    ways.append(("compress_saved, lossless", False, lambda: gradckpt.compress_saved("lossless"), 0))
    return ways


def hugging_face(job: Job, row: Callable[..., None]) -> None:
    model = gpu_llama.hugging_face(job.device.kind, job.small)
    ids = torch.randint(0, 256, (2, 64 if job.small else 512), generator=torch.Generator().manual_seed(1))
    ids = ids.to(job.device.kind)
    subject = Subject(job, list(model.parameters()), lambda: model(input_ids=ids, labels=ids).loss)
    for name, is_lossy, turn_on, count in model_ways(model, None):
        with job.part(f"Hugging Face Llama: {name}"), turn_on():
            subject.compare(f"Hugging Face Llama: {name}", is_lossy, row, count)
    for codec in ("int8", "lossless"):
        with job.part(f"Hugging Face Llama: patched, {codec}"):
            old = not hasattr(model, "activation_checkpointing_enable")  # transformers before 5.23
            turn = "gradient_checkpointing" if old else "activation_checkpointing"
            getattr(model, f"{turn}_enable")({"use_reentrant": False})
            with gradckpt.patched(codec):
                subject.compare(f"Hugging Face Llama: patched, {codec}", codec == "int8", row, 3)
            getattr(model, f"{turn}_disable")()


def own_model(job: Job, row: Callable[..., None]) -> None:
    sizes = gpu_llama.Sizes(3, 128) if job.small else gpu_llama.Sizes(3, 512)
    model = gpu_llama.build(sizes, job.device.kind)
    ids = gpu_llama.batch(64 if job.small else 512, job.device.kind)
    subject = Subject(job, list(model.parameters()), lambda: model(ids).loss)
    for codec in (None, "int8"):
        with job.part(f"own model: enable, {codec}"), gradckpt.enable(model, codec, modules=gpu_llama.Layer):
            subject.compare(f"own model: enable, {codec}", codec is not None, row, 3 if codec else 0)
    with job.part("own model: torch's checkpoint, patched"):
        forwards = [layer.forward for layer in model.layers]
        for layer, forward in zip(model.layers, forwards, strict=True):
            layer.forward = lambda *a, forward=forward: torch_checkpoint(forward, *a, use_reentrant=False)
        with gradckpt.patched("int8"):
            subject.compare("own model: patched, int8", True, row, 3)
        for layer in model.layers:
            del layer.forward
    with job.part("own model: plan"):
        planned(job, model, ids, subject, row)


def planned(job: Job, model: Any, ids: torch.Tensor, subject: Subject, row: Callable[..., None]) -> None:
    """Exact and with int8: planned, applied, within its budget."""
    table = gradckpt.plan(model, (ids,))
    job.check(bool(str(table)), "plan without a budget prints nothing")
    whole = gradckpt.plan(model, (ids,), budget="activations:1TiB")
    middle = (whole.peak + whole.smallest_budget) // 2
    settings: dict[str | None, dict[str, Any]] = {None: {"profile": whole}, "int8": {"compress": "int8"}}
    for codec, keywords in settings.items():
        subject.run()  # gradients exist, as in a later step
        model.zero_grad()
        plan = gradckpt.plan(model, (ids,), budget=middle, **keywords)
        job.check(plan.peak <= middle, f"plan, {codec}: its peak {plan.peak:,} is above the budget {middle:,}")
        handle = plan.apply(model)
        with contextlib.ExitStack() as stack:
            stack.callback(handle.remove)
            formats = {region.option for region in plan.regions}
            subject.compare(f"own model: plan, {codec}", any("int8" in str(each) for each in formats), row)


def run(job: Job) -> None:
    row = job.table(
        "gradients beside no checkpointing",
        ["entry point, dtype, setting", "kind", "relative error", "compressed", "ratio"],
    )
    for name, part in (("regions", regions), ("Hugging Face", hugging_face), ("own model", own_model)):
        with job.part(name):
            part(job, row)
    with job.part("checkpoint_sequential"):
        sequential(job, row)
    with job.part("refused and broken"):
        refused_and_broken(job)
    with job.part("each codec and dtype"):
        encode_each(job, row)
