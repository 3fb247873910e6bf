"""Ten million random groups: every instruction set against group_portable.c,
in a C program (codec_parity.c).

GRADCKPT_SOAK_SECONDS bounds it (1800 by default). AVX-512 is emulated where the CPU has none.
"""

import os
import pathlib
import platform
import shlex
import shutil
import subprocess

import pytest
from checkout import CODEC, CSRC, NATIVE

GROUPS = 10_000_000
FLAGS = shlex.split("-std=c11 -O2 -D_GNU_SOURCE -ffp-contract=off -fno-math-errno -Wall -Wextra -Werror")
AVX2 = shlex.split("-mavx2 -mfma -mf16c")
AVX512 = shlex.split("-mavx512f -mavx512bw -mavx512dq -mavx512vl")


def build(folder):
    gcc = shutil.which("gcc")
    assert gcc, "gcc is needed: the extension could not have been built without it"
    emulated = " avx512bw " not in pathlib.Path("/proc/cpuinfo").read_text()
    define = ["-DGCK_EMULATE_AVX512"] if emulated else []
    objects = []
    for path in [*(CODEC / "portable").glob("*.c"), *(CODEC / "x86").glob("*.c")]:
        avx512 = AVX2 if emulated else AVX2 + AVX512
        isa = {"avx2": AVX2, "avx512": avx512}.get(path.stem.rpartition("_")[2], [])
        objects.append(folder / f"{path.stem}.o")
        subprocess.run([gcc, *FLAGS, *isa, *define, f"-I{CSRC}", "-c", path, "-o", objects[-1]], check=True)
    program = folder / "codec_parity"
    main = NATIVE / "codec_parity.c"
    subprocess.run([gcc, *FLAGS, *define, f"-I{CSRC}", main, *objects, "-o", program, "-lm"], check=True)
    return program


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="there is one instruction set only")
def test_instruction_sets_agree(tmp_path):
    seconds = os.environ.get("GRADCKPT_SOAK_SECONDS", "1800")
    command = [build(tmp_path), str(GROUPS), seconds, os.environ.get("GRADCKPT_SOAK_SEED", "1")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        lines = []
        for line in running.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    assert running.returncode == 0, "".join(lines[-3:])
    assert lines[-1].startswith("same bytes: ")
