"""Run by test_devices.py in a process of its own:
a torch that believes in a CUDA and an XPU device.

Their generators are counters; tensors there are fake ones. Prints, for each implementation,
what it did.
"""

import contextlib
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

fake_tensor.init_gpu_context = lambda device: None  # else a torch built for CUDA asks the driver
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")  # before gradckpt looks

import gradckpt  # noqa: E402

state = {"cuda": [10, 20, 30], "xpu": [40]}


def pretend(kind: str) -> None:
    """Put counters in place of the generators of ``torch.<kind>``."""
    module, current = getattr(torch, kind), [0]

    def index_of(device: Any) -> int:
        return device if isinstance(device, int) else current[0]

    @contextlib.contextmanager
    def device(index: int) -> Any:
        before, current[0] = current[0], index
        yield
        current[0] = before

    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.tensor(state[kind][index_of(device)])

    def set_rng_state(new: torch.Tensor, device: Any = None) -> None:
        state[kind][index_of(device)] = int(new)

    module.device, module.get_rng_state, module.set_rng_state = device, get_rng_state, set_rng_state
    module.device_count = lambda: len(state[kind])
    module._initialized = True


def on(device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.randn(2, device=device)


def seen_by(checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The generators as the forward and the recompute find them,
    and as the backward leaves them."""
    state.update(cuda=[10, 20, 30], xpu=[40])
    seen = []

    def fn(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append({kind: list(values) for kind, values in state.items()})
        for values in state.values():
            values[:] = [value + 1 for value in values]
        return t.sin().exp()

    x = torch.ones(2, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = checkpoint(fn, x, *args, use_reentrant=False, **kwargs)
        state["cuda"][:] = [value + 100 for value in state["cuda"]]
        y.sum().backward()
    return {
        "forward": seen[0],
        "recompute": seen[1],
        "after": {kind: list(values) for kind, values in state.items()},
        "warnings": [str(w.message) for w in caught],
    }


def wakes_the_device(checkpoint: Callable[..., Any], **options: Any) -> str | None:
    """A region in whose forward CUDA is used for the first time."""
    torch.cuda._initialized = False

    def fn(t: torch.Tensor) -> torch.Tensor:
        torch.cuda._initialized = True
        return t.sin().exp()

    try:
        checkpoint(fn, torch.ones(2, requires_grad=True), use_reentrant=False, **options)
        return None
    except RuntimeError as e:
        return str(e)
    finally:
        torch.cuda._initialized = True


def report(checkpoint: Callable[..., Any]) -> dict[str, Any]:
    cuda, second, xpu = on("cuda:0"), on("cuda:1"), on("xpu:0")
    return {
        "one": seen_by(checkpoint, cuda),
        "same twice": seen_by(checkpoint, cuda, cuda),
        "in a container": seen_by(checkpoint, [{"t": second}], cuda),
        "none": seen_by(checkpoint),
        "not preserved": seen_by(checkpoint, cuda, preserve_rng_state=False),
        "keyword": seen_by(checkpoint, u=cuda),
        "two types": seen_by(checkpoint, cuda, [xpu]),
        "two types, not preserved": seen_by(checkpoint, cuda, xpu, preserve_rng_state=False),
        "meta": seen_by(checkpoint, torch.ones(2, device="meta")),
        "wakes": wakes_the_device(checkpoint),
        "wakes, not preserved": wakes_the_device(checkpoint, preserve_rng_state=False),
    }


def without_kernels() -> dict[str, Any]:
    """A device of which gradckpt knows nothing: why its tensors are kept,
    and what encode() says."""
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("odd")
    x, y = torch._C._acc.create_empty_tensor((4,), torch.float32), torch.ones(4, requires_grad=True) * 1
    gradckpt.stats.reset()
    options = {"codec": "int8", "min_numel": 0, "include": "floating"}
    gradckpt.checkpoint(lambda t, u: t.sin(), y, x, compress=options)
    try:
        gradckpt.codecs.encode(x)
        return {}
    except TypeError as e:
        return {"device": str(x.device), "uncompressed": gradckpt.stats()["uncompressed"], "encode": str(e)}


pretend("cuda")
pretend("xpu")
implementations = {
    "torch": torch_checkpoint.checkpoint,
    "compat": gradckpt.compat.checkpoint,
    "gradckpt": gradckpt.checkpoint,
}
reports = {name: report(checkpoint) for name, checkpoint in implementations.items()}
odd = without_kernels() if hasattr(torch._C, "_acc") else None  # torch 2.11 and later
print(json.dumps({**reports, "without kernels": odd}))
