"""The arrows between packages go one way: every #include, every name of C and every import is read,
and a new arrow, or a circle, fails."""

import ast
import re

import pytest
from checkout import CSRC, ROOT

#: package of csrc -> the packages that it may know, besides itself and gradckpt.h
ALLOWED = {
    "codec/format": set(),
    "codec/portable": {"codec/format"},
    "codec/x86": {"codec/format", "codec/portable"},
    "codec/cuda": {"codec/format"},
    "codec/host": {"codec/format", "codec/portable", "codec/x86", "codec/cuda"},
    "codec": {"codec/format", "codec/host", "codec/cuda"},
    "planner": set(),
    "offload": set(),
    "torch": set(),
    "engine": {"planner", "offload", "torch"},
    "engine/payload": {"engine", "torch"},
    "engine/selective": {"engine/payload", "engine", "torch"},
    "engine/saved": {"engine/payload", "engine", "torch"},
    "engine/region": {"engine/selective", "engine/saved", "engine/payload", "engine", "torch"},
    "module": {"engine/region", "engine/selective", "engine/saved", "engine/payload", "engine", "torch"},
}

#: what only one package may know, with those inside it
ONLY = {"Python.h": {"torch", "engine", "module"}, "dlfcn.h": {"torch"}, "cuda_runtime.h": {"codec"}}

#: Packages and modules of Python that few may import: what imports them, by prefix
PYTHON = {
    "gradckpt.__main__": set(),
    "gradckpt.run": {"gradckpt.__main__"},
    "gradckpt._script": {"gradckpt.run"},
    "gradckpt._doctor": {"gradckpt", "gradckpt.__main__"},
    "gradckpt.integrations": {"gradckpt", "gradckpt._models.switch", "gradckpt._settings", "gradckpt.compat"},
    "gradckpt._patching": {
        "gradckpt",
        "gradckpt.run",
        "gradckpt._engine.selective_callbacks",
        "gradckpt._gradient_error",
    },
    "gradckpt._enable": {"gradckpt", "gradckpt.integrations"},
    "gradckpt._planning": {"gradckpt", "gradckpt.__main__", "gradckpt._enable"},
    "gradckpt._models": {
        "gradckpt",
        "gradckpt._enable",
        "gradckpt._planning",
        "gradckpt._engine.callbacks",
        "gradckpt._engine.saved_tensors",
        "gradckpt._gradient_error",
        "gradckpt._patching",
        "gradckpt._settings",
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
    **{f"gradckpt.integrations.torchtitan{part}": {"torchtitan"} for part in ("", ".in_place", ".wrapped")},
    "gradckpt.integrations.transformers.trainer_callback": {"transformers"},
}

SOURCES = sorted(p for pattern in ("*.c", "*.h", "*.cu", "*.cuh") for p in CSRC.rglob(pattern))


#: What macros declare, for each row: codecs, device functions (cuda_device.h), kernels (kernels.h).
BY_MACRO = re.compile(r"gck_(codec_\w+|\w+_cuda|(portable|avx2|avx512)_\w+)")

#: The contract between codec and the others, which know nothing else of codec.
CONTRACT = CSRC / "gradckpt.h"


def unit_of(path):
    """Return the name of X.c, or X.cu, and of X.h, which are one unit."""
    return str(path.relative_to(CSRC).with_suffix(""))


def package_of(unit):
    return unit.rpartition("/")[0] or unit


def includes_of(path):
    """(bracket, name) of every #include, without the tests' stand-ins for missing hardware."""
    found = re.findall(r'#include ([<"])([^>"]+)[>"]', path.read_text())
    return [(kind, name) for kind, name in found if not name.endswith("_emulation.h")]


def code_of(path):
    """The text without comments, strings and included names."""
    comment, string, char = r"/\*.*?\*/|//[^\n]*", r'"(?:\\.|[^"\\\n])*"', r"'(?:\\.|[^'\\\n])+'"
    return re.sub(f"{comment}|{string}|{char}", lambda m: " " if m[0][0] == "/" else '""', path.read_text(), flags=re.S)


def statements_of(code):
    """The statements outside of all braces; @ in place of braces and what is in them."""
    code = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", "", code, flags=re.MULTILINE)
    code = re.sub(r'\bextern ""\s*\{', "", code)
    before = None
    while before != code:
        before, code = code, re.sub(r"\{[^{}]*\}", "@", code)
    return [" ".join(part.split()) for part in re.sub(r"\)\s*@", ")@;", code).split(";")]


def names_of(path):
    """(names that the file defines for others, names that it only declares), those that a macro
    makes left out"""
    code, header = code_of(path), path.suffix in {".h", ".cuh"}
    defined, declared = set(re.findall(r"^#define (gck_\w+)", code, re.M)) if header else set(), set()
    for statement in statements_of(code):
        left = statement.partition("=")[0]
        function = re.match(r"[^(]*?\b(gck_\w+) ?\(", left)
        names = [function[1]] if function else re.findall(r"(gck_\w+) ?(?:\[[^]]*\] ?)*(?=,|@|$)", left)
        if re.search(r"\b(static|typedef)\b", statement) or re.match(r"struct|enum|union", statement):
            if header:  # a type, or a function of every file that includes it
                defined.update(names)
        elif statement.startswith("extern ") or (function and not statement.endswith("@")):
            declared.update(names)
        else:
            defined.update(names)
    return defined, declared


NAMES = {path: names_of(path) for path in SOURCES}


def owners():
    """name -> the units that define it"""
    found = {}
    for path, (defined, _) in NAMES.items():
        for name in defined:
            found.setdefault(name, set()).add(unit_of(path))
    return found


OWNERS = owners()


def known_by(path):
    """The units whose headers the file includes, or whose names it uses. A struct of which only
    the tag is mentioned, behind a pointer, is not known."""
    unit = unit_of(path)
    known = {unit_of(CSRC / name) for kind, name in includes_of(path) if kind == '"'}
    for name in set(re.findall(r"(?<!struct )\bgck_\w+", code_of(path))) - NAMES[path][0]:
        contract = name in NAMES[CONTRACT][1] and not unit.startswith("codec/")
        of = {unit_of(CONTRACT)} if contract else OWNERS.get(name, set())
        known |= of if unit not in of else set()
    return known - {unit}


KNOWN = {path: known_by(path) for path in SOURCES}


def circles(graph):
    """Those of the graph {name: what it needs} that need each other, and what lies between."""
    left = {name: needs & graph.keys() - {name} for name, needs in graph.items()}
    while True:
        needed = set().union(*left.values())
        free = {name for name, needs in left.items() if not needs & left.keys() or name not in needed}
        if not free:
            return left
        left = {name: needs - free for name, needs in left.items() if name not in free}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(CSRC)))
def test_c_follows_the_arrows(path):
    package = package_of(unit_of(path))
    for kind, name in includes_of(path):
        assert name not in ONLY or package.split("/")[0] in ONLY[name], f"{path.name} includes {name}"
        assert kind == "<" or (CSRC / name).exists(), f"{path.name} includes {name}, which csrc/ does not have"
    for unit in KNOWN[path] - {unit_of(CONTRACT)}:
        assert package_of(unit) in {package} | ALLOWED[package], f"{path.name} ({package}) knows {unit}"


def test_c_has_no_circles():
    """A unit is X.c with its X.h."""
    graph = {}
    for path, known in KNOWN.items():
        graph.setdefault(unit_of(path), set()).update(known)
    left = circles(graph)
    assert not left, f"these know each other: {left}"


def test_what_a_file_defines_its_header_declares():
    """And no other file. The contract declares what codec defines."""
    declared = {}
    for path, (_, names) in NAMES.items():
        for name in names:
            declared.setdefault(name, set()).add(path)
    wrong = []
    for path, (defined, _) in NAMES.items():
        if path.suffix in {".c", ".cu"}:
            own = {path.with_suffix(".h"), path.with_suffix(".cuh")}
            own |= {CONTRACT} if unit_of(path).startswith("codec/") else set()
            for name in sorted(name for name in defined if not BY_MACRO.fullmatch(name)):
                by = declared.get(name, set())
                if len(by) != 1 or not by <= own:
                    wrong.append((path.name, name, sorted(p.name for p in by)))
    assert not wrong, f"(file, what it defines, what declares that): {wrong}"


def test_no_cpp_no_torch_header():
    assert not [p for p in CSRC.rglob("*") if p.suffix in {".cpp", ".cc", ".cxx", ".hpp"}]
    for path in SOURCES:
        assert not re.search(r'#include (<(torch|ATen|c10|pybind11)|"(torch/csrc|ATen|c10))', path.read_text()), path


def test_lines_of_c_have_at_most_120_columns():
    lines = [(p.name, i, line) for p in SOURCES for i, line in enumerate(p.read_text().splitlines(), 1)]
    assert not [(name, i) for name, i, line in lines if len(line) > 120]


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


def is_in(name, package):
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("name", MODULES)
def test_imports_follow_the_arrows(name):
    for imported, top in imports_of(name):
        assert imported != "gradckpt", f"{name} imports the package; import from the module that defines the name"
        for package, importers in PYTHON.items():
            if is_in(imported, package) and not is_in(name, package):
                listed = any(name == each or (each != "gradckpt" and is_in(name, each)) for each in importers)
                assert listed, f"{name} imports {imported}"
        if imported in FRAMEWORKS:
            assert not top, f"{name} imports {imported} at the top"
        library = imported.split(".")[0]
        if top and library in {library for each in FRAMEWORKS.values() for library in each} | {"accelerate"}:
            assert library in FRAMEWORKS.get(name, ()), f"{name} imports {imported} at the top"


def test_python_has_no_circles():
    """Also through imports inside functions: those hide a circle, they do not open it."""
    graph = {
        name: {m for m, _ in imports_of(name) if m in MODULES and m != name} for name in MODULES if name != "gradckpt"
    }
    left = circles(graph)
    assert not left, f"these import each other: {left}"


def test_modules_are_public_or_underscored():
    seen = {name.split(".")[1] for name in MODULES if "." in name}
    assert {name for name in seen if not name.startswith("_")} == PUBLIC


def test_callbacks_are_what_c_calls():
    from gradckpt._engine.callbacks import TABLE

    table = re.search(
        r"#define GCK_PY_CALLBACKS\(CALLBACK\)(.*?)\n\n", (CSRC / "torch" / "objects.h").read_text(), re.S
    )
    called = {name for p in SOURCES for name in re.findall(r"(?:\.|->)call\.(\w+)", p.read_text())} - {"name"}
    assert set(re.findall(r"CALLBACK\((\w+)\)", table.group(1))) == set(TABLE) == called
