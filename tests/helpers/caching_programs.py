"""Models that keep something from one step for the next, in every kind of place: PROGRAMS."""

import collections
import contextvars
import dataclasses
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


@program
class Attribute(Block):
    pure = True

    def prepare(self):
        self.kept = None

    def scale(self, x):
        if self.kept is None:
            self.kept = table()
        return self.kept


@program
class NewAttribute(Block):
    pure = True

    def scale(self, x):
        if not hasattr(self, "kept"):
            self.kept = table()
        return self.kept


@program
class Tuple(Block):
    def prepare(self):
        self.kept = ()

    def scale(self, x):
        self.kept = self.kept[-1:] + (table() if not self.kept else self.kept[-1] * 0.99,)
        return self.kept[-1]


@program
class CachedProperty(Block):
    pure = True

    @functools.cached_property
    def kept(self):
        return table()

    def scale(self, x):
        return self.kept


@program
class ClassAttribute(Block):
    pure = True

    kept = None

    def scale(self, x):
        if ClassAttribute.kept is None:
            ClassAttribute.kept = table()
        return ClassAttribute.kept


@program
class ParameterAttribute(Block):
    def prepare(self):
        self.linear.weight.kept = table()

    def scale(self, x):
        weight = self._parameters_of_linear()
        weight.kept = getattr(weight, "kept", table()) * 0.9
        return weight.kept

    def _parameters_of_linear(self):
        return self.linear.weight


@program
class Counted(Block):
    calls = 0

    def scale(self, x):
        self.calls += 1
        return 1 / self.calls


# ---- containers


@program
class Dict(Block):
    pure = True

    def prepare(self):
        self.kept = {}

    def scale(self, x):
        if x.shape[1] not in self.kept:
            self.kept[x.shape[1]] = table(x.shape[1])
        return self.kept[x.shape[1]]


@program
class NestedDict(Block):
    pure = True

    def prepare(self):
        self.kept = {"a": {"b": {}}}

    def scale(self, x):
        return self.kept["a"]["b"].setdefault(x.shape[1], table())


@program
class Ordered(Block):
    def prepare(self):
        self.kept = collections.OrderedDict()

    def scale(self, x):
        self.kept.setdefault("table", table())
        self.kept["n"] = self.kept.get("n", 0) + 1
        self.kept.move_to_end("table")
        return self.kept["table"] / self.kept["n"]


@program
class Default(Block):
    def prepare(self):
        self.kept = collections.defaultdict(list)

    def scale(self, x):
        self.kept["a"].append(table())
        return self.kept["a"][0] / len(self.kept["a"])


@program
class Counter(Block):
    def prepare(self):
        self.kept = collections.Counter()

    def scale(self, x):
        self.kept[x.shape[1]] += 1
        return 1 / self.kept[x.shape[1]]


@program
class List(Block):
    pure = True

    def prepare(self):
        self.kept = []

    def scale(self, x):
        if not self.kept:
            self.kept.append(table())
        return self.kept[0]


@program
class Deque(Block):
    def prepare(self):
        self.kept = collections.deque(maxlen=3)

    def scale(self, x):
        self.kept.append(table() if not self.kept else self.kept[-1] * 0.9)
        return self.kept[0]


@program
class SetOfObjects(Block):
    pure = True

    def prepare(self):
        self.kept = set()

    def scale(self, x):
        if not self.kept:
            self.kept.add(Holder(table()))
        return next(iter(self.kept)).x


@program
class Amax(Block):
    """A statistic of activations."""

    def prepare(self):
        self.kept = {"amax": torch.ones(())}

    def scale(self, x):
        self.kept["amax"] = torch.maximum(self.kept["amax"] * 0.9, x.detach().abs().amax())
        return self.kept["amax"]


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
class ClearedByTheForward(Block):
    def prepare(self):
        self.kept = []

    def scale(self, x):
        old = sum(float(each.detach().mean()) if each.requires_grad else 1.0 for each in self.kept[:0])
        self.kept.clear()
        self.kept.append(x * 2)
        return 1.0 + old + len(self.kept)


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


@dataclasses.dataclass
class Record:
    tables: dict


@program
class Helper(Block):
    pure = True

    def prepare(self):
        self.helper = Holder()

    def scale(self, x):
        return self.helper.get()


@program
class HelperWithSlots(Helper):
    pure = True

    def prepare(self):
        self.helper = Slotted()


@program
class BoundMethod(Block):
    pure = True

    def prepare(self):
        self.get = Holder().get

    def scale(self, x):
        return self.get()


@program
class Partial(Block):
    pure = True

    def prepare(self):
        self.get = functools.partial(default, {})

    def scale(self, x):
        return self.get()


@program
class Namespace(Block):
    def prepare(self):
        self.kept = types.SimpleNamespace(x=None)

    def scale(self, x):
        self.kept.x = table() if self.kept.x is None else self.kept.x * 0.9
        return self.kept.x


@program
class DataClass(Block):
    pure = True

    def prepare(self):
        self.kept = Record({})

    def scale(self, x):
        return self.kept.tables.setdefault(x.shape[1], table())


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


@program
class UnboundedCache(Block):
    pure = True

    def scale(self, x):
        return unbounded(x.shape[1])


@program
class BoundedCache(Block):
    pure = True

    def scale(self, x):
        return bounded(x.shape[1])


@program
class MethodCache(Block):
    pure = True

    @functools.cache  # noqa: B019
    def of(self, n):
        return table(n)

    def scale(self, x):
        return self.of(x.shape[1])


@program
class GlobalDict(Block):
    pure = True

    def scale(self, x):
        return GLOBAL.setdefault(x.shape[1], table())


@program
class GlobalTensor(Block):
    def scale(self, x):
        global TENSOR
        TENSOR = table() if TENSOR is None else TENSOR * 0.9
        return TENSOR


@program
class OtherModule(Block):
    pure = True

    def scale(self, x):
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


@program
class DefaultArgument(Block):
    pure = True

    def scale(self, x):
        return default()


@program
class FunctionAttribute(Block):
    pure = True

    def scale(self, x):
        return attribute()


@program
class ContextVariable(Block):
    def scale(self, x):
        VARIABLE.set(table() if VARIABLE.get() is None else VARIABLE.get() * 0.9)
        return VARIABLE.get()


@program
class ThreadLocal(Block):
    def scale(self, x):
        LOCAL.x = getattr(LOCAL, "x", table()) * 0.9
        return LOCAL.x


@program
class WeakValues(Block):
    pure = True

    def prepare(self):
        self.holders = []

    def scale(self, x):
        if x.shape[1] not in VALUES:
            self.holders.append(Holder(table()))
            VALUES[x.shape[1]] = self.holders[-1]
        return VALUES[x.shape[1]].x


@program
class Generator(Block):
    """No generator can be put back."""

    def prepare(self):
        def numbers():
            n = 1.0
            while True:
                yield n
                n += 1

        self.numbers = numbers()

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


@program
class LazyModule(Block):
    pure = True

    def forward(self, x):
        if not hasattr(self, "late"):
            self.late = nn.LayerNorm(WIDTH)
        return self.late(super().forward(x))


@program
class NewBuffer(Block):
    pure = True

    persistent = True

    def scale(self, x):
        if not hasattr(self, "kept"):
            self.register_buffer("kept", table(), persistent=self.persistent)
        return self.kept


@program
class NewBufferNotSaved(NewBuffer):
    persistent = False


@program
class BufferInPlace(Block):
    def prepare(self):
        self.register_buffer("kept", table())

    def scale(self, x):
        self.kept.mul_(0.9)
        return self.kept.clone()


@program
class TensorInPlace(Block):
    def prepare(self):
        self.kept = table()

    def scale(self, x):
        self.kept.mul_(0.9)
        return self.kept.clone()


@program
class RunningStatistics(Block):
    def prepare(self):
        self.batch_norm = nn.BatchNorm1d(TOKENS, momentum=0.5)

    def scale(self, x):
        self.batch_norm(x)
        return self.batch_norm.running_mean.abs().mean().clone() + 1


@program
class Rotary(Block):
    """As remote code of transformers has it: tables as long as the longest sequence."""

    pure = True

    def prepare(self):
        self.longest = 0

    def scale(self, x):
        n = x.shape[1]
        if n > self.longest:
            self.longest = n
            self.register_buffer("cos", table(n).cos(), persistent=False)
            self.register_buffer("sin", table(n).sin(), persistent=False)
        return self.cos[:n] + self.sin[:n]


@program
class KeysAndValues(Block):
    """A cache that each step appends to."""

    def prepare(self):
        self.cache = Record({"keys": []})

    def scale(self, x):
        keys = self.cache.tables["keys"]
        keys.append(x.detach().mean(1))
        return torch.stack(keys).mean() + 2


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


@program
class Numpy(Block):
    def prepare(self):
        self.kept = np.ones(WIDTH, dtype=np.float32)

    def scale(self, x):
        self.kept *= 0.9
        return torch.tensor(self.kept)


@program
class FromNumpy(Block):
    def prepare(self):
        self.kept = table().numpy()

    def scale(self, x):
        self.kept = self.kept * np.float32(0.9)
        return torch.tensor(self.kept)


# ---- random numbers, files


@program
class TorchGenerator(Block):
    def prepare(self):
        self.generator = torch.Generator().manual_seed(1)

    def scale(self, x):
        return torch.rand(WIDTH, generator=self.generator)


@program
class PythonRandom(Block):
    def prepare(self):
        self.generator = random.Random(1)

    def scale(self, x):
        return self.generator.random() + random.random()


@program
class NumpyRandom(Block):
    def prepare(self):
        self.generator = np.random.default_rng(1)

    def scale(self, x):
        return self.generator.random() + np.random.random()


@program
class Dropout(Block):
    def prepare(self):
        self.drop = nn.Dropout(0.5)

    def scale(self, x):
        return self.drop(table())


@program
class Log(Block):
    def prepare(self):
        self.file = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def scale(self, x):
        self.file.write("a step\n")
        return 1.0
