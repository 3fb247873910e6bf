"""The command line of gradckpt run: options, what cannot be run,
and what the report says of both."""

import argparse
import json
import os
import sys
import textwrap

import pytest
from checkout import PROGRAMS
from worlds import LAUNCH, REGION, call, program, script

import gradckpt
import gradckpt._script
import gradckpt.run

TRAINER = PROGRAMS / "hf_trainer.py"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--compress", "script.py", "--lr", "1"], "write:\n  gradckpt run --compress int8 script.py --lr 1\n"),
        (
            ["--quiet", "--compress", "-m", "job"],
            "-m is not; write:\n  gradckpt run --quiet --compress int8 -m job\n",
        ),
        (
            ["--policy", "script.py"],
            "a policy, which script.py is not; write:\n  gradckpt run --policy save_matmuls s",
        ),
        (["--min-numel", "script.py"], "a number, which script.py is not; write:\n  gradckpt run --min-numel 1024 s"),
        (["--quiet", "python", "script.py", "a b"], "this Python; write:\n  gradckpt run --quiet script.py 'a b'\n"),
        ([sys.executable, "-m", "job", "-u"], "this Python; write:\n  gradckpt run -m job -u\n"),
        (["python3", "-W", "error", "-mjob"], "write:\n  python3 -W error -m gradckpt run -m job\n"),
        (["--codec", "int4", "script.py"], "unknown option --codec; did you mean --compress?"),
        (["--compress", "int9", "script.py"], "unknown codec 'int9'; did you mean 'int8'? choose one of: raw, "),
        (["--policy", "all", "script.py"], "unknown policy 'all'; choose one of: save_matmuls"),
        (["--min-numel", "-1", "script.py"], "min_numel counts values and cannot be -1"),
        (["--min-numel", "few", "script.py"], "invalid int value: 'few'"),
        (
            ["--compress", "none", "--fake-quantize", "script.py"],
            "--fake-quantize would do nothing with --compress none",
        ),
        (["--stats", "nowhere/s.json", "script.py"], "there is no such folder"),
        (["missing.py"], "there is no script 'missing.py'"),
        (["-m", "missing_module.train"], "there is no module 'missing_module.train'"),
        ([], "which script?"),
        (["-m"], "which module?"),
        (["--zip", "script.py"], "unknown option --zip; gradckpt run --help lists the options"),
        (["-m", "torch.distributed.run", "script.py"], "torchrun ... -m gradckpt.run --compress int8"),
        (["/usr/bin/torchrun", "script.py"], "torchrun ... -m gradckpt.run"),
        (
            ["axolotl", "train", "a.yml"],
            "run its module:\n  gradckpt run --compress int8 -m axolotl.cli.train [arguments]",
        ),
        (["-m", "folder"], "folder is a package without __main__; name one of its modules: -m folder.MODULE"),
        (["package"], "there is no script 'package' (from "),
        (["pdb"], "; for the module: gradckpt run -m pdb"),
        (["bash"], "bash is no Python script; run the module that it starts: gradckpt run -m MODULE"),
        (["elsewhere"], "elsewhere runs in another Python; install gradckpt there: /x/bin/python3 -m gradckpt run"),
    ],
)
def test_bad_arguments_before_the_script_starts(tmp_path, monkeypatch, capsys, arguments, said):
    script(tmp_path, "print('started')")
    script(tmp_path, "", "folder/__init__.py")
    program(tmp_path, "elsewhere", "", "/x/bin/python3")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as end:
        gradckpt.run.main(arguments)
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_options_reach_the_patch(tmp_path):
    path = script(tmp_path, textwrap.dedent(REGION) + "step()")
    options = ["--compress", "int4", "--fake-quantize", "--min-numel", "7", "--policy", "save_matmuls:int8"]
    done = call(*LAUNCH, *options, "--stats", "s.json", path, cwd=tmp_path)
    stats = json.loads((tmp_path / "s.json").read_text())
    assert stats["policy"] == "save_matmuls:int8"
    assert stats["compress"] == gradckpt.CompressionConfig("int4", fake_quantize=True, min_numel=7).to_dict()
    assert gradckpt.CompressionConfig.from_dict(stats["compress"]).codec == "int4"
    assert done.stderr.startswith("gradckpt run (int4, fake-quantized, policy save_matmuls:int8)\n")


AFTER_SCRIPT = "gradckpt run: after the script, so given to it: {}; options of gradckpt come before it\n"


def test_options_after_the_script_are_the_scripts(tmp_path):
    """And who meant gradckpt is told, whether the script refuses them or swallows them."""
    strict = script(tmp_path, "import argparse\nargparse.ArgumentParser().parse_args()", "strict.py")
    done = call(*LAUNCH, strict, "--compress", "int4", "--fake-quantize", cwd=tmp_path, status=2)
    assert "unrecognized arguments: --compress int4 --fake-quantize" in done.stderr
    assert done.stderr.startswith(AFTER_SCRIPT.format("--compress, --fake-quantize")), "before hours of training"
    assert done.stderr.count("after the script") == 1
    loose = script(tmp_path, textwrap.dedent(REGION) + "step()\nprint(sys.argv[1:])", "loose.py")
    done = call(*LAUNCH, loose, "--compress=int4", cwd=tmp_path)
    assert done.stdout == "['--compress=int4']\n"
    assert AFTER_SCRIPT.format("--compress=int4") in done.stderr
    assert "compressed 1 of 1 tensors in int8" in done.stderr
    done = call(*LAUNCH, loose, "--quiet", "--stats", "x", cwd=tmp_path)
    assert "after the script" not in done.stderr, "words of many scripts"


@pytest.mark.parametrize("name", ["accelerate", "torchrun", "deepspeed"])
def test_a_script_that_is_called_like_a_launcher(tmp_path, monkeypatch, capsys, name):
    """It runs; the launcher itself does not, wherever it is installed."""
    monkeypatch.chdir(tmp_path)
    path = script(tmp_path, "from accelerate import Accelerator", name)
    assert gradckpt._script.find(argparse.Namespace(script=f"./{name}", module=False)) == f"./{name}"
    module = {key: each for each in gradckpt._script._LAUNCHERS for key in [each.split(".")[0]] if "." in each}
    path.write_text(f"import sys\nfrom {module.get(name, 'torch.distributed.run')} import main\nsys.exit(main())")
    with pytest.raises(SystemExit):
        gradckpt.run.main([f"./{name}", "train.py"])
    assert f"./{name} starts the script in processes of its own" in capsys.readouterr().err
    path.unlink()
    script(tmp_path, "", f"{name}/README")
    with pytest.raises(ValueError, match="put it first"):
        gradckpt._script.find(argparse.Namespace(script=name, module=False, compress="int8"))


STEPS = "x = torch.nn.Parameter(torch.ones(2))\noptimizer = torch.optim.SGD([x])\n" + 2 * "optimizer.step()\n"


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("raise ValueError", 1, "the script ended by ValueError, and nothing was compressed until then"),
        (f"import torch\n{STEPS}raise ValueError", 1, "the script ended by ValueError, and nothing was compressed"),
        ("import sys\nsys.exit(3)", 3, "the script ended with status 3, and nothing was compressed until then"),
        ("import sys\nsys.exit('no data')", 1, "the script ended with status 1, and nothing was compressed until"),
        ("print('usage')\nraise SystemExit", 0, "no training was seen: no call of checkpoint, no step of a torch opti"),
        (f"import torch\n{STEPS}raise SystemExit(3)", 3, None),
        (f"import torch\n{STEPS}", 0, None),
    ],
)
def test_only_who_trained_uncompressed_is_told_so_in_capitals(tmp_path, end, status, said):
    shown = call(*LAUNCH, script(tmp_path, end), cwd=tmp_path, status=status).stderr
    assert ("NOTHING WAS COMPRESSED: nothing in this process called" in shown) is (said is None)
    assert ("programs that it starts with subprocess are not reached" in shown) is (status == 0 or said is None)
    assert said is None or said in shown


def test_the_scripts_own_settings_are_reported(tmp_path):
    """They count, and the report says what they did,
    not what the options of the launcher would have done."""
    kwargs = 'args.activation_checkpointing, args.activation_checkpointing_kwargs = True, {"compress": "int8"}'
    flag = script(
        tmp_path, TRAINER.read_text().replace("    torch.manual_seed", f"    {kwargs}\n    torch.manual_seed")
    )
    options = ["--max_steps", 1, "--logging_steps", 1, "--report_to", "none", "--save_strategy", "no", "--use_cpu"]
    done = call(*LAUNCH, "--compress", "int4", flag, "--output_dir", "out", *options, cwd=tmp_path)
    assert "gradckpt ran 4 regions with grad, 4 of them by settings of the script's own" in done.stderr
    assert "compressed 4 of 4 tensors in int8" in done.stderr
    own = "import gradckpt\ngradckpt.checkpoint(layer, layer(torch.randn(32, 64)), compress='int8').sum().backward()\n"
    mixed = script(tmp_path, textwrap.dedent(REGION) + "step()\nstep()\n" + own)
    done = call(*LAUNCH, "--compress", "int4", "--stats", "s.json", mixed, cwd=tmp_path)
    assert "2 calls of checkpoint; gradckpt ran 3 regions with grad, 1 of them by settings of the" in done.stderr
    assert "compressed 3 of 3 tensors in int8, int4" in done.stderr
    assert json.loads((tmp_path / "s.json").read_text())["codecs"] == {"int8": 1, "int4": 2}
