"""Threads: one recompute per region and backward, from any thread, and nothing hangs. Four
threads train one model at once: gradients of integers are those of one thread, every hook is called
once."""

import collections
import contextlib
import functools
import os
import random
import subprocess
import sys
import threading
import time

import processes
import pytest
import torch
from call_faults import instead
from processes import WAIT, alone
from test_processes import grad_of, leaf
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

import gradckpt
from gradckpt._engine.callbacks import TABLE

theirs = functools.partial(torchs_checkpoint, use_reentrant=False)


@pytest.fixture(autouse=True)
def _nothing_left_behind():
    torch.manual_seed(0)
    yield
    assert hooks_left() is None
    assert torch.is_grad_enabled()


def hooks_left():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_threads(*functions):
    """No thread may keep hooks, either."""

    def checked(function):
        try:
            function()
        finally:
            assert hooks_left() is None, "a thread kept hooks"
            assert torch.is_grad_enabled(), "the grad mode of a thread is off"

    processes.in_threads(*(functools.partial(checked, function) for function in functions))


# ---- two threads of one graph task. A device made of Python has a thread of its own,
# also without a GPU ----


@functools.cache
def toy_device():
    """Two functions: CPU to toy (saves its input), toy to CPU."""
    from torch.utils import backend_registration as registration

    class Module(registration._DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.bfloat16]

    registration._setup_privateuseone_for_python_backend("toy", Module())

    class Toy(torch.Tensor):
        @staticmethod
        def __new__(cls, values):
            self = torch._C._acc.create_empty_tensor(values.shape, values.dtype)
            self.__class__ = cls
            return self

        def __init__(self, values):
            self.values_on_cpu = values

    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return Toy(x.exp())

        @staticmethod
        def backward(ctx, grad):
            return grad.values_on_cpu * ctx.saved_tensors[0].exp()

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.values_on_cpu.clone()

        @staticmethod
        def backward(ctx, grad):
            return Toy(grad.clone())

    return Exp.apply, Back.apply


class TwoSides:
    """A region whose saved tensors the thread of the CPU and the
    thread of the device want at the same time."""

    def __init__(self, fail=False):
        self.to, self.back = toy_device()
        self.fail, self.runs, self.threads = fail, 0, set()
        self.wanted = [threading.Event(), threading.Event()]

    def region(self, t):
        self.runs += 1
        if self.runs > 1:
            assert all(e.wait(WAIT) for e in self.wanted)
            time.sleep(0.01)  # the other thread gets from its event to the region
        if self.runs == 2 and self.fail:
            raise ZeroDivisionError
        return t.sin().exp(), self.to(t.sin())

    def loss(self, x, **options):
        def want(event, *_):
            self.threads.add(threading.get_ident())
            event.set()

        host, device = gradckpt.checkpoint(self.region, x, **options)
        for y, event in zip((host, device), self.wanted, strict=True):
            y.grad_fn.register_prehook(functools.partial(want, event))
        return (host + self.back(device)).sum()


def one_task_two_threads(compress):
    for _ in range(20):
        two, x = TwoSides(), leaf(2048)
        two.loss(x * 1, compress=compress).backward()
        assert len(two.threads) == 2
        assert two.runs == 2
        assert torch.equal(x.grad, grad_of(lambda t: 2 * t.sin().exp(), x))


def one_task_two_threads_and_the_first_fails():
    for _ in range(10):
        two, x = TwoSides(fail=True), leaf(64)
        loss = two.loss(x)
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        time.sleep(0.03)  # the device's thread may still be about to end its part
        runs = two.runs
        x.grad = None
        loss.backward()
        assert two.runs == runs + 1
        assert torch.equal(x.grad, grad_of(lambda t: 2 * t.sin().exp(), x))


def one_group_many_tasks_two_threads():
    two, x = TwoSides(), leaf(64)
    loss = two.loss(x)
    other = gradckpt.checkpoint(lambda t: (t.sin().exp(), t.cos().exp()), x)
    with GraphExecGroup():  # known on the device's thread, too
        loss.backward()
        other[0].sum().backward()
        other[1].sum().backward()
    assert two.runs == 2


needs_toy_device = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot make a device in Python",
)


def two_threads():
    for compress in (None, "raw"):
        one_task_two_threads(compress)
    one_task_two_threads_and_the_first_fails()
    one_group_many_tasks_two_threads()


@needs_toy_device
def test_two_threads_of_one_backward_recompute_once():
    """Also when the first one's recompute raises, and in a group."""
    alone(two_threads)


@pytest.mark.parametrize("ck", [theirs, gradckpt.checkpoint], ids=["torch", "gradckpt"])
def test_saved_tensors_read_by_a_helper_thread_of_backward(ck):
    """A graph task is known to its own threads only: elsewhere each access is one from outside."""
    runs, read = [], []

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            in_threads(*[lambda: read.append(ctx.saved_tensors[0])] * 3)
            return grad * ctx.saved_tensors[0].exp()

    x = leaf(16)
    ck(lambda t: runs.append(1) or Reads.apply(t.sin()).cos(), x).sum().backward()
    assert len(runs) == 1 + 3 + 1
    assert all(torch.equal(r, x.sin()) for r in read)
    torch.testing.assert_close(x.grad, grad_of(lambda t: t.sin().exp().cos(), x))


@pytest.mark.parametrize("fails", [False, True])
def test_two_threads_in_one_group_recompute_once(fails):
    """The second one waits; it tries itself when the recompute of the first raises."""
    runs, entered, group = [], threading.Event(), GraphExecGroup()
    x, grads = leaf(64), [None, None]

    def region(t):
        runs.append(1)
        if len(runs) == 2:
            entered.set()
            time.sleep(0.05)
            if fails:
                raise ZeroDivisionError
        return t.sin().exp(), t.cos().exp()

    outputs = gradckpt.checkpoint(region, x, early_stop=False)

    def backward(i):
        with group:
            grads[i] = grad_of(lambda _: outputs[i], x)

    def first():
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            backward(0)

    def second():
        assert entered.wait(WAIT)
        backward(1)

    in_threads(first, second)
    assert len(runs) == 2 + fails
    assert fails or torch.equal(grads[0], grad_of(lambda t: t.sin().exp(), x))
    assert torch.equal(grads[1], grad_of(lambda t: t.cos().exp(), x))


def test_first_warning_about_compression_does_not_let_a_second_thread_in():
    x, runs, note, group = leaf(64, 64), [], TABLE["note_step"], GraphExecGroup()
    gradckpt.stats.reset()  # the first two steps are noted
    outputs = gradckpt.checkpoint(lambda t: runs.append(1) or (t.sin().exp(), t.cos().exp()), x * 1, compress="raw")

    def backward(i):
        with group:
            torch.autograd.grad(outputs[i].sum(), x, retain_graph=True)

    with instead(note_step=lambda eligible: (time.sleep(0.05), note(eligible))):
        in_threads(functools.partial(backward, 0), functools.partial(backward, 1))
    assert len(runs) == 2


LOCKS = """
import _thread, threading
entered, refused, allocate = threading.Event(), threading.Event(), _thread.allocate_lock
def lock():
    if entered.is_set() and not refused.is_set():
        refused.set()
        raise KeyboardInterrupt("no lock")
    return allocate()
_thread.allocate_lock = lock
import torch, gradckpt
from torch.utils.checkpoint import GraphExecGroup
runs, group, grads = [], GraphExecGroup(), {}
def region(t):
    runs.append(1)
    if len(runs) == 2:
        entered.set()
        assert refused.wait(30)
    return t.sin().exp(), t.cos().exp()
x = torch.ones(4, requires_grad=True)
outputs = gradckpt.checkpoint(region, x, early_stop=False)
def backward(i):
    with group:
        grads[i] = torch.autograd.grad(outputs[i].sum(), x, retain_graph=True)[0]
thread = threading.Thread(target=backward, args=(0,))
thread.start()
assert entered.wait(30)
try:
    backward(1)
except KeyboardInterrupt as error:
    print(error)
thread.join()
backward(1)
print(len(runs), [torch.equal(grads[i], torch.autograd.grad(y.sum(), x)[0]) for i, y in enumerate(region(x))])
"""


def test_a_thread_that_cannot_wait_says_so():
    """Here for a lock; so does one that Ctrl-C reaches."""
    out = subprocess.run([sys.executable, "-c", LOCKS], capture_output=True, text=True, timeout=4 * WAIT)
    assert out.stdout == "no lock\n2 [True, True]\n", (out.returncode, out.stderr[-2000:])


# ---- several backwards over one region ----


@pytest.mark.parametrize("compress", [None, "raw"])
def test_two_backwards_inside_one_region_at_once(compress):
    """Both are held inside the recompute until the other is there, too,
    after each of its saved tensors again."""
    x, runs, together, grads = leaf(2048), [], threading.Barrier(2), [[], []]

    def region(t, wait=True):
        runs.append(threading.get_ident())
        outputs = [t.sin(), t.cos()]  # autograd locks a node: two threads get to this region by different nodes only
        for _ in range(4):
            outputs = [o.exp().sin() for o in outputs]
            if wait and len(runs) > 1:
                together.wait(WAIT)
        return outputs

    outputs = gradckpt.checkpoint(region, x * 1, compress=compress, preserve_rng_state=False)

    def backward(i):
        grads[i].append(torch.autograd.grad(outputs[i].sum(), x, retain_graph=True)[0])

    for rounds in range(1, 11):
        in_threads(functools.partial(backward, 0), functools.partial(backward, 1))
        assert len(runs) == 1 + 2 * rounds
    for i in range(2):
        want = grad_of(lambda t, i=i: region(t, wait=False)[i], x)
        assert all(torch.equal(g, want) for g in grads[i])


def test_backwards_overtake_each_other_on_one_region():
    """The second begins and ends while the first is between two
    saved tensors of the same region."""
    x, runs, grads = leaf(64), [], []
    y = gradckpt.checkpoint(lambda t: runs.append(1) or t.sin().exp().tanh().exp(), x, preserve_rng_state=False).sum()
    nodes = [y.grad_fn.next_functions[0][0]]
    for _ in range(3):
        nodes.append(nodes[-1].next_functions[0][0])
    main = threading.get_ident()

    def overtake(*_):
        if threading.get_ident() == main:
            in_threads(lambda: grads.append(torch.autograd.grad(y, x, retain_graph=True)[0]))

    for node in nodes:
        node.register_prehook(overtake)
    grads.append(torch.autograd.grad(y, x, retain_graph=True)[0])
    assert len(grads) == 5
    assert len(runs) == 1 + 5
    assert all(torch.equal(g, grad_of(lambda t: t.sin().exp().tanh().exp(), x)) for g in grads)


# ---- many threads ----


@pytest.mark.parametrize("where", ["forward", "recompute"])
@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_thread_that_dies_in_a_step_leaves_the_rest_working(where, error):
    x, runs = leaf(8), []

    def region(t):
        runs.append(1)
        y = t.sin().exp()
        if len(runs) == (1 if where == "forward" else 2):
            raise error
        return y.sin()

    def dies():
        outputs.append(gradckpt.checkpoint(region, x))
        outputs[0].sum().backward(retain_graph=True)

    outputs = []
    with pytest.raises(error):
        in_threads(dies)
    y = outputs[0] if outputs else gradckpt.checkpoint(region, x)
    y.sum().backward()
    assert torch.equal(x.grad, grad_of(lambda t: t.sin().exp().sin(), x))


def forked_during_a_recompute():
    inside, go = threading.Event(), threading.Event()

    def function(x):
        if gradckpt.policies.is_recomputing() and threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go.wait(WAIT)
        return torch.dropout(x, 0.5, True).sin()

    x = leaf(1000)
    thread = threading.Thread(target=lambda: gradckpt.checkpoint(function, x * 1).sum().backward())
    thread.start()
    assert inside.wait(WAIT)
    child = os.fork()
    if child == 0:
        loss = gradckpt.checkpoint(function, x * 1).sum()
        torch.randn(10)
        before = torch.get_rng_state()
        torch.autograd.grad(loss, x)
        os._exit(0 if torch.equal(before, torch.get_rng_state()) else 7)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    go.set()
    thread.join()
    raise SystemExit(status)


def test_a_child_that_is_forked_during_a_recompute_restores_its_generator():
    alone(forked_during_a_recompute)


def test_recomputes_at_once_leave_the_generator_as_it_was():
    """As autograd's threads of several devices run them. The second one begins in the state of the
    first, and ends last."""
    first_is_inside, second_is_inside, first_is_done = (threading.Event() for _ in range(3))

    def first(x):
        if gradckpt.policies.is_recomputing():
            first_is_inside.set()
            assert second_is_inside.wait(WAIT)
        return x.exp().sin()

    def second(x):
        if gradckpt.policies.is_recomputing():
            second_is_inside.set()
            assert first_is_done.wait(WAIT)
        return x.exp().sin()

    loss = gradckpt.checkpoint(first, leaf(4)).sum()
    torch.rand(1)
    other = gradckpt.checkpoint(second, leaf(4)).sum()
    torch.rand(1)
    before = torch.get_rng_state()

    def backward():
        loss.backward()
        first_is_done.set()

    def backward_of_the_second():
        assert first_is_inside.wait(WAIT)
        other.backward()

    in_threads(backward, backward_of_the_second)
    assert torch.equal(torch.get_rng_state(), before)
    x = torch.ones(4, requires_grad=True)
    gradckpt.checkpoint(first, x).sum().backward()  # and so does the next one
    assert x.grad is not None
    assert torch.equal(torch.get_rng_state(), before)


# ---- four threads train one model ----


THREADS = 4
SR = gradckpt.SelectiveRecompute.apply


@pytest.fixture
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
    block, log = Block(), []
    hooks = [Hooks(block.up.weight), Hooks(block.scale)]
    in_threads(*(functools.partial(work, block, hooks, seed, steps, log) for seed in range(THREADS)))
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


@pytest.mark.usefixtures("_threads_take_turns_often")
def test_four_threads_train_as_one():
    assert train(60) == THREADS * 60


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("_threads_take_turns_often")
def test_four_threads_train_for_ten_minutes():
    end = time.monotonic() + 600
    while time.monotonic() < end:  # in parts: sums of gradients stay exact
        assert train(min(time.monotonic() + 10, end)) > 0


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    # Not through the end of the interpreter: torch's thread of the
    # device may still be putting objects away.
    os._exit(0)
