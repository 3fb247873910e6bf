"""Objects of torch that have to be searched for.

C looks each of them up once (csrc/torch/objects.c, rng.c).
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradckpt._engine import torch_private as private


def _find_dlpack() -> Any:
    """Return the DLPack exchange table.

    Raises:
        ImportError: torch is older than what gradckpt is tested with.
    """
    version = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if version is not None and (int(version[1]), int(version[2])) < (2, 11):
        raise ImportError(
            f"gradckpt: torch {torch.__version__} is older than 2.11; run: pip install --upgrade 'torch>=2.11'"
        )
    return torch.Tensor.__dlpack_c_exchange_api__


def _find_key(name: str) -> Any:
    try:
        return private.key_of(name)
    except RuntimeError:
        return None


def _find_adoption() -> tuple[Any, bool]:
    """Return a function that makes a Python tensor of one that C has made, or None, and whether it
    copies what it should take, so that C still has to free its own: torch 2.13 does.

    Then a tensor outlives its last reference in Python.
    """
    if private.adopt_tensor is None or private.handle_of is None:
        return None, False
    x = torch.empty((0,))
    alive = weakref.ref(x)
    try:
        private.adopt_tensor(private.handle_of(x))
    except (RuntimeError, TypeError):  # it takes something else than a capsule
        return None, False
    del x
    return private.adopt_tensor, alive() is not None


adopt_tensor, adopt_copies = _find_adoption()
dlpack = _find_dlpack()
#: The dispatch key that catches operators, or None, which means that modes do so. It lies between
#: autograd and the kernels, and torch's fallback there passes on what has no pending negation.
key = _find_key("Negative")
if key is not None and not private.has_fallback(key):
    key = None
key_inplace = _find_key("ADInplaceOrView")
#: Those through which dispatch modes see operators.
key_python, key_snapshot = _find_key("Python"), _find_key("PythonTLSSnapshot")
default_generator = torch.default_generator
cpu_device = torch.device("cpu")
_accelerator = torch.accelerator.current_accelerator()
#: The device type besides the CPU that this build of torch supports (it may be absent), or None.
accelerator = None if _accelerator is None else _accelerator.type
cast: Any = torch.ops.aten._to_copy.default
draws: Any = torch.Tag.nondeterministic_seeded
#: Operators that return views with version counters of their own: writes into these are not seen.
unseen_views: Any = (
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
)

#: Marks in the storage of a selective region: an operator that ran again, a value that was
#: returned.
recompute_mark, consumed_mark = "recomputed", "consumed"
#: A node that makes an alias which requires grad.
as_non_leaf: Any = private.DelayedError
#: The type of the node that such an alias has.
error_node: Any = None
if "torch._C._functions.DelayedError" not in private.MISSING:
    as_non_leaf = private.DelayedError(
        "gradckpt: a backward inside a region went past its compressed input; call torch.autograd.grad with inputs, or "
        "pass compress=None to the region",
        1,
    )
    with torch.no_grad():
        error_node = type(as_non_leaf(torch.empty((0,)).requires_grad_()).grad_fn)


# ---- where the CPU's generator keeps its state (csrc/torch/rng.c) ----

#: The number of a Mersenne twister's words, and the bytes that ``get_state`` writes before them.
#: There each word takes eight bytes.
_WORDS, _HEADER = 624, 24

#: Calls that draw, each in a different way.
_DRAWS = (("rand", 1), ("randn", 1), ("randn", 1), ("randperm", 3), ("rand", 1000), ("randn", 40), ("randn", 3))


def _read_memory(address: int, nbytes: int) -> bytes:
    """Read this process's memory. It fails instead of faulting."""
    memory = os.open("/proc/self/mem", os.O_RDONLY)
    try:
        return os.pread(memory, nbytes, address)
    finally:
        os.close(memory)


def _find_words(generator: torch.Generator) -> int:
    """Return the offset of the words in the generator object; -1 if it is not known."""
    state = bytes(generator.get_state().tolist())
    words = b"".join(state[i : i + 4] for i in range(_HEADER, _HEADER + 8 * _WORDS, 8))
    found = _read_memory(generator._cdata, 256 + len(words)).find(words)  # type: ignore[attr-defined]
    return found if len(words) == 4 * _WORDS else -1


def _shows_draws(generator: torch.Generator, address: int, nbytes: int) -> bool:
    """Return whether every way to draw shows in these bytes, and nothing else does."""
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
    """Return the address of the state, which begins so many bytes before the words; 0 if torch
    keeps it elsewhere.
    """
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

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return torch.empty((0,))


class _NodeSaved:
    """A tensor that is saved through an autograd node, so that outer saved-tensor hooks see it."""

    __slots__ = ("output",)

    def __init__(self, x: torch.Tensor, is_output: bool) -> None:
        with torch.enable_grad():
            anchor = torch.empty((0,), requires_grad=True)
            self.output = _SaveOne.apply(anchor, x)  # type: ignore[no-untyped-call]  # owns the node

    def unpack(self) -> torch.Tensor:
        x: torch.Tensor = self.output.grad_fn.saved_tensors[0]
        return x


make_saved_tensor: Any = private.make_saved_tensor or _NodeSaved


def barred_by(text: str, grads: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return gradients with a history that raises this when they are differentiated.

    They are aliases, because one of them may be the incoming gradient itself.
    """
    return [None if x is None else private.DelayedError(text, 1)(x.detach().requires_grad_()) for x in grads]


def raise_modified(x: torch.Tensor, expected: int) -> None:
    """Raise autograd's own error for an input that changed between forward and recompute.

    Autograd itself raises it, for a SavedTensor made while ``x`` is back at the forward's version.
    """
    now = x._version
    try:
        private.set_versions((x,), (expected,))
        saved = make_saved_tensor(x, False)
    finally:
        private.set_versions((x,), (now,))
    saved.unpack()
    raise RuntimeError(f"gradckpt: an input of a region of shape {tuple(x.shape)} was changed in place; clone it first")


# ---- autograd Functions ----


def in_python(builtin: Callable[..., Any]) -> Any:
    """Return a static method that torch.compile can trace."""

    def method(ctx: Any, *args: Any) -> Any:
        return builtin(ctx, *args)

    method.__name__ = method.__qualname__ = builtin.__name__
    return staticmethod(method)


def node_classes(
    forward: Callable[..., Any], backward: Callable[..., Any], apply: Callable[..., Any], doc: str
) -> tuple[Any, Any, Any]:
    """Return torch's reentrant Function, gradckpt.SelectiveRecompute, and autograd's own ``apply``
    of the latter.
    """
    base: Any = torch.autograd.Function

    def make(name: str, **attributes: Any) -> Any:
        return type(base)(name, (base,), {"forward": in_python(forward), "backward": in_python(backward), **attributes})

    reentrant = make("CheckpointFunction", __module__="gradckpt._C")
    selective = make("SelectiveRecompute", __module__="gradckpt", __doc__=doc, apply=apply)
    return reentrant, selective, super(base, selective).apply
