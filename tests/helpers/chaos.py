"""Random programs under a torch-function mode that does whatever
Python code may do inside a getter.

The engine asks tensors for attributes, and under a torch-function mode each such question runs
Python. This mode drops references to graphs and payloads, collects garbage, lets another thread run
regions, changes the tensors and containers that a region was given, and raises KeyboardInterrupt or
MemoryError, all drawn from a seed.

``python chaos.py FIRST COUNT`` runs the programs of these seeds and prints what they came to, as
JSON. What goes wrong raises AssertionError with the seed.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.overrides import TorchFunctionMode

import gradckpt

ROWS, WIDTH = 6, 16
EXACT = ("raw", "lossless")
CODECS = (*EXACT, "int8", "int4")
AUTOGRAD: Any = torch._C._autograd
SOURCE = torch.Generator().manual_seed(5)
WEIGHT = (torch.randn(WIDTH, WIDTH, generator=SOURCE) / 4).requires_grad_()
STARTS = [torch.randn(ROWS, WIDTH, generator=SOURCE) for _ in range(3)]
LINEAR = torch.nn.Linear(WIDTH, WIDTH)

OPERATORS: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    lambda a, b: a.sin(),
    lambda a, b: a * b,
    lambda a, b: torch.relu(a @ WEIGHT),
    lambda a, b: LINEAR(a).tanh(),
    lambda a, b: (a + b).softmax(-1),
    lambda a, b: torch.nn.functional.layer_norm(a, (WIDTH,)) + b,
    lambda a, b: a.t().tanh().t().exp(),
    lambda a, b: a * (a > b),
    lambda a, b: a.amax(-1, keepdim=True) + b,
    lambda a, b: torch.nn.functional.dropout(a, 0.3),
)

Values = list[torch.Tensor]


# ---- programs ----


class World:
    """What a program uses and what the mode may take away."""

    def __init__(self, codec: str | None) -> None:
        self.codec = codec
        self.held: list[Any] = []
        self.given: list[Any] = []

    def options(self) -> dict[str, Any]:
        return {
            "compress": None if self.codec is None else {"codec": self.codec, "min_numel": 0, "replay_discrete": False}
        }

    def hold(self, *things: Any) -> None:
        """Only the mode lets go of them before the program ends."""
        self.held.extend(things)


def _direct(world: World, body: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return body(a, b)


def _checkpoint(world: World, body: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return gradckpt.checkpoint(body, a, b, **world.options())


def _shared(world: World, body: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One tensor for several regions and twice for one, beside containers."""
    region = functools.partial(gradckpt.checkpoint, **world.options())
    world.hold(region(torch.sin, b), gradckpt.codecs.encode(b.detach(), "int8"))
    box = {"a": a, "b": [b, b]}
    world.given.append(box)
    return region(lambda box, *, also: body(box["a"], box["b"][1]) * also, box, also=b) + region(torch.sin, b)


def _torchs(world: World, body: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch_checkpoint.checkpoint(body, a, b, use_reentrant=False)
    return out


def _reentrant(world: World, body: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return gradckpt.checkpoint(body, a, b, use_reentrant=True)


def _contexts(world: World, body: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, gradckpt.policies.save_matmuls)
    return gradckpt.checkpoint(body, a, b, context_fn=contexts, **world.options())


def _selective(world: World, body: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    region = gradckpt.SelectiveRecompute.apply
    return region(LINEAR, "save_matmuls", a, **world.options()) + region(body, None, a, b, **world.options())


def _saved(world: World, body: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if world.codec is None:
        return body(a, b)
    with gradckpt.compress_saved({"codec": world.codec, "min_numel": 0}):
        return body(a, b)


def _on_cpu(world: World, body: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return gradckpt.checkpoint(body, a, b, **world.options())


WAYS = (_direct, _checkpoint, _shared, _torchs, _reentrant, _contexts, _selective, _saved, _on_cpu)


def draw_body(rng: random.Random, depth: int) -> list[Any]:
    """Steps: an operator, or (way, body)."""
    steps: list[Any] = []
    for _ in range(rng.randint(1, 3)):
        if depth and rng.random() < 0.6:
            steps.append((rng.choice(WAYS), draw_body(rng, depth - 1)))
        else:
            steps.append(rng.choice(OPERATORS))
    return steps


def run_body(world: World, steps: list[Any], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    for step in steps:
        if isinstance(step, tuple):
            way, body = step
            a = way(world, functools.partial(run_body, world, body), a, b)
        else:
            a = step(a, b)
    return a


def run(world: World, steps: list[Any], seed: int) -> list[torch.Tensor | None]:
    """Loss and gradients."""
    torch.manual_seed(seed)
    leaves = [x.clone().requires_grad_() for x in STARTS[:2]]
    a, b = (x * 1 for x in leaves)
    world.given += [a, b]
    try:
        loss = (run_body(world, steps, a, b) * STARTS[2]).sum()
        loss.backward()
    finally:
        world.given.clear()
        world.held.clear()  # its graphs hold functions that hold the world
    return [loss.detach(), *(x.grad for x in (*leaves, WEIGHT, *LINEAR.parameters()))]


# ---- the mode ----


def elsewhere(codec: str) -> None:
    """What another thread does meanwhile."""
    x = STARTS[0].clone().requires_grad_()
    h = x * 1
    y = gradckpt.checkpoint(torch.sin, h, compress={"codec": codec, "min_numel": 0})
    with gradckpt.compress_saved({"codec": codec, "min_numel": 0}):
        y = y * h
    torch.autograd.grad(y.sum(), x)


class Chaos(TorchFunctionMode):
    def __init__(self, rng: random.Random, world: World, wild: bool, raise_at: tuple[int, ...]) -> None:
        super().__init__()
        self.rng, self.world, self.wild, self.raise_at = rng, world, wild, raise_at
        self.calls, self.changed = 0, False
        self.raised: list[BaseException] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        if self.calls in self.raise_at:
            self.raised.append(self.rng.choice((KeyboardInterrupt, MemoryError))(f"call {self.calls}"))
            raise self.raised[-1]
        if self.rng.random() < 0.25:
            self.disturb()
        return func(*args, **(kwargs or {}))

    def disturb(self) -> None:
        action = self.rng.randrange(60)
        if action < 20 and self.world.held:
            self.world.held.pop(self.rng.randrange(len(self.world.held)))
        elif action < 30:
            self.world.held.clear()
        elif action < 36:
            gc.collect(self.rng.randrange(3))
        elif action < 55:
            time.sleep(0)
        elif action < 57:
            thread = threading.Thread(target=elsewhere, args=(self.rng.choice(CODECS),))
            thread.start()
            thread.join()
        elif self.wild and self.world.given:
            self.change(self.rng.choice(self.world.given))

    def change(self, given: Any) -> None:
        """A container is emptied; a tensor gets other memory of another shape."""
        self.changed = True
        if isinstance(given, dict):
            given["b"].clear()
            given.clear()
        else:
            given.data = torch.ones(self.rng.choice((1, ROWS - 1, 3 * ROWS)), WIDTH)


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


# ---- one program ----


def chain_of(error: BaseException | None) -> list[BaseException]:
    """An exception and what it was raised from, or while."""
    found: list[BaseException] = []
    queue = [error]
    while queue:
        e = queue.pop()
        if e is not None and e not in found:
            found.append(e)
            queue += [e.__cause__, e.__context__]
    return found


def same(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(
        x is y or (x is not None and y is not None and torch.allclose(x, y, 0, 0, equal_nan=True))
        for x, y in zip(a, b, strict=True)
    )


def forget_gradients() -> None:
    for p in (WEIGHT, *LINEAR.parameters()):
        p.grad = None


def left_behind() -> dict[str, int]:
    gc.collect()
    found = Counter(type(x).__name__ for x in gc.get_objects() if type(x).__module__ == "gradckpt._C")
    return {
        "live_bytes": gradckpt.stats()["live_bytes"],
        "hooks": AUTOGRAD._top_saved_tensors_default_hooks(True) is not None,
        "no grad": not torch.is_grad_enabled(),
        "recomputing": gradckpt.policies.is_recomputing(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "key": torch._C._dispatch_tls_is_dispatch_key_included(torch._C._dispatch_key_parse("Negative")),
        **{name: found[name] for name in ("Frame", "OpStorage", "OpOutput")},
    }


def program(seed: int, counts: Counter[str]) -> bool:
    """True if nothing may be left behind."""
    rng = random.Random(seed)
    codec, kind = rng.choice(CODECS), rng.choice(("calm", "calm", "raise", "raise", "wild"))
    steps = draw_body(rng, 2)
    with Counting() as counting:
        want = run(World(codec), steps, seed)
    forget_gradients()
    if codec in EXACT:
        plain = run(World(None), steps, seed)
        forget_gradients()
        assert same(want, plain), (seed, "codec", codec)
    world = World(codec)
    times = rng.choice((1, 1, 2)) if kind == "raise" else 0
    raise_at = tuple(rng.randint(1, counting.calls) for _ in range(times))
    chaos = Chaos(rng, world, kind == "wild", raise_at)
    unraisable: list[Any] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda u: unraisable.append(u.exc_value)
    arrived: BaseException | None = None
    got = None
    try:
        with chaos:
            got = run(world, steps, seed)
    except BaseException as error:
        arrived = error
    finally:
        sys.unraisablehook = hook
    forget_gradients()
    seen = [e for error in (arrived, *unraisable) for e in chain_of(error)]
    lost = [e for e in chaos.raised if not any(e is s for s in seen)]
    counts.update(programs=1, calls=chaos.calls, raised=len(chaos.raised), unraisable=len(unraisable))
    counts["changed"] += chaos.changed
    assert not lost, (seed, "lost", lost, arrived)
    if chaos.raised:
        assert arrived is not None, (seed, chaos.raised)
    elif not chaos.changed:
        if arrived is not None:
            raise AssertionError(f"seed {seed}: an undisturbed program failed") from arrived
        assert got is not None
        assert same(got, want), (seed, "result", codec)
    elif arrived is not None:
        assert isinstance(arrived, Exception), (seed, arrived)
    seen.clear()
    chaos.raised.clear()
    for e in (arrived, *unraisable):
        clear_frames(e)
    # torch's own checkpoint makes uncollected cycles when a recompute fails; so does a
    # graph whose inputs got other shapes.
    return not chaos.changed and (arrived is None or "_torchs" not in repr(steps))


def clear_frames(error: BaseException | None) -> None:
    """Tracebacks hold the tensors of every frame."""
    for e in chain_of(error):
        e.__traceback__ = e.__cause__ = e.__context__ = None


def main(first: int, count: int) -> Counter[str]:
    torch.set_num_threads(1)
    for codec in CODECS:
        elsewhere(codec)
        run(World(codec), [(way, list(OPERATORS)) for way in WAYS], 0)  # whatever is imported late
    forget_gradients()
    gc.collect()
    gc.freeze()  # a collection looks at what programs made, and at nothing else
    counts: Counter[str] = Counter()
    before = left_behind()
    try:
        for seed in range(first, first + count):
            strict = program(seed, counts)
            after = left_behind()
            assert not strict or all(after[name] <= before[name] for name in after), (seed, before, after)
            before = after
    finally:
        gc.unfreeze()
    return counts


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
