"""gradckpt run: scripts that know nothing of gradckpt, as they are."""

import json
import py_compile
import re
import subprocess
import sys
import textwrap
import zipapp

import pytest
import torch
from checkout import PROGRAMS
from worlds import ENV, LAUNCH, REGION, call, on_path, program, script

import gradckpt
import gradckpt._script

PLAIN = PROGRAMS / "plain_loop.py"
TRAINER = PROGRAMS / "hf_trainer.py"


def relative_error(found, exact):
    a, b = (torch.cat([g[name].flatten() for name in exact]) for g in (found, exact))
    return ((a - b).norm() / b.norm()).item()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- the two public-style scripts, unchanged ----


def plain(folder, name, *launcher):
    done = call(*launcher, PLAIN, "--save", f"{name}.pt", cwd=folder)
    return torch.load(folder / f"{name}.pt"), done


def trained(folder, name, *launcher):
    options = ["--max_steps", 3, "--logging_steps", 1, "--report_to", "none", "--save_strategy", "no", "--use_cpu"]
    done = call(*launcher, TRAINER, "--output_dir", name, "--gradient_checkpointing", *options, cwd=folder)
    return torch.load(folder / name / "result.pt"), done


@pytest.mark.parametrize(("train", "regions"), [(plain, 12), (trained, 12)], ids=["plain loop", "Trainer"])
def test_untouched_scripts(tmp_path, train, regions):
    stock, _ = train(tmp_path, "stock")
    none, done = train(tmp_path, "none", *LAUNCH, "--compress", "none")
    assert none["losses"] == stock["losses"]
    assert same(none["gradients"], stock["gradients"])
    assert same(none["weights"], stock["weights"])
    assert f"gradckpt ran {regions} regions" in done.stderr

    int8, done = train(tmp_path, "int8", *LAUNCH, "--compress", "int8", "--stats", "stats.json")
    assert f"compressed {regions} of {regions} tensors" in done.stderr
    stats = json.loads((tmp_path / "stats.json").read_text())
    assert (stats["calls"], stats["compressed"]) == (regions, regions)
    assert 0 < stats["bytes_out"] == round(stats["bytes_in"] * 8.25 / 32)  # rows of 64
    assert int8["losses"][0] == stock["losses"][0]
    assert 0 < relative_error(int8["gradients"], stock["gradients"]) < 0.01
    assert all(g.abs().sum() > 0 for name, g in int8["gradients"].items() if stock["gradients"][name].abs().sum() > 0)


# ---- where it cannot act ----


def test_explicit_reentrant_is_said(tmp_path):
    done = call(*LAUNCH, "--stats", "s.json", PLAIN, "--save", "x.pt", "--reentrant", "yes", cwd=tmp_path)
    assert "GradckptInactiveWarning" in done.stderr
    assert "NOTHING WAS COMPRESSED: all 12 calls of checkpoint passed use_reentrant=True" in done.stderr
    assert "use_reentrant=True" in json.loads((tmp_path / "s.json").read_text())["inactive_reason"]
    done = call(*LAUNCH, "--compress", "none", PLAIN, "--save", "x.pt", "--reentrant", "yes", cwd=tmp_path)
    assert "Warning" not in done.stderr


# ---- as python would run it ----

SEEN = """
    import __main__, json, sys
    def evaluated(x: int): pass
    if __name__ == "__main__":
        here = __main__.__dict__ is globals(), evaluated.__annotations__ == {"x": int}
        names = ("__name__", "__file__", "__package__", "__doc__", "__cached__")
        print(json.dumps([here, sys.argv, sys.path[0], *(globals()[n] for n in names), str(__spec__), str(__loader__)]))
"""


def without_addresses(shown):
    return re.sub("0x[0-9a-f]+", "", shown)


def test_a_script_sees_what_it_would_see(tmp_path):
    path = script(tmp_path, SEEN, "folder/script.py")
    link = tmp_path / "link.py"
    link.symlink_to(path)
    for name, *options in (path, "--quiet"), ("./folder/script.py", "--compress=none", "--"), (link, "--min-numel", 0):
        arguments = ["--compress", "int4", "--", "-m", "x y", "--help"]
        expected, found = (
            without_addresses(call(*start, name, *arguments, cwd=tmp_path).stdout)
            for start in ([], [*LAUNCH, *options])
        )
        assert found == expected
    assert json.loads(expected)[1][1:] == arguments


def test_the_command_gradckpt(tmp_path):
    """Modules and scripts see what they see under ``python -m gradckpt.run``."""
    console = program(tmp_path, "gradckpt", "import sys\nfrom gradckpt.__main__ import main\nsys.exit(main())")
    starts = LAUNCH, [console, "run"], ["-m", "gradckpt", "run"]
    script(tmp_path, SEEN, "package/train.py")
    script(tmp_path, SEEN, "folder/script.py")
    for target in (["-m", "package.train"], ["folder/script.py"]):
        runs = [call(*start, "--quiet", *target, "-a", cwd=tmp_path).stdout for start in starts]
        assert len({without_addresses(run) for run in runs}) == 1


def test_a_console_script(tmp_path):
    """By its name, as the shell finds it; a file of that name comes first."""
    path = program(tmp_path, "trains", textwrap.dedent(SEEN) + textwrap.dedent(REGION) + "step()")
    done = call(*LAUNCH, "trains", "-a", cwd=tmp_path, env=on_path(tmp_path))
    assert without_addresses(done.stdout) == without_addresses(call(path, "-a", cwd=tmp_path).stdout)
    assert "compressed 1 of 1" in done.stderr
    script(tmp_path, "print('a file')", "trains")
    assert call(*LAUNCH, "trains", cwd=tmp_path, env=on_path(tmp_path)).stdout == "a file\n"


@pytest.mark.parametrize(
    ("head", "interpreter"),
    [
        ("#!/venv/bin/python\n", "/venv/bin/python"),
        ("#! /venv/bin/python3.13 -I\n", "/venv/bin/python3.13"),
        ("#!/usr/bin/env python3\n", "python3"),
        ("#!/usr/bin/env -S python -u\n", "python"),
        ("#!/bin/sh\n'''exec' /very/long/python3 \"$0\" \"$@\"\n' '''\n", "/very/long/python3"),
        ("#!/bin/sh\n'''exec' \"/with a space/python3\" \"$0\"", "/with a space/python3"),
        ("#!/bin/sh\nexec python\n", None),
        ("#!/usr/bin/env bash\n# python", None),
        ("\x7fELF python", None),
    ],
)
def test_forms_of_console_scripts(head, interpreter):
    found = gradckpt._script._SHEBANG.match(head)
    assert (found and (found[1] or found[2])) == interpreter


#: What needs ``__main__`` when its body has run: a thread, an exit handler, pickles.
LATE = (
    SEEN
    + """
    import atexit, multiprocessing, pickle, threading, time
    class Thing: pass
    def own(when):
        assert sys.modules["__main__"].__dict__ is globals()
        print(when, pickle.loads(pickle.dumps(Thing())).__class__ is Thing)
    def late():
        time.sleep(0.5)
        own("thread")
    if __name__ == "__main__":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.map(len, ["abc"]))
        atexit.register(own, "exit")
        threading.Thread(target=late).start()
"""
)


@pytest.mark.parametrize("kind", ["script.py", "script.pyc", "folder", "folder.pyz", "archive", "-m", "-mpackage"])
def test_main_stays_until_the_process_ends(tmp_path, kind):
    """And is what it is under python, which runs all of these."""
    path = script(tmp_path, LATE, "script.py")
    script(tmp_path, LATE, "folder/__main__.py")
    script(tmp_path, LATE, "package/__main__.py")
    py_compile.compile(path, cfile=tmp_path / "script.pyc")
    for name in "folder.pyz", "archive":
        zipapp.create_archive(tmp_path / "folder", tmp_path / name)
    command = [*(["-m", "package"] if kind == "-m" else [kind]), "-a", "--", "b"]
    expected, found = (call(*start, *command, cwd=tmp_path).stdout for start in ([], [*LAUNCH, "--quiet"]))
    assert without_addresses(found) == without_addresses(expected)
    assert found.endswith("[3]\nthread True\nexit True\n")


def test_a_spawned_process_imports_the_functions_of_a_compiled_script(tmp_path):
    work = "import multiprocessing\ndef work(i):\n    return i + 1\nif __name__ == '__main__':\n"
    work += "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n        print(pool.map(work, [1]))\n"
    py_compile.compile(script(tmp_path, work), cfile=tmp_path / "work.pyc")
    assert call(*LAUNCH, "--quiet", "work.pyc", cwd=tmp_path).stdout == "[2]\n"


def test_a_script_on_stdin(tmp_path):
    expected, found = (
        subprocess.run(
            [sys.executable, *start, "-", "a"],
            input=textwrap.dedent(SEEN),
            cwd=tmp_path,
            env=ENV,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for start in ([], [*LAUNCH, "--quiet"])
    )
    assert found == expected
    assert json.loads(found)[1:3] == [["-", "a"], ""]


@pytest.mark.parametrize(
    ("end", "status", "shown"),
    [
        ("sys.exit(7)", 7, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('over')", 1, "over\n"),
        ("raise ValueError('x')", 1, "Traceback.*ValueError: x\n"),
        ("raise KeyboardInterrupt", -2, "Traceback.*KeyboardInterrupt\n"),
        ("x = (", 1, ' +File "[^"]*script.py", line .*SyntaxError: .*\n'),
    ],
)
def test_exits(tmp_path, end, status, shown):
    path = script(tmp_path, f"import sys\nprint('did')\n{end}\n")
    expected = call(path, cwd=tmp_path, status=status)
    found = call(*LAUNCH, path, cwd=tmp_path, status=status)
    assert re.fullmatch(shown, expected.stderr, re.S)
    shown, report, _ = found.stderr.partition("gradckpt run (int8)\n")
    assert (found.stdout, shown) == (expected.stdout, expected.stderr)
    assert report


def test_a_traceback_starts_in_the_module(tmp_path):
    script(tmp_path, "def f():\n    1 / 0\nf()", "train.py")
    shown = call(*LAUNCH, "--quiet", "-m", "train", cwd=tmp_path, status=1).stderr
    assert re.findall(r'File "([^"]*)"', shown) == [str(tmp_path / "train.py")] * 2


def test_a_traceback_shows_where_the_script_calls_runpy(tmp_path):
    script(tmp_path, "1 / 0", "inner.py")
    script(tmp_path, "import runpy\nrunpy.run_path('inner.py')", "train.py")
    shown = call(*LAUNCH, "--quiet", "train.py", cwd=tmp_path, status=1).stderr
    assert shown == call("train.py", cwd=tmp_path, status=1).stderr


def test_a_hook_of_the_script_gets_the_exception(tmp_path):
    path = script(
        tmp_path,
        """
        import sys, traceback
        sys.excepthook = lambda kind, error, tb: print(kind.__name__, len(traceback.extract_tb(tb)))
        1 / 0
        """,
    )
    assert call(*LAUNCH, path, cwd=tmp_path, status=1).stdout == "ZeroDivisionError 1\n"


def test_it_lasts_until_the_process_ends(tmp_path):
    """Threads and exit handlers of the script train, too; the report counts them."""
    path = script(
        tmp_path,
        textwrap.dedent(REGION)
        + textwrap.dedent("""
        import atexit, threading, time
        import __main__
        def late():
            time.sleep(0.2)
            __main__.step()
        atexit.register(step)
        threading.Thread(target=late).start()
        step()
        """),
    )
    assert "compressed 3 of 3" in call(*LAUNCH, path, cwd=tmp_path).stderr


# ---- other processes ----

RANKS = textwrap.dedent(REGION) + textwrap.dedent("""
    import os
    import torch.distributed as dist
    import torch.multiprocessing as mp

    def train(rank, size, store):
        dist.init_process_group("gloo", rank=rank, world_size=size, init_method=store)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(2):
            step()
            optimizer.step()
        dist.destroy_process_group()

    if __name__ == "__main__":
        store = "file://" + os.path.abspath("store")
        if sys.argv[1] == "torchrun":
            train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
        else:
            mp.start_processes(train, (2, store), nprocs=2, start_method=sys.argv[1])
""")


def test_torchrun(tmp_path):
    path = script(tmp_path, RANKS)
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    done = call(*run, *LAUNCH, "--stats", "s.json", path, "torchrun", cwd=tmp_path)
    assert done.stderr.count("gradckpt run (int8, rank 0 of 2)") == 1
    assert "rank 1 of 2" not in done.stderr
    stats = json.loads((tmp_path / "s.json").read_text())
    assert (stats["rank"], stats["world_size"], stats["compressed"]) == (0, 2, 2)


def test_accelerate_launch(tmp_path):
    pytest.importorskip("accelerate")
    path = script(tmp_path, textwrap.dedent(REGION) + "step()\nprint(sys.argv[1:])")
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", 1]
    done = call(*launch, *LAUNCH, "--compress", "int8", path, "--lr", 1, cwd=tmp_path)
    assert "compressed 1 of 1 tensors" in done.stderr
    assert "['--lr', '1']" in done.stdout


@pytest.mark.parametrize(
    ("how", "target"),
    [("fork", ["train.py"]), ("spawn", ["train.py"]), ("forkserver", ["train.py"]), ("spawn", ["-m", "train"])],
    ids=["fork", "spawn", "forkserver", "spawn, module"],
)
def test_processes_of_multiprocessing(tmp_path, how, target):
    script(tmp_path, RANKS, "train.py")
    done = call(*LAUNCH, "--compress", "int4", "--stats", "s.json", *target, how, cwd=tmp_path)
    assert done.stderr.count("compressed 2 of 2 tensors") == 1
    assert re.search(r"gradckpt run \(int4, rank 0 of 2, process \d+ \(", done.stderr)
    assert "those of rank 0 that called checkpoint said so above" in done.stderr
    stats = json.loads((tmp_path / "s.json").read_text())
    assert (stats["rank"], stats["compressed"]) == (0, 2)


def test_workers_of_a_data_loader_say_nothing(tmp_path):
    path = script(
        tmp_path,
        textwrap.dedent(REGION)
        + textwrap.dedent("""
        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return i
        if __name__ == "__main__":
            for how in ("fork", "spawn"):
                loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context=how)
                assert [int(x) for x in loader] == [0, 1, 2, 3]
            step()
        """),
    )
    done = call(*LAUNCH, path, cwd=tmp_path)
    assert done.stderr.count("gradckpt run (") == 1
    assert "compressed 1 of 1" in done.stderr


def test_a_child_that_the_script_forks_itself(tmp_path):
    path = script(
        tmp_path,
        textwrap.dedent(REGION)
        + textwrap.dedent("""
        import os
        step()
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
        """),
    )
    assert call(*LAUNCH, path, cwd=tmp_path).stderr.count("gradckpt run (") == 1


def test_nothing_left_behind(tmp_path):
    """In one process: what main() changed is as before once the process would end."""
    path = script(
        tmp_path,
        f"""
        import atexit, multiprocessing.spawn, sys
        import torch.utils.checkpoint as tc
        from torch.optim import optimizer
        import inspect
        def state():
            inner = getattr(tc, "_checkpoint_impl", None) or inspect.unwrap(tc.checkpoint)
            hooks = optimizer._global_optimizer_post_hooks
            return tc.checkpoint, inner.__code__, multiprocessing.spawn.get_preparation_data, list(hooks)
        before = state()
        def compare():
            print(all(a is b or a == b for a, b in zip(before, state())), state()[1] is before[1])
        atexit.register(compare)
        import gradckpt.run
        sys.argv = ["run", {str(script(tmp_path, textwrap.dedent(REGION) + "step()", "inner.py"))!r}]
        gradckpt.run.main()
        print(state()[1] is before[1])
        """,
    )
    assert call(path, cwd=tmp_path).stdout == "False\nTrue True\n"
