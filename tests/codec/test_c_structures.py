"""tests/helpers/codec_libraries.py against the headers: names, offsets and sizes of fields."""

import ctypes
import re

import codec_libraries
from checkout import ROOT
from codec_libraries import MIRRORS
from native_programs import gcc


def test_mirrors_are_what_the_headers_declare(tmp_path):
    lines = ["#include <stddef.h>", *{f'#include "{header}"' for _, header in MIRRORS.values()}]
    for name, (mirror, _) in MIRRORS.items():
        for field, _ in mirror._fields_:
            at, size = getattr(mirror, field).offset, getattr(mirror, field).size
            same = f"offsetof({name}, {field}) == {at} && sizeof((({name} *)0)->{field}) == {size}"
            lines.append(f'_Static_assert({same}, "{name}.{field}");')
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(mirror)}, "{name}");')
    (tmp_path / "mirrors.c").write_text("\n".join(lines) + "\n")
    gcc("-fsyntax-only", tmp_path / "mirrors.c")


def test_no_other_file_mirrors_a_structure():
    mirror = re.compile(r"^class \w+\((ctypes\.)?\w*(Structure|Union)\)", re.MULTILINE)
    paths = [
        path for folder in ("benchmarks", "gradckpt", "tests", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [str(path) for path in paths if mirror.search(path.read_text())] == [codec_libraries.__file__]
