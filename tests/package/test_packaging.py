"""The sdist and the wheel as a user gets them: built with gcc alone,
then installed where there is not even that."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import distribution as dist
import fresh_venv
import pytest
from checkout import ROOT

import gradckpt


@pytest.fixture(scope="module")
def gcc_alone(tmp_path_factory):
    """PATH of a machine with gcc, the assembler and the linker: no g++, no nvcc.
    -O1 since this one is not measured."""
    programs = tmp_path_factory.mktemp("bin")
    for name in ("as", "ld", "patchelf"):
        (programs / name).symlink_to(shutil.which(name, path=dist.environment()["PATH"]))
    for name in {"gcc", sysconfig.get_config_var("CC").split()[0]}:
        (programs / name).write_text(f'#!/bin/sh\nexec {shutil.which("gcc")} "$@" -O1\n')
        (programs / name).chmod(0o755)
    return str(programs)


@pytest.fixture(scope="module")
def built(tmp_path_factory, gcc_alone):
    """sdist, wheel, and what the build said: made once,
    by the first of pytest-xdist's processes that comes here."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "packaging"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "note").exists():
            env = {
                **dist.environment(GRADCKPT_CUDA="auto", CUDA_HOME="/nowhere", GRADCKPT_WERROR="0"),
                "PATH": gcc_alone,
            }
            note = dist.build_wheel(dist.build_sdist(folder), folder, base=env)[1]
            (folder / "note").write_text(note)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl")), (folder / "note").read_text()


@pytest.fixture(scope="module")
def sdist(built):
    return built[0]


@pytest.fixture(scope="module")
def wheel(built):
    return built[1]


def test_sdist_holds_what_builds_and_tests_it(sdist):
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    parts = ("csrc", "gradckpt", "tests", "docs", "examples", "benchmarks", "release")
    files = [path for part in parts for path in (ROOT / part).rglob("*") if path.is_file()]
    kept = {str(path.relative_to(ROOT)) for path in files if not re.search(r"__pycache__|\.so$", str(path))}
    kept |= {"Makefile", "LICENSE", "README.md", "CHANGELOG.md", "RELEASING.md", "setup.py", "pyproject.toml"}
    kept |= {"mkdocs.yml"}  # tests/package/test_docs.py builds the site
    assert kept <= names
    assert not [name for name in names if re.search(r"\.so$|\.pyc$|\.venv|^build", name)]


def test_sdist_is_the_same_bytes_again(sdist, tmp_path):
    assert dist.build_sdist(tmp_path).read_bytes() == sdist.read_bytes()


def test_builds_for_the_cpu_with_gcc_alone_and_says_so(built, gcc_alone):
    assert not [name for name in ("g++", "c++", "nvcc", "cc1plus") if shutil.which(name, path=gcc_alone)]
    assert built[2] == "built without CUDA: nvcc not found; the CPU codecs are complete"


def test_one_wheel_for_every_python_and_old_systems(wheel):
    assert re.fullmatch(
        rf"gradckpt-{re.escape(gradckpt.__version__)}-cp311-abi3-(manylinux2014_\w+\.)?manylinux_2_17_(x86_64|aarch64)\.whl",
        wheel.name,
    )
    with zipfile.ZipFile(wheel) as packed:
        text = packed.read(next(name for name in packed.namelist() if name.endswith("METADATA"))).decode()
    assert f"\nVersion: {gradckpt.__version__}\n" in text
    assert "\nRequires-Python: >=3.11\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert [line for line in re.findall("^Requires-Dist: (.+)$", text, re.MULTILINE) if "extra" not in line] == [
        "torch>=2.11"
    ]


def test_wheel_passes_every_checker(sdist, wheel):
    assert [look.__name__ for look in dist.CHECKS] == ["contents", "auditwheel", "abi3audit", "twine"]
    for look in dist.CHECKS:
        assert look(sdist, wheel)


def with_changes(wheel, to, change):
    """The wheel again, with ``change(name, bytes)`` for each file: other bytes,
    or None to leave it out."""
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(to / wheel.name, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return to / wheel.name


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda name, content: None if name.endswith("py.typed") else content, "py.typed is not in it"),
        (lambda name, content: None if name.endswith("LICENSE") else content, "LICENSE is not in it"),
        (
            lambda name, content: None if name.endswith("codecs.py") else content,
            "codecs.py of the checkout is not in it",
        ),
        (lambda name, content: content + b"\0/root/someone/csrc\0" * name.endswith(".so"), "names /root/someone/csrc"),
        (lambda name, content: content.replace(b"libdl.so.2", b"libxx.so.2"), "needs the library libxx.so.2"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_said(wheel, tmp_path, change, complaint):
    assert complaint in "; ".join(dist.complaints(with_changes(wheel, tmp_path, change)))


def test_a_symbol_of_a_newer_glibc_is_noticed(wheel, tmp_path):
    shutil.copy(wheel, tmp_path / wheel.name.replace("2_17", "2_14"))
    said = "; ".join(dist.complaints(next(tmp_path.glob("*.whl"))))
    assert "the extension needs GLIBC_2.17" in said
    assert "GLIBC_2.14" not in said


def test_installs_and_runs_without_a_compiler(wheel, tmp_path):
    import torch

    said = fresh_venv.install(wheel, tmp_path, Path(sys.executable), str(Path(torch.__file__).parent.parent))
    assert "built without CUDA" in said
    assert "FAILED" not in said
    checks = len(re.findall(r"^ok ", said, re.MULTILINE))
    assert checks > 10
    version = ".".join(map(str, sys.version_info[:3]))
    expected = f"CPython {version}, torch {torch.__version__}: doctor ({checks} checks), training step"
    assert fresh_venv.summary(said) == expected


# ---- one version


def test_the_version_is_kept_once():
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text()
    said = subprocess.run(
        [sys.executable, "setup.py", "-q", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout.split()[-1] == gradckpt.__version__


def test_the_version_is_the_newest_of_the_changelog():
    headings = re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == gradckpt.__version__
