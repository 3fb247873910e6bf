"""Stub libraries of an older glibc, to link against: what is linked with them also runs there.

The linker takes the newest version of each symbol of the C library that it finds,
``dlopen@GLIBC_2.34`` in Debian 12, and so ties the result to that release and later ones. But a C
library keeps the versions of all releases before it, and the stubs offer of each symbol only the
newest that TARGET had. They hold names and no code, and only the linker sees them:
``LDFLAGS=-L<folder>``. A symbol that TARGET did not have is not in them; ``distribution.py`` looks
for what is left.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

#: Functions that had a library of their own until glibc 2.34, where all became part of libc.so.6.
FORMER = {
    "libdl.so.2": re.compile(r"dl(open|sym|vsym|close|error|addr|addr1|info|mopen)"),
    "libpthread.so.0": re.compile(r"pthread_.*|sem_.*"),
    "librt.so.1": re.compile(r"shm_(open|unlink)|timer_.*|mq_.*|aio_.*|lio_.*"),
}

LOADER = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}

Version = tuple[int, ...]


def number(version: str) -> Version:
    """``"GLIBC_2.2.5"`` or ``"2.2.5"`` as numbers that can be compared;
    empty for ``GLIBC_PRIVATE`` and the like."""
    return tuple(int(n) for n in re.findall(r"\d+", version)) if re.fullmatch(r"(GLIBC_)?[\d.]+", version) else ()


def newest(library: Path, target: Version) -> dict[str, str]:
    """Name of each symbol that ``library`` defines -> the newest
    version of it that is not newer than ``target``."""
    found: dict[str, str] = {}
    with library.open("rb") as file:
        elf = ELFFile(file)
        names, versions, symbols = (
            elf.get_section_by_name(name) for name in (".gnu.version_d", ".gnu.version", ".dynsym")
        )
        assert isinstance(names, GNUVerDefSection)
        assert isinstance(versions, GNUVerSymSection)
        assert isinstance(symbols, SymbolTableSection)
        of = {definition["vd_ndx"]: next(auxiliaries).name for definition, auxiliaries in names.iter_versions()}
        for i, symbol in enumerate(symbols.iter_symbols()):
            index = versions.get_symbol(i)["ndx"]
            if symbol["st_shndx"] in ("SHN_UNDEF", "SHN_ABS") or not isinstance(index, int):  # ABS: names of versions
                continue
            version = of.get(index & 0x7FFF, "")  # the top bit: not what a linker takes by default
            if () < number(version) <= target and number(version) > number(found.get(symbol.name, "")):
                found[symbol.name] = version
    return found


def stub(folder: Path, soname: str, symbols: dict[str, str]) -> None:
    """A library that defines ``symbols``, each with its version, as functions without a body."""
    source, script = folder / f"{soname}.s", folder / f"{soname}.map"
    source.write_text("".join(f".globl {name}\n.type {name}, @function\n{name}:\n" for name in sorted(symbols)))
    nodes, before = [], ""
    for version in sorted(set(symbols.values()), key=number):
        names = "; ".join(sorted(name for name, of in symbols.items() if of == version))
        nodes.append(f"{version} {{ global: {names}; }} {before};\n")
        before = version
    script.write_text("".join(nodes))
    link = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"]
    subprocess.run([*link, "-o", str(folder / soname), str(source)], check=True)


def where(name: str) -> Path:
    """The file that gcc would link for ``name``."""
    said = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    path = Path(said.strip())
    if not path.is_absolute():
        sys.exit(f"gradckpt: gcc finds no {name}; install the Debian package libc6-dev")
    return path.resolve()


def make(folder: Path, target: str) -> None:
    """Fills ``folder`` with what ``-lc -lm -ldl -lpthread -lrt`` find there,
    as glibc ``target`` had them."""
    folder.mkdir(parents=True, exist_ok=True)
    rest, former = newest(where("libc.so.6"), number(target)), {}
    for soname, pattern in FORMER.items():
        moved = {name: rest.pop(name) for name in list(rest) if pattern.fullmatch(name)}
        former[soname] = {**newest(where(soname), number(target)), **moved}  # before 2.34 they are there still
    mathematics = newest(where("libm.so.6"), number(target))
    for soname, symbols in {"libc.so.6": rest, "libm.so.6": mathematics, **former}.items():
        stub(folder, soname, symbols)
    # As in the C library's own libc.so: a part of it is linked in (atexit),
    # and the loader has a symbol or two.
    loader = where(LOADER[os.uname().machine])
    others = " ".join(str(folder / soname) for soname in former)
    script = f"GROUP ( {folder / 'libc.so.6'} {where('libc_nonshared.a')} AS_NEEDED ( {loader} {others} ) )\n"
    (folder / "libc.so").write_text(script)
    (folder / "libm.so").write_text(f"GROUP ( {folder / 'libm.so.6'} )\n")
    for soname in former:
        (folder / soname.partition(".")[0]).with_suffix(".so").write_text(f"GROUP ( {folder / soname} )\n")
