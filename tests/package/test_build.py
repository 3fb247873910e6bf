"""The extension as built: what it needs, what it shows,
how it refuses an environment it cannot serve."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from gradckpt import _C

PATH = _C.__file__

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) not found")
needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) not found")


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_is_abi3():
    assert PATH.endswith(".abi3.so")


@needs_nm
def test_exports_one_symbol():
    lines = [line.split() for line in run("nm", "-D", "--defined-only", PATH).splitlines()]
    assert [line[-1] for line in lines if line[-2] in "TDBRVW"] == ["PyInit__C"]


@needs_nm
def test_needs_no_cpp_torch_or_cuda_symbol():
    undefined = [line.split()[-1] for line in run("nm", "-D", "-u", PATH).splitlines()]
    assert not [s for s in undefined if re.match(r"_Z|aoti_|torch_|cuda|cu[A-Z]|__cxa_(throw|guard)|__gxx", s)]


@needs_readelf
def test_links_libc_only_and_is_hardened():
    text = run("readelf", "-dlW", PATH)
    needed = re.findall(r"NEEDED.*\[(.+?)\]", text)
    assert all(
        re.match(r"(libc|libm|libdl|libpthread|librt|ld-linux.*|libasan|libubsan)\.", n + ".") for n in needed
    ), needed
    assert "BIND_NOW" in text
    assert "GNU_RELRO" in text
    assert "TEXTREL" not in text
    assert "RPATH" not in text
    assert "RUNPATH" not in text
    assert not re.search(r"GNU_STACK.*RWE", text)


def python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


def test_without_torch_one_sentence():
    out = python("import sys; sys.modules['torch'] = None\nimport gradckpt")
    assert re.search(r"ImportError: gradckpt: torch is not installed; run: pip install", out.stderr)


def test_old_torch_one_sentence():
    code = "import torch; torch.__version__ = '2.10.1+cpu'\nimport gradckpt"
    sentence = "ImportError: gradckpt: torch 2.10.1+cpu is older than 2.11; run: pip install --upgrade 'torch>=2.11'"
    assert sentence in python(code).stderr


@pytest.mark.parametrize(("isa", "words"), [("scalar", None), ("mmx", "is not known"), ("avx512", "not supported")])
def test_isa_is_forced_by_name(isa, words):
    if isa == "avx512" and python("from gradckpt import _C; _C.force_isa('avx512')").returncode == 0:
        pytest.skip("this CPU has AVX-512: nothing to refuse")
    out = python("from gradckpt import _C; print(_C.isa())", GRADCKPT_ISA=isa)
    if words is None:
        assert out.stdout.strip() == isa
    else:
        assert f"ImportError: gradckpt: GRADCKPT_ISA={isa} is" in out.stderr
        assert words in out.stderr


def test_import_is_silent():
    out = python("import gradckpt")
    assert (out.returncode, out.stdout, out.stderr) == (0, "", "")
