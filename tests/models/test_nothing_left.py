"""Once a handle is removed, torch and transformers are what they were: every name of every module,
every attribute of every class, and the code, defaults and attributes of every function that is
alive."""

import gc
import sys
import tempfile
import types

import model_families
import torch
import torch.utils.checkpoint
from test_huggingface import IDS, build, on, trainer

import gradckpt

LIBRARIES = ("torch", "transformers", "accelerate", "multiprocessing")


def is_theirs(thing):
    module_name = vars(thing).get("__module__") if issubclass(type(thing), type) else thing.__module__
    return type(module_name) is str and module_name.split(".")[0] in LIBRARIES


class Snapshot:
    """Identities, and what they are of, so that no address is used again meanwhile."""

    def __init__(self):
        self.found, self.held = {}, []
        gc.unfreeze()  # what conftest.py froze is what is looked at here
        gc.collect()
        for module_name, module in list(sys.modules.items()):
            if module_name.split(".")[0] in LIBRARIES and isinstance(module, types.ModuleType):
                self.attributes(module_name, module)
        for thing in gc.get_objects():
            if issubclass(type(thing), type) and is_theirs(thing):
                self.attributes((thing.__module__, thing.__qualname__, id(thing)), thing)
            elif type(thing) is types.FunctionType and is_theirs(thing):
                what = thing.__code__, thing.__defaults__, thing.__kwdefaults__
                own = {
                    name: value for name, value in vars(thing).items() if name != "__dynamo_disable"
                }  # torch's cache
                self.note(("function", thing.__qualname__, id(thing)), (thing, *what, *own, *own.values()))

    def attributes(self, key, thing):
        self.held.append((thing,))  # a class that another test made does not die between two looks
        for name, value in list(vars(thing).items()):
            if type(value) is not int:  # counters
                self.note((key, name), (value,))

    def note(self, key, values):
        self.held.append(values)
        self.found[key] = tuple(value if type(value) is str else id(value) for value in values)

    def changed(self, later):
        return {key for key, value in self.found.items() if later.found.get(key, value) != value} | {
            key for key in self.found if key not in later.found and key[0] != "function"
        }


def train(model):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    layer = torch.nn.Linear(64, 64)
    x = torch.randn(32, 64, requires_grad=True)
    torch.utils.checkpoint.checkpoint_sequential([layer, layer], 2, x * 1, use_reentrant=False).sum().backward()


def train_by_flag(**keys):
    trainer(build(), tempfile.mkdtemp(), **model_families.flag({"use_reentrant": False, **keys})).train()


def stock():
    model = build()
    on(model, {"use_reentrant": False})
    train(model)
    train_by_flag()


def ours():
    model = build()
    with gradckpt.enable(model):
        train(model)
    on(model, {"use_reentrant": False})
    with gradckpt.patched("int8", policy="save_matmuls"):
        train(model)
        with gradckpt.patched("int4"):
            train(model)
    with gradckpt.enable(build().model.layers[0], None, modules={"mlp": "int8"}), gradckpt.compress_saved("int8"):
        train(build())
    train_by_flag(compress="int8")


def test_modules_classes_and_functions():
    stock()  # what is imported and cached at the first time
    start = Snapshot()
    stock()
    middle = Snapshot()
    ours()
    end = Snapshot()
    assert len(start.found) > 100_000
    assert middle.changed(end) <= start.changed(middle)


def test_it_finds_a_change(monkeypatch):
    before = Snapshot()
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x)
    assert len(before.changed(Snapshot())) == 1
    monkeypatch.undo()
    stock_code = torch.utils.checkpoint.checkpoint
    with gradckpt.patched("int8"):
        names = {key[1] for key in before.changed(Snapshot())}
        assert names & {"checkpoint", "_checkpoint_impl"}  # which is what torch's function calls since 2.14
    assert torch.utils.checkpoint.checkpoint is stock_code
    assert before.changed(Snapshot()) == set()
