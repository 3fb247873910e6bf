"""Makes a folder with the toolkit that the wheel is built with: ``CUDA_HOME`` of ``make release``.

Its nvcc is 12.4, so that drivers from 525 on take the wheel. PyPI's packages of CUDA 12 have ptxas,
the headers and, in 12.9 alone, libcudart_static.a; they lack nvcc, cicc, cudafe++, fatbinary and
nvlink. Debian 13 has these in nvidia-cuda-toolkit (non-free), 87 MB; its other packages, 900 MB of
libraries, are not needed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from commands import Failed, run

#: Headers and libdevice of the same release as Debian's nvcc; the runtime is a later one of 12.
WHEELS = (
    "nvidia-cuda-nvcc-cu12==12.4.131",
    "nvidia-cuda-runtime-cu12==12.4.127",
    "nvidia-cuda-runtime-cu12==12.9.79",
)
#: Of nvidia-cuda-toolkit: folder there -> names -> folder here.
PROGRAMS = (
    ("usr/bin", ("cudafe++", "fatbinary", "bin2c", "ptxas", "nvlink"), "bin"),
    ("usr/lib/nvidia-cuda-toolkit/bin", ("nvcc", "crt"), "bin"),
    ("usr/lib/nvidia-cuda-toolkit/bin", ("cicc",), "nvvm/bin"),
)
PROFILE = """TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""


def copy(source: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, folder / source.name, dirs_exist_ok=True)
    else:
        shutil.copy(source, folder)


def unpack(wheel: str, folder: Path) -> Path:
    """Download a wheel and unpack it; return its folder ``nvidia``."""
    download = folder / wheel.replace("==", "-")
    run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download, wheel])
    with zipfile.ZipFile(next(download.glob("*.whl"))) as packed:
        packed.extractall(download)
    return download / "nvidia"


def make(toolkit: Path, deb: Path) -> str:
    """Fill the folder; return what its nvcc says of itself."""
    with tempfile.TemporaryDirectory() as scratch:
        debian = Path(scratch) / "debian"
        run(["dpkg-deb", "--extract", deb, debian])
        for there, names, here in PROGRAMS:
            for name in names:
                copy(debian / there / name, toolkit / here)
        compiler, headers, runtime = (unpack(wheel, Path(scratch)) for wheel in WHEELS)
        copy(compiler / "cuda_nvcc" / "nvvm" / "libdevice", toolkit / "nvvm")
        copy(compiler / "cuda_nvcc" / "include", toolkit)
        copy(headers / "cuda_runtime" / "include", toolkit)
        copy(runtime / "cuda_runtime" / "lib" / "libcudart_static.a", toolkit / "lib64")
    (toolkit / "bin" / "nvcc.profile").write_text(PROFILE)
    return run([toolkit / "bin" / "nvcc", "--version"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("toolkit", type=Path, help="folder to make")
    parser.add_argument("deb", type=Path, help="Debian 13's nvidia-cuda-toolkit_12.4*.deb")
    options = parser.parse_args(arguments)
    try:
        print(make(options.toolkit, options.deb))
    except (Failed, OSError) as failed:
        print(f"gradckpt: {failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
