"""setup.py and the nvcc that it finds: flags that it has, architectures that it knows,
toolkits that are too old.

And systems and interpreters for which setup.py builds nothing.
"""

import importlib.util
import sys
import sysconfig

import pytest
import setuptools
from checkout import ROOT
from setuptools.dist import Distribution

KNOWN = {
    "12.1": "50 52 60 70 75 80 86 87 89 90",
    "12.6": "50 52 60 70 75 80 86 87 89 90",
    "12.8": "50 60 75 80 86 89 90 100 101 120",
    "13.0": "75 80 86 87 88 89 90 100 103 110 120 121",
}
DEFAULT = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX"]


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
    compress = setup_py.COMPRESS_FLAGS if "--compress-mode" in setup_py.ask(nvcc, "--help") else []
    build.compile_cu("csrc/codec/cuda/driver.cu", nvcc, archs, compress)
    return spawned[0]


@pytest.mark.parametrize(("version", "compresses"), [("12.1", False), ("12.6", False), ("12.8", True), ("13.0", True)])
def test_flags_are_those_nvcc_has(setup_py, nvcc, version, compresses):
    path = nvcc(version, compresses)
    assert setup_py.reason_against(path) is None
    command = commands(setup_py, path)
    assert ("--compress-mode=size" in command) == compresses
    assert ("-DGCK_CUDA_LEAST_DRIVER=12040" in command) == compresses
    known = {f"arch=compute_{n}" for n in KNOWN[version].split()}
    codes = [flag for flag in command if flag.startswith("arch=")]
    assert codes
    assert {code.partition(",")[0] for code in codes} <= known
    assert codes[-1].endswith("]")  # the last as PTX, too: later cards compile that
    if compresses:
        assert setup_py.cuda_archs(path) == DEFAULT


def test_archs_that_are_asked_for(setup_py, nvcc, monkeypatch):
    path = nvcc("12.6", False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a+PTX")
    assert setup_py.cuda_archs(path) == ["8.0", "9.0a+PTX"]
    monkeypatch.setenv("GRADCKPT_CUDA_ARCHS", "9.0;12.0")
    with pytest.raises(SystemExit, match=r"this nvcc does not know compute capability 12.0; change GRADCKPT"):
        setup_py.cuda_archs(path)


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
