"""The command gradckpt and its doctor, whose self-test can fail;
and an extension that cannot be loaded."""

import getpass
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkout import ROOT

import gradckpt
from gradckpt import _C
from gradckpt import __main__ as program
from gradckpt._doctor import environment, selftest
from gradckpt._engine import torch_private

LOSSY = [c for c in gradckpt.codecs.names() if gradckpt.codecs.info(c)["max_error"]]


def python(*arguments, folder=ROOT, **env):
    """With the package of that folder."""
    env = {**os.environ, "PYTHONPATH": str(folder), **env}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


def run(*arguments, **where):
    """``python -m gradckpt doctor`` as a user has it, by its short name."""
    return python("-m", "gradckpt", *(["doctor", *arguments] if arguments else []), **where)


def main(capsys, *arguments):
    status = program.main(["doctor", *arguments])
    return status, capsys.readouterr().out


def failed(out):
    return [line for line in out.splitlines() if line.startswith("FAILED")]


# ---- as a program ----


def test_text_is_plain_lines():
    out = run(GRADCKPT_ISA="scalar", GRADCKPT_IAS="avx2", GRADCKPT_CUDA=str(ROOT))
    assert (out.returncode, out.stderr) == (0, "")
    lines = out.stdout.splitlines()
    assert lines[0].startswith("gradckpt ")
    assert "`" not in out.stdout
    assert f"torch         {torch.__version__}" in out.stdout
    assert "CPU codecs    scalar" in out.stdout
    assert "variable      GRADCKPT_CUDA=(a path) (read when gradckpt is built)" in lines
    assert "variable      GRADCKPT_IAS=avx2 (gradckpt knows no such variable)" in lines
    tests = lines[lines.index("") + 1 :]
    assert all(line.startswith("ok ") for line in tests)
    for codec in gradckpt.codecs.names():
        assert any(re.match(rf"ok +cpu +round trip {codec} ", line) for line in tests), codec
    for private in (str(Path.home()), str(ROOT), os.path.dirname(torch.__file__), platform.node(), getpass.getuser()):
        assert len(private) < 3 or not re.search(rf"(?<!\w){re.escape(private)}(?!\w)", out.stdout), private


def test_json_is_all_there_is_on_stdout():
    noisy = "import sys, runpy, torch; check = torch.cuda.is_available\n"
    noisy += "torch.cuda.is_available = lambda: print('noise') or check()\n"
    noisy += "sys.argv = ['gradckpt', 'doctor', '--json']; runpy.run_module('gradckpt', run_name='__main__')"
    out = python("-c", noisy)
    assert out.returncode == 0
    assert "noise" in out.stderr
    found = json.loads(out.stdout)
    assert found["ok"] is True
    assert found["versions"]["gradckpt"] == gradckpt.__version__
    assert found["build"]["note"] == _C.build_info()["build"]
    assert found["integrations"]["transformers"]["importable"] is True
    assert len(found["self_test"]) >= len(gradckpt.codecs.names()) + 5
    assert all(check["ok"] for check in found["self_test"])


def test_a_failed_self_test_is_exit_status_1():
    code = "import sys, runpy; from gradckpt._doctor import selftest; selftest.FLOORS['int8'] = 99.0\n"
    code += "sys.argv = ['gradckpt']; runpy.run_module('gradckpt', run_name='__main__')"
    out = python("-c", code)
    assert (out.returncode, out.stderr) == (1, "")
    (line,) = failed(out.stdout)
    assert re.search(r"round trip int8 +4\d\.\d dB.*at least 99.0 dB", line)


def test_a_reader_that_goes_away_is_no_traceback():
    command = [sys.executable, "-m", "gradckpt", "doctor", "--no-self-test"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "unknown command '--nonsense'; choose doctor, plan or run"),
        (["rum"], "unknown command 'rum'; did you mean 'run'?"),
        (["plam"], "unknown command 'plam'; did you mean 'plan'?"),
        (["train.py"], "'train.py' is no command; to run it: gradckpt run train.py"),
        (["--json"], "--json is an option of doctor; write gradckpt doctor --json"),
        (["--tokens", "64"], "--tokens is an option of plan; write gradckpt plan --tokens"),
        (["--compress", "int4", "train.py"], "--compress is an option of run; write gradckpt run --compress"),
        (["doctor", "--jason"], "unknown option --jason; did you mean --json?"),
        (["doctor", "now"], "unknown option now; gradckpt doctor --help lists the options"),
        (["plan"], "the following arguments are required: CONFIG"),
        (["plan", "x.json", "--batch", "0"], "argument --batch: '0' is no such number; give 1 or more"),
        (["run"], "which script?"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments, said, capsys, tmp_path, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        program.main(arguments)
    assert stop.value.code == 2
    *usage, line = capsys.readouterr().err.splitlines()
    assert said in line
    assert all(each.startswith(("usage: gradckpt", "       gradckpt")) for each in usage)


def test_help(capsys):
    assert program.main(["--help"]) == 0
    assert re.findall(r"^  (\w+)   ", capsys.readouterr().out, re.M) == ["doctor", "plan", "run"]
    for command, word in (("doctor", "--no-self-test"), ("plan", "--tokens"), ("run", "--policy")):
        with pytest.raises(SystemExit) as stop:
            program.main([command, "--help"])
        said = capsys.readouterr().out
        assert stop.value.code == 0
        assert said.startswith(f"usage: gradckpt {command} ")
        assert word in said
        assert max(map(len, said.splitlines())) <= 110


def test_the_console_script_is_this_program():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"gradckpt": f"{program.main.__module__}:main"}


# ---- the self-test ----


def flipped(payload, bit=1):
    """Decodes as ``payload`` with a bit of every byte flipped."""
    arrays = {"codes": payload.codes ^ bit, "scales": payload.scales ^ bit}
    data, decode = torch.cat([*arrays.values()]), torch.ops.gradckpt.decode
    return SimpleNamespace(
        **arrays,
        nbytes=payload.nbytes,
        decode=lambda: decode(data, payload.codec, list(payload.shape), payload.dtype),
    )


@pytest.mark.parametrize("codec", gradckpt.codecs.names())
def test_wrong_bits_of_a_codec_are_found(codec, monkeypatch, capsys):
    encode = selftest.encode
    bit = 1 if codec not in LOSSY else 64  # of a code: far more than its noise
    monkeypatch.setattr(
        selftest, "encode", lambda x, name: flipped(encode(x, name), bit) if name == codec else encode(x, name)
    )
    status, out = main(capsys)
    assert status == 1
    assert [re.search(rf"round trip {codec} ", line) is not None for line in failed(out)] == [True]


@pytest.mark.skipif(not selftest._isas(), reason="this CPU has scalar code only")
def test_other_bytes_of_an_instruction_set_are_found(monkeypatch, capsys):
    encode = selftest.encode
    wrong = selftest._isas()[0]
    used = _C.isa()
    monkeypatch.setattr(
        selftest,
        "encode",
        lambda x, name: flipped(encode(x, name)) if (name, _C.isa()) == ("int4", wrong) else encode(x, name),
    )
    _C.force_isa("scalar")
    try:
        status, out = main(capsys)
        assert _C.isa() == "scalar"
    finally:
        _C.force_isa(used)
    assert status == 1
    (line,) = failed(out)
    assert f"bytes of {wrong}" in line
    assert "int4 float32, int4 float16, int4 bfloat16" in line


@pytest.mark.parametrize(
    ("name", "broken", "found"),
    [
        ("_with_int8", selftest._plain, {"gradients with int8", "bytes saved"}),
        ("_with_int8", lambda f, x: _C.checkpoint(f, x, compress="int4"), {"gradients with int8", "bytes saved"}),
        (
            "_with_int8",
            lambda f, x: _C.checkpoint(f, x, compress={"codec": "int8", "fake_quantize": True}),
            {"loss with int8"},
        ),
        ("_with_none", lambda f, x: _C.checkpoint(f, x, preserve_rng_state=False), {"compress=None"}),
    ],
)
def test_a_region_that_does_otherwise_is_found(name, broken, found, monkeypatch):
    monkeypatch.setattr(selftest, name, broken)
    assert {check.name for check in selftest.run() if not check.ok} == found


def test_an_exception_is_a_failure(monkeypatch, capsys):
    def refuse(x, codec):
        raise RuntimeError("no kernels\nand more")

    monkeypatch.setattr(selftest, "encode", refuse)
    status, out = main(capsys, "--json")
    checks = {check["name"]: check for check in json.loads(out)["self_test"]}
    assert status == 1
    assert checks["round trip int8"]["figure"] == "RuntimeError: no kernels"
    assert checks["compress=None"]["ok"]


def test_the_program_around_is_left_alone():
    torch.manual_seed(7)
    state, isa = torch.get_rng_state(), _C.isa()
    with torch.no_grad():
        assert all(check.ok for check in selftest.run())
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert _C.isa() == isa


def test_every_codec_has_a_bound():
    assert set(selftest.FLOORS) == set(LOSSY)


# ---- what is here ----


def test_integrations_are_found_without_importing_them(monkeypatch, capsys):
    code = "import sys; from gradckpt.__main__ import main; main(['doctor', '--no-self-test'])\n"
    code += "assert not {'transformers', 'accelerate', 'rich'} & set(sys.modules)"
    assert python("-c", code).returncode == 0
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(__spec__=None))  # find_spec raises
    _, out = main(capsys, "--no-self-test")
    (line,) = [line for line in out.splitlines() if line.startswith("not installed")]
    assert {"transformers", "timm"} <= set(line.removeprefix("not installed ").split(", "))


def test_versions_outside_the_tested_range():
    for version, tested in {"2.9.1": False, "2.11.0a0+git": True, "2.13.0+cu130": True, "3.0": False}.items():
        assert environment.tested("torch", version) is tested
    assert environment.tested("torch", None) is None
    assert environment.tested("timm", "1.0") is None
    found = environment.facts()
    found["versions"] |= {"torch": "2.99.0", "torch_tested": False}
    assert any("2.99.0" in line and "NOT TESTED; tested: 2.11 to" in line for line in program.describe(found))


def test_tested_ranges_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert f"torch>={environment.TESTED['torch'][0]}" in project["dependencies"]
    assert f"transformers>={environment.TESTED['transformers'][0]}" in extras["hf"]
    assert any(x.startswith(f"transformers=={environment.TESTED['transformers'][1]}.") for x in extras["test"])
    for of_make in re.findall(r"^(?:TORCH|NEWER) \?= (\S+)", (ROOT / "Makefile").read_text(), re.M):
        assert environment.tested("torch", of_make)


def test_every_variable_is_known():
    sources = [*(ROOT / "gradckpt").rglob("*.py"), *(ROOT / "csrc").rglob("*.c"), ROOT / "setup.py"]
    read = {name for p in sources for name in re.findall(r"[\"'](GRADCKPT_[A-Z_]+)[\"']", p.read_text())}
    assert read == set(environment.VARIABLES)


def test_what_torch_says_otherwise_is_named(monkeypatch, capsys):
    """Nothing on a torch that was tested."""
    assert environment.differs() == []

    def changed(function=None, *, new_keyword=None, **kwargs):
        raise AssertionError

    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", changed)
    monkeypatch.setattr(torch_private, "CheckpointFrame", torch_private.Missing("torch.utils.checkpoint._Frame"))
    _, out = main(capsys, "--no-self-test")
    assert "torch differs its checkpoint() takes new_keyword=, which gradckpt does not know" in out
    assert "torch differs it has no text for more_saved; gradckpt says it in its own words" in out


def test_what_torch_lacks_is_named(monkeypatch, capsys):
    monkeypatch.setitem(torch_private.MISSING, "torch._C._any_name", "some feature")
    monkeypatch.setattr(_C, "selective_key", lambda: None)
    _, out = main(capsys, "--no-self-test")
    assert "torch lacks   torch._C._any_name: no some feature" in out
    assert "torch lacks   a free dispatch key: " in out


def test_every_optional_symbol_is_explained():
    symbols = re.findall(r"SYMBOL\(OPTIONAL, \w+, (\w+),", (ROOT / "csrc" / "torch" / "abi.h").read_text())
    assert symbols
    assert set(symbols) < set(environment.WITHOUT)
    assert set(_C.build_info()["missing"]) <= set(symbols)


# ---- CUDA, without a device ----

INFO = {
    "build": "CUDA codecs built in",
    "cuda_archs": "7.5;8.0;9.0;12.0+PTX",
    "cuda_runtime": 13000,
    "cuda_usable": True,
}


@pytest.fixture
def card(monkeypatch):
    """Pretends that torch sees one card: ``card(capability, **what build_info says otherwise)``."""

    def pretend(capability, **info):
        major, minor = capability
        properties = SimpleNamespace(name="Pretend 1", major=major, minor=minor, total_memory=80 * 2**30)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        said = {**_C.build_info(), **INFO, "cuda_driver": 13000, **info}
        monkeypatch.setattr(_C, "build_info", lambda: said)

    return pretend


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ((8, 6), "native kernels"),
        ((9, 0), "native kernels"),
        ((12, 1), "native"),
        ((13, 0), "PTX"),
        ((7, 0), "NO kernels"),
    ],
)
def test_kernels_for_a_card(capability, words, card, capsys):
    card(capability)
    _, out = main(capsys, "--no-self-test")
    number = ".".join(map(str, capability))
    assert re.search(rf"^GPU 0 +Pretend 1, capability {number}, 80.0 GiB: .*{words}", out, re.M)
    wanted = "off: gradckpt was built for 7.5" if words == "NO kernels" else "on; driver for CUDA 13.0"
    assert f"CUDA codecs   {wanted}" in out
    assert "CUDA toolkit 13.0 for 7.5 8.0 9.0 12.0+PTX" in out


def test_an_old_driver_is_named_with_both_versions(card, capsys):
    card((9, 0), cuda_usable=False, cuda_driver=12040)
    _, out = main(capsys, "--no-self-test")
    assert "CUDA codecs   off: the driver supports CUDA 12.4, but gradckpt was built with the CUDA 13.0 runtime" in out


def test_a_card_that_answers_with_an_error(card, capsys, monkeypatch):
    def refuse(index):
        raise RuntimeError("CUDA error: out of memory\nmore")

    card((9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    _, out = main(capsys, "--no-self-test")
    assert "GPU 0         unusable (CUDA error: out of memory): NO kernels" in out


def test_a_card_without_kernels_in_the_build_fails(card, capsys):
    card((9, 0), cuda_archs="", build="built without CUDA: nvcc not found", cuda_runtime=0, cuda_usable=False)
    status, out = main(capsys)
    assert status == 1
    assert "CUDA codecs   off: gradckpt is built without CUDA: nvcc not found" in out
    assert all("cuda:0" in line for line in failed(out))
    assert len(failed(out)) >= len(gradckpt.codecs.names())


# ---- an extension that cannot be loaded ----


@pytest.fixture
def copy(tmp_path):
    """The package without its extension, elsewhere."""
    shutil.copytree(ROOT / "gradckpt", tmp_path / "gradckpt", ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    # An editable install would find the extension all the same.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if '__editable__' not in getattr(f, '__module__', '')]\n"
    )
    return tmp_path


def only_sentence(out):
    assert out.returncode == 1
    assert out.stdout == ""
    assert out.stderr.count("\n") == 1, out.stderr
    assert out.stderr.startswith("gradckpt")
    return out.stderr


def test_not_built(copy):
    said = only_sentence(run(folder=copy))
    assert "was not built here; build it: pip install" in said
    out = run("--json", folder=copy)
    assert (out.returncode, out.stderr) == (1, "")
    assert json.loads(out.stdout) == {"ok": False, "error": said.strip()}


def test_not_an_extension(copy):
    (copy / "gradckpt" / "_C.abi3.so").write_text("not ELF")
    said = only_sentence(run(folder=copy))
    assert "cannot be loaded (_C.abi3.so: " in said, "and no path"
    assert "build it again: pip install" in said


@pytest.mark.parametrize(
    ("torch_py", "words"),
    [
        ("raise ImportError('libtorch_cpu.so: cannot open shared object file')", r"torch itself cannot be imported"),
        (
            "raise ModuleNotFoundError('torch', name='torch')",
            r"gradckpt: torch is not installed; run: pip install",
        ),
        ("__version__ = '1.0'", r"gradckpt: torch 1.0 has no libtorch_cpu.so; run: pip install --upgrade"),
    ],
)
def test_a_torch_that_will_not_do(torch_py, words, copy):
    (copy / "torch.py").write_text(torch_py)
    shutil.copy(_C.__file__, copy / "gradckpt")
    assert re.search(words, only_sentence(run(folder=copy)))


@pytest.mark.parametrize(
    "form", [["-mgradckpt"], ["-Wignore", "-m", "gradckpt"], ["-Bm", "gradckpt.config", "x"], ["bin/gradckpt", "run"]]
)
def test_every_form_of_the_command_line(form, copy):
    (copy / "bin").mkdir()
    (copy / "bin" / "gradckpt").write_text("from gradckpt.__main__ import main\nmain()")
    assert "was not built here" in only_sentence(python(*form, folder=copy))


def test_other_programs_get_the_traceback(copy):
    (copy / "gradckpt_user.py").write_text("import gradckpt")
    (copy / "user").mkdir()
    (copy / "user" / "__init__.py").write_text("import gradckpt")
    (copy / "user" / "__main__.py").write_text("")
    for module in ("gradckpt_user", "user"):
        out = python("-m", module, folder=copy)
        assert "Traceback" in out.stderr
        assert "ImportError: gradckpt: the extension" in out.stderr
