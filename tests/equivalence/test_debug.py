"""debug=True and set_checkpoint_debug_enabled: the operator log in the error, and what changed in a
region's arguments between its forward and its recompute."""

import collections
import dataclasses
import enum
import functools
import gc
import logging
import re
import threading
import types
import warnings
import weakref

import pytest
import torch
from _pytest.logging import LogCaptureHandler
from behaviours import behaviour, leaf, raises_in
from torch.utils.checkpoint import CheckpointError, set_checkpoint_debug_enabled

import gradckpt
from gradckpt import compat


@pytest.fixture(autouse=True)
def _no_log_handlers(monkeypatch):
    """The logging mode behind debug=True logs tensors in a way that
    pytest's own handler cannot format."""
    monkeypatch.setattr(LogCaptureHandler, "handleError", lambda self, record: None)


def fails(run, first, again, enabled=None, **options):
    """The text of the error, without the stack traces,
    whose lines are those of each implementation."""
    functions = iter([first] + [again] * 3)
    with set_checkpoint_debug_enabled(enabled):
        y = run.checkpoint(run.watched(lambda t: next(functions)(t)), leaf(4, 4), **options)
    with pytest.raises(CheckpointError) as caught:
        y.sum().backward()
    text = str(caught.value)
    run.log(re.sub(r"(?m)^(?!\$).*:\d+:.*\n", "", text))
    run.log("this file" if __file__ in text else "no traces")
    run.log(caught.value.__cause__)


DIFFERENT = {
    "fewer": (lambda t: t.sin().exp().tanh(), lambda t: t.sin() + 1, {}),
    "more": (lambda t: t.sin().exp(), lambda t: t.sin().exp().tanh(), {"early_stop": False}),
    "shapes": (lambda t: (t @ t).exp().sin(), lambda t: (t @ t[:, :2]).exp().sin(), {}),
    "in place and constants": (lambda t: (t * 2).add_(1).exp().view(-1).sin(), lambda t: (t * 2).exp(), {}),
}


@pytest.mark.parametrize("name", DIFFERENT)
@behaviour
def test_log_when_saved_tensors_differ(run, name):
    first, again, options = DIFFERENT[name]
    fails(run, first, again, debug=True, **options)


@pytest.mark.parametrize("argument", [True, False])
@pytest.mark.parametrize("enabled", [True, False, None])
@behaviour
def test_context_manager_beats_the_argument(run, enabled, argument):
    fails(run, lambda t: t.sin().exp().tanh(), lambda t: t.sin() + 1, enabled=enabled, debug=argument)


@behaviour
def test_context_managers_nest_and_count_at_the_forward(run):
    with set_checkpoint_debug_enabled(True):
        fails(run, lambda t: t.sin().exp(), lambda t: t + 1, enabled=False)
        fails(run, lambda t: t.sin().exp(), lambda t: t + 1, enabled=None)
    y = run.checkpoint(lambda t: t.sin().exp(), leaf(4))
    with set_checkpoint_debug_enabled(True):
        y.sum().backward()


@behaviour
def test_debug_changes_no_result(run):
    x = leaf(4, 4)
    y = run.checkpoint(run.watched(lambda t: torch.nn.functional.dropout(t @ t).sin()), x, debug=True)
    y.sum().backward()
    return y, x.grad, torch.rand(2)


@behaviour
def test_debug_serves_one_backward(run):
    """The contexts that log can be entered once."""
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: t.sin().exp()), x, debug=True)
    y.sum().backward(retain_graph=True)
    with run.error(AttributeError):
        y.sum().backward()
    return x.grad


@behaviour
def test_other_exceptions_pass_by_the_log(run):
    y = run.checkpoint(raises_in(2, LookupError, "mine"), leaf(4), debug=True)
    with run.error(LookupError, "mine"):
        y.sum().backward()


@behaviour
def test_unpacked_twice_is_logged_too(run):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t.exp()

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0] * ctx.saved_tensors[0]

    y = run.checkpoint(lambda t: Twice.apply(t.sin()), leaf(4), debug=True)
    with pytest.raises(CheckpointError, match="An error happened while unpacking tensors") as caught:
        y.sum().backward()
    run.log(caught.value.__cause__)


# ---- arguments that changed ----

INT8 = {"codec": "int8", "min_numel": 1}


@dataclasses.dataclass
class Settings:
    scale: float = 3.0
    mask: object = None


class Own:
    __slots__ = ("__dict__", "inner", "unset")

    def __init__(self):
        self.inner, self.scale = Settings(), 3.0


class Dict(dict):
    pass


class List(list):
    pass


Pair = collections.namedtuple("Pair", "left right")


def with_scale(x, scale=3.0):
    x.scale = scale
    return x


def own(**attributes):
    made = Own()
    vars(made).update(attributes)
    return made


def sine(x, *rest, **more):
    return x.sin().exp()


def named(change, *args, function=sine, compress=None, checkpoint=gradckpt.checkpoint, **kwargs):
    """What the warning of a region names when its arguments change between forward and backward."""
    options = {} if compress is None else {"compress": compress}
    if checkpoint is compat.checkpoint:
        options["use_reentrant"] = False
    y = checkpoint(function, leaf(4, 4) * 1, *args, debug=True, **options, **kwargs)
    change()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y.sum().backward()
    texts = [str(each.message) for each in caught if "changed between" in str(each.message)]
    assert len(texts) <= 1
    assert all(each.filename == __file__ for each in caught if "changed between" in str(each.message))
    return re.sub("^gradckpt: arguments of .* changed .*, or pass a copy: ", "", texts[0]) if texts else ""


def scaled(x):
    x.scale = 4.0


def with_itself():
    made = own()
    made.me = made
    return made


def use_libraries(x):
    x.logger.disabled = True
    x.lock.acquire()
    x.queue.append(1)


def put_back(x):
    x.scale, x.inner, x.nan, x.many = 3.0, Settings(), float("nan"), list(x.many)


def norm_with_cache():
    norm = torch.nn.BatchNorm1d(4)
    norm.cache = []
    return norm


def use_norm(norm):
    norm.cache.append(1)
    norm(torch.randn(3, 4))


class Level(enum.Enum):
    LOW = 1


SCALED, LONGER = "args[1].scale: 3.0, now 4.0", "args[1]: 2 items, now 3 items"
#: What is passed, what happens to it between forward and backward, and what is named.
NAMED = {
    "an attribute": (Settings, scaled, SCALED),
    "of an object with slots": (Own, scaled, SCALED),
    "of a namespace": (lambda: types.SimpleNamespace(scale=3.0), scaled, SCALED),
    "of a dict": (lambda: with_scale(Dict(a=1)), scaled, SCALED),
    "of a tensor": (lambda: with_scale(torch.zeros(4)), scaled, SCALED),
    "of an object that leads to itself": (with_itself, scaled, SCALED),
    "of an object inside": (Own, lambda x: setattr(x.inner, "scale", None), "args[1].inner.scale: 3.0, now None"),
    "an attribute more": (
        Own,
        lambda x: setattr(x, "new", 1),
        "args[1]: Own with 2 attributes, now Own with 3 attributes",
    ),
    "a longer list": (lambda: [1, 2], lambda x: x.append(3), LONGER),
    "an item": (lambda: List([1, 2]), lambda x: x.__setitem__(0, 5), "args[1][0]: 1, now 5"),
    "an item of a dict": (lambda: {"a": 1}, lambda x: x.update(a=2.5), "args[1]['a']: 1, now 2.5"),
    "of an OrderedDict": (lambda: collections.OrderedDict(a=1), lambda x: x.update(a=2.5), "args[1]['a']: 1, now 2.5"),
    "another key": (lambda: {"a": 1, "b": 2}, lambda x: x.update(c=x.pop("a")), "args[1]: other contents"),
    "a long text": (
        lambda: {"b": "x" * 99},
        lambda x: x.update(b=b"x" * 99),
        f"args[1]['b']: '{'x' * 12}...{'x' * 13}', now b'{'x' * 11}...{'x' * 13}'",
    ),
    "in a named tuple": (lambda: Pair([1], 2), lambda x: x.left.clear(), "args[1].left: 1 item, now 0 items"),
    "a set": (lambda: {1, 2}, lambda x: x.clear(), "args[1]: 2 items, now 0 items"),
    "a version": (lambda: Settings(mask=torch.ones(1)), lambda x: x.mask.add_(1), "args[1].mask: version 0, now 1"),
    "a tensor that was replaced": (
        lambda: Settings(mask=torch.zeros(4)),
        lambda x: setattr(x, "mask", torch.zeros(4)),  # equal values do not make it the same
        "args[1].mask: another tensor",
    ),
    "a parameter": (norm_with_cache, lambda x: torch.nn.init.zeros_(x.weight), "args[1].weight: version 1, now 2"),
    "data of a parameter": (norm_with_cache, lambda x: x.weight.data.add_(1), ""),  # as everywhere in autograd
    "a module's own affairs": (norm_with_cache, use_norm, ""),
    "objects of libraries": (  # a logger remembers which levels it has
        lambda: own(logger=logging.Logger("of a test"), lock=threading.Lock(), queue=collections.deque()),
        use_libraries,
        "",
    ),
    "another object of a library": (
        lambda: own(lock=threading.Lock()),
        lambda x: setattr(x, "lock", None),
        "args[1].lock: lock, now None",
    ),
    "what stays": (lambda: own(nan=float("nan"), level=Level.LOW, many=[Settings(mask=torch.ones(1))]), put_back, ""),
    "what is deep": (
        lambda: functools.reduce(lambda inside, _: [inside], range(100), [1]),
        lambda x: functools.reduce(lambda outside, _: outside[0], range(100), x).append(2),
        "",
    ),
    "what comes after thousands": (lambda: [[0] * 1500 for _ in range(4)], lambda x: x[3].__setitem__(1400, 1), ""),
    "what comes before them": (
        lambda: [[0] * 1500 for _ in range(4)],
        lambda x: x[0].__setitem__(1400, 1),
        "args[1][0][1400]: 0, now 1",
    ),
    "many changes": (
        lambda: list(range(12)),
        lambda x: x.__setitem__(slice(None), range(1, 13)),
        f"{', '.join(f'args[1][{i}]: {i}, now {i + 1}' for i in range(5))}, and 7 more",
    ),
}


@pytest.mark.parametrize("compress", [None, INT8], ids=["by reference", "int8"])
@pytest.mark.parametrize("name", NAMED)
def test_changes_are_named(name, compress):
    make, change, said = NAMED[name]
    given = make()
    assert named(functools.partial(change, given), given, compress=compress) == said


def test_changes_of_several_arguments_are_named():
    mask, nested, settings = torch.zeros(4), torch.zeros(4), Settings(mask=torch.zeros(4))
    change = functools.partial(torch._foreach_add_, [mask, nested, settings.mask], 1)
    assert named(change, {"a": [nested]}, settings, mask=mask) == (
        "kwargs['mask']: version 0, now 1, args[2].mask: version 0, now 1, args[1]['a'][0]: version 0, now 1"
    )


def test_what_a_partial_binds_is_named():
    settings, items = Settings(), []

    def change():
        settings.scale = 4.0
        items.append(1)

    function = functools.partial(functools.partial(sine, settings=settings), items=items)
    assert named(change, function=function) == (
        "function.keywords['items']: 0 items, now 1 item, function.keywords['settings'].scale: 3.0, now 4.0"
    )


def test_what_the_function_itself_changed_is_named():
    """It took the last tensor out of a list; the recompute would take another."""
    items = [1, 2]
    y = named(lambda: None, items, function=lambda x, items: x.sin() * items.pop())
    assert y == "args[1]: 2 items, now 1 item"


def test_what_a_region_has_copies_of_does_not_count():
    """A compressed tensor, and the list that is made again around it; what is beside it does."""
    h, mask, settings = leaf(4, 4) * 1, torch.zeros(4), Settings()
    items = [h, mask, settings]

    def change():
        items.append(1)
        items[0] = None
        h.detach().add_(1)

    assert named(change, items, compress=INT8) == ""
    items = [h, mask, settings]
    assert named(change, items) == "args[1]: 3 items, now 4 items, args[1][0]: version 1, now None"

    items[:] = [h, mask, settings]

    def change_others():
        mask.add_(1)
        settings.scale = 4.0

    assert named(change_others, items, compress=INT8) == "args[1][1]: version 0, now 1, args[1][2].scale: 3.0, now 4.0"


def raises(*args, **kwargs):
    raise LookupError


class Odd:
    scale = property(raises)
    __getattr__ = __getattribute__ = __eq__ = __hash__ = __repr__ = __len__ = __iter__ = raises


class OddDict(dict):
    __iter__ = items = keys = values = __len__ = __getitem__ = __repr__ = __eq__ = raises


class OddInt(int):
    __repr__ = __str__ = __eq__ = __hash__ = raises


class OddModule(torch.nn.Module):
    named_parameters = raises


def test_objects_that_raise_are_not_looked_at():
    own = types.SimpleNamespace(odd=Odd(), table=OddDict(a=1), numbers=[OddInt(3)], scale=3.0)

    def change():
        object.__setattr__(own.odd, "new", 1)
        dict.update(own.table, a=2)
        own.numbers[0], own.scale = OddInt(4), 4.0

    assert named(change, own) == "args[1].scale: 3.0, now 4.0"
    others = [(i for i in "abc"), weakref.ref(Odd), sine, torch, torch.jit, torch.ones(3, device="meta"), OddModule()]
    assert named(lambda: others.append(1), others) == "args[1]: 7 items, now 8 items"
    with torch.inference_mode():
        first, second = torch.ones(3), torch.ones(3)
    own = Settings(mask=first)
    assert named(lambda: setattr(own, "mask", second), own) == "args[1].mask: another tensor"


def test_no_tensor_is_kept_alive():
    own = Settings(mask=torch.ones(3))
    gone = weakref.ref(own.mask)

    def change():
        own.mask = None
        gc.collect()
        assert gone() is None

    assert named(change, own) == "args[1].mask: version 0, now None"


def test_the_warning_names_the_function():
    settings = Settings()
    y = gradckpt.checkpoint(functools.partial(sine), leaf(4), settings, debug=True)
    settings.scale = 4.0
    with pytest.warns(UserWarning, match=r"^gradckpt: arguments of sine changed .*: args\[1\].scale: 3.0, now 4.0$"):
        y.sum().backward()


def test_parameters_that_changed_still_raise_first():
    net = torch.nn.Linear(4, 4)
    y = gradckpt.checkpoint(net, leaf(4, 4), debug=True)
    torch.nn.init.zeros_(net.weight)
    said = r"parameters changed .* would be wrong; call optimizer.* backward: weight \(version 1, now 2\)$"
    with pytest.raises(RuntimeError, match=said):
        y.sum().backward()


def test_without_debug_and_in_compat_changes_are_silent_as_in_torch():
    settings = Settings()
    change = functools.partial(setattr, settings, "scale", 4.0)
    assert named(change, settings, checkpoint=compat.checkpoint) == ""
    y = gradckpt.checkpoint(sine, leaf(4), settings)
    settings.scale = 5.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y.sum().backward()
