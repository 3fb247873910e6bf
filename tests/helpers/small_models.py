"""Models and activations of the tests of compress_saved()."""

import copy
import functools
import gc
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as torch_module

import gradckpt
from gradckpt._engine import buffers
from gradckpt._engine.sequential import Segment
from gradckpt._planning import options
from gradckpt._planning.options import KEEP, Cost

SMALL = {"codec": "int8", "min_numel": 16}


RAW = {"codec": "raw", "min_numel": 16}


EXACT = "backward needs it exactly"


@pytest.fixture(autouse=True)
def fresh():
    torch.manual_seed(0)
    gc.collect()  # payloads in the traceback of an expected error
    gradckpt.stats.reset()


def activation(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype).requires_grad_() * 1


def payload_of(value):
    return value.value if isinstance(getattr(value, "value", None), gradckpt.codecs.Payload) else None


def int8_bytes(*shapes):
    return sum(gradckpt.codecs.encode(torch.zeros(shape), "int8").nbytes for shape in shapes)


class Block(nn.Module):
    """A residual block as in a ResNet: BatchNorm, in-place ReLU, pooling."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.conv1, self.conv2 = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 2)
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        return self.head(self.relu(x + y).mean((2, 3))).square().mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 48, 2, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0].square().mean()


def llama(tokens=64):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    ids = torch.randint(0, 256, (2, tokens))
    model = transformers.LlamaForCausalLM(config)
    return model, lambda: model(ids, labels=ids).loss


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False)
    ids = torch.randint(0, 256, (2, 64))
    model = transformers.GPT2LMHeadModel(config)
    return model, lambda: model(ids, labels=ids).loss


def resnet():
    model, x = Block(), torch.randn(8, 3, 16, 16)
    return model, lambda: model(x)


def lstm():
    model, x = Recurrent(), torch.randn(8, 12, 32)
    return model, lambda: model(x)


def gradients(model, loss_of, context, autocast=False):
    """Loss and gradients of a step whose forward runs in the context."""
    model.zero_grad()
    torch.manual_seed(1)
    with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


class Sentinel:
    pass


def watch(node):
    """A weak reference that dies with the node, of which Python has none."""
    node.metadata["sentinel"] = sentinel = Sentinel()
    return weakref.ref(sentinel)


# ---- What the tests of buffers="once" share: a net with every norm, the ways to checkpoint it,
# and one step.

RAW_NORMS = {"codec": "raw", "min_numel": 1}


@pytest.fixture(autouse=True)
def nothing_left_behind():
    torch.manual_seed(0)
    before = [dict(hooks) for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks)]
    yield
    assert before == [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    assert not buffers._entered


class Norms(nn.Module):
    """Every kind of norm that keeps statistics, between layers that save tensors."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.flat = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6, momentum=None))
        self.image = nn.ModuleList(
            [nn.BatchNorm2d(2), nn.InstanceNorm2d(2, track_running_stats=True), nn.SyncBatchNorm(2), nn.BatchNorm2d(2)]
        )
        self.plain = nn.InstanceNorm2d(2)
        self.last = nn.Linear(6, 6)

    def forward(self, x, scale=1.0):
        x = self.flat(self.first(x)).view(-1, 2, 3, 1)
        for norm in self.image:
            x = norm(x).sin() + self.plain(x)
        return self.last(x.view(-1, 6)) * scale

    def method(self, x):
        return self(x)


class Caller:
    def __init__(self, function):
        self.function = function

    def __call__(self, x):
        return self.function(x)


def decorated(net):
    return gradckpt.checkpoint(compress=RAW_NORMS)(net.method)


#: name -> what is checkpointed, made from a net: it says itself which module it belongs to
FORMS = {
    "module": lambda net: net,
    "method": lambda net: net.method,
    "forward": lambda net: net.forward,
    "call": lambda net: net.__call__,
    "partial": lambda net: functools.partial(functools.partial(net, scale=2.0), scale=3.0),
    "partial of a method": lambda net: functools.partial(net.forward, scale=2.0),
    "decorated": decorated,
    "segment": lambda net: Segment([nn.Identity(), net]),
}

#: The same, where the module has to be passed.
OPAQUE = {
    "lambda": lambda net: lambda x: net(x),
    "closure over a method": lambda net: lambda x: net.method(x),
    "callable object": lambda net: Caller(net),
    "method of another object": lambda net: Caller(net).__call__,
    "partial of a function": lambda net: functools.partial(lambda m, x: m(x), net),
    "partial of a region": lambda net: functools.partial(gradckpt.checkpoint, net),
    "segment of functions": lambda net: Segment([torch.sin, lambda x: net(x)]),
}


def step(net, function, call, backwards=1):
    """Statistics and gradients after one training step of `function`, run by `call`."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3), requires_grad=True)
    loss = call(function, x * 1).square().sum()
    for i in range(backwards):
        loss.backward(retain_graph=i + 1 < backwards)
    return {"x": x.grad, **dict(net.named_buffers()), **{name: p.grad for name, p in net.named_parameters()}}


def plainly(function, *args):
    return function(*args)


def both(make, call, net=None, backwards=1, passed=False):
    """The same step with and without checkpointing, on copies of one net; passed:
    as ``buffers=``."""
    net = net or Norms()
    other = copy.deepcopy(net)
    if passed:
        call = functools.partial(call, buffers=other)
    return step(net, make(net), plainly, backwards), step(other, make(other), call, backwards)


def different(a, b):
    assert a.keys() == b.keys()
    return [name for name in a if (a[name] is None) != (b[name] is None) or not equal(a[name], b[name])]


def equal(a, b):
    return a is None or torch.equal(a, b)


# ---- A small net of equal blocks, times of its blocks that do not depend on the machine, what a
# step takes and a refused plan says, and a check that planning leaves a model as it was.

NET_WIDTH, LAYERS, ROWS = 128, 6, 256


class PlannedBlock(nn.Module):
    def __init__(self, width=NET_WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, layers=LAYERS):
        super().__init__()
        self.embed = nn.Linear(NET_WIDTH, NET_WIDTH)
        self.blocks = nn.ModuleList(PlannedBlock() for _ in range(layers))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def called(block, x):
    return block(x)


class Chain(nn.Module):
    """A first layer and blocks of a class, each called by ``call``; the same weights each time."""

    def __init__(self, kind, count, call=called, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(kind() for _ in range(count))
        self.call = call

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x


def fixed_costs(monkeypatch):
    """Times that do not depend on the machine: recomputing costs a third, codecs a little."""

    def measured(block, options, args, kwargs):
        seconds = {
            option: 3.0 + (option.name != "keep") * 0.2 + option.name.startswith("recompute") for option in options
        }
        errors = {option: {"int8": 0.01, "int6": 0.03, "int4": 0.1}.get(option.codec, 0.0) for option in options}
        return {option: Cost(seconds[option], errors[option]) for option in (KEEP, *options)}

    monkeypatch.setattr(options, "_measure", measured)


def measured_briefly(monkeypatch):
    """Few options, each of which is measured a few times."""
    monkeypatch.setattr(options, "_SECONDS", 0.0)
    monkeypatch.setattr(options, "_POLICIES", ("save_matmuls",))


@pytest.fixture
def short_measurements(monkeypatch):
    """Each option of a region is measured once; of what earlier tests left, nothing counts."""
    gc.collect()
    monkeypatch.setattr(options, "_SECONDS", 0.0)
    monkeypatch.setattr(options, "_LEAST", 1)


def smallest_of(call):
    """The smallest budget, from the refusal of a smaller one."""
    with pytest.raises(ValueError, match="no plan stays within") as error:
        call()
    return int(re.search(r"\((\d+) bytes\)", str(error.value))[1])


def peak_of(step):
    with gradckpt.track_memory() as memory:
        step()
    return memory.peak


def net(layers=LAYERS):
    torch.manual_seed(0)
    return Net(layers).train()


class Untouched:
    """Checks that the block leaves the model and all generators and counters as they were."""

    def __init__(self, model):
        self.model = model

    def state(self):
        parameters = list(self.model.parameters())
        return {
            "values": [p.detach().clone() for p in parameters],
            "random": torch.get_rng_state(),
            "rounding": gradckpt.config.get_rounding_state(),
            "stats": dict(gradckpt.stats()),
            "buffers": {name: x.clone() for name, x in self.model.named_buffers()},
            "same buffers": [id(x) for x in self.model.buffers()],
            "gradients": [None if p.grad is None else p.grad.clone() for p in parameters],
            "same gradients": [id(p.grad) for p in parameters],
            "requires_grad": [p.requires_grad for p in parameters],
            "attributes": [dict(vars(module)) for module in self.model.modules()],
            "handle": gradckpt.config.Handle(self.model).modules,
        }

    def __enter__(self):
        self.before = self.state()

    def __exit__(self, *_):
        after = self.state()
        for key, value in self.before.items():
            tensors = [x for x in torch.utils._pytree.tree_leaves([value, after[key]]) if isinstance(x, torch.Tensor)]
            if key in ("values", "random", "buffers", "gradients"):
                half = len(tensors) // 2
                assert all(map(torch.equal, tensors[:half], tensors[half:])), key
            else:
                assert value == after[key], key


# ---- Fields of Llama configs: published shapes, and one that runs in an instant.

SHAPE_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPE_70B = {
    **SHAPE_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# ---- The two ways to keep what a function needs compressed, called alike: in a region, and as
# saved tensors.


def in_regions(function, x, config):
    return gradckpt.checkpoint(function, x, compress=config)


def saved(function, x, config):
    with gradckpt.compress_saved(config):
        return function(x)


# ---- What a handle of gradckpt.enable says of all its modules.


def config_of(handle):
    """The CompressionConfig, or None, that all modules have."""
    (config,) = {settings["compress"] for settings in handle.modules.values()}
    return config
