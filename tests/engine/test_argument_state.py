"""A restored argument has what the argument had beside its values: attributes, the class of a
container and what that holds outside its leaves."""

import collections
import dataclasses
import enum

import pytest
import torch
from nestings import Tail
from torch.utils import _pytree

import gradckpt
from gradckpt import CompressionConfig

CODECS = ["raw", "lossless", "int8"]
NOT_COPIED = "attribute that cannot be copied"


class Color(enum.Enum):
    RED = 1


PLAIN = {
    "none": None,
    "scale": 3.0,
    "flags": (True, 2, 1 + 2j, "text", b"bytes", Color.RED),
    "types": [torch.float16, torch.device("cpu"), torch.Size((2, 3)), torch.strided, torch.channels_last],
    "nested": {"a": [1, {2, 3}, frozenset((4,))], 5: ()},
}


def hidden(n=64):
    return torch.randn(n, 128, generator=torch.Generator().manual_seed(0)).requires_grad_() * 1


def both_runs(argument, codec="int8", run=gradckpt.checkpoint, **config):
    """The argument as the forward and as the recompute see it."""
    seen = []

    def region(given):
        seen.append(given)
        return sum(t.sin().sum() for t in _pytree.tree_leaves(given) if isinstance(t, torch.Tensor))

    gradckpt.stats.reset()
    run(region, argument, compress=CompressionConfig(codec, min_numel=0, **config)).backward()
    return seen


def one_node(function, *args, compress):
    return gradckpt.SelectiveRecompute.apply(Tail(function), None, *args, compress=compress)


RUNS = {"region": gradckpt.checkpoint, "one node": one_node}
every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


# ---- tensors ----


@every_run
@pytest.mark.parametrize("codec", CODECS)
def test_plain_attributes_come_back(codec, run):
    x = hidden()
    vars(x).update(PLAIN)
    _, recompute = both_runs(x, codec, run)
    assert recompute is not x
    assert gradckpt.stats()["compressed"] == 1
    assert vars(recompute) == PLAIN
    assert recompute.nested is x.nested


def test_attributes_come_back_in_containers_under_hooks_and_in_a_quantized_forward():

    def scaled():
        return attributed(hidden(), scale=3.0)

    x = scaled()
    for seen in (
        both_runs([{"x": scaled()}]),
        both_runs(scaled(), fake_quantize=True),
        both_runs((x, x)),
    ):
        for given in seen:
            assert all(t.scale == 3.0 for t in _pytree.tree_leaves(given))
    with torch.autograd.graph.save_on_cpu():
        assert both_runs(scaled())[1].scale == 3.0
    assert not hasattr(both_runs(hidden())[1], "scale")


class Thing:
    pass


@every_run
@pytest.mark.parametrize(
    "value", [torch.ones(2), Thing(), [1, torch.ones(2)], {"a": Thing()}, len, Thing], ids=lambda v: type(v).__name__
)
def test_an_argument_whose_attribute_is_not_plain_stays_exact(value, run):
    x = hidden()
    x.extra = value
    _, recompute = both_runs(x, "int8", run)
    assert recompute.extra is value
    assert torch.equal(recompute, x)
    assert gradckpt.stats()["uncompressed"] == {NOT_COPIED: 1}
    assert gradckpt.stats()["uncompressed_bytes"] == x.nbytes


def test_an_attribute_that_contains_itself_stays_exact():
    x = hidden()
    x.loop = []
    x.loop.append(x.loop)
    assert both_runs(x)[1] is x


# ---- containers ----


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: object = None
    extra: object = None


_pytree.register_dataclass(Batch, field_names=["x"], drop_field_names=["scale", "extra"])


class Bag(list):
    """Registered, with attributes."""


class Slotted:
    __slots__ = ("scale", "x")

    def __init__(self, x):
        self.x = x


class SlottedWithDict(Slotted):
    """Has attributes in a slot and in a dict."""

    __slots__ = ("__dict__",)


class Table(dict):
    """pytree gets a part of it."""


def register(kind, flatten, unflatten):
    _pytree.register_pytree_node(kind, flatten, unflatten)


register(Bag, lambda bag: (list(bag), None), lambda children, _: Bag(children))
register(Slotted, lambda s: ([s.x], None), lambda children, _: Slotted(*children))
register(SlottedWithDict, lambda s: ([s.x], None), lambda children, _: SlottedWithDict(*children))
register(Table, lambda t: ([t["x"]], None), lambda children, _: Table(x=children[0]))

Pair = collections.namedtuple("Pair", "a b")


class NamedPair(Pair):
    """Has attributes, for want of slots."""


def attributed(container, **attributes):
    for name, value in attributes.items():
        setattr(container, name, value)
    return container


#: What to pass, and what of it has to come back.
CONTAINERS = {
    "a dropped field": (lambda x: Batch(x, 3.0), lambda c: (type(c), c.scale)),
    "a subclass of list": (lambda x: attributed(Bag([x, 2]), scale=3.0), lambda c: (type(c), c.scale, c[1])),
    "slots": (lambda x: attributed(Slotted(x), scale=3.0), lambda c: (type(c), c.scale)),
    "a slot beside a dict": (
        lambda x: attributed(SlottedWithDict(x), scale=3.0, shift=1.0),
        lambda c: (type(c), c.scale, c.shift),
    ),
    "an OrderedDict with an attribute": (
        lambda x: attributed(collections.OrderedDict(x=x), scale=3.0),
        lambda c: (type(c), c.scale),
    ),
    "a named tuple with an attribute": (
        lambda x: attributed(NamedPair(x, 2), scale=3.0),
        lambda c: (type(c), c.scale, c.b),
    ),
    "nested": (
        lambda x: {"list": [1, (Batch(x, 4.0), Batch(x.sin(), 5.0))]},
        lambda c: (c["list"][1][0].scale, c["list"][1][1].scale),
    ),
    "in another": (
        lambda x: attributed(Bag([Batch(x, 3.0)]), scale=(1, 2)),
        lambda c: (type(c), c.scale, type(c[0]), c[0].scale),
    ),
    "nothing but types": (
        lambda x: [collections.defaultdict(list, a=x), collections.deque([x], maxlen=3), Pair(x, 1)],
        lambda c: (c[0].default_factory, c[1].maxlen, type(c[2])),
    ),
}


@every_run
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_comes_back_as_it_was(name, codec, run):
    make, show = CONTAINERS[name]
    for given in (*both_runs(make(hidden()), codec, run), *both_runs(make(hidden()), codec, fake_quantize=True)):
        assert show(given) == show(make(hidden()))
    assert gradckpt.stats()["compressed"] >= 1


@pytest.mark.parametrize(
    ("make", "leaves"),
    {
        "a field with an object": (lambda x: Batch(x, Thing()), 1),
        "a field with the tensor": (lambda x: Batch(x, extra=[x]), 1),
        "items that pytree does not get": (lambda x: Table(x=x, y=x.sin()), 1),
        "deep inside": (lambda x: {"a": x, "b": [Batch(x.sin(), Thing())]}, 2),
    }.values(),
)
def test_a_container_that_cannot_be_made_again_stays_exact(make, leaves):
    argument = make(hidden())
    _, recompute = both_runs(argument)
    assert recompute is argument
    assert gradckpt.stats()["uncompressed"] == {NOT_COPIED: leaves}


def test_one_node_gets_what_it_cannot_copy_as_it_is():
    """Its tensors are inputs of the node, so it makes the container again."""
    thing = Thing()
    _, recompute = both_runs([Batch(hidden(), thing)], "int8", one_node)
    assert recompute[0].scale is thing
    assert gradckpt.stats()["uncompressed"] == {NOT_COPIED: 1}


def test_outputs_of_transformers_models():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = hidden()
    argument = outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(x.sin(), x.cos()))
    argument.scale = 3.0
    _, recompute = both_runs(argument)
    assert type(recompute) is outputs.BaseModelOutput
    assert recompute.scale == 3.0
    assert recompute.attentions is None
    assert recompute.keys() == argument.keys()
    assert recompute.last_hidden_state is not x
