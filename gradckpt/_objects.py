"""Objects of torch that take some finding. C looks each of them up once (csrc/torch/objects.c, rng.c)."""

from __future__ import annotations

import os
from typing import Any

import torch

from gradckpt import _torch_private as private


def _find_dlpack() -> Any:
    """The DLPack exchange table; early builds of torch 2.10 have it under an older name."""
    for name in ("__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"):
        if hasattr(torch.Tensor, name):
            return getattr(torch.Tensor, name)
    raise ImportError("gradckpt needs torch >= 2.10: this torch has no DLPack exchange table")


def _find_key() -> Any:
    """The dispatch key that catches operators, or None: modes do the work.

    It lies between autograd and the kernels; torch's fallback there passes on what has no negation pending.
    """
    try:
        key = private.key_of("Negative")
        return key if private.has_fallback(key) else None
    except RuntimeError:
        return None


def _find_inplace_key() -> Any:
    try:
        return private.key_of("ADInplaceOrView")
    except RuntimeError:
        return None


dlpack = _find_dlpack()
key, key_inplace = _find_key(), _find_inplace_key()
default_generator = torch.default_generator
cpu_device = torch.device("cpu")
cast: Any = torch.ops.aten._to_copy.default
draws: Any = torch.Tag.nondeterministic_seeded

#: In the storage of a selective region: what ran again, what was given back.
recompute_mark, consumed_mark = "recomputed", "consumed"
#: A node that makes an alias which requires grad.
as_non_leaf: Any = private.DelayedError
if "torch._C._functions.DelayedError" not in private.MISSING:
    as_non_leaf = private.DelayedError(
        "gradckpt: a backward inside a checkpointed region went past the region's compressed input; give "
        "torch.autograd.grad the inputs to stop at, or use compress=None for this region",
        1,
    )


# ---- where the CPU's generator keeps its state (csrc/torch/rng.c) ----

#: A Mersenne twister's words, and what ``get_state`` writes before them; there each of them takes eight bytes.
_WORDS, _HEADER = 624, 24

#: Calls that draw, each in a way of its own.
_DRAWS = (("rand", 1), ("randn", 1), ("randn", 1), ("randperm", 3), ("rand", 1000), ("randn", 40), ("randn", 3))


def _read_memory(address: int, nbytes: int) -> bytes:
    """Of this process; fails instead of faulting."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return os.pread(memory, nbytes, address)
    finally:
        os.close(memory)


def _find_words(generator: torch.Generator) -> int:
    """The offset of the words in the generator object; -1: not known."""
    state = bytes(generator.get_state().tolist())
    words = b"".join(state[i : i + 4] for i in range(_HEADER, _HEADER + 8 * _WORDS, 8))
    found = _read_memory(generator._cdata, 256 + len(words)).find(words)  # type: ignore[attr-defined]
    return found if len(words) == 4 * _WORDS else -1


def _shows_draws(generator: torch.Generator, address: int, nbytes: int) -> bool:
    """Whether every way to draw shows in these bytes, and nothing else does."""
    before = _read_memory(address, nbytes)
    for function, n in _DRAWS:
        generator.get_state()
        quiet = _read_memory(address, nbytes)
        getattr(torch, function)(n, generator=generator, device="cpu")
        drawn = _read_memory(address, nbytes)
        if quiet != before or drawn == quiet:
            return False
        before = drawn
    return True


def generator_window(before: int, nbytes: int) -> int:
    """The address of the state, which begins so many bytes before the words; 0: torch keeps it elsewhere."""
    own = torch.Generator()
    try:
        offset = _find_words(own)
        good = offset >= before and _shows_draws(own, own._cdata + offset - before, nbytes)  # type: ignore[attr-defined]
        good = good and _find_words(default_generator) == offset
    except (AttributeError, OSError, RuntimeError):
        return 0
    return int(default_generator._cdata) + offset - before if good else 0  # type: ignore[attr-defined]


# ---- torch without _make_saved_tensor ----


class _SaveOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty((0,))


class _NodeSaved:
    """One tensor, saved through an autograd node, so that outer saved-tensor hooks see it."""

    __slots__ = ("output",)

    def __init__(self, x: torch.Tensor, is_output: bool) -> None:
        with torch.enable_grad():
            anchor = torch.empty((0,), requires_grad=True)
            self.output = _SaveOne.apply(anchor, x)  # type: ignore[no-untyped-call]  # owns the node

    def unpack(self) -> torch.Tensor:
        x: torch.Tensor = self.output.grad_fn.saved_tensors[0]
        return x


make_saved_tensor: Any = private.make_saved_tensor or _NodeSaved
