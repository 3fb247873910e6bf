"""The portable codecs on aarch64 (Grace, Graviton), under emulation: the same bytes as here.

Debian's cross compiler and emulator do it: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user.
"""

import platform
import shlex
import shutil
import struct
import subprocess
import sysconfig

import codec_inputs
import numpy as np
import pytest
from checkout import CSRC, NATIVE
from codec_libraries import compile_codecs

from gradckpt import codecs

TOOLS = ("aarch64-linux-gnu-gcc", "qemu-aarch64")
missing = [name for name in TOOLS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64"),
    pytest.mark.skipif(
        bool(missing), reason=f"no {', '.join(missing)}: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user"
    ),
]
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "bool": 3}  # gck_dtype


def program(folder, cross=None):
    """csrc/codec and codec_bytes.c, without a library of that machine that runs it."""
    objects = compile_codecs(folder, [NATIVE / "codec_bytes.c"], cross)
    made = folder / "codec_bytes"
    subprocess.run([cross or "gcc", "-static", *objects, "-o", made, "-lm"], check=True)
    return made


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    here = program(tmp_path_factory.mktemp("here"))
    return [[here], ["qemu-aarch64", program(tmp_path_factory.mktemp("aarch64"), TOOLS[0])]]


def tensors(dtype):
    """Bits of tensors, with the number of columns of those that are stored by column."""
    if dtype == "bool":
        yield from ((np.arange(n, dtype=np.uint8) * 37 % 11 > 4, 1) for n in (1, 7, 128, 129, 4096, 5003))
        return
    yield codec_inputs.inputs(dtype), 1
    for inputs in (codec_inputs.hostile, codec_inputs.huge_groups, codec_inputs.unusual):
        yield inputs(dtype), 1
    for n in (0, 1, 127, 128, 129, 4095, 4097, 20003):
        yield codec_inputs.gaussian(dtype, n, 3.0), 1
    for columns in (3, 64):
        yield codec_inputs.gaussian(dtype, columns * 130, 1e-41 if dtype == "float32" else 1e-4), columns


def cases(dtype):
    for name in codecs.names():
        for bits, columns in tensors(dtype):
            for noisy, flush in ((0, 0), (1, 0), (0, 1)):
                yield name, bits, noisy, flush, columns


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bytes(programs, dtype, tmp_path):
    written, n = tmp_path / "tensors", 0
    with written.open("wb") as file:
        for name, bits, noisy, flush, columns in cases(dtype):
            file.write(struct.pack("16s4iq", name.encode(), DTYPES[dtype], noisy, flush, columns, bits.size))
            file.write(bits.tobytes())
            n += 1
    assert n > 150
    answers = []
    for i, command in enumerate(programs):
        with written.open("rb") as file, (tmp_path / str(i)).open("wb") as out:
            subprocess.run(command, stdin=file, stdout=out, check=True)
        answers.append((tmp_path / str(i)).read_bytes())
    assert len(answers[0]) > 3 * n
    assert answers[0] == answers[1]


def test_the_extension_compiles(tmp_path):
    """All of it but the link: Python's headers of this machine describe that one too."""
    include = sysconfig.get_path("include")
    flags = shlex.split("-std=c11 -O1 -fPIC -fexceptions -Wall -Wextra -Wno-missing-field-initializers -Werror")
    flags += shlex.split("-D_GNU_SOURCE -DPy_LIMITED_API=0x030B0000 -DGCK_BUILD_NOTE='\"\"'")
    for source in sorted(CSRC.rglob("*.c")):
        command = [TOOLS[0], *flags, f"-I{CSRC}", f"-I{include}", "-c", source]
        done = subprocess.run([*command, "-o", tmp_path / "x.o"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
