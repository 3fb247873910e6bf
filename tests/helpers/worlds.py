"""Worlds of ranks on this machine, and torch's launcher."""

import gc
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from checkout import EXAMPLES, HELPERS, ROOT
from processes import PATH

# ---- Worlds of two processes on gloo: :func:`run` starts them; each writes down what it found,
# and the tests read it. :func:`of_one` is the world of a test's own process.

#: Seconds: for a world, and for a rank after another has failed.
LIMIT, GRACE = 240, 8

#: In a rank: its number, and the folder of the world.
RANK = int(os.environ.get("RANK", "0"))
FOLDER = os.environ.get("GRADCKPT_TEST_WORLD")


def run(function, folder, *arguments, ranks=2, fails=False):
    """Run a function of a test file in each rank. It returns what JSON can carry; here:
    a list with that of each rank.

    With ``fails``: the errors (the last line of stderr) of ranks that raise, or None, in that list.
    """
    file = Path(function.__code__.co_filename)
    processes = []
    for rank in range(ranks):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "GRADCKPT_TEST_WORLD": str(folder),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "ACCELERATE_USE_CPU": "true",
            "PYTHONPATH": PATH,
        }
        command = [sys.executable, str(HELPERS / "worlds.py"), str(file), function.__name__, str(folder), *arguments]
        with open(folder / f"output{rank}", "w") as output, open(folder / f"errors{rank}", "w") as errors:
            processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=errors))
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit and any(p.poll() is None for p in processes):
        if any(p.poll() not in (None, 0) for p in processes):
            limit = min(limit, time.monotonic() + GRACE)
        time.sleep(0.05)
    for process in processes:
        process.kill()
        process.wait()
    errors = [(folder / f"errors{rank}").read_text() for rank in range(ranks)]
    if fails:
        raised = [text.strip().splitlines() or ["nothing was said"] for text in errors]
        return [lines[-1] if p.returncode else None for lines, p in zip(raised, processes, strict=True)]
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, f"{codes}\n" + "\n".join(f"rank {r}:\n{text}" for r, text in enumerate(errors))
    return [json.loads((folder / f"found{rank}").read_text()) for rank in range(ranks)]


def with_disk(folder):
    """The folder, where ``Offload("disk")`` can use it; else the test is skipped."""
    import pytest

    import gradckpt
    from gradckpt._engine.places import place_of

    try:
        place_of(gradckpt.Offload("disk", directory=folder))
    except ValueError as error:
        pytest.skip(f"the temporary folder's file system serves no store: {error}")
    return folder


def join(folder, name="store"):
    import datetime

    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}",
        rank=RANK,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=60),
    )


def of_one(function, *arguments):
    """function(*arguments) in a process group of this process alone.

    A function, since a DistributedDataParallel must go before its group: where its reducer holds
    the group last, torch joins gloo's threads with the GIL held, and one of them may wait for the
    GIL to let go of its last work.
    """
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(*arguments)
    finally:
        gc.collect()
        dist.destroy_process_group()


def main(file, name, folder, *arguments):
    import importlib

    join(folder)
    sys.path.insert(0, str(Path(file).parent))
    found = getattr(importlib.import_module(Path(file).stem), name)(*arguments)
    Path(folder, f"found{RANK}").write_text(json.dumps(found))
    leave()


def leave():
    """End this rank without the end of Python.

    A thread of Gloo that then frees its last tensor aborts the process (pytorch issue 190489), and
    DTensor's caches keep the group and so its threads.
    """
    import torch.distributed as dist

    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def torchrun(*command, tries=3, **options):
    """The finished process of two ranks of it; run again where only the end of Python failed,
    as :func:`leave` says."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for _ in range(tries):
        done = subprocess.run([*launch, *map(str, command)], capture_output=True, text=True, **options)
        if "terminate called without an active exception" not in done.stderr:
            break
    return done


# ---- ``python -m gradckpt.run`` in a process of its own, and scripts for it.

ENV = {
    **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
LAUNCH = ["-m", "gradckpt.run"]


def call(*command, cwd=None, status=0, env=ENV, timeout=300):
    """A Python process: its output, with the exit status that is expected."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def tests_pass(file, env):
    """All tests of a file, in a process of their own."""
    out = call("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", file, env=env, timeout=500).stdout
    assert " passed" in out
    assert "skipped" not in out


def example_passes(name, *options, env):
    """An example with three steps of eight regions, which checks by itself what it says."""
    out = call(EXAMPLES / f"{name}.py", *options, env=env, timeout=500).stdout
    assert "FAILED" not in out
    assert "24 regions" in out


def script(folder, text, name="script.py"):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def program(folder, name, text, interpreter=sys.executable):
    """A console script as installers make it."""
    path = script(folder, f"#!{interpreter}\n{textwrap.dedent(text)}", f"bin/{name}")
    path.chmod(0o755)
    return path


def on_path(folder):
    return {**ENV, "PATH": f"{folder / 'bin'}{os.pathsep}{ENV['PATH']}"}


REGION = """
    import sys
    import torch
    from torch.utils.checkpoint import checkpoint
    layer = torch.nn.Linear(64, 64)
    def step():
        checkpoint(layer, layer(torch.randn(32, 64)), use_reentrant=False).sum().backward()
"""


if __name__ == "__main__":
    main(*sys.argv[1:])
