"""checkpoint_sequential: torch's exact one in gradckpt.compat, and ours with "sqrt",
boundaries and several tensors."""

import copy
import functools
import inspect
import pickle
import warnings

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from small_models import RAW_NORMS, different
from torch import nn

import gradckpt
import gradckpt.compat
from gradckpt import compat
from gradckpt._engine import sequential
from gradckpt._engine.sequential import Segment, checkpoint_sequential

BOTH = {"torch": torch_checkpoint.checkpoint_sequential, "compat": compat.checkpoint_sequential}


class Counted(nn.Module):
    """A layer that counts its runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x):
        self.runs += 1
        return self.linear(x).sin()


def chain(n):
    torch.manual_seed(0)
    return nn.Sequential(*(Counted() for _ in range(n)))


def train(net, call, container=lambda net: net):
    """One step: the outcome, and how often each layer ran; for an error, its class and text."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(container(net), x * 1).square().sum().backward()
    except Exception as error:
        return type(error), str(error)
    grads = {"x": x.grad, **{name: p.grad for name, p in net.named_parameters()}}
    return [layer.runs for layer in net], [(w.category, str(w.message), w.filename) for w in caught], grads


def assert_same(a, b):
    assert a[:-1] == b[:-1]
    assert a[-1] == b[-1] if isinstance(a[-1], str) else different(a[-1], b[-1]) == []


# ---- compat ----

SEGMENTS = [1, 2, 3, 4, 5, 6, 7, 9, 0, -1, -2, True, 2.0, "sqrt", None, [2], torch.tensor(2)]


@pytest.mark.parametrize("use_reentrant", [False, True, None])
@pytest.mark.parametrize("segments", SEGMENTS, ids=str)
@pytest.mark.parametrize("n", [1, 5, 6])
def test_compat_is_torch(n, segments, use_reentrant):
    runs = [train(chain(n), lambda net, x, call=call: call(net, segments, x, use_reentrant)) for call in BOTH.values()]
    assert_same(*runs)


def repeated(call, net, x):
    return call(nn.Sequential(net[0], net[1], net[0]), 2, x, False)


def with_keywords(**keywords):
    return lambda call, net, x: call(net, 2, x, **keywords)


def in_container(container):
    return lambda call, net, x: call(container(net), 2, x, False)


def with_arguments(*arguments):
    return lambda call, net, x: call(*arguments)


#: What else torch's function is called with, and how it says no.
CALLS = {
    "no keywords": with_keywords(),
    "rng state not kept": with_keywords(use_reentrant=False, preserve_rng_state=False),
    "compress": with_keywords(use_reentrant=False, compress="int8"),
    "early_stop, debug": with_keywords(use_reentrant=False, early_stop=True, debug=False),
    "buffers, segments twice": with_keywords(buffers="once", segments=2),
    "list": in_container(list),
    "tuple": in_container(tuple),
    "ModuleList": in_container(nn.ModuleList),
    "a repeated module": repeated,
    "nothing": with_arguments(),
    "one argument": with_arguments(1),
    "two arguments": with_arguments(1, 2),
    "None for functions": with_arguments(None, 2, 3),
    "no functions": with_arguments([], 1, 3),
    "no functions, two segments": with_arguments([], 2, 3),
    "an iterator": with_arguments(iter([]), 1, 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_compat_takes_and_refuses_what_torch_does(name):
    assert_same(*(train(chain(4), functools.partial(CALLS[name], call)) for call in BOTH.values()))


def test_compat_has_torchs_signature_and_name():
    ours, theirs = BOTH["compat"], BOTH["torch"]
    assert ours.__name__ == ours.__qualname__ == theirs.__qualname__
    assert [(p.name, p.kind, p.default) for p in inspect.signature(ours).parameters.values()] == [
        (p.name, p.kind, p.default) for p in inspect.signature(theirs).parameters.values()
    ]


# ---- ours ----

#: segments, and how many functions each segment has, of 10
SPLITS = [
    (1, [10]),
    (2, [5, 5]),
    (3, [3, 3, 4]),
    (4, [2, 2, 2, 4]),
    (10, [1] * 10),
    (torch.tensor(2), [5, 5]),
    ("sqrt", [3, 3, 4]),
    ([], [10]),
    ([1], [1, 9]),
    ([4, 9], [4, 5, 1]),
    ((2, 3), [2, 1, 7]),
    (range(2, 10, 2), [2] * 5),
]


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("segments", "sizes"), SPLITS, ids=[str(s) for s, _ in SPLITS])
def test_segments(segments, sizes, use_reentrant, monkeypatch):
    """All but the last are regions, run twice; the gradients are those of the plain chain."""
    regions = []

    def spy(function, *args, **kwargs):
        regions.append(len(function.functions))
        return original(function, *args, **kwargs)

    original = gradckpt.checkpoint
    monkeypatch.setattr(sequential, "checkpoint", spy)
    net = chain(10)
    plain = train(copy.deepcopy(net), lambda net, x: net(x))
    ours = train(net, lambda net, x: checkpoint_sequential(net, segments, x, use_reentrant))
    assert regions == sizes[:-1]
    assert ours[0] == [2] * (10 - sizes[-1]) + [1] * sizes[-1]
    assert different(plain[-1], ours[-1]) == []


@pytest.mark.parametrize("n", range(1, 30))
def test_sqrt_is_rounded(n):
    runs = train(chain(n), lambda net, x: checkpoint_sequential(net, "sqrt", x))[0]
    segments = round(n**0.5)
    assert runs == [2] * (n // segments * (segments - 1)) + [1] * (n - n // segments * (segments - 1))


REFUSED = [
    (0, ValueError, "from 1 to the number of functions, 4; got 0"),
    (-2, ValueError, "got -2"),
    (5, ValueError, "got 5"),
    (True, TypeError, "segments must be an int, not bool"),
    (2.0, TypeError, "segments must be an int, not float"),
    (None, TypeError, "segments must be an int, not NoneType"),
    ({2}, TypeError, "segments must be an int, not set"),
    ("root", ValueError, r"'sqrt' .*not 'root'"),
    (b"\x01", TypeError, "not bytes"),
    ([0], ValueError, "start at 0"),
    ([2, 4], ValueError, "start at 4: of 4 functions, the index is 1 to 3"),
    ([-1], ValueError, "start at -1"),
    ([1, 1], ValueError, "1 comes after 1"),
    ([3, 1], ValueError, "1 comes after 3"),
    ([1, 2.0], TypeError, "index in segments must be an int, not float"),
    ([True], TypeError, "index in segments must be an int, not bool"),
]


@pytest.mark.parametrize(("segments", "error", "text"), REFUSED, ids=[str(r[0]) for r in REFUSED])
def test_impossible_segments_are_named(segments, error, text):
    with pytest.raises(error, match=text):
        checkpoint_sequential(chain(4), segments, torch.randn(3, 4))


@pytest.mark.parametrize("segments", [1, "sqrt", []])
def test_no_functions(segments):
    with pytest.raises(ValueError, match="no functions"):
        checkpoint_sequential([], segments, torch.randn(3))


def test_unknown_keywords_are_named():
    with pytest.raises(ValueError, match=r"^Unexpected keyword arguments: early,scale$"):
        checkpoint_sequential(chain(4), 2, torch.randn(3, 4), early=True, early_stop=True, scale=2)


def test_without_use_reentrant_warns_once_as_torch():
    runs = [
        train(chain(6), lambda net, x, f=f: f(net, 3, x, use_reentrant=None))
        for f in (checkpoint_sequential, BOTH["torch"])
    ]
    assert len(runs[0][1]) == 1
    assert_same(*runs)


@pytest.mark.parametrize("container", [list, tuple, iter, nn.ModuleList, lambda net: (f for f in net)])
def test_any_iterable_of_callables(container):
    plain = train(chain(4), lambda net, x: net(x))
    ours = train(chain(4), lambda fs, x: checkpoint_sequential(fs, 2, x), container)
    assert different(plain[-1], ours[-1]) == []


def test_a_repeated_module_is_called_each_time():
    """As nn.Sequential does, and torch's function does not."""
    net = chain(2)
    twice = lambda net: nn.Sequential(net[0], net[1], net[0], net[1])  # noqa: E731
    plain = train(copy.deepcopy(net), lambda net, x: twice(net)(x))
    ours = train(net, lambda net, x: checkpoint_sequential(twice(net), 2, x))
    assert ours[0] == [3, 3]
    assert different(plain[-1], ours[-1]) == []


# ---- several tensors ----


class Pair(nn.Module):
    """(a, b) -> (a', b'), given as two arguments or as one tuple."""

    def __init__(self, whole):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.whole = whole

    def forward(self, *inputs):
        a, b = inputs[0] if self.whole else inputs
        assert len(inputs) == (1 if self.whole else 2)
        return (self.linear(a).sin() * b, b.cos())


def pairs(whole, call):
    torch.manual_seed(0)
    net = [Pair(whole) for _ in range(5)]
    a, b = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    out = call(net, (a * 1, b * 1))
    (out[0] * out[1]).sum().backward()
    return {str(i): t for i, t in enumerate((*out, a.grad, b.grad, *(p.grad for m in net for p in m.parameters())))}


def plain_pairs(net, value):
    for f in net:
        value = f(value) if f.whole else f(*value)
    return value


@pytest.mark.parametrize("compress", [None, RAW_NORMS])
@pytest.mark.parametrize("whole", [True, False], ids=["one object", "arguments"])
def test_tuples(whole, compress):
    gradckpt.stats.reset()
    plain = pairs(whole, plain_pairs)
    ours = pairs(whole, lambda net, x: checkpoint_sequential(net, 3, x, compress=compress, unpack_tuples=not whole))
    assert different(plain, ours) == []
    assert gradckpt.stats()["compressed"] == (4 if compress else 0)


def test_spread_tuples_work_reentrantly():
    """That form sees no tensor inside a tuple."""
    plain = pairs(False, plain_pairs)
    ours = pairs(False, lambda net, x: checkpoint_sequential(net, 3, x, True, unpack_tuples=True))
    assert different(plain, ours) == []


def test_spreading_leaves_other_values_alone():
    functions = [lambda x: [x, x], lambda pair: pair[0] * pair[1], lambda x: (x, 2), lambda x, n: x * n]
    x = torch.randn(3, requires_grad=True)
    out = checkpoint_sequential(functions, 4, x, unpack_tuples=True)
    assert torch.equal(out, x * x * 2)


# ---- what is passed on ----


def test_options_are_passed_on(monkeypatch):
    calls = []

    def spy(function, *args, **kwargs):
        calls.append(kwargs)
        return function(*args)

    monkeypatch.setattr(sequential, "checkpoint", spy)
    options = {
        "preserve_rng_state": False,
        "context_fn": torch_checkpoint.noop_context_fn,
        "determinism_check": "none",
        "debug": False,
        "early_stop": False,
        "buffers": "torch",
    }
    checkpoint_sequential(chain(3), 2, torch.randn(3, 4), compress="int8", **options)
    assert calls == [{"use_reentrant": False, "compress": "int8", **options}]


@pytest.mark.parametrize(
    ("buffers", "updates"),
    [(None, [1, 1, 1]), ("once", [1, 1, 1]), ("torch", [2, 2, 1]), ("first", [1, 2, 1]), ("mixed", [1, 2, 1])],
)
def test_running_statistics(buffers, updates):
    norms = [nn.BatchNorm1d(4) for _ in range(3)]
    layers = [norms[0], nn.Linear(4, 4), norms[1], nn.Linear(4, 4), norms[2]]
    if buffers == "mixed":
        layers[2] = lambda x: norms[1](x).exp()
    given = {"first": norms[0], "mixed": None}.get(buffers, buffers)
    x = torch.randn(3, 4, requires_grad=True)
    checkpoint_sequential(layers, [2, 4], x, buffers=given).square().sum().backward()
    assert [int(norm.num_batches_tracked) for norm in norms] == updates


def test_segment_can_be_pickled():
    segment = Segment([nn.Linear(4, 4), torch.sin], unpack_tuples=True)
    again = pickle.loads(pickle.dumps(segment))
    x = torch.randn(3, 4)
    assert torch.equal(again(x), segment(x))
    assert again.unpack_tuples
    assert "Linear" in repr(again)
