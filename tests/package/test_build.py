"""setup.py, and the extension as built: what it needs, what it shows, how it refuses an environment
that it cannot serve.

The nvcc that setup.py finds: flags that it has, architectures that it knows, toolkits that are too
old or broken. And systems and interpreters for which nothing is built.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest
import setuptools
from checkout import ROOT
from setuptools.dist import Distribution
from setuptools.errors import CompileError, LinkError

from gradckpt import _C

# ---- the extension

PATH = _C.__file__

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) not found")
needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) not found")


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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


def test_import_is_silent_and_imports_no_framework_and_no_compiler():
    others = {"transformers", "tensorboard", "rich", "torch._dynamo", "sympy"}
    out = python(f"import sys, gradckpt; assert not {others} & sys.modules.keys()")
    assert (out.returncode, out.stdout, out.stderr) == (0, "", "")


# ---- nvcc

KNOWN = {
    "12.1": "50 52 60 70 75 80 86 87 89 90",
    "12.6": "50 52 60 70 75 80 86 87 89 90",
    "12.8": "50 60 75 80 86 89 90 100 101 120",
    "13.0": "75 80 86 87 88 89 90 100 103 110 120 121",
}
DEFAULT = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0+PTX", "12.0"]


def load_setup_py():
    """setup.py as a module; it runs its commands unless ``setuptools.setup`` is replaced."""
    spec = importlib.util.spec_from_file_location("gradckpt_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup_py(monkeypatch):
    """setup.py as a module; it sets nothing up."""
    for name in ("GRADCKPT_CUDA", "GRADCKPT_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return load_setup_py()


@pytest.fixture
def nvcc(tmp_path, monkeypatch):
    """Puts an nvcc of some version where setup.py looks; it answers as that one does,
    and fails otherwise."""

    def put(version, compresses, said=None):
        (tmp_path / "bin").mkdir(exist_ok=True)
        path = tmp_path / "bin" / "nvcc"
        known = KNOWN.get(version, "50 60 70 75")
        lines = "".join(f"compute_{number}\\n" for number in known.split())
        path.write_text(f"""#!{sys.executable}
import sys
said = {{"--version": {said or f"Cuda compilation tools, release {version}, V{version}.88"!r},
        "--help": "--threads <n>" + {" --compress-mode [default,size,speed]" if compresses else ""!r},
        "--list-gpu-arch": "{lines}"}}
if sys.argv[1] not in said:
    sys.exit("nvcc fatal: unknown option " + sys.argv[1])
print(said[sys.argv[1]])
""")
        path.chmod(0o755)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        return str(path)

    return put


def commands(setup_py, nvcc):
    """What is run to compile one .cu file."""
    build = setup_py.BuildExt(Distribution())
    build.build_temp = "/tmp"
    spawned = []
    build.spawn = spawned.append
    archs = setup_py.cuda_archs(nvcc)
    build.compile_cu("csrc/codec/cuda/driver.cu", nvcc, archs, setup_py.compress_flags(nvcc))
    return spawned[0]


@pytest.mark.parametrize(("version", "compresses"), [("12.1", False), ("12.6", False), ("12.8", True), ("13.0", True)])
def test_flags_are_those_nvcc_has(setup_py, nvcc, version, compresses):
    path = nvcc(version, compresses)
    assert setup_py.reason_against(path) is None
    command = commands(setup_py, path)
    # Of 12, drivers older than 550 would not load what is compressed by modes.
    assert ("--compress-mode=size" in command) == (version == "13.0")
    assert ("-compress-all" in command) == (version != "13.0")
    known = {f"arch=compute_{n}" for n in KNOWN[version].split()}
    codes = [flag for flag in command if flag.startswith("arch=")]
    assert codes
    assert {code.partition(",")[0] for code in codes} <= known
    assert [code for code in codes if code.endswith("]")] == [
        "arch=compute_100,code=[sm_100,compute_100]" if compresses else "arch=compute_90,code=[sm_90,compute_90]"
    ], "later cards, and 11.0, compile that"
    if compresses:
        assert setup_py.cuda_archs(path) == DEFAULT


def test_archs_that_are_asked_for(setup_py, nvcc, monkeypatch):
    path = nvcc("12.6", False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    monkeypatch.setenv("GRADCKPT_CUDA_ARCHS", "8.0 9.0a+PTX")
    assert setup_py.cuda_archs(path) == ["8.0", "9.0a+PTX"]
    monkeypatch.setenv("GRADCKPT_CUDA_ARCHS", "9.0;12.0")
    with pytest.raises(SystemExit, match=r"this nvcc does not know compute capability 12.0; change GRADCKPT"):
        setup_py.cuda_archs(path)
    monkeypatch.setenv("GRADCKPT_CUDA_ARCHS", "Hopper")
    with pytest.raises(SystemExit, match=r"cannot read CUDA architecture 'Hopper'; expected something like 9.0"):
        setup_py.cuda_archs(path)


OLD_DEFAULT = ["7.5", "8.0", "8.6", "8.9", "9.0+PTX"]  # of nvcc 12.6


@pytest.mark.parametrize(
    ("version", "text", "archs", "left_out"),
    [
        ("12.6", "Hopper", ["9.0+PTX"], ""),
        ("12.6", "Ampere;Ada", ["8.0", "8.6+PTX", "8.9+PTX"], ""),
        ("12.6", "ampere+tegra 8.6 AMPERE", ["8.7", "8.6+PTX", "8.0"], ""),
        ("12.6", "5.2;8.0", ["8.0"], "5.2"),
        ("12.6", "Blackwell Hopper", ["9.0+PTX"], "10.0, 10.3, 12.0, 12.1"),
        ("12.6", "Pascal Volta", OLD_DEFAULT, "6.0, 6.1, 7.0"),
        ("12.6", "sm_90 nonsense 8.0", ["8.0"], "sm_90, nonsense"),
        ("13.0", "native", DEFAULT, ""),
        ("13.0", "Blackwell", ["10.0", "10.3", "12.0", "12.1+PTX"], ""),
        ("13.0", "7.0 7.5 8.0 8.6 9.0 10.0 12.0+PTX", ["7.5", "8.0", "8.6", "9.0", "10.0", "12.0+PTX"], "7.0"),
        ("13.0", "12.0f Blackwell+Tegra", ["12.0", "11.0"], ""),
    ],
)
def test_archs_in_torchs_words(setup_py, nvcc, monkeypatch, capsys, version, text, archs, left_out):
    """The list is meant for torch's extensions, so nothing in it ends this build."""
    path = nvcc(version, False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", text)
    assert setup_py.cuda_archs(path) == archs
    default = "; the default is built" if archs == OLD_DEFAULT else ""
    line = f"gradckpt: left out of TORCH_CUDA_ARCH_LIST: {left_out} (below 7.5, or unknown to nvcc){default}\n"
    assert capsys.readouterr().err == (line if left_out else "")


def test_nvcc_of_which_no_capability_is_left(setup_py, nvcc, monkeypatch):
    monkeypatch.setitem(KNOWN, "15.0", "150 160")
    with pytest.raises(setup_py.CudaError, match="knows no compute capability of the default"):
        setup_py.cuda_archs(nvcc("15.0", True))


@pytest.mark.parametrize(
    ("version", "said", "why"),
    [
        ("11.8", None, "nvcc 11.8 is older than 12.1"),
        ("12.0", None, "nvcc 12.0 is older than 12.1"),
        ("12.8", "Segmentation fault", "nvcc does not tell its version"),
    ],
)
def test_toolkit_that_cannot_build(setup_py, nvcc, monkeypatch, capsys, version, said, why):
    nvcc(version, False, said)
    build = setup_py.BuildExt(Distribution())
    assert build.choose_cuda(["a.cu"]) == (None, f"built without CUDA: {why}")
    assert capsys.readouterr().err == f"gradckpt: built without CUDA: {why}; the CPU codecs are complete\n"
    monkeypatch.setenv("GRADCKPT_CUDA", "1")
    with pytest.raises(SystemExit, match=f"=1 but {why}; set CUDA_HOME to a toolkit of CUDA 12.1 or later"):
        build.choose_cuda(["a.cu"])
    monkeypatch.setenv("GRADCKPT_CUDA", "0")
    assert build.choose_cuda(["a.cu"]) == (None, "built without CUDA: GRADCKPT_CUDA=0")


# ---- a toolkit that fails when it is used


class Compiler:
    """Takes the place of gcc: writes nothing, keeps what it is told."""

    def __init__(self):
        self.linker_so, self.macros, self.linked, self.link_fails_with = [], [], [], None

    def compile(self, sources, build_temp, macros, include_dirs, extra_postargs):
        self.macros.append(dict(macros))
        return [f"{sources[0]}.o"]

    def link_shared_object(self, objects, path, extra_postargs):
        self.linked.append(objects)
        if self.link_fails_with in extra_postargs:
            raise LinkError("ld failed")


@pytest.fixture
def build(setup_py, nvcc, tmp_path, monkeypatch):
    """A build of two C sources and three of CUDA by nvcc 13.0; ``build.fails`` names the .cu files
    that do not compile."""
    nvcc("13.0", True)
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    monkeypatch.chdir(tmp_path)
    build = setup_py.BuildExt(Distribution())
    build.build_temp, build.compiler, build.fails, build.spawned = str(tmp_path), Compiler(), set(), []
    build.get_ext_fullpath = lambda name: str(tmp_path / "gradckpt" / "_C.so")

    def spawn(command):
        build.spawned.append(command[2])
        if command[2] in build.fails:
            raise CompileError("nvcc failed")

    build.spawn = spawn
    build.run = lambda: build.build_extension(
        setup_py.Extension("gradckpt._C", ["x.c", "a.cu", "cuda/driver.cu", "c.cu", "y.c"], extra_compile_args=[])
    )
    return build


def built_note(build):
    """What `gradckpt doctor` will show; all C sources agree about it."""
    macros = build.compiler.macros[-2:]
    assert macros[0] == macros[1]
    return macros[0]["GCK_BUILD_NOTE"].strip('"'), "GCK_WITH_CUDA" in macros[0]


def test_toolkit_that_works(build, capsys):
    build.run()
    assert built_note(build) == ("CUDA codecs built in", True)
    assert build.spawned[0] == "cuda/driver.cu", "it has no kernels, and shows whether nvcc works"
    assert sorted(build.spawned[1:]) == ["a.cu", "c.cu"]
    assert len(build.compiler.linked) == 1
    assert len(build.compiler.linked[0]) == 5
    assert capsys.readouterr().err == f"gradckpt: built with CUDA: nvcc 13.0 for {';'.join(DEFAULT)}\n"


def no_object(build, tmp_path):
    build.fails.add("cuda/driver.cu")
    return "nvcc 13.0 could not compile driver.cu"


def no_later_object(build, tmp_path):
    build.fails.add("c.cu")
    return "nvcc 13.0 could not compile c.cu"


def no_runtime(build, tmp_path):
    (tmp_path / "lib64" / "libcudart_static.a").unlink()
    return "libcudart_static.a not found beside nvcc"


def no_link(build, tmp_path):
    build.compiler.link_fails_with = str(tmp_path / "lib64" / "libcudart_static.a")
    return "the kernels could not be linked"


@pytest.mark.parametrize("breaks", [no_object, no_later_object, no_runtime, no_link])
def test_toolkit_that_does_not_work(build, tmp_path, monkeypatch, capsys, breaks):
    """`auto` ends in a build for the CPU, which says why; with GRADCKPT_CUDA=1 it fails."""
    why = breaks(build, tmp_path)
    build.run()
    assert len(build.spawned) == {no_object: 1, no_runtime: 0}.get(breaks, 3)
    assert built_note(build) == (f"built without CUDA: {why}", False)
    assert build.compiler.linked[-1] == ["x.c.o", "y.c.o"]
    assert capsys.readouterr().err == f"gradckpt: built without CUDA: {why}; the CPU codecs are complete\n"
    monkeypatch.setenv("GRADCKPT_CUDA", "1")
    with pytest.raises(SystemExit, match=f"^gradckpt: GRADCKPT_CUDA=1 but {why}; set CUDA_HOME to a toolkit"):
        build.run()


def test_what_gcc_says_is_not_cudas_fault(build):
    build.compiler.link_fails_with = "-lm"
    with pytest.raises(LinkError):
        build.run()


# ---- systems and interpreters


@pytest.mark.parametrize("command", ["bdist_wheel", "dist_info", "editable_wheel"])
@pytest.mark.parametrize(
    ("platform", "free_threaded", "sentence"),
    [
        ("darwin", 0, "gradckpt: darwin is not supported; use Linux"),
        ("win32", 0, "gradckpt: win32 is not supported; use Linux (WSL)"),
        (
            "linux",
            1,
            "gradckpt: free-threaded CPython cannot load abi3 extensions; use the build of CPython that has a GIL",
        ),
    ],
)
def test_what_cannot_be_built_for_is_refused_by_name(monkeypatch, platform, free_threaded, sentence, command):
    monkeypatch.setattr(setuptools, "setup", lambda **_: pytest.fail("setup() was called"))
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", free_threaded)
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    with pytest.raises(SystemExit) as refused:
        load_setup_py()
    assert str(refused.value) == sentence


@pytest.mark.parametrize("command", ["sdist", "egg_info"])
def test_an_sdist_can_be_made_anywhere(monkeypatch, command):
    called = []
    monkeypatch.setattr(setuptools, "setup", lambda **_: called.append(True))
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "argv", ["setup.py", command])
    load_setup_py()
    assert called
