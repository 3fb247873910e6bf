"""The arrows of the house go one way: every #include and import is read, and a new arrow fails."""

import ast
import re

import pytest
from checkout import ROOT

CSRC = ROOT / "csrc"

#: room -> rooms whose headers it may include, besides its own and gradckpt.h
ALLOWED = {"codec": set(), "torch": set(), "engine": {"torch"}, "module": {"engine", "torch"}}

#: what only one room may know
ONLY = {"Python.h": {"torch", "engine", "module"}, "dlfcn.h": {"torch"}, "cuda_runtime.h": {"codec"}}

#: Python module -> modules of the package that it may import at the top level
PYTHON = {
    "gradckpt": {
        "gradckpt._C",
        "gradckpt._import_error",
        "gradckpt._memory",
        "gradckpt._ops",
        "gradckpt.codecs",
        "gradckpt.compat",
        "gradckpt.compile",
        "gradckpt.config",
        "gradckpt.integrations",
        "gradckpt.patched",
        "gradckpt.policies",
        "gradckpt.residuals",
        "gradckpt.saved",
        "gradckpt.selectors",
        "gradckpt.sequential",
        "gradckpt.stats",
        "gradckpt.switch",
    },
    "gradckpt._aliases": set(),
    "gradckpt._allocations": set(),
    "gradckpt._decisions": {"gradckpt._forms"},
    "gradckpt._forms": {"gradckpt._C"},
    "gradckpt._hooks": {"gradckpt._C", "gradckpt._torch_private"},
    "gradckpt._memory": {"gradckpt._C", "gradckpt._allocations", "gradckpt._torch_private", "gradckpt.stats"},
    "gradckpt._objects": {"gradckpt._torch_private"},
    "gradckpt._ops": {"gradckpt._C", "gradckpt._torch_private"},
    "gradckpt._savers": {"gradckpt._torch_private"},
    "gradckpt._selection": {"gradckpt._torch_private"},
    "gradckpt._shim": {"gradckpt._objects", "gradckpt._torch_private"},
    "gradckpt._torch_private": set(),
    "gradckpt.arguments": set(),
    "gradckpt.apply": {
        "gradckpt",
        "gradckpt._activity",
        "gradckpt.arguments",
        "gradckpt.caches",
        "gradckpt.config",
        "gradckpt.decorator",
        "gradckpt.integrations.offload",
        "gradckpt.integrations.overlap",
        "gradckpt.integrations.ranks",
        "gradckpt.integrations.sharded",
        "gradckpt.kinds",
        "gradckpt.policies",
        "gradckpt.selectors",
    },
    "gradckpt.buffers": {"gradckpt._torch_private"},
    "gradckpt.caches": set(),
    "gradckpt.codecs": {"gradckpt._C", "gradckpt.config", "gradckpt.rounding"},
    "gradckpt.compat": {"gradckpt._C", "gradckpt.selective", "gradckpt.sequential"},
    "gradckpt.compile": {
        "gradckpt",
        "gradckpt._C",
        "gradckpt._decisions",
        "gradckpt._ops",
        "gradckpt._torch_private",
        "gradckpt.compat",
        "gradckpt.config",
        "gradckpt.imports",
        "gradckpt.packing",
        "gradckpt.policies",
        "gradckpt.selective",
        "gradckpt.stats",
    },
    "gradckpt._activity": {
        "gradckpt",
        "gradckpt._frames",
        "gradckpt.config",
        "gradckpt.policies",
        "gradckpt.selective",
        "gradckpt.stats",
    },
    "gradckpt._frames": set(),
    "gradckpt.config": {"gradckpt._frames", "gradckpt._C", "gradckpt.rounding"},
    "gradckpt.decorator": set(),
    "gradckpt.imports": set(),
    "gradckpt.kinds": set(),
    "gradckpt.packing": {"gradckpt._C", "gradckpt._torch_private", "gradckpt.config"},
    "gradckpt.rounding": {"gradckpt._C"},
    "gradckpt.selftest": {"gradckpt._C"},
    "gradckpt.selectors": {"gradckpt._C", "gradckpt.config", "gradckpt.kinds"},
    "gradckpt.residuals": {
        "gradckpt._C",
        "gradckpt._frames",
        "gradckpt._torch_private",
        "gradckpt.selective",
        "gradckpt.stats",
    },
    "gradckpt.patched": {
        "gradckpt._C",
        "gradckpt._activity",
        "gradckpt._shim",
        "gradckpt.apply",
        "gradckpt.arguments",
        "gradckpt.compat",
        "gradckpt.compile",
        "gradckpt.config",
        "gradckpt.decorator",
        "gradckpt.integrations.kwargs",
        "gradckpt.policies",
        "gradckpt.stats",
    },
    "gradckpt.policies": {
        "gradckpt._C",
        "gradckpt._decisions",
        "gradckpt._forms",
        "gradckpt.packing",
        "gradckpt.selective",
    },
    "gradckpt.run": {"gradckpt.config", "gradckpt.imports", "gradckpt.patched", "gradckpt.policies", "gradckpt.stats"},
    "gradckpt.saved": {
        "gradckpt._C",
        "gradckpt._activity",
        "gradckpt._savers",
        "gradckpt.config",
        "gradckpt.decorator",
    },
    "gradckpt.selective": {
        "gradckpt._C",
        "gradckpt._decisions",
        "gradckpt._forms",
        "gradckpt._torch_private",
        "gradckpt.config",
        "gradckpt.packing",
    },
    "gradckpt.sequential": {"gradckpt.config"},
    "gradckpt.stats": {"gradckpt._C"},
    "gradckpt.switch": {
        "gradckpt._activity",
        "gradckpt.apply",
        "gradckpt.config",
        "gradckpt.integrations",
        "gradckpt.integrations.kwargs",
        "gradckpt.integrations.seam",
        "gradckpt.kinds",
        "gradckpt.policies",
        "gradckpt.selectors",
    },
    "gradckpt.__main__": {"gradckpt"},
    "gradckpt._import_error": set(),
    "gradckpt.environment": {"gradckpt._C", "gradckpt._torch_private"},
    "gradckpt.integrations": set(),
    "gradckpt.integrations.deepspeed": {
        "gradckpt",
        "gradckpt.apply",
        "gradckpt.arguments",
        "gradckpt.integrations.kwargs",
        "gradckpt.integrations.offload",
    },
    "gradckpt.integrations.huggingface": {
        "gradckpt",
        "gradckpt.config",
        "gradckpt.decorator",
        "gradckpt.integrations.kwargs",
        "gradckpt.integrations.offload",
        "gradckpt.integrations.seam",
        "gradckpt.integrations.watch",
        "gradckpt.policies",
    },
    "gradckpt.integrations.kwargs": {"gradckpt.config", "gradckpt.policies"},
    "gradckpt.integrations.lightning": {
        "gradckpt",
        "gradckpt.apply",
        "gradckpt.config",
        "gradckpt.integrations.kwargs",
        "gradckpt.stats",
        "gradckpt.switch",
    },
    "gradckpt.integrations.offload": {"gradckpt", "gradckpt.apply", "gradckpt.arguments"},
    "gradckpt.integrations.seam": {
        "gradckpt",
        "gradckpt._activity",
        "gradckpt.apply",
        "gradckpt.integrations.kwargs",
        "gradckpt.integrations.offload",
        "gradckpt.integrations.overlap",
        "gradckpt.integrations.watch",
    },
    "gradckpt.integrations.trainer_callback": {
        "gradckpt.config",
        "gradckpt.integrations.huggingface",
        "gradckpt.integrations.kwargs",
        "gradckpt.integrations.seam",
    },
    "gradckpt.integrations.trainer_flag": {"gradckpt.imports", "gradckpt.integrations.trainer_callback"},
    "gradckpt.integrations.torchtitan": {"gradckpt.config", "gradckpt.integrations.wrapper"},
    "gradckpt.integrations.overlap": set(),
    "gradckpt.integrations.ranks": {"gradckpt._torch_private", "gradckpt.config"},
    "gradckpt.integrations.sharded": {"gradckpt._torch_private"},
    "gradckpt.integrations.wrapper": {
        "gradckpt",
        "gradckpt.apply",
        "gradckpt.config",
        "gradckpt.integrations.overlap",
        "gradckpt.integrations.ranks",
        "gradckpt.kinds",
    },
    "gradckpt.integrations.watch": {"gradckpt._activity", "gradckpt.integrations.ranks", "gradckpt.stats"},
}

#: Python module -> frameworks that it may import at the top: only who uses the framework imports the module
FRAMEWORKS = {
    "gradckpt.integrations.deepspeed": {"deepspeed"},
    "gradckpt.integrations.lightning": {"lightning", "pytorch_lightning"},
    "gradckpt.integrations.torchtitan": {"torchtitan"},
    "gradckpt.integrations.trainer_callback": {"transformers"},
}

SOURCES = sorted(p for pattern in ("*.c", "*.h", "*.cu", "*.cuh") for p in CSRC.rglob(pattern))


def room_of(path):
    return path.stem if path.parent == CSRC else path.parent.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_follow_the_arrows(path):
    room = room_of(path)
    for kind, name in re.findall(r'#include ([<"])([^>"]+)[>"]', path.read_text()):
        if name in ONLY:
            assert room in ONLY[name], f"{path.name} includes {name}"
        if kind == "<" or name.endswith("_emulation.h"):  # the tests' stand-ins for missing hardware
            continue
        target = (path.parent / name).resolve()
        assert target.exists(), f"{path.name} includes {name}, which is not there"
        if target.name != "gradckpt.h":
            seen = room_of(target)
            assert seen == room or seen in ALLOWED[room], f"{path.name} ({room}) includes {name} ({seen})"


def test_no_cpp_no_torch_header():
    assert not [p for p in CSRC.rglob("*") if p.suffix in {".cpp", ".cc", ".cxx", ".hpp"}]
    for path in SOURCES:
        assert not re.search(r'#include (<(torch|ATen|c10|pybind11)|"(torch/csrc|ATen|c10))', path.read_text()), path


def test_file_names_are_unique_and_files_hold_one_noun():
    code = [p for p in SOURCES if p.suffix in {".c", ".cu", ".cuh"}]
    assert len({p.name for p in code}) == len(code)
    package = sorted((ROOT / "gradckpt").rglob("*.py"))
    long = [p.name for p in [*code, *package] if len(p.read_text().splitlines()) > 500]
    assert not long


def imports_of(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "gradckpt":
            yield from (
                f"gradckpt.{a.name}" if f"gradckpt.{a.name}" in {*PYTHON, "gradckpt._C"} else "gradckpt"
                for a in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            yield node.module


@pytest.mark.parametrize("path", sorted((ROOT / "gradckpt").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_arrows(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for imported in imports_of(path):
        if imported.split(".")[0] == "gradckpt":
            allowed = PYTHON[name]
            assert imported in allowed or imported.rpartition(".")[0] in allowed, f"{name} imports {imported}"
            assert imported not in FRAMEWORKS, f"{name} imports {imported}"
        else:
            all_of_them = {"transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed", "torchtitan"}
            frameworks = all_of_them - FRAMEWORKS.get(name, set())
            assert imported.split(".")[0] not in frameworks, f"{name} imports {imported} at the top"


def test_ids_of_codecs_are_unique():
    lines = re.findall(r"^GCK_CODEC\((\w+), +(\d+)\)", (CSRC / "codec" / "codecs.def").read_text(), re.MULTILINE)
    assert len({i for _, i in lines}) == len(lines) >= 5
