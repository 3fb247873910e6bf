"""What nvcc says of the device kernels: no warnings, no spills, few registers, the instructions
that are meant, nothing that needs a C++ runtime."""

import ctypes
import pathlib
import re
import shlex
import shutil
import subprocess

import pytest
from checkout import CODEC, CSRC, source

SOURCES = sorted(p.stem for p in CODEC.rglob("*.cu"))
#: PTX is kept in the objects, as text.
FLAGS = shlex.split(
    """-std=c++17 -O3 -fmad=false -cudart static -gencode arch=compute_90,code=[sm_90,compute_90] --no-compress
    -Xcompiler -fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall,-Wextra,-Werror
    -Werror all-warnings -Xptxas -v '-DGCK_CUDA_ARCHS="90"'"""
)
#: Of each format: {one tensor, several} x dtypes, and strided, all x {encode,
#: encode with noise, decode}.
KERNELS = {
    "fp8": 42,
    "int8": 43,
    "int6": 22,
    "int4": 22,
    "raw": 12,
    "cast": 8,
    "lossless": 12,
    "mask": 4,
    "cuda_device": 0,
    "driver": 0,
    "cuda_error": 0,
    "equal": 1,
}
ENTRY = re.compile(r"Compiling entry function '(\S+)' for.*?(?=Compiling entry|\Z)", re.DOTALL)
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
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
            [nvcc, *FLAGS, f"-I{CSRC}", "-c", source(f"{name}.cu"), "-o", out / f"{name}.o"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name in SOURCES
    }  # fmt: skip
    said = {name: p.communicate()[0] for name, p in running.items()}
    for name, p in running.items():
        assert p.returncode == 0, said[name]
    return {"nvcc": nvcc, **{name: (out / f"{name}.o", said[name]) for name in SOURCES}}


@pytest.fixture(params=SOURCES)
def kernels(request, built):
    """{mangled name: what ptxas said of it and of the functions it calls}"""
    said = {m[1]: m[0] for m in ENTRY.finditer(built[request.param][1])}
    assert len(said) == KERNELS.get(request.param, len(said))
    return said


@pytest.mark.parametrize("name", SOURCES)
def test_no_warning(built, name):
    assert "warning" not in built[name][1].lower()


def test_no_spills_and_few_registers(kernels):
    """64 at most; of the contiguous kernels of 16-bit values so few that an SM holds 1536 threads,
    48 KiB in flight. A device keeps local memory for every thread it can hold; beyond 1 KiB each, a
    launch may wait for more."""
    for name, said in kernels.items():
        found = SPILLS.findall(said)
        assert found
        assert [f for f in found if f[1:] != ("0", "0")] == [], name
        used = int(re.search(r"Used (\d+) registers", said)[1])
        assert used <= 64, name
        noisy = re.search(r"encode_kernelIL10gck_format\dELb1E", name)
        if re.search(r"5typedIL9gck_dtype[12]E", name) and not noisy:
            assert used <= (48 if "4jobs" in name else 40), name
        stack = re.search(r"(\d+) bytes cumulative stack size", said)
        assert stack is None or int(stack[1]) <= 512, name


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_code_of_other_formats_is_gone(built, name):
    """Only int4 fills tables in advance: what a format's numbers decide, ptxas has folded. Where it
    has not, kernels take more registers."""
    assert "gck_choose_entries" in built["int4"][1]
    assert "gck_choose_entries" not in built[name][1]


def entries_of(path):
    """{mangled name: PTX}"""
    text = path.read_bytes().decode("latin-1")
    bodies = re.findall(r"\.entry (\w+)\((.*?)\n\}", text, re.DOTALL)
    assert bodies
    return dict(bodies)


INSTRUCTIONS = {
    "fp8": {
        r"encode_kernelIL10gck_format0ELb0E": ["ld.global.nc.v4", "st.global.cs.v4", "cvt.rn.satfinite.e4m3x2.f32"],
        r"encode_kernelIL10gck_format1ELb0E": ["ld.global.nc.v4", "st.global.cs.v4", "cvt.rn.satfinite.e5m2x2.f32"],
        r"decode_kernelIL10gck_format0E": ["ld.global.cs.v4", "st.global.v4", "cvt.rn.f16x2.e4m3x2"],
        r"decode_kernelIL10gck_format1E": ["ld.global.cs.v4", "st.global.v4", "cvt.rn.f16x2.e5m2x2"],
    },
    "int8": {
        r"encode_kernelIL10gck_format\dELb.E": ["ld.global.nc.v4", "st.global.cs.v4"],
        r"decode_kernelIL10gck_format\dE": ["ld.global.cs.v4", "st.global.v4"],
    },
    "int6": {
        r"encode_kernelIL10gck_format4ELb.E": ["ld.global.nc.v4", "st.global.cs.v2", "st.global.cs.u32"],
        r"decode_kernelIL10gck_format4E": ["ld.global.cs.v2", "ld.global.cs.u32", "st.global.v4"],
    },
    "int4": {
        r"encode_kernelIL10gck_format5ELb.E": ["ld.global.nc.v4", "st.global.cs.v2"],
        r"decode_kernelIL10gck_format5E": ["ld.global.cs.v2", "st.global.v4"],
    },
    "raw": {r"copy_kernelI.*5dense": ["ld.global.nc.v4", "st.global.v4"]},
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions(built, name):
    """16-byte loads, streaming stores of the payload, hardware conversions."""
    entries = {k: v for k, v in entries_of(built[name][0]).items() if "7untyped" not in k and "strided" not in k}
    for pattern, wanted in INSTRUCTIONS[name].items():
        matching = [k for k in entries if re.search(pattern, k)]
        assert matching, pattern
        for kernel in matching:
            assert [w for w in wanted if w not in entries[kernel]] == [], kernel


@pytest.mark.parametrize("name", SOURCES)
def test_no_double_arithmetic(built, name):
    assert re.findall(r"\.f64\b", built[name][0].read_bytes().decode("latin-1")) == []


def test_links_without_a_cxx_runtime(built, tmp_path):
    """gcc links the objects; the result needs the C library only
    and can be loaded without a driver."""
    gcc, readelf = shutil.which("gcc"), shutil.which("readelf")
    if gcc is None or readelf is None:
        pytest.skip("gcc or readelf not found")
    plan = subprocess.run(
        [built["nvcc"], "-dryrun", f"-I{CSRC}", "-c", source("driver.cu")], capture_output=True, text=True
    ).stderr
    top = pathlib.Path(re.search(r"TOP=(\S+)", plan).group(1)).resolve()
    places = [top / "lib64", top / "lib", *top.glob("targets/*/lib")]
    cudart = next((p / "libcudart_static.a" for p in places if (p / "libcudart_static.a").exists()), None)
    if cudart is None:
        pytest.skip(f"libcudart_static.a not found under {top}")

    (tmp_path / "probe.c").write_text(SHIM)
    library = tmp_path / "probe.so"
    objects = [built[name][0] for name in SOURCES]
    subprocess.run([gcc, "-shared", "-fPIC", "-Wl,--no-undefined", "-DGCK_WITH_CUDA=1", f"-I{CSRC}",
                    tmp_path / "probe.c", source("overflow.c"), source("devices.c"),
                    *objects, cudart, "-lpthread", "-ldl", "-lrt", "-o", library], check=True)  # fmt: skip
    dynamic = subprocess.run([readelf, "-d", library], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert [n for n in needed if not SYSTEM_LIBRARIES.fullmatch(n)] == []

    driver, runtime = ctypes.c_int(-1), ctypes.c_int(-1)
    status = ctypes.CDLL(str(library)).probe_check(ctypes.byref(driver), ctypes.byref(runtime))
    assert runtime.value >= 12000
    assert status == (0 if driver.value // 1000 >= runtime.value // 1000 else E_DRIVER)
