"""A torch we do not know yet: without a private name of it the import works,
and what is lost is said by name."""

import ast
import json
import re
import subprocess
import sys

import pytest
from checkout import ROOT

from gradckpt._engine import torch_private as private

SCRIPT = ROOT / "tests" / "helpers" / "first_imports.py", "without_names"
#: Those that this process has looked up; names of Dynamo are looked up when it is imported.
NAMES = [path for path in private.NAMES if path not in private.MISSING and path not in private.DYNAMO.values()]
PARTS = 4


def without(names):
    out = subprocess.run([sys.executable, *SCRIPT, json.dumps(names)], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return {path: said for line in out.stdout.splitlines() for path, said in json.loads(line).items()}


@pytest.mark.parametrize("part", range(PARTS))
def test_each_name_may_be_missing(part):
    for path, said in without(NAMES[part::PARTS]).items():
        refused = {key for key, answer in said.items() if answer != "ok" and not answer.startswith("torch itself: ")}
        assert refused == {key for key in refused if f"no {path}, which " in said[key]}, (path, said)
        assert "import" not in refused, (path, said)
        assert private.NAMES[path] == private.EVERYTHING or "plain" not in refused, (path, said)


COMPILED = """
import torch, torch._dynamo.guards, logging
logging.basicConfig(format="%(message)s")
del torch._dynamo.guards.install_guard
import gradckpt
net = torch.nn.Linear(64, 64)
def region(x):
    return gradckpt.checkpoint(net, x * 1, compress="int8").sum()
x = torch.randn(32, 64, requires_grad=True)
exact, = torch.autograd.grad(net(x).sum(), x)
found, = torch.autograd.grad(torch.compile(region, backend="eager")(x), x)
assert torch.allclose(exact, found)
assert gradckpt.stats()["compressed"] == 1
"""


def test_without_a_name_of_dynamo_regions_break_the_graph():
    out = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "has no torch._dynamo.guards.install_guard, so regions break compiled graphs" in out.stderr


def test_every_name_of_dynamo_is_there():

    assert private.load_dynamo() == []
    assert private.load_cut() is not None


# ---- none elsewhere ----

#: Operators, and modules of torch.distributed that are imported
#: when something of them is asked for.
ALLOWED = r"torch\.ops\..*|torch\.distributed\.algorithms\._checkpoint\.checkpoint_wrapper.*"


def chain(node):
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def names_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield (
                chain(node).replace("torch_checkpoint", "torch.utils.checkpoint").replace("dist.", "torch.distributed.")
            )


def test_python_has_no_other_private_names():
    paths = [path for path in (ROOT / "gradckpt").rglob("*.py") if path.name != "torch_private.py"]
    for path in paths:
        everything = set(names_in(ast.parse(path.read_text())))
        names = {name for name in everything if re.match(r"torch\.(\w+\.)*_(?!_)", name)}
        assert not [name for name in names if not re.fullmatch(ALLOWED, name)], path
        assert everything.isdisjoint(private.NAMES), path  # also those without an underscore


def test_every_name_that_is_read_is_in_the_table():
    """Type checkers take every name for one of it."""
    for path in (ROOT / "gradckpt").rglob("*.py"):
        names = [
            name.partition(".")[2] for name in names_in(ast.parse(path.read_text())) if name.startswith("private.")
        ]
        assert not [name for name in names if not hasattr(private, name.partition(".")[0])], path


def test_c_has_no_other_private_names():
    objects = re.findall(r'OBJECT\(\w+, "([\w.]+)", "(\w+)"\)', (ROOT / "csrc" / "torch" / "objects.h").read_text())
    assert len(objects) > 40
    named = [f"{module}.{name}" for module, name in objects if module.startswith("torch")]
    assert not [name for name in named if "._" in name or name.rpartition(".")[2].isupper()]
