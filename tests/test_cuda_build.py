"""What nvcc says of the device kernels: no warnings, no spills, nothing that needs a C++ runtime."""

import ctypes
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest

CODEC = pathlib.Path(__file__).resolve().parent.parent / "csrc" / "codec"
DIRECT = ["cast", "lossless", "mask"]  # kernels of their own, see direct.h
SOURCES = ["fp8", "int8", "raw", *DIRECT, "verdict", "cuda"]
FLAGS = shlex.split(
    """-std=c++17 -O3 -fmad=false -cudart static -gencode arch=compute_90,code=sm_90
    -Xcompiler -fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall,-Wextra,-Werror
    -Werror all-warnings -Xptxas -v '-DGCK_CUDA_ARCHS="90"'"""
)
# Formats x dtypes x layouts x directions; raw: by item size.
KERNELS = {"fp8": 24, "int8": 24, "raw": 6, "cast": 8, "lossless": 12, "mask": 4, "verdict": 0, "cuda": 0}
PROPERTIES = re.compile(
    r"properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
SYSTEM_LIBRARIES = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d+|ld-linux.*")
E_DRIVER = -3

SHIM = """
#include "gradckpt.h"
int probe_check(int *driver, int *runtime) { return gck_cuda_check(driver, runtime); }
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """{name: (object file, what nvcc printed)}, and nvcc itself under "nvcc"."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc not found")
    out = tmp_path_factory.mktemp("cuda")
    running = {
        name: subprocess.Popen(
            [nvcc, *FLAGS, "-c", CODEC / f"{name}.cu", "-o", out / f"{name}.o"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in SOURCES
    }  # fmt: skip
    said = {name: p.communicate()[0] for name, p in running.items()}
    for name, p in running.items():
        assert p.returncode == 0, said[name]
    return {"nvcc": nvcc, **{name: (out / f"{name}.o", said[name]) for name in SOURCES}}


@pytest.mark.parametrize("name", SOURCES)
def test_no_warning(built, name):
    assert "warning" not in built[name][1].lower()


@pytest.mark.parametrize("name", SOURCES)
def test_no_spills(built, name):
    said = built[name][1]
    spills = PROPERTIES.findall(said)
    assert len(re.findall(r"Compiling entry function", said)) == KERNELS[name]
    assert len(spills) >= KERNELS[name]
    assert [s for s in spills if s[1:] != ("0", "0")] == []


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_registers_leave_room_for_48_kib_in_flight(built, name):
    """16-bit contiguous kernels: 1536 threads per SM, so 65536 / 1536, rounded down to a multiple of 8."""
    used = re.findall(r"Compiling entry function '(\S+)' for.*?Used (\d+) registers", built[name][1], re.DOTALL)
    contiguous = {kernel: int(registers) for kernel, registers in used if re.search(r"5denseIt", kernel)}
    assert len(contiguous) == 8
    assert max(contiguous.values()) <= 40


@pytest.mark.parametrize("name", DIRECT)
def test_registers_of_the_direct_codecs(built, name):
    """64 at most; 16-bit lossless, one block of 256 threads x 32 bytes: 40, so that 48 KiB are in flight."""
    used = re.findall(r"Compiling entry function '(\S+)' for.*?Used (\d+) registers", built[name][1], re.DOTALL)
    assert len(used) == KERNELS[name]
    assert max(int(registers) for _, registers in used) <= 64
    if name == "lossless":
        half = [int(registers) for kernel, registers in used if re.search(r"5denseIt", kernel)]
        assert len(half) == 4
        assert max(half) <= 40


@pytest.mark.parametrize("name", DIRECT)
def test_wide_accesses(built, name, tmp_path):
    """16 bytes at a time; the payload by stores that leave the cache to others."""
    made = tmp_path / f"{name}.ptx"
    flags = [f for f in FLAGS if f not in ("-Xptxas", "-v")]
    subprocess.run([built["nvcc"], *flags, "-ptx", CODEC / f"{name}.cu", "-o", made], check=True, capture_output=True)
    ptx = made.read_text()
    assert re.search(r"ld\.global\.nc\.v4", ptx)
    assert re.search(r"st\.global\.cs\.v4", ptx)
    assert re.search(r"st\.global\.v4", ptx)


def test_links_without_a_cxx_runtime(built, tmp_path):
    """gcc links the objects; the result needs the C library only and can be loaded without a driver."""
    gcc, readelf = shutil.which("gcc"), shutil.which("readelf")
    if gcc is None or readelf is None:
        pytest.skip("gcc or readelf not found")
    plan = subprocess.run([built["nvcc"], "-dryrun", "-c", CODEC / "cuda.cu"], capture_output=True, text=True).stderr
    top = pathlib.Path(re.search(r"TOP=(\S+)", plan).group(1)).resolve()
    places = [top / "lib64", top / "lib", *top.glob("targets/*/lib")]
    cudart = next((p / "libcudart_static.a" for p in places if (p / "libcudart_static.a").exists()), None)
    if cudart is None:
        pytest.skip(f"libcudart_static.a not found under {top}")

    (tmp_path / "probe.c").write_text(SHIM)
    library = tmp_path / "probe.so"
    objects = [built[name][0] for name in SOURCES]
    subprocess.run([gcc, "-shared", "-fPIC", "-Wl,--no-undefined", "-DGCK_WITH_CUDA=1", f"-I{CODEC.parent}",
                    tmp_path / "probe.c", CODEC / "verdict.c",
                    *objects, cudart, "-lpthread", "-ldl", "-lrt", "-o", library], check=True)  # fmt: skip
    dynamic = subprocess.run([readelf, "-d", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert [n for n in needed if not SYSTEM_LIBRARIES.fullmatch(n)] == []

    driver, runtime = ctypes.c_int(-1), ctypes.c_int(-1)
    status = ctypes.CDLL(str(library)).probe_check(ctypes.byref(driver), ctypes.byref(runtime))
    assert runtime.value >= 12000
    assert status == (0 if driver.value // 1000 >= runtime.value // 1000 else E_DRIVER)
