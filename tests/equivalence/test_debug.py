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
def test_debug_with_grad_off(run):
    with torch.no_grad():
        return run.checkpoint(run.watched(torch.sin), leaf(4), debug=True)


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


@behaviour
def test_debug_of_nested_regions(run):
    def outer(t):
        return run.checkpoint(run.watched(lambda u: u.sin().exp(), "inner"), t.tanh(), debug=True).cos()

    return run.gradients(run.watched(outer, "outer"), leaf(4))


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


@pytest.mark.parametrize("compress", [None, INT8], ids=["by reference", "int8"])
class TestNamed:
    def test_versions_of_tensors(self, compress):
        mask, nested, tensor = torch.zeros(4), torch.zeros(4), torch.zeros(4)
        own = Settings(mask=tensor)
        change = functools.partial(torch._foreach_add_, [mask, nested, tensor], 1)
        assert named(change, {"a": [nested]}, own, mask=mask, compress=compress) == (
            "kwargs['mask']: version 0, now 1, args[2].mask: version 0, now 1, args[1]['a'][0]: version 0, now 1"
        )

    def test_a_tensor_that_was_replaced(self, compress):
        """Equal values, or an address that is used again, do not make it the same."""
        own = Settings(mask=torch.zeros(4))

        def change():
            own.mask = None
            own.mask = torch.zeros(4)

        assert named(change, own, compress=compress) == "args[1].mask: another tensor"
        assert named(lambda: setattr(own, "mask", 1), own, compress=compress) == "args[1].mask: version 0, now 1"
        own = Settings()
        change = functools.partial(setattr, own, "mask", torch.zeros(4))
        assert named(change, own, compress=compress) == "args[1].mask: None, now a tensor"

    def test_attributes(self, compress):
        for make in (Settings, Own, lambda: types.SimpleNamespace(scale=3.0), lambda: with_scale(Dict(a=1))):
            own = make()
            change = functools.partial(setattr, own, "scale", 4.0)
            assert named(change, own, compress=compress) == "args[1].scale: 3.0, now 4.0"
        assert named(lambda: setattr(own, "new", 1), with_scale(Own()), compress=compress) == ""
        own = Own()
        assert named(lambda: setattr(own.inner, "scale", None), own, compress=compress) == (
            "args[1].inner.scale: 3.0, now None"
        )
        assert named(lambda: setattr(own, "new", 1), own, compress=compress) == (
            "args[1]: Own with 2 attributes, now Own with 3 attributes"
        )

    def test_attributes_of_tensors(self, compress):
        mask = with_scale(torch.zeros(4))
        assert named(lambda: with_scale(mask, 4.0), mask, compress=compress) == "args[1].scale: 3.0, now 4.0"

    def test_containers(self, compress):
        for kind in (list, List):
            items = kind([1, 2])
            assert named(lambda: items.append(3), items, compress=compress) == "args[1]: 2 items, now 3 items"  # noqa: B023
            assert named(lambda: items.__setitem__(0, 5), items, compress=compress) == "args[1][0]: 1, now 5"  # noqa: B023
        for kind in (dict, Dict, collections.OrderedDict):
            table = kind(a=1, b="x" * 99)
            change = functools.partial(table.__setitem__, "a", 2.5)
            assert named(change, table, compress=compress) == "args[1]['a']: 1, now 2.5"
            assert named(lambda: table.update(c=table.pop("a")), table, compress=compress) == (  # noqa: B023
                "args[1]: other contents"
            )
            assert named(lambda: table.update(b=b"x" * 99), table, compress=compress) == (  # noqa: B023
                f"args[1]['b']: '{'x' * 12}...{'x' * 13}', now b'{'x' * 11}...{'x' * 13}'"
            )
        pair, members = Pair([1], 2), {1, 2}
        assert named(pair.left.clear, pair, compress=compress) == "args[1].left: 1 item, now 0 items"
        assert named(members.clear, members, compress=compress) == "args[1]: 2 items, now 0 items"

    def test_what_a_partial_binds(self, compress):
        settings, items = Settings(), []

        def change():
            settings.scale = 4.0
            items.append(1)

        function = functools.partial(functools.partial(sine, settings=settings), items=items)
        assert named(change, function=function, compress=compress) == (
            "function.keywords['items']: 0 items, now 1 item, function.keywords['settings'].scale: 3.0, now 4.0"
        )

    def test_parameters_of_a_module_but_not_its_own_affairs(self, compress):
        norm = torch.nn.BatchNorm1d(4)
        norm.cache = []

        def change():
            norm.cache.append(1)
            norm(torch.randn(3, 4))

        assert named(change, norm, compress=compress) == ""
        assert named(lambda: norm.weight.data.add_(1), norm, compress=compress) == ""  # as everywhere in autograd
        assert named(lambda: torch.nn.init.zeros_(norm.weight), norm, compress=compress) == (
            "args[1].weight: version 1, now 2"
        )

    def test_what_the_function_itself_changed(self, compress):
        """It took the last tensor out of a list; the recompute would take another."""
        items = [1, 2]
        y = named(lambda: None, items, function=lambda x, items: x.sin() * items.pop(), compress=compress)
        assert y == "args[1]: 2 items, now 1 item"


def with_scale(x, scale=3.0):
    x.scale = scale
    return x


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


def test_only_so_much_is_looked_at():
    """An object that leads to itself is seen once, what is deep or after thousands is not."""
    own = Own()
    own.me = own
    assert named(lambda: setattr(own, "scale", 4.0), own) == "args[1].scale: 3.0, now 4.0"
    deep = [1]
    around = functools.reduce(lambda inside, _: [inside], range(100), deep)
    assert named(lambda: deep.append(2), around) == ""
    lists = [list(range(1500)) for _ in range(4)]
    assert named(lambda: lists[3].__setitem__(1400, 0), *lists) == ""
    assert named(lambda: lists[0].__setitem__(1400, 0), *lists) == "args[1][1400]: 1400, now 0"


def test_objects_of_libraries_are_not_looked_into():
    """They change for reasons of their own: a logger remembers which levels it has."""
    own = Own()
    own.logger, own.lock, own.queue = logging.Logger("of a test"), threading.Lock(), collections.deque()

    def change():
        own.logger.disabled = True
        own.lock.acquire()
        own.queue.append(1)

    assert named(change, own) == ""
    assert named(lambda: setattr(own, "lock", None), own) == "args[1].lock: lock, now None"


def test_what_stays_is_not_named():
    class Level(enum.Enum):
        LOW = 1

    own = Own()
    own.me, own.level, own.nan = own, Level.LOW, float("nan")
    own.many = [Settings(mask=torch.ones(1)) for _ in range(3)]

    def put_back():
        own.scale, own.inner, own.nan = 3.0, Settings(), float("nan")
        own.many = list(own.many)

    for compress in (None, INT8):
        assert named(put_back, own, [leaf(4) * 1, own], compress=compress, both=own) == ""


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


def test_the_first_changes_are_named_and_the_others_counted():
    items = list(range(12))
    assert named(lambda: items.__setitem__(slice(None), range(1, 13)), items) == (
        "args[1][0]: 0, now 1, args[1][1]: 1, now 2, args[1][2]: 2, now 3, args[1][3]: 3, now 4, args[1][4]: 4, now 5, "
        "and 7 more"
    )


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
