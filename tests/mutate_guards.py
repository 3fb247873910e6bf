"""Which of the C sources' guards do the tests notice? A guard is an
``if`` that ends in return or goto.

    python tests/mutate_guards.py [--draw 40] [--seed COMMIT] [--all] [--how negate] [--list]

Works in a copy of the tree (--folder), built once for the CPU with every guard behind a switch:
GRADCKPT_GUARD=17 makes guard 17 let everything through. A first pass runs the tests as they are and
writes down which guards each test meets; it takes as long as `make test` in one process, and is
kept for the next call on the same sources. Then guards are drawn by the commit's hash, and for each
the tests that meet it run with the guard gone, those that meet few others and are quick first,
until one fails, crashes or hangs: found.

Guards against a failed allocation, and those for a CUDA device alone, are not drawn: no test on a
CPU makes them fire. Neither are those whose comment says "faster": without them the same comes out,
later. `--list` counts all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "helpers"))
from checkout import ROOT, TESTS
from targets import is_left

#: Environment: the guard that lets everything through, how,
#: and the file in which guards are written down.
GUARD, HOW, HITS = "GRADCKPT_GUARD", "GRADCKPT_GUARD_HOW", "GRADCKPT_GUARD_HITS"
EVALUATED, FIRED = 1, 2
PACKAGES = ("codec", "engine", "offload", "planner", "torch", "module")
#: Tests of the sources' text, which the copy changes.
TEXT = ("package/test_layers.py", "package/test_packaging.py", "package/test_targets.py")

SWITCH = """/* Made by tests/mutate_guards.py: every guard behind a switch. */
#ifndef GCK_GUARDS_H
#define GCK_GUARDS_H
#pragma GCC system_header
#ifdef __CUDACC__
#define GCK_GUARD(id, condition) (condition)
#else
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* as the files that this precedes would, too late */
#endif
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
static unsigned char gck_guards_none[COUNT];
static inline __attribute__((unused)) int gck_guard(int id, int condition)
{
    static int chosen = -2, negate;
    static unsigned char *hits = gck_guards_none;
    if (chosen == -2) {
        const char *guard = getenv("GRADCKPT_GUARD"), *how = getenv("GRADCKPT_GUARD_HOW");
        const char *path = getenv("GRADCKPT_GUARD_HITS");
        const int file = path ? open(path, O_RDWR) : -1;
        void *map = file < 0 ? MAP_FAILED : mmap(NULL, COUNT, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (file >= 0) close(file);
        if (map != MAP_FAILED) hits = (unsigned char *)map;
        negate = how && how[0] == 'n';
        chosen = guard ? atoi(guard) : -1;
    }
    hits[id] |= (unsigned char)(condition ? 3 : 1);
    return id != chosen ? condition : negate ? !condition : 0;
}
#define GCK_GUARD(id, condition) gck_guard(id, (condition) ? 1 : 0)
#endif
#endif
"""

# ---- the sources


@dataclass(frozen=True)
class Guard:
    file: str  # below csrc
    line: int
    start: int  # of the condition, inside its parentheses
    end: int
    condition: str
    body: str
    apart: str  # why it is not drawn, or ""

    @property
    def package(self) -> str:
        return self.file.split("/")[0] if "/" in self.file else "module"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: if ({self.condition}) {self.body}"


def blanked(text: str) -> str:
    """Comments, literals and preprocessor lines become spaces; every offset stays."""

    def spaces(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    literals = r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'"
    text = re.sub(literals, spaces, text, flags=re.DOTALL)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", spaces, text, flags=re.MULTILINE)


def closing(text: str, at: int) -> int:
    """Where the bracket that opens at `at` closes."""
    pairs = {"(": ")", "{": "}"}
    opened, closed, depth = text[at], pairs[text[at]], 0
    for k in range(at, len(text)):
        depth += (text[k] == opened) - (text[k] == closed)
        if depth == 0:
            return k
    raise ValueError("a bracket that does not close")


#: Calls that fail for want of memory alone.
ALLOCATES = (
    r"\b(?:PyObject_GC_New\w*|PyObject_New\w*|Py(?:Tuple|List|Dict|Set|FrozenSet)_New|PyMem_\w+|PyObject_\w*[Aa]lloc|"
    r"\w*(?:malloc|calloc|realloc|strdup)|tp_alloc|PyThread_allocate_lock|PyTuple_Pack|Py_BuildValue|PyErr_NewException\w*|"
    r"Py(?:Long|Float|Unicode|Bytes|Bool|Slice|Capsule|CFunction|CMethod)_(?:From|New|Intern)\w*|PyType_FromSpec\w*|"
    r"PyList_Append|PyList_AsTuple|Py(?:List|Tuple)_GetSlice|PyModule_Add\w*|PyDict_SetItem\w*|PySet_Add)\s*\("
)


def operands(condition: str) -> list[str]:
    """What `||` joins, at the top."""
    parts, depth, start = [], 0, 0
    for k, c in enumerate(condition):
        depth += (c in "([") - (c in ")]")
        if depth == 0 and condition.startswith("||", k):
            parts.append(condition[start:k])
            start = k + 2
    return [*parts, condition[start:]]


def why_apart(file: str, condition: str, body: str, before: str) -> str:
    """Why no test on a CPU can make a guard fire; "" when one can."""
    if file.endswith((".cu", ".cuh")):
        return "device code"
    if "PyErr_NoMemory" in body:
        return "a failed allocation"
    made = {found[1] for found in re.finditer(r"(\w+)\s*=\s*(?:\([^()]*\)\s*)?" + ALLOCATES, before)}

    def fails(operand: str) -> bool:
        checked = re.search(r"(\w+) == NULL", operand)
        return bool(re.search(ALLOCATES, operand) or (checked and checked[1] in made))

    return "a failed allocation" if all(map(fails, operands(condition))) else ""


def guards_of(text: str, file: str) -> Iterator[Guard]:
    plain = blanked(text)
    cuda = [False] * (text.count("\n") + 2)
    stack: list[bool] = []
    for number, line in enumerate(text.split("\n"), 1):
        if re.match(r"\s*#\s*if", line):
            stack.append("WITH_CUDA" in line and "!" not in line and "ifndef" not in line)
        elif re.match(r"\s*#\s*(else|elif)", line) and stack:
            stack[-1] = False
        elif re.match(r"\s*#\s*endif", line) and stack:
            stack.pop()
        cuda[number] = any(stack)
    for match in re.finditer(r"\bif\s*\(", plain):
        opens = match.end() - 1
        end = closing(plain, opens)
        at = end + 1 + len(plain[end + 1 :]) - len(plain[end + 1 :].lstrip())
        stop = closing(plain, at) if plain[at] == "{" else plain.index(";", at)
        statements = [s.strip() for s in re.split(r"[;{}]", plain[at : stop + 1]) if s.strip()]
        if not statements or not re.match(r"(return|goto)\b", statements[-1]):
            continue
        line = text.count("\n", 0, match.start()) + 1
        condition = " ".join(text[opens + 1 : end].split())
        before = plain[max(plain.rfind("}", 0, match.start()), match.start() - 300, 0) : match.start()]
        apart = why_apart(file, condition, text[at : stop + 1], before)
        if re.search(r"/\* faster\b", text[match.start() : stop + 1]):
            apart = "speed alone"
        body = " ".join(text[at : stop + 1].split())
        yield Guard(file, line, opens + 1, end, condition, body, "device code" if cuda[line] else apart)


def all_guards(csrc: Path) -> list[Guard]:
    files = sorted(p for p in csrc.rglob("*") if p.suffix in (".c", ".h", ".cu", ".cuh"))
    return [guard for p in files for guard in guards_of(p.read_text(), p.relative_to(csrc).as_posix())]


def switched(text: str, guards: list[tuple[int, Guard]], header: Path, name: str) -> str:
    """The source with these guards, by number, behind switches;
    compilers still name its own lines."""
    edits = [(g.end, ")") for _, g in guards] + [(g.start, f"GCK_GUARD({n}, ") for n, g in guards]
    for at, inserted in sorted(edits, key=lambda edit: -edit[0]):
        text = text[:at] + inserted + text[at:]
    return f'#include "{header}"\n#line 1 "{name}"\n{text}'


# ---- the copy


def prepare(folder: Path, guards: list[Guard]) -> None:
    """The tree with every guard behind a switch, built for the CPU."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    csrc = folder / "csrc"
    (csrc / "guards.h").write_text(SWITCH.replace("COUNT", str(len(guards))))
    by_file: dict[str, list[tuple[int, Guard]]] = {}
    for number, guard in enumerate(guards):
        by_file.setdefault(guard.file, []).append((number, guard))
    for name, its in by_file.items():
        if name.endswith((".cu", ".cuh")):
            continue
        path = csrc / name
        path.write_text(switched(path.read_text(), its, csrc / "guards.h", name))
    env = {**os.environ, "GRADCKPT_CUDA": "0"}
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env=env,
        check=True,
        capture_output=True,
    )


def run_tests(folder: Path, arguments: list[str], env: dict[str, str], seconds: float | None) -> tuple[int | None, str]:
    """Exit status, None when it did not end; and what it said."""
    paths = [str(folder), str(folder / "tests")]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **env}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not soak", *arguments]
    running = subprocess.Popen(
        command, cwd=folder, env=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = running.communicate(timeout=seconds)
        return running.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)
        return None, running.communicate()[0]


# ---- the first pass: a plugin of pytest


class Recorder:
    """Writes down, for each test that passes,
    its seconds and what each guard did in it and its processes."""

    def __init__(self, hits: Path, out: Path) -> None:
        with hits.open("r+b") as file:
            self.hits = mmap.mmap(file.fileno(), 0)
        self.out = out.open("a")
        self.passed = True
        self.always: bytes | None = None  # what fires while everything is imported
        self.shared: dict[Any, bytes] = {}  # what fires while a fixture is set up that several tests use

    def pytest_runtest_logreport(self, report: object) -> None:
        self.passed = self.passed and not report.failed  # type: ignore[attr-defined]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.passed, self.started = True, time.monotonic()
        if self.always is None:
            self.always = self.hits[:]
        self.hits[:] = bytes(len(self.hits))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        before = self.hits[:]
        self.hits[:] = bytes(len(before))
        try:
            return (yield)
        finally:
            self.shared[fixturedef] = self.hits[:]
            self.add(before)

    def pytest_runtest_teardown(self, item: Any) -> None:
        for fixturedef in (f for same in item._fixtureinfo.name2fixturedefs.values() for f in same):
            self.add(self.shared.get(fixturedef, b""))

    def add(self, hits: bytes) -> None:
        for k, byte in enumerate(hits):
            if byte:
                self.hits[k] |= byte

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = round(time.monotonic() - self.started, 3)
        met = {k: a | b for k, (a, b) in enumerate(zip(self.hits[:], self.always or b"", strict=True)) if a | b}
        print(json.dumps([nodeid, self.passed, seconds, met]), file=self.out, flush=True)


def pytest_configure(config: object) -> None:
    out = os.environ.get("GRADCKPT_GUARD_RECORD")
    if out:
        config.pluginmanager.register(Recorder(Path(os.environ[HITS]), Path(out)))  # type: ignore[attr-defined]


Tests = dict[str, tuple[float, dict[int, int]]]


def record_file(folder: Path, guards: list[Guard], name: str, target: str) -> Path:
    """The record of a file's tests; kept, so that an interrupted pass goes on where it was."""
    out = folder / "record" / target / name.replace("/", "-")
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    part, hits = out.with_suffix(".part"), out.with_suffix(".hits")
    part.write_text("")
    hits.write_bytes(bytes(len(guards)))
    env = {HITS: str(hits), "GRADCKPT_GUARD_RECORD": str(part)}
    options = ["-p", "mutate_guards", *([] if target == "all" else ["--target", target]), f"tests/{name}"]
    status, said = run_tests(folder, options, env, 1800)
    if status not in (0, 5):
        print(f"  {name}: {(said.strip().splitlines() or ['?'])[-1]}; what fails is left out", flush=True)
    part.rename(out)
    return out


def record(folder: Path, guards: list[Guard], files: list[str], target: str, jobs: int) -> Tests:
    """Tests that pass as they are: their seconds and the guards they meet."""
    found: Tests = {}
    with ThreadPoolExecutor(jobs) as pool:
        for out in pool.map(lambda name: record_file(folder, guards, name, target), files):
            for line in out.read_text().splitlines():
                test, passed, seconds, met = json.loads(line)
                if passed:
                    found[test] = (seconds, {int(k): byte for k, byte in met.items()})
    return found


# ---- the mutants


def tests_of(tests: Tests, number: int, bit: int, most: float) -> tuple[list[str], int]:
    """Tests that meet the guard, about `most` seconds of them, and how many there are. Those that
    meet few others are about it; quick ones first among them."""
    meeting = sorted(
        (t for t, (_, met) in tests.items() if met.get(number, 0) & bit),
        key=lambda t: tests[t][0] * (1 + sum(1 for byte in tests[t][1].values() if byte & FIRED)),
    )
    chosen, seconds = [], 0.0
    for test in meeting:
        seconds += tests[test][0]
        if seconds > most and chosen:
            break
        chosen.append(test)
    return chosen, len(meeting)


def try_mutant(folder: Path, number: int, tests: list[str], how: str, most: float) -> tuple[str, str]:
    """("found", by what) or ("survived", "")."""
    chosen = folder / f"tests-of-{number}"
    chosen.write_text("\n".join(tests) + "\n")
    env = {GUARD: str(number), HOW: how}
    status, said = run_tests(folder, ["-x", "--tb=no", f"@{chosen}"], env, 120 + 3 * most)
    if status == 0:
        return "survived", ""
    if status is None:
        return "found", "a test that does not end"
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+::.*?)(?: - .*)?$", said, re.MULTILINE)
    if failed:
        return "found", failed[1]
    if status < 0 or status > 5:
        return "found", f"a crash ({signal.Signals(-status).name if status < 0 else status})"
    return "found", (said.strip().splitlines() or [f"status {status}"])[-1]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=int, default=40, help="how many guards (default: 40)")
    parser.add_argument("--seed", help="what they are drawn by (default: the commit's hash)")
    parser.add_argument("--guard", action="append", default=[], metavar="FILE:LINE", help="this guard, none are drawn")
    parser.add_argument("--all", action="store_true", help="with the tests of `make test_all`, too")
    parser.add_argument("--how", choices=("remove", "negate"), default="remove", help="(default: remove)")
    parser.add_argument("--seconds", type=float, default=90, help="of tests for each guard (default: 90)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "guards", help="of the copy (default: %(default)s)"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes of tests at a time (default: 1)")
    parser.add_argument(
        "--list", action="store_true", help="the guards by package, and which are not drawn; run nothing"
    )
    return parser.parse_args()


def show(guards: list[Guard]) -> None:
    for package in PACKAGES:
        its = [g for g in guards if g.package == package]
        apart = Counter(g.apart for g in its if g.apart)
        said = ", ".join(f"{n} of {reason}" for reason, n in apart.items())
        print(
            f"{package}: {len(its)} guards, {sum(not g.apart for g in its)} to draw from"
            + (f" (not: {said})" if said else "")
        )


def main() -> int:
    options = parse()
    guards = all_guards(ROOT / "csrc")
    show(guards)
    if options.list:
        for guard in guards:
            print(f"{'- ' + guard.apart + ': ' if guard.apart else ''}{guard}")
        return 0

    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    seed = options.seed or head.strip()
    pool = [n for n, guard in enumerate(guards) if not guard.apart]
    wanted = {n for n in range(len(guards)) if f"{guards[n].file}:{guards[n].line}" in options.guard}
    drawn = sorted(wanted or random.Random(seed).sample(pool, min(options.draw, len(pool))))

    # Of what the record depends on: the sources, and the tests.
    texts = [p.read_bytes() for top in ("csrc", "gradckpt", "tests") for p in sorted((ROOT / top).rglob("*"))
             if p.is_file() and p.suffix in (".c", ".h", ".py")]  # fmt: skip
    version = hashlib.sha256(b"\0".join(texts)).hexdigest()
    folder = options.folder.resolve()
    stamp = folder / "version"
    if not stamp.exists() or stamp.read_text() != version:
        print(f"building the copy in {folder}")
        prepare(folder, guards)
        stamp.write_text(version)
    files = sorted(p.relative_to(TESTS).as_posix() for p in TESTS.rglob("test_*.py"))
    files = [f for f in files if f not in TEXT and (options.all or not is_left(f))]
    print("which guards each test meets")
    tests = record(folder, guards, files, "all" if options.all else "test", options.jobs)

    print(f"{len(drawn)} guards, seed {seed[:12]}, {len(tests)} tests")
    survived = 0

    def judge(number: int) -> tuple[bool, str]:
        bit = EVALUATED if options.how == "negate" else FIRED
        chosen, meeting = tests_of(tests, number, bit, options.seconds)
        if not chosen:
            return False, "SURVIVED: no test meets it"
        outcome, by = try_mutant(folder, number, chosen, options.how, options.seconds)
        if outcome == "found":
            return True, f"found by {by}"
        return False, f"SURVIVED: {len(chosen)} of the {meeting} tests that meet it pass"

    with ThreadPoolExecutor(options.jobs) as pool:
        for place, (number, (found, said)) in enumerate(zip(drawn, pool.map(judge, drawn), strict=True), 1):
            survived += not found
            print(f"{place:3d} {guards[number]}\n    {said}", flush=True)
    print(f"found: {len(drawn) - survived} of {len(drawn)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
