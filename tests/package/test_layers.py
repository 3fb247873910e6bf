"""The arrows of the house go one way: every #include and import is read, and a new arrow fails."""

import ast
import re

import pytest
from checkout import CSRC, ROOT

#: room -> rooms whose headers it may include, besides its own and gradckpt.h
ALLOWED = {"codec": set(), "torch": set(), "engine": {"torch"}, "module": {"engine", "torch"}}

#: what only one room may know
ONLY = {"Python.h": {"torch", "engine", "module"}, "dlfcn.h": {"torch"}, "cuda_runtime.h": {"codec"}}

#: Rooms and modules of Python that few may import: what imports them, by prefix
PYTHON = {
    "gradckpt.__main__": set(),
    "gradckpt.run": {"gradckpt.__main__"},
    "gradckpt._script": {"gradckpt.run"},
    "gradckpt._doctor": {"gradckpt", "gradckpt.__main__"},
    "gradckpt.integrations": {"gradckpt", "gradckpt._models.switch", "gradckpt.compat"},
    "gradckpt._patching": {"gradckpt", "gradckpt.run", "gradckpt._engine.selective_callbacks"},
    "gradckpt._models": {
        "gradckpt",
        "gradckpt._engine.callbacks",
        "gradckpt._engine.saved_tensors",
        "gradckpt._patching",
        "gradckpt.integrations",
        "gradckpt.config",
        "gradckpt.selectors",
    },
    "gradckpt._compile": {"gradckpt", "gradckpt._engine.selective", "gradckpt._patching"},
}

#: The modules that users import; all others begin with an underscore.
PUBLIC = {"codecs", "compat", "config", "integrations", "policies", "run", "selectors"}

#: Python module -> frameworks that it may import at the top:
#: only who uses the framework imports the module
FRAMEWORKS = {
    "gradckpt.integrations.deepspeed": {"deepspeed"},
    "gradckpt.integrations.lightning": {"lightning", "pytorch_lightning"},
    "gradckpt.integrations.torchtitan": {"torchtitan"},
    "gradckpt.integrations.transformers.trainer_callback": {"transformers"},
}

SOURCES = sorted(p for pattern in ("*.c", "*.h", "*.cu", "*.cuh") for p in CSRC.rglob(pattern))


def room_of(path):
    return path.stem if path.parent == CSRC else path.relative_to(CSRC).parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_includes_follow_the_arrows(path):
    room = room_of(path)
    for kind, name in re.findall(r'#include ([<"])([^>"]+)[>"]', path.read_text()):
        if name in ONLY:
            assert room in ONLY[name], f"{path.name} includes {name}"
        if kind == "<" or name.endswith("_emulation.h"):  # the tests' stand-ins for missing hardware
            continue
        target = CSRC / name
        assert target.exists(), f"{path.name} includes {name}, which csrc/ does not have"
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


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(p): p for p in sorted((ROOT / "gradckpt").rglob("*.py"))}


def imports_of(name):
    """(module, whether at the top) of every import, also in functions,
    and of every text that names a module."""
    tree = ast.parse(MODULES[name].read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: relative imports are not read here"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES or full == "gradckpt._C" else node.module, id(node) in top
        elif isinstance(node, ast.Constant) and node.value in MODULES and node.value not in {"gradckpt", name}:
            yield node.value, False


def is_in(name, room):
    return name == room or name.startswith(f"{room}.")


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_arrows(name):
    for imported, top in imports_of(name):
        assert imported != "gradckpt", f"{name} imports the package; import from the module that defines the name"
        for room, importers in PYTHON.items():
            if is_in(imported, room) and not is_in(name, room):
                listed = any(name == each or (each != "gradckpt" and is_in(name, each)) for each in importers)
                assert listed, f"{name} imports {imported}"
        if imported in FRAMEWORKS:
            assert not top, f"{name} imports {imported} at the top"
        library = imported.split(".")[0]
        if top and library in {library for each in FRAMEWORKS.values() for library in each} | {"accelerate"}:
            assert library in FRAMEWORKS.get(name, ()), f"{name} imports {imported} at the top"


def test_python_has_no_circles():
    """Also through imports inside functions: those hide a circle, they do not open it."""
    left = {
        name: {m for m, _ in imports_of(name) if m in MODULES and m != name} for name in MODULES if name != "gradckpt"
    }
    while free := [name for name, imported in left.items() if not imported & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other, or what does: {sorted(left)}"


def test_modules_are_public_or_underscored():
    seen = {name.split(".")[1] for name in MODULES if "." in name}
    assert {name for name in seen if not name.startswith("_")} == PUBLIC


def test_callbacks_are_what_c_calls():
    from gradckpt._engine.callbacks import TABLE

    objects = (CSRC / "torch" / "objects.h").read_text()
    table = re.search(r"#define GCK_PY_CALLBACKS\(CALLBACK\)(.*?)\n\n", objects, re.S)
    called = {name for p in SOURCES for name in re.findall(r"(?:\.|->)call\.(\w+)", p.read_text())} - {"name"}
    assert set(re.findall(r"CALLBACK\((\w+)\)", table.group(1))) == set(TABLE) == called


def test_ids_of_codecs_are_unique():
    lines = re.findall(r"^GCK_CODEC\((\w+), +(\d+)\)", (CSRC / "codec" / "codecs.def").read_text(), re.MULTILINE)
    assert len({i for _, i in lines}) == len(lines) >= 5
