"""One program run twice, with torch's checkpoint and with ours: both must leave the same record.

A *behaviour* is a test written as a program: it takes a :class:`Run`, calls ``run.checkpoint``
where a user would call torch's, and returns what it wants compared. Compared are also every event
it logged, every warning, the random state it leaves, and that it leaves nothing else behind."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from checkout import TESTS
from torch.utils._python_dispatch import TorchDispatchMode

import gradckpt

OURS = {"gradckpt": gradckpt.checkpoint, "compat": gradckpt.compat.checkpoint}


# ---- what is compared ----


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor as it was at one moment: two are equal when every bit is."""

    kind: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    requires_grad: bool
    is_leaf: bool
    grad_fn: str
    data: bytes = dataclasses.field(repr=False)
    text: str = dataclasses.field(compare=False)


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    """No mode of the program sees what the harness does, nor changes it."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def _bits(t: torch.Tensor) -> bytes:
    if t.device.type == "meta":
        return b""
    return bytes(t.contiguous().flatten().view(torch.uint8).tolist())


def random_state() -> bytes:
    with _unobserved():
        return _bits(torch.get_rng_state())


def _value(t: torch.Tensor) -> Value:
    with _unobserved():
        plain = t.detach()
        grad_fn = "" if t.is_leaf else type(t.grad_fn).__name__
        return Value(
            type(t).__name__,
            t.dtype,
            tuple(t.shape),
            str(t.device),
            t.requires_grad,
            t.is_leaf,
            grad_fn,
            _bits(plain),
            str(plain.flatten()[:4].tolist()) if plain.device.type != "meta" else "",
        )


HARNESS = ("behaviours.py", "exact_codecs.py")
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")
_TRACE_ENTRY = re.compile(r'  File "(?P<file>[^"]*)", line .*\n(?:    .*\n)*')


def normal(text: str) -> str:
    """Without addresses, and of stack traces only the lines of the tests:
    the others are each one's own."""

    def keep(entry: re.Match[str]) -> str:
        path = entry["file"]
        return entry[0] if path.startswith(str(TESTS)) and not path.endswith(HARNESS) else ""

    return _TRACE_ENTRY.sub(keep, _ADDRESS.sub("0x...", text))


def freeze(x: Any) -> Any:
    """A comparable copy, taken now, so that what happens to ``x`` later does not matter."""
    if isinstance(x, torch.Tensor):
        return _value(x)
    if isinstance(x, dict):
        return {k: freeze(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [type(x).__name__, *map(freeze, x)]
    if isinstance(x, BaseException):
        cause = x.__cause__
        return [type(x), normal(str(x)), None if cause is None else freeze(cause)]
    if isinstance(x, str):
        return normal(x)
    if x is None or isinstance(x, (bool, int, float, complex, bytes, type, torch.dtype, torch.device)):
        return x
    return normal(repr(x))


def surroundings() -> dict[str, Any]:
    """Everything a checkpoint touches and must put back, but for the random state."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "hooks": torch._C._autograd._top_saved_tensors_default_hooks(False),
        "hooks enabled": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "group": torch._C._get_graph_exec_group(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "anomaly": torch.is_anomaly_enabled(),
        "device": str(torch.get_default_device()),
        "early stop": torch_checkpoint._enable_checkpoint_early_stop,
        "debug": torch_checkpoint._checkpoint_debug_enabled,
    }


class Operators(TorchDispatchMode):  # type: ignore[misc]
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# ---- the run ----


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


class Run:
    """What a program is given: a checkpoint, and a record to write into."""

    def __init__(self, bare: Callable[..., Any]) -> None:
        self.bare = bare
        theirs = bare is torch_checkpoint.checkpoint
        sequential = (torch_checkpoint if theirs else gradckpt.compat).checkpoint_sequential
        self._call = call if theirs else _call
        self.sequential = functools.partial(self._call, sequential)
        self.events: list[Any] = []

    def checkpoint(self, function: Any, *args: Any, **options: Any) -> Any:
        """The implementation with ``use_reentrant=False`` unless the program says otherwise."""
        return self._call(self.bare, function, *args, **{"use_reentrant": False, **options})

    def gradients(self, function: Any, *args: Any, **options: Any) -> list[torch.Tensor | None]:
        """Those of the arguments that are leaves, after a backward of the region's sum."""
        self.checkpoint(function, *args, **options).sum().backward()
        return [t.grad for t in args if isinstance(t, torch.Tensor) and t.is_leaf]

    def log(self, *event: Any) -> None:
        self.events.append(freeze(event))

    def watched(self, function: Callable[..., Any], name: str = "function") -> Callable[..., Any]:
        """``function``, every call of which is logged: how it starts,
        and whether and how it ends."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.log("enter", name, torch.is_grad_enabled(), random_state()[:64])
            try:
                result = function(*args, **kwargs)
            except BaseException as error:
                self.log("leave", name, type(error))
                raise
            self.log("leave", name)
            return result

        return call

    @contextlib.contextmanager
    def error(self, kind: type[BaseException], match: str = "") -> Iterator[None]:
        """The block raises ``kind``; class, text and cause go into the record."""
        with pytest.raises(kind, match=match) as caught:
            yield
        self.log("error", caught.value)


def raises_in(call: int, kind: Callable[..., BaseException], *words: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """sin, then exp; in this call of it an error between the two."""
    calls: list[int] = []

    def fn(t: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        t = t.sin()
        if len(calls) == call:
            raise kind(*words)
        return t.exp()

    return fn


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def record(program: Callable[..., Any], bare: Callable[..., Any], **params: Any) -> dict[str, Any]:
    """Run the program from a clean state."""
    torch.manual_seed(0)
    before = surroundings()
    run = Run(bare)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.set_warn_always(True)  # or the second implementation would not get what is said once per process
        try:
            returned = freeze(program(run, **params))
        finally:
            torch.set_warn_always(False)
    after = surroundings()
    assert after == before
    said = [(w.category, normal(str(w.message))) for w in caught]
    assert run.events or returned is not None, "a program that records nothing proves nothing"
    return {
        "events": run.events,
        "returned": returned,
        "warnings": said,
        "random state": random_state(),
    }


class OtherEvents(AssertionError):
    """What a program returns and leaves is the same; what it logged on its way is not."""


def assert_same(program: Callable[..., Any], ours: str, **params: Any) -> None:
    theirs = record(program, torch_checkpoint.checkpoint, **params)
    mine = record(program, OURS[ours], **params)
    for name in ("returned", "warnings", "random state"):
        assert mine[name] == theirs[name], name
    if mine["events"] != theirs["events"]:
        raise OtherEvents(f"events: {theirs['events']}, ours: {mine['events']}")


def behaviour(program: Any = None, *, ours: tuple[str, ...] = tuple(OURS)) -> Any:
    """Make a test of a program; ``run`` becomes the parameter that says which of ours it meets."""
    if program is None:
        return functools.partial(behaviour, ours=ours)

    def test(ours: str, **params: Any) -> None:
        assert_same(program, ours, **params)

    parameters = list(inspect.signature(program).parameters.values())[1:]
    first = inspect.Parameter("ours", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    functools.update_wrapper(test, program)
    del test.__wrapped__
    test.__signature__ = inspect.Signature([first, *parameters])  # type: ignore[attr-defined]
    return pytest.mark.parametrize("ours", ours)(test)


# ---- Torch's own checkpoint, with which tests compare, and where the installed torch's differs
# from that of 2.13.

#: Before 2.12: by an autograd.Function. Modes see its dummies, nodes around it save them, detach_()
#: of an input goes unnoticed, and in compiled code the inputs of inner regions are kept.
SAVES_INPUTS_BY_A_NODE = hasattr(torch_checkpoint, "_NoopSaveInputs")

#: Each region then looks for tensors of the device, whose generators are put back,
#: on machines without one, too.
BUILT_FOR_A_DEVICE = torch.accelerator.current_accelerator() is not None


def call(function, *args, **kwargs):
    """Call one of torch's that checkpoints. Before 2.13 it leaves its hooks and contexts when the
    forward raises, until the traceback is freed, which is in any later test: here they end at once.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        entry, generators = error.__traceback__, []
        while entry is not None:
            if entry.tb_frame.f_code.co_filename == torch_checkpoint.__file__:
                generators.append(entry.tb_frame.f_locals.get("gen"))
            entry = entry.tb_next
        for generator in reversed(generators):
            if generator is not None:
                generator.close()
        raise


def checkpoint(function, *args, use_reentrant=False, **options):
    return call(torch_checkpoint.checkpoint, function, *args, use_reentrant=use_reentrant, **options)


def _tells_contexts():
    """Whether the contexts of ``context_fn`` get what the forward raises: 2.13."""
    seen = []

    class Context:
        def __enter__(self):
            pass

        def __exit__(self, kind, *rest):
            seen.append(kind)

    with contextlib.suppress(ZeroDivisionError):
        checkpoint(lambda t: 1 / 0, torch.ones(1, requires_grad=True), context_fn=lambda: (Context(), Context()))
    return seen == [ZeroDivisionError]


TELLS_CONTEXTS = _tells_contexts()
tells_contexts = pytest.mark.skipif(
    not TELLS_CONTEXTS, reason="torch's checkpoint does not tell its contexts what the forward raises"
)
saves_inputs_alone = pytest.mark.skipif(
    SAVES_INPUTS_BY_A_NODE, reason="torch's checkpoint saves its inputs by an autograd.Function, which shows"
)


def _graphs_checkpoint():
    """Whether a region in a graph that runs as Dynamo made it is one: 2.12."""
    seen, stock = [], torch_checkpoint.checkpoint
    torch_checkpoint.checkpoint = lambda function, *args, **options: seen.append(1) or function(*args)
    try:
        region = torch.fx.symbolic_trace(lambda x: x.sin())
        torch.ops.higher_order.tag_activation_checkpoint(region, torch.ones(1), use_reentrant=False)
    finally:
        torch_checkpoint.checkpoint = stock
    return bool(seen)


graphs_checkpoint = pytest.mark.skipif(
    not _graphs_checkpoint(), reason="torch's regions in graphs without a policy do not call its checkpoint"
)
