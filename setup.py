"""Builds gradckpt._C: one cp311-abi3 extension from csrc/, without torch.

Switches (environment):
    GRADCKPT_CUDA=0|1|auto    leave CUDA out | fail without it | use nvcc when it works (default)
    GRADCKPT_CUDA_ARCHS       e.g. "8.0;9.0;12.0+PTX"; the default covers 7.5 and later
    TORCH_CUDA_ARCH_LIST      the same in torch's words; what nvcc does not know is left out
    GRADCKPT_DEBUG=1          -O0 -g3, assertions on
    GRADCKPT_SANITIZE=address,undefined
                              instrument the C sources; run with the sanitizers preloaded
    GRADCKPT_WERROR=1         warnings are errors (CI)
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, ExecError, LinkError

ROOT = Path(__file__).parent
#: Those that nvcc knows.  Cards of 11.0, and later ones than 12, compile the PTX of 10.0.
DEFAULT_ARCHS = "7.5;8.0;8.6;8.9;9.0;10.0+PTX;12.0"
LEAST_ARCH = (7, 5)
#: What TORCH_CUDA_ARCH_LIST may name, as torch.utils.cpp_extension has it.
NAMED_ARCHS = {
    "kepler+tesla": "3.7",
    "kepler": "3.5+PTX",
    "maxwell+tegra": "5.3",
    "maxwell": "5.0;5.2+PTX",
    "pascal": "6.0;6.1+PTX",
    "volta+tegra": "7.2",
    "volta": "7.0+PTX",
    "turing": "7.5+PTX",
    "ampere+tegra": "8.7",
    "ampere": "8.0;8.6+PTX",
    "ada": "8.9+PTX",
    "hopper": "9.0+PTX",
    "blackwell+tegra": "11.0",
    "blackwell": "10.0;10.3;12.0;12.1+PTX",
}
#: These mean the default here: of torch's own build; "native" needs torch to see the cards.
DEFAULT_NAMES = {"all", "common", "auto", "native"}
#: Commands that end in a compiled extension; ``sdist`` and ``egg_info`` work on any system.
BUILDS = {"bdist_wheel", "build", "build_ext", "develop", "dist_info", "editable_wheel", "install"}
LEAST_NVCC = (12, 1)  # the first whose PTX (8.1) has FP8 conversions for sm_89

C_FLAGS = [
    "-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-missing-field-initializers",
    # A daemon thread that outlives Python is unwound without the GIL: it must release nothing then.
    "-fno-exceptions", "-fasynchronous-unwind-tables",
    "-g0",                      # Python's own flags ask for -g: 11 MB, and the paths of this machine
    "-ffp-contract=off",        # codecs: bytes are defined by IEEE operations, one by one
    "-fno-math-errno", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2",
]  # fmt: skip
# These hold no references. ops.c fails by exceptions of torch's; codecs are what gcc 12 compiles
# better with them: without, lossless takes 1.04 times as long to decode float32, int6 1.02 times.
WITH_EXCEPTIONS = ("csrc/torch/ops.c", "csrc/codec/")
# By the end of the file's name; x86 only, elsewhere those files are empty.
ISA_FLAGS = {
    "_avx2.c": ["-mavx2", "-mfma", "-mf16c"],
    "_avx512.c": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
}
LINK_FLAGS = ["-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack", "-Wl,--exclude-libs,ALL", "-Wl,--as-needed"]
NVCC_FLAGS = [
    "-std=c++17", "-O3", "-fmad=false", "-ftz=false", "-prec-div=true", "-cudart", "static", "--threads", "2",
    "-Xcompiler", "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall,-Wextra",
]  # fmt: skip


#: Of int6, 13 MB for six architectures become 5 MB, or 1.8 MB where only drivers of CUDA 12.4 and
#: later need to load them: of 12, nvcc 12.8 and 12.9 have that option, too.
COMPRESS_FLAGS = {12: ["-Xfatbin", "-compress-all"], 13: ["--compress-mode=size"]}


class CudaError(Exception):
    """Why no kernels can be built, without a full stop."""


def env_flag(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def reason_against_python() -> str | None:
    """Return why nothing can be built for this interpreter: what is wrong, and what to do."""
    if sys.platform != "linux":
        return f"{sys.platform} is not supported; use Linux{' (WSL)' if sys.platform == 'win32' else ''}"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "free-threaded CPython cannot load abi3 extensions; use the build of CPython that has a GIL"
    return None


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = os.path.join(home, "bin", "nvcc") if home else shutil.which("nvcc")
    if found is None and os.path.exists("/usr/local/cuda/bin/nvcc"):
        found = "/usr/local/cuda/bin/nvcc"
    return found if found and os.path.exists(found) else None


def static_cudart(nvcc: str) -> str:
    """Path of libcudart_static.a, from the toolkit that nvcc says
    it belongs to (nvcc may be a wrapper)."""
    said = subprocess.run([nvcc, "-dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    tops = re.findall(r"^#\$ TOP=(.+)$", said, re.MULTILINE) + [str(Path(nvcc).resolve().parent.parent)]
    for top in tops:
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            path = Path(top.strip()) / folder / "libcudart_static.a"
            if path.exists():
                return str(path)
    raise CudaError("libcudart_static.a not found beside nvcc")


def ask(nvcc: str, question: str) -> str:
    """What nvcc prints; nothing when it fails."""
    try:
        return subprocess.run([nvcc, question], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def reason_against(nvcc: str) -> str | None:
    """Why this nvcc cannot build the kernels."""
    least = ".".join(map(str, LEAST_NVCC))
    version = version_of(nvcc)
    if version is None:
        return "nvcc does not tell its version"
    return f"{name_of(nvcc)} is older than {least}" if version < LEAST_NVCC else None


def version_of(nvcc: str) -> tuple[int, int] | None:
    said = re.search(r"release (\d+)\.(\d+)", ask(nvcc, "--version"))
    return (int(said[1]), int(said[2])) if said else None


def name_of(nvcc: str) -> str:
    version = version_of(nvcc)
    return f"nvcc {version[0]}.{version[1]}" if version else "nvcc"


def compress_flags(nvcc: str) -> list[str]:
    version = version_of(nvcc)
    return COMPRESS_FLAGS[12 if version is None or version[0] < 13 else 13]


def known_archs(nvcc: str) -> set[str]:
    """``{"75", "80", ...}``; empty when nvcc does not say."""
    return set(re.findall(r"compute_(\w+)", ask(nvcc, "--list-gpu-arch")))


def split_archs(text: str) -> list[str]:
    return [arch for arch in re.split(r"[;,\s]+", text) if arch]


def cuda_archs(nvcc: str) -> list[str]:
    """What the environment asks for, or those of the default that this nvcc knows, one of them as
    PTX, too."""
    known = known_archs(nvcc)
    ours = split_archs(os.environ.get("GRADCKPT_CUDA_ARCHS", ""))
    if ours:
        return checked_archs(ours, known)
    return torch_archs(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), known) or default_archs(known)


def default_archs(known: set[str]) -> list[str]:
    archs = [arch for arch in split_archs(DEFAULT_ARCHS) if is_known(arch, known)]
    if not archs:
        raise CudaError("nvcc knows no compute capability of the default")
    if not any(arch.endswith("+PTX") for arch in archs):
        archs[-1] += "+PTX"
    return archs


def is_known(arch: str, known: set[str]) -> bool:
    return not known or re.sub(r"[^0-9]", "", arch) in known


def checked_archs(archs: list[str], known: set[str]) -> list[str]:
    """Those of GRADCKPT_CUDA_ARCHS, or the build ends: they are meant for gradckpt alone."""
    for arch in archs:
        if not re.fullmatch(r"\d+\.\d[a-z]?(\+PTX)?", arch):
            sys.exit(f"gradckpt: cannot read CUDA architecture {arch!r}; expected something like 9.0 or 12.0+PTX")
        if not is_known(arch, known):
            sys.exit(f"gradckpt: this nvcc does not know compute capability {arch}; change GRADCKPT_CUDA_ARCHS, or "
                     "use another toolkit")  # fmt: skip
    return archs


def torch_archs(text: str, known: set[str]) -> list[str]:
    """Those of TORCH_CUDA_ARCH_LIST that this nvcc and gradckpt have; the others are named.

    It is meant for torch's extensions, so nothing in it ends the build. Suffixes (9.0a) name
    instructions that the kernels do not use.
    """
    archs: dict[str, bool] = {}  # with PTX?
    left_out = []
    for word in split_archs(text):
        name = re.sub(r"(\+ptx)+$", "", word.lower())
        named = default_archs(known) if name in DEFAULT_NAMES else split_archs(NAMED_ARCHS.get(name, name))
        for arch in named:
            number = re.fullmatch(r"(\d+)\.(\d)[a-z]?(\+PTX)?", arch)
            if number and (int(number[1]), int(number[2])) >= LEAST_ARCH and is_known(f"{number[1]}{number[2]}", known):
                capability = f"{number[1]}.{number[2]}"
                archs[capability] = archs.get(capability, False) or name != word.lower() or bool(number[3])
            else:
                left_out.append(arch.removesuffix("+PTX"))
    if left_out:
        names, instead = ", ".join(left_out), "" if archs else "; the default is built"
        print(f"gradckpt: left out of TORCH_CUDA_ARCH_LIST: {names} (below 7.5, or unknown to nvcc){instead}",
              file=sys.stderr)  # fmt: skip
    return [arch + "+PTX" * ptx for arch, ptx in archs.items()]


def gencode(arch: str) -> list[str]:
    number = arch.removesuffix("+PTX").replace(".", "")
    code = f"sm_{number}" if not arch.endswith("+PTX") else f"[sm_{number},compute_{number}]"
    return ["-gencode", f"arch=compute_{number},code={code}"]


class BuildExt(build_ext):
    """Compiles each source with the flags its name asks for, and .cu files with nvcc."""

    def build_extension(self, ext: Extension) -> None:
        cuda_sources = [s for s in ext.sources if s.endswith(".cu")]
        nvcc, note = self.choose_cuda(cuda_sources)
        if nvcc is not None:
            try:
                archs, objects, links = self.compile_cuda(nvcc, cuda_sources)
                self.build(ext, note, objects, links)
                print(f"gradckpt: built with CUDA: {name_of(nvcc)} for {';'.join(archs)}", file=sys.stderr)
                return
            except CudaError as error:
                note = self.without_cuda(str(error))
        self.build(ext, note, [], [])

    def build(self, ext: Extension, note: str, cuda_objects: list[str], cuda_links: list[str]) -> None:
        """Compile the C sources and link; CudaError when that is CUDA's fault."""
        macros = [*ext.define_macros, ("GCK_BUILD_NOTE", f'"{note}"'), *[("GCK_WITH_CUDA", "1")] * bool(cuda_objects)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda s: self.compile_c(s, ext, macros),
                                    [s for s in ext.sources if s.endswith(".c")]))  # fmt: skip
        path = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        # The interpreter's own link line may carry a path of the machine that built it.
        self.compiler.linker_so = [f for f in self.compiler.linker_so if not f.startswith("-Wl,-rpath")]
        links = [*ext.extra_link_args, *cuda_links, "-lm", "-ldl"]
        try:
            self.compiler.link_shared_object([*objects, *cuda_objects], path, extra_postargs=links)
        except LinkError as error:
            if not cuda_objects:
                raise
            raise CudaError("the kernels could not be linked") from error

    def compile_cuda(self, nvcc: str, sources: list[str]) -> tuple[list[str], list[str], list[str]]:
        """Architectures, objects, and what is linked with them.

        The source without kernels comes first: it shows whether nvcc works.
        """
        links = [static_cudart(nvcc), "-lpthread", "-lrt"]
        archs, compress = cuda_archs(nvcc), compress_flags(nvcc)
        first, *rest = sorted(sources, key=lambda source: os.path.basename(source) != "driver.cu")
        objects = [self.compile_cu(first, nvcc, archs, compress)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(self.compile_cu, s, nvcc, archs, compress) for s in rest]
            try:
                return archs, objects + [job.result() for job in jobs], links
            except CudaError:
                pool.shutdown(cancel_futures=True)
                raise

    def choose_cuda(self, cuda_sources: list[str]) -> tuple[str | None, str]:
        wish = os.environ.get("GRADCKPT_CUDA", "auto")
        if wish not in ("0", "1", "auto"):
            sys.exit(f"gradckpt: GRADCKPT_CUDA is 0, 1 or auto; not {wish!r}")
        nvcc = find_nvcc() if wish != "0" and cuda_sources else None
        against = reason_against(nvcc) if nvcc else "nvcc not found"
        if against is None:
            return nvcc, "CUDA codecs built in"
        return None, self.without_cuda("GRADCKPT_CUDA=0" if wish == "0" else against)

    def without_cuda(self, against: str) -> str:
        """Say why the build is for the CPU alone, or end it if CUDA is a must."""
        if os.environ.get("GRADCKPT_CUDA") == "1":
            sys.exit(f"gradckpt: GRADCKPT_CUDA=1 but {against}; set CUDA_HOME to a toolkit of CUDA 12.1 or later")
        note = f"built without CUDA: {against}"
        print(f"gradckpt: {note}; the CPU codecs are complete", file=sys.stderr)
        return note

    def compile_c(self, source: str, ext: Extension, macros: list[tuple[str, str]]) -> str:
        flags = [*ext.extra_compile_args, *(["-fexceptions"] if source.startswith(WITH_EXCEPTIONS) else [])]
        if os.uname().machine == "x86_64":
            flags += next((f for suffix, f in ISA_FLAGS.items() if source.endswith(suffix)), [])
        return self.compiler.compile([source], self.build_temp, macros, ext.include_dirs, extra_postargs=flags)[0]

    def compile_cu(self, source: str, nvcc: str, archs: list[str], compress: list[str]) -> str:
        out = os.path.join(self.build_temp, source + ".o")
        os.makedirs(os.path.dirname(out), exist_ok=True)
        define = '-DGCK_CUDA_ARCHS="' + ";".join(archs) + '"'
        codes = [flag for arch in archs for flag in gencode(arch)]
        werror = ["-Werror", "all-warnings"] if env_flag("GRADCKPT_WERROR") else []
        try:
            self.spawn([nvcc, "-c", source, "-o", out, "-Icsrc", define, *NVCC_FLAGS, *compress, *werror, *codes])
        except (CompileError, ExecError) as error:
            raise CudaError(f"{name_of(nvcc)} could not compile {os.path.basename(source)}") from error
        return out


def files(*patterns: str) -> list[str]:
    return sorted(str(p.relative_to(ROOT)) for pattern in patterns for p in (ROOT / "csrc").rglob(pattern))


def extension() -> Extension:
    flags, links = list(C_FLAGS), list(LINK_FLAGS)
    if env_flag("GRADCKPT_WERROR"):
        flags.append("-Werror")
    if env_flag("GRADCKPT_DEBUG"):
        flags += ["-O0", "-g3", "-UNDEBUG", "-U_FORTIFY_SOURCE"]
    sanitize = os.environ.get("GRADCKPT_SANITIZE")
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g",
                  "-U_FORTIFY_SOURCE"]  # fmt: skip
        links += [f"-fsanitize={sanitize}"]
    return Extension(
        "gradckpt._C",
        files("*.c", "*.cu"),
        depends=files("*.h", "*.cuh"),
        include_dirs=["csrc"],
        define_macros=[("Py_LIMITED_API", "0x030B0000"), ("_GNU_SOURCE", "1")],
        extra_compile_args=flags,
        extra_link_args=links,
        py_limited_api=True,
    )


class InPlace(Distribution):
    """Reads no pyproject.toml, which says nothing of the extension,
    and which setuptools before 77 cannot read."""

    def parse_config_files(self, *args: object, **kwargs: object) -> None:
        pass


# Before setup(): setuptools' own refusal of a free-threaded CPython does not say what to do.
if BUILDS.intersection(sys.argv) and (against := reason_against_python()):
    sys.exit(f"gradckpt: {against}")

setup(
    distclass=InPlace if "build_ext" in sys.argv else Distribution,
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
