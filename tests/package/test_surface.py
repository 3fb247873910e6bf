"""The public names: few, and they stay few, documented and sorted. And what type checkers see: the
stub of the extension, programs of users."""

import inspect
import json
import os
import re
import subprocess
import sys
import textwrap

import pytest
from checkout import ROOT

import gradckpt

#: docs/reference.md says what each does. Nothing is added: what is new is a keyword,
#: a method or in a submodule.
NAMES = {
    *("CompressionConfig", "GradckptInactiveWarning", "Offload", "SelectiveRecompute"),
    *("checkpoint", "checkpoint_sequential", "compress_saved", "disable", "enable", "gradient_error", "patched"),
    *("Plan", "plan", "residuals", "stats", "track_memory"),
}

SUBMODULES = {"codecs", "compat", "config", "integrations", "policies", "run", "selectors"}


def test_names_of_a_fresh_process_are_the_frozen_ones():
    program = "import gradckpt, json; print(json.dumps([name for name in vars(gradckpt) if name[0] != '_']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) - SUBMODULES == NAMES
    assert len(NAMES) == 16


# ---- types

#: Torch is not followed: no line of the programs below depends on it,
#: and reading it takes half a minute.
CONFIG = """
[mypy]
strict = True
[mypy-torch.*,transformers.*,rich.*]
follow_imports = skip
ignore_missing_imports = True
"""


def mypy(folder, *arguments):
    (folder / "mypy.ini").write_text(CONFIG)
    env = {**os.environ, "MYPYPATH": str(ROOT), "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


#: What mypy.stubtest finds and is meant.
ALLOWED = r"""
gradckpt\._C\.checkpoint          # the form of a decorator has no function, which a signature cannot say
gradckpt\._C\.compat_checkpoint   # torch's default of context_fn is a function, which C's signature calls None
gradckpt\._C\.SelectiveRecompute  # its metaclass is torch's, and torch is not followed
"""


def test_the_stub_is_what_the_extension_has(tmp_path):
    (tmp_path / "allowed").write_text(ALLOWED)
    out = mypy(
        tmp_path,
        "mypy.stubtest",
        "gradckpt._C",
        "--mypy-config-file",
        "mypy.ini",
        "--allowlist",
        "allowed",
        "--concise",
    )
    assert out.returncode == 0, out.stdout + out.stderr


GOOD = """
import gradckpt
from gradckpt import CompressionConfig

def layer(x: int, y: str = "") -> list[str]:
    return [y] * x

kept: list[str] = gradckpt.checkpoint(layer, 3, y="a", compress="int8", use_reentrant=False)
plain: list[str] = gradckpt.checkpoint(layer, 3)
torchs: list[str] = gradckpt.compat.checkpoint(layer, 3)

@gradckpt.checkpoint(compress={"codec": "int4", "fake_quantize": True})
def decorated(x: int) -> str:
    return str(x)

class Block:
    @gradckpt.checkpoint(compress=CompressionConfig("fp8", min_numel=4096))
    def forward(self, x: int) -> str:
        return str(x)

text: str = decorated(3) + Block().forward(3)

def main(model: object) -> float:
    handle = gradckpt.enable(model, compress=True, every_n_layers=2, policy="save_attention:int8")
    with gradckpt.compress_saved("int8"):
        pass
    handle.remove()
    print(gradckpt.stats())
    number: int = gradckpt.codecs.encode(model, "int8").nbytes
    scalars: dict[str, float] = gradckpt.stats().since(gradckpt.stats()).scalars("x/")
    return scalars["x/ratio"] + number

for compress in (None, True, "lossless", CompressionConfig(), {"codec": "int8"}):
    gradckpt.enable(object(), None, modules={"layer": compress})
"""

#: A line that is wrong, and the code and words of the error.
WRONG = {
    "number: int = gradckpt.checkpoint(layer, 3)": r'has type "list\[str\]", variable has type "int"',
    "gradckpt.checkpoint(layer, 3, compress=3.5)": r'argument types .*"float"  \[call-overload\]',
    "gradckpt.checkpoint(layer, 3, early_stop='no')": r'argument types .*"str"  \[call-overload\]',
    "gradckpt.checkpoint(3, compress='int8')": r'argument types "int", "str"  \[call-overload\]',
    "decorated('three')": r'Argument 1 to "decorated" has incompatible type "str"; expected "int"  \[arg-type\]',
    "length: int = decorated(3)": r'has type "str", variable has type "int".*\[assignment\]',
    "gradckpt.patched('int8')(layer)('three')": r'has incompatible type "str"; expected "int"  \[arg-type\]',
    "gradckpt.compress_saved()(layer)('three')": r'has incompatible type "str"; expected "int"  \[arg-type\]',
    "CompressionConfig(codec='int8', min_numel='many')": r"\[arg-type\]",
    "CompressionConfig(bits=8)": r'Unexpected keyword argument "bits".*\[call-arg\]',
    "gradckpt.enable(object(), compres='int8')": r'Unexpected keyword argument "compres".*\[call-arg\]',
    "gradckpt.codecs.encode(layer).decode(1)": r"Too many arguments.*\[call-arg\]",
    "gradckpt.no_such_name": r"\[attr-defined\]",
}


def test_a_typed_program_passes(tmp_path):
    (tmp_path / "program.py").write_text(GOOD)
    out = mypy(tmp_path, "mypy", "program.py")
    assert out.returncode == 0, out.stdout + out.stderr


def test_a_wrong_line_is_an_error(tmp_path):
    (tmp_path / "program.py").write_text(GOOD.partition("class Block")[0] + "\n".join(WRONG) + "\n")
    first = GOOD.partition("class Block")[0].count("\n") + 1
    out = mypy(tmp_path, "mypy", "program.py")
    errors = {int(n): text for n, text in re.findall(r"^program\.py:(\d+): error: (.*)$", out.stdout, re.M)}
    for n, (line, words) in enumerate(WRONG.items(), first):
        assert re.search(words, errors.pop(n, "no error")), (line, out.stdout)
    assert not errors


@pytest.mark.parametrize("name", gradckpt.__all__)
def test_public_names_are_documented(name):
    thing = getattr(gradckpt, name)
    doc = thing.__doc__ or ""
    assert len(textwrap.dedent(doc).strip()) >= 20, name
    assert not doc.startswith(f"{name}("), "a signature that inspect could not read"
    unsigned = ("Payload", "GradckptInactiveWarning")  # made by encode(); a warning like any other
    if not inspect.ismodule(thing) and name not in unsigned:
        assert str(inspect.signature(thing)).startswith("(")


def test_public_names_are_sorted_and_there():
    assert gradckpt.__all__ == sorted(gradckpt.__all__)
    assert len(set(gradckpt.__all__)) == len(gradckpt.__all__)
