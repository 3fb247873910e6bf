"""tests/helpers/c_structures.py against the headers: names, order, offsets and sizes of all fields."""

import ctypes
import re
import shutil
import subprocess

import c_structures
import pytest
from c_structures import MIRRORS
from checkout import CSRC, ROOT

every_mirror = pytest.mark.parametrize("name", MIRRORS)


def fields_of(text, name):
    """The names of a structure's fields, as the header declares them."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    body = re.search(rf"typedef struct {{([^{{}}]*)}} {name};", text).group(1)
    declared = [part for line in body.split(";") for part in line.split(",")]
    return [re.search(r"(\w+)\s*(?:\[\w+\]\s*)*$", part.strip()).group(1) for part in declared if part.strip()]


def layout_of(folder, name, fields, header):
    """[(offset, size) of each field, ..., size of all], by the compiler."""
    size = f'printf("%zu\\n", sizeof({name}));'
    lines = [f'printf("%zu %zu\\n", offsetof({name}, {f}), sizeof((({name} *)0)->{f}));' for f in fields]
    program = f'#include <stdio.h>\n#include "{header}"\nint main(void) {{ {" ".join(lines)} {size} return 0; }}\n'
    (folder / "layout.c").write_text(program)
    command = [shutil.which("gcc"), "-std=c11", f"-I{CSRC}", folder / "layout.c", "-o", folder / "layout"]
    subprocess.run(command, check=True)
    found = subprocess.run([folder / "layout"], capture_output=True, text=True, check=True).stdout
    *rows, total = [tuple(map(int, line.split())) for line in found.splitlines()]
    return rows, total[0]


def differences(folder, name, text, header):
    """What a mirror has that the header has not, in words."""
    mirror = MIRRORS[name][0]
    names, declared = [field for field, _ in mirror._fields_], fields_of(text, name)
    if names != declared:
        return f"fields {names}, not {declared}"
    rows, size = layout_of(folder, name, names, header)
    mine = [(getattr(mirror, field).offset, getattr(mirror, field).size) for field in names]
    return "" if (mine, ctypes.sizeof(mirror)) == (rows, size) else f"layout {mine}, not {rows}"


@every_mirror
def test_a_mirror_is_what_the_header_declares(name, tmp_path):
    header = MIRRORS[name][1]
    assert differences(tmp_path, name, (CSRC / header).read_text(), header) == ""


@every_mirror
@pytest.mark.parametrize("change", ["a field more", "a field wider"])
def test_a_header_that_changes_is_noticed(name, change, tmp_path):
    """Where the compiler has a hole, too: a field there moves no other."""
    text = (CSRC / MIRRORS[name][1]).read_text()
    for number in range(len(MIRRORS[name][0]._fields_) if change == "a field more" else 1):
        start, end = re.search(rf"typedef struct {{([^{{}}]*)}} {name};", text).span(1)
        declarations = text[start:end].split(";")
        if change == "a field more":
            declarations.insert(min(number, len(declarations) - 1), "\n    char added")
        else:
            declarations[-2] = re.sub(r"\w+$", r"\g<0>[2]", declarations[-2])
        changed = tmp_path / "changed.h"
        changed.write_text(text[:start] + ";".join(declarations) + text[end:])
        assert differences(tmp_path, name, changed.read_text(), changed) != ""


def test_no_other_file_mirrors_a_structure():
    named = re.compile(r"\(ctypes\.(?:Little|Big)?\w*(?:Structure|Union)\)|\((?:Structure|Union)\)")
    here = c_structures.__file__
    files = [
        path for folder in ("benchmarks", "gradckpt", "tests", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    found = [str(path) for path in files if str(path) != here and named.search(path.read_text())]
    assert found == []
