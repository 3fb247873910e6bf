"""Models that keep something from one step for the next, in every kind of place: PROGRAMS."""

import collections
import contextvars
import functools
import random
import tempfile
import threading
import types
import weakref

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize

WIDTH, TOKENS = 16, 8

#: name -> class of a block
PROGRAMS = {}


def program(block):
    PROGRAMS[block.__name__] = block
    return block


def table(n=TOKENS):
    return torch.linspace(0.5, 1.5, n * WIDTH).reshape(n, WIDTH).sin() + 2


class Block(nn.Module):
    """``scale``: what a subclass keeps, and how. ``pure``: it is the same if it is asked for again,
    so that the block may be a region.
    """

    pure = False

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self):
        pass

    def scale(self, x):
        return 1.0

    def forward(self, x):
        return x + self.linear(self.norm(x)) * self.scale(x)


def keeps(first=lambda: None, *, pure=False):
    """A program whose ``scale`` is the function; its block's ``kept`` is made anew for each."""

    def prepare(self):
        self.kept = first()

    def register(scale):
        return program(type(scale.__name__, (Block,), {"pure": pure, "prepare": prepare, "scale": scale}))

    return register


class Net(nn.Module):
    def __init__(self, block):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.last = block(), Block()
        self.regions = [self.block, self.last] if block.pure else [self.last]

    def forward(self, x):
        return self.last(self.block(x)).square().mean()


def make(name):
    """Return a new model, with all that is global as at the start."""
    GLOBAL.clear()
    OTHER_MODULE.cache = {}
    globals()["TENSOR"] = None
    unbounded.cache_clear()
    bounded.cache_clear()
    VARIABLE.set(None)
    VALUES.clear()
    vars(LOCAL).clear()
    default.__defaults__[0].clear()
    ClassAttribute.kept = None
    MethodCache.of.cache_clear()
    Closure.scale = Closure.new()
    attribute.__dict__.clear()
    random.seed(0)
    np.random.seed(0)
    return Net(PROGRAMS[name]).train()


def loss_of(model, x):
    """Run the user's forward, which also takes what the blocks have collected."""
    loss = model(x)
    return model.block.collect(loss) if hasattr(model.block, "collect") else loss


# ---- attributes


@keeps(pure=True)
def Attribute(self, x):
    if self.kept is None:
        self.kept = table()
    return self.kept


@keeps(tuple)
def Tuple(self, x):
    self.kept = self.kept[-1:] + (table() if not self.kept else self.kept[-1] * 0.99,)
    return self.kept[-1]


@program
class ClassAttribute(Block):
    pure = True

    kept = None

    def scale(self, x):
        if ClassAttribute.kept is None:
            ClassAttribute.kept = table()
        return ClassAttribute.kept


@keeps()
def ParameterAttribute(self, x):
    weight = self.linear.weight
    weight.kept = getattr(weight, "kept", table()) * 0.9
    return weight.kept


# ---- containers


@keeps(dict, pure=True)
def Dict(self, x):
    return self.kept.setdefault(x.shape[1], table(x.shape[1]))


@keeps(collections.OrderedDict)
def Ordered(self, x):
    self.kept.setdefault("table", table())
    self.kept["n"] = self.kept.get("n", 0) + 1
    self.kept.move_to_end("table")
    return self.kept["table"] / self.kept["n"]


@keeps(lambda: collections.deque(maxlen=3))
def Deque(self, x):
    self.kept.append(table() if not self.kept else self.kept[-1] * 0.9)
    return self.kept[0]


@keeps(set, pure=True)
def SetOfObjects(self, x):
    if not self.kept:
        self.kept.add(Holder(table()))
    return next(iter(self.kept)).x


@program
class AuxiliaryLosses(Block):
    """The loop adds and clears them."""

    pure = True

    def prepare(self):
        self.kept = []

    def forward(self, x):
        y = super().forward(x)
        self.kept.append(y.square().mean())
        return y

    def collect(self, loss):
        loss = loss + 0.1 * sum(self.kept)
        self.kept.clear()
        return loss


@program
class Hook(Block):
    """The user's hook stores outputs, which the loop takes."""

    def prepare(self):
        self.kept = outputs = {}
        self.linear.register_forward_hook(lambda module, args, output: outputs.update(last=output))

    def collect(self, loss):
        return loss + self.kept.pop("last").square().mean()


# ---- objects


class Holder:
    def __init__(self, x=None):
        self.x = x

    def get(self):
        if self.x is None:
            self.x = table()
        return self.x


class Slotted:
    __slots__ = ("x",)

    def get(self):
        if not hasattr(self, "x"):
            self.x = table()
        return self.x


@keeps(Holder, pure=True)
def Helper(self, x):
    return self.kept.get()


@keeps(Slotted, pure=True)
def HelperWithSlots(self, x):
    return self.kept.get()


@keeps(lambda: Holder().get, pure=True)
def BoundMethod(self, x):
    return self.kept()


@keeps(lambda: functools.partial(default, {}), pure=True)
def Partial(self, x):
    return self.kept()


@program
class WeakReference(Block):
    pure = True

    def prepare(self):
        holder = weakref.ref(self.linear)  # which has it
        self.get = holder

    def scale(self, x):
        linear = self.get()
        if not hasattr(linear, "kept"):
            linear.kept = table()
        return linear.kept


# ---- functions, globals, classes


GLOBAL, TENSOR = {}, None
OTHER_MODULE = types.ModuleType("tables_of_the_user")
VARIABLE = contextvars.ContextVar("table", default=None)
VALUES = weakref.WeakValueDictionary()
LOCAL = threading.local()


@functools.lru_cache(None)
def unbounded(n):
    return table(n)


@functools.lru_cache
def bounded(n):
    return table(n)


def default(kept={}):  # noqa: B006
    return kept.setdefault("x", table())


def attribute():
    if not hasattr(attribute, "x"):
        attribute.x = table()
    return attribute.x


@keeps(pure=True)
def UnboundedCache(self, x):
    return unbounded(x.shape[1])


@keeps(pure=True)
def BoundedCache(self, x):
    return bounded(x.shape[1])


@program
class MethodCache(Block):
    pure = True

    @functools.cache  # noqa: B019
    def of(self, n):
        return table(n)

    def scale(self, x):
        return self.of(x.shape[1])


@keeps(pure=True)
def GlobalDict(self, x):
    return GLOBAL.setdefault(x.shape[1], table())


@keeps()
def GlobalTensor(self, x):
    global TENSOR
    TENSOR = table() if TENSOR is None else TENSOR * 0.9
    return TENSOR


@keeps(pure=True)
def OtherModule(self, x):
    return OTHER_MODULE.cache.setdefault(x.shape[1], table())


@program
class Closure(Block):
    @staticmethod
    def new():
        kept = None

        def scale(self, x):
            nonlocal kept
            kept = table() if kept is None else kept * 0.9
            return kept

        return scale


@keeps(pure=True)
def DefaultArgument(self, x):
    return default()


@keeps(pure=True)
def FunctionAttribute(self, x):
    return attribute()


@keeps()
def ContextVariable(self, x):
    VARIABLE.set(table() if VARIABLE.get() is None else VARIABLE.get() * 0.9)
    return VARIABLE.get()


@keeps()
def ThreadLocal(self, x):
    LOCAL.x = getattr(LOCAL, "x", table()) * 0.9
    return LOCAL.x


@keeps(list, pure=True)
def WeakValues(self, x):
    if x.shape[1] not in VALUES:
        self.kept.append(Holder(table()))
        VALUES[x.shape[1]] = self.kept[-1]
    return VALUES[x.shape[1]].x


def counting():
    n = 1.0
    while True:
        yield n
        n += 1


@program
class Generator(Block):
    """No generator can be put back."""

    def prepare(self):
        self.numbers = counting()

    def scale(self, x):
        return 1 / next(self.numbers)


# ---- modules and tensors


@program
class Swap(Block):
    """BigBird replaces a part by another one with the same weights."""

    def forward(self, x):
        other = nn.Linear(WIDTH, WIDTH)
        other.weight, other.bias = self.linear.weight, self.linear.bias
        other.calls = getattr(self.linear, "calls", 0) + 1
        self.linear = other
        return super().forward(x) / other.calls


@keeps(pure=True)
def NewBuffer(self, x):
    if not hasattr(self, "late"):
        self.register_buffer("late", table())
    return self.late


@program
class BufferInPlace(Block):
    def prepare(self):
        self.register_buffer("kept", table())

    def scale(self, x):
        self.kept.mul_(0.9)
        return self.kept.clone()


@keeps(table)
def TensorInPlace(self, x):
    self.kept.mul_(0.9)
    return self.kept.clone()


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@program
class Parametrization(Block):
    pure = True

    def prepare(self):
        parametrize.register_parametrization(self.linear, "weight", Doubled())

    def forward(self, x):
        with parametrize.cached():
            return super().forward(x) + self.linear(x)


@keeps(lambda: np.ones(WIDTH, dtype=np.float32))
def Numpy(self, x):
    self.kept *= 0.9
    return torch.tensor(self.kept)


# ---- random numbers, files


@keeps(lambda: torch.Generator().manual_seed(1))
def TorchGenerator(self, x):
    return torch.rand(WIDTH, generator=self.kept)


@keeps(lambda: random.Random(1))
def PythonRandom(self, x):
    return self.kept.random() + random.random()


@keeps(lambda: np.random.default_rng(1))
def NumpyRandom(self, x):
    return self.kept.random() + np.random.random()


@keeps(lambda: tempfile.TemporaryFile("w+"))  # noqa: SIM115
def Log(self, x):
    self.kept.write("a step\n")
    return 1.0
