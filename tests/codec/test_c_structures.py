"""tests/helpers/codec_libraries.py against the headers: names, order, offsets and sizes of
fields."""

import ctypes
import re
import shutil
import subprocess

import codec_libraries
import pytest
from checkout import CSRC, ROOT
from codec_libraries import MIRRORS


def fields_of(text, name):
    """The names of a structure's fields, as the header declares them."""
    between = re.search(rf"typedef struct {{([^{{}}]*)}} {name};", text)[1]
    text = re.sub(r"\(\*(\w+(?:\[\w+\])?)\)\([^)]*\)", r"\1", between, flags=re.DOTALL)  # pointers to functions
    declared = [part.strip() for line in text.split(";") for part in line.split(",")]
    return [re.search(r"(\w+)(\[\w+\])*$", part).group(1) for part in declared if part]


def header_of(name):
    """Its text, without comments."""
    return re.sub(r"/\*.*?\*/", "", (CSRC / MIRRORS[name][1]).read_text(), flags=re.DOTALL)


def layout_of(folder, name, fields, text):
    """([(offset, size) of each field], size of all), by the compiler."""
    lines = [f'printf("%zu %zu\\n", offsetof({name}, {f}), sizeof((({name} *)0)->{f}));' for f in fields]
    lines.append(f'printf("%zu\\n", sizeof({name}));')
    (folder / "layout.c").write_text(f"#include <stdio.h>\n{text}\nint main(void) {{ {' '.join(lines)} return 0; }}\n")
    command = [shutil.which("gcc"), "-std=c11", f"-I{CSRC}", folder / "layout.c", "-o", folder / "layout"]
    subprocess.run(command, check=True)
    found = subprocess.run([folder / "layout"], capture_output=True, text=True, check=True).stdout
    *rows, total = [tuple(map(int, line.split())) for line in found.splitlines()]
    return rows, total[0]


def differences(folder, name, text):
    """What a mirror has that the header has not, in words."""
    mirror = MIRRORS[name][0]
    names, declared = [field for field, _ in mirror._fields_], fields_of(text, name)
    if names != declared:
        return f"fields {names}, not {declared}"
    theirs = layout_of(folder, name, names, text)
    mine = [(getattr(mirror, field).offset, getattr(mirror, field).size) for field in names], ctypes.sizeof(mirror)
    return "" if mine == theirs else f"layout {mine}, not {theirs}"


@pytest.mark.parametrize("name", MIRRORS)
def test_a_mirror_is_what_the_header_declares(name, tmp_path):
    assert differences(tmp_path, name, header_of(name)) == ""


def test_no_other_file_mirrors_a_structure():
    mirror = re.compile(r"^class \w+\((ctypes\.)?\w*(Structure|Union)\)", re.MULTILINE)
    paths = [
        path for folder in ("benchmarks", "gradckpt", "tests", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [str(path) for path in paths if mirror.search(path.read_text())] == [codec_libraries.__file__]
