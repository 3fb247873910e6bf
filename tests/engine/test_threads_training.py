"""Four threads train one model at once: gradients of integers are those of one thread,
every hook is called once."""

import collections
import contextlib
import random
import sys
import threading
import time

import pytest
import torch

import gradckpt

THREADS = 4
SR = gradckpt.SelectiveRecompute.apply


@pytest.fixture(autouse=True)
def _threads_take_turns_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


class Block(torch.nn.Module):
    """Of integers, whose sums are exact in any order."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.scale = torch.nn.Parameter(torch.empty(8))
        for p in self.parameters():
            p.data = torch.randint(-1, 2, p.shape).float()

    def forward(self, x):
        return self.down(self.up(x).relu()) * self.scale


class Nested(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return SR(self.block, None, gradckpt.checkpoint(self.block, x).relu()) + x


def ways(compress):
    """Each takes a module and its input."""

    def saved(block, x):
        with gradckpt.compress_saved(compress) if compress else contextlib.nullcontext():
            return block(x)

    return {
        "checkpoint": lambda block, x: gradckpt.checkpoint(block, x, compress=compress),
        "closure": lambda block, x: gradckpt.checkpoint(lambda t: block(t), x, compress=compress),
        "selective": lambda block, x: SR(block, None, x, compress=compress),
        "selective, kept": lambda block, x: SR(block, "save_matmuls", x, compress=compress),
        "compress_saved": saved,
        "nested": lambda block, x: SR(Nested(block), None, x, compress=compress),
        "nested in checkpoint": lambda block, x: gradckpt.checkpoint(Nested(block), x, compress=compress),
    }


CONFIGS = (None, {"codec": "raw", "min_numel": 0}, {"codec": "lossless", "min_numel": 0})
WAYS = [way for compress in CONFIGS for way in ways(compress).values()]


class Hooks:
    """Of a parameter: one stays and doubles the gradient, one of each thread comes and goes."""

    def __init__(self, parameter):
        self.parameter = parameter
        self.calls = collections.Counter()
        parameter.register_hook(self.double)

    def double(self, grad):
        self.calls[threading.get_ident()] += 1
        return grad * 2

    @contextlib.contextmanager
    def own(self):
        """Called once in the thread that registered it, whatever the others do meanwhile."""
        me, calls = threading.get_ident(), []
        handle = self.parameter.register_hook(lambda grad: calls.append(1) if threading.get_ident() == me else None)
        yield
        handle.remove()
        assert len(calls) == 1


def step(block, hooks, way, x):
    """The gradient of the input; those of parameters are added up in `.grad`, by all threads."""
    before = [h.calls[threading.get_ident()] for h in hooks]
    x.grad = None
    h = x * 1
    for _ in range(2):
        h = way(block, h)
    loss = h.sum()
    with hooks[0].own(), hooks[1].own():
        loss.backward()
    assert [h.calls[threading.get_ident()] - n for h, n in zip(hooks, before, strict=True)] == [1, 1]
    return x.grad


def work(block, hooks, seed, steps, log):
    """Steps by count, or until a time."""
    choose = random.Random(seed)
    x = torch.randint(-2, 3, (4, 8), generator=torch.Generator().manual_seed(seed)).float().requires_grad_()
    done = 0
    while done < steps if isinstance(steps, int) else time.monotonic() < steps:
        way = choose.randrange(len(WAYS))
        log.append((seed, way, step(block, hooks, WAYS[way], x).clone()))
        done += 1


def train(steps):
    torch.manual_seed(0)
    block, errors, log = Block(), [], []
    hooks = [Hooks(block.up.weight), Hooks(block.scale)]

    def guarded(seed):
        try:
            work(block, hooks, seed, steps, log)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(seed,), daemon=True) for seed in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60 + (0 if isinstance(steps, int) else steps - time.monotonic()))
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    if errors:
        raise errors[0]
    together = [p.grad for p in block.parameters()]
    # The same steps, one after the other, without us.
    block.zero_grad()
    expected = {}
    counts = collections.Counter((seed, way) for seed, way, _ in log)
    sums = [torch.zeros_like(p, dtype=torch.float64) for p in block.parameters()]
    for (seed, way), n in counts.items():
        x = torch.randint(-2, 3, (4, 8), generator=torch.Generator().manual_seed(seed)).float().requires_grad_()
        block.zero_grad()
        h = x * 1
        for _ in range(2):
            h = plainly(way)(block, h)
        h.sum().backward()
        expected[seed, way] = x.grad
        sums = [s + n * p.grad.double() for s, p in zip(sums, block.parameters(), strict=True)]
    assert all(torch.equal(grad, expected[seed, way]) for seed, way, grad in log)
    if max(s.abs().max().item() for s in sums) < 2**24:
        assert all(torch.equal(a.double(), b) for a, b in zip(together, sums, strict=True))
    assert gradckpt.stats()["live_bytes"] == 0
    return len(log)


def plainly(way):
    if way % len(ways(None)) >= 5:
        return lambda block, x: block(block(x).relu()) + x
    return lambda block, x: block(x)


def test_four_threads_train_as_one():
    assert train(60) == THREADS * 60


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_four_threads_train_for_ten_minutes():
    end = time.monotonic() + 600
    while time.monotonic() < end:  # in parts: sums of gradients stay exact
        assert train(min(time.monotonic() + 10, end)) > 0
