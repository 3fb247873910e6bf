"""gradckpt._C.choose_options against plans that are replayed one by one, block by block
(helpers/planner_chains.py), and what it promises where there are too many plans for that."""

import array
import hashlib
import itertools
import random
import subprocess
import sys

import pytest
from checkout import CSRC, HELPERS, NATIVE, ROOT
from native_programs import gcc, output_of, said_of_failing_memory
from planner_chains import (
    UNAVAILABLE,
    arguments_of,
    chain_of_126,
    least_time,
    plain_time,
    plans,
    random_chain,
    replay,
    solve,
    sums_of,
    tables_of,
)

from gradckpt import _C

PARTS = 8


@pytest.mark.parametrize("errors", [False, True], ids=["bytes", "errors"])
@pytest.mark.parametrize("part", range(PARTS))
def test_best_of_all_plans(part, errors):
    """500 chains in each part: 8,000 in all. Exact, and so optimal, down to the smallest budget."""
    infeasible = 0
    for seed in range(part * 500, (part + 1) * 500):
        rng = random.Random(f"{seed} {errors}")
        chain = random_chain(rng, errors)
        found, tables = plans(chain), tables_of(chain, errors)
        peaks = [peak for peak, _, _ in found] or [0]
        budget = rng.randint(min(peaks) - 10, max(peaks))
        error_budget = rng.randint(0, 60) if errors else 0
        choice = solve(tables, budget, error_budget)
        assert choice["exact"]
        assert choice["time"] == choice["lower_bound"] == least_time(found, budget, error_budget)
        within = [peak for peak, _, error in found if error <= error_budget]
        assert choice["smallest_budget"] == min(within, default=None)
        if choice["choices"] is None:
            infeasible += 1
        else:
            assert replay(chain, choice["choices"]) == (choice["peak"], choice["time"], choice["error"])
            assert choice["peak"] <= budget
        front = {(peak, time, error) for peak, time, error in choice["front"]}
        assert front == {
            (peak, time, error)
            for peak, error, time in {(p, e, t) for p, t, e in found}
            if not any(p <= peak and t <= time and e <= error and (p, t, e) != (peak, time, error) for p, t, e in found)
        }
    assert infeasible > 30


def budgets_of(tables, buckets=256, shares=(0, 0.03, 0.2, 0.5, 0.8, 1)):
    """From the smallest budget to that of the last point of the front."""
    front = solve(tables, None, 2**59, buckets)
    least, most = front["smallest_budget"], front["front"][-1][0]
    return [least + int(share * (most - least)) for share in shares]


SHAPES = ["different", "alike", "stages", "encoder_decoder", "hostile_needs"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("buckets", [64, 1000])
@pytest.mark.parametrize("errors", [False, True], ids=["bytes", "errors"])
def test_thinned_plans_are_sound(shape, buckets, errors):
    """The budget holds, the sums are true, and the exact answer is between the bound and the
    plan. Chains so short that all labels can be kept."""
    tables = chain_of_126(random.Random(3), shape, errors=errors, regions=9 if errors else 20, options=6)
    most = sum(map(max, tables["error"])) if errors else 0
    thinned = missed = 0
    for budget, share in itertools.product(budgets_of(tables), (0, 0.1, 0.5) if errors else (0,)):
        choice = solve(tables, budget, int(most * share), buckets)
        best = solve(tables, budget, int(most * share), 1 << 18)
        assert best["exact"]
        if choice["choices"] is None:  # without an error there may be none, however large the budget
            assert best["choices"] is None or errors
            missed += best["choices"] is not None
            continue
        assert choice["lower_bound"] <= best["time"] <= choice["time"]
        assert sums_of(tables, choice["choices"]) == (choice["peak"], choice["time"], choice["error"])
        assert choice["peak"] <= budget
        assert choice["error"] <= most * share
        assert choice["smallest_budget"] >= best["smallest_budget"]
        if not errors:
            assert choice["smallest_budget"] == best["smallest_budget"]
        thinned += not choice["exact"]
    assert thinned or buckets > 64
    assert missed <= 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("buckets", "gap"), [(4096, 0.02), (16384, 0.0065)])
def test_gap_of_126_regions(shape, buckets, gap):
    """(time - lower bound) / time over that without checkpointing."""
    for seed in range(2):
        tables = chain_of_126(random.Random(seed), shape)
        for budget in budgets_of(tables, shares=(0.02, 0.1, 0.3, 0.5, 0.7, 0.9)):
            choice = solve(tables, budget, buckets=buckets)
            assert sums_of(tables, choice["choices"])[:2] == (choice["peak"], choice["time"])
            assert choice["peak"] <= budget
            assert choice["time"] - choice["lower_bound"] <= gap * (choice["time"] - plain_time(tables))


@pytest.mark.parametrize(("shape", "seed"), list(itertools.product(SHAPES, (0, 1))))
def test_gap_with_errors(shape, seed):
    """Also where regions are alike, so that all would change their option at one price of error."""
    tables = chain_of_126(random.Random(seed), shape, errors=True)
    most = sum(map(max, tables["error"]))
    for budget, share in itertools.product(budgets_of(tables, shares=(0.3, 0.5, 0.7)), (0.1, 0.4)):
        choice = solve(tables, budget, int(most * share), 4096)
        assert sums_of(tables, choice["choices"]) == (choice["peak"], choice["time"], choice["error"])
        assert choice["peak"] <= budget
        assert choice["error"] <= most * share
        assert choice["time"] - choice["lower_bound"] <= 0.025 * (choice["time"] - plain_time(tables))


@pytest.mark.parametrize("buckets", [64, 700, 4096])
@pytest.mark.parametrize("errors", [False, True], ids=["bytes", "errors"])
def test_a_larger_budget_is_never_slower(errors, buckets):
    """With errors not by more than 5 %: each pair of budgets has its own search."""
    tables = chain_of_126(random.Random(7), "different", errors=errors, regions=12, options=5)
    most = sum(map(max, tables["error"])) if errors else 0
    error_budgets = [int(most * i / 12) for i in range(13)] if errors else [0]
    count = 1000 if not errors and buckets < 4096 else 60
    rows = []
    for budget in budgets_of(tables, shares=[i / (count - 1) for i in range(count)]):
        rows.append([solve(tables, budget, error_budget, buckets)["time"] for error_budget in error_budgets])
    infinite = [[float("inf") if time is None else time for time in row] for row in rows]
    for row in (*infinite, *zip(*infinite, strict=True)):
        best = list(itertools.accumulate(row, min))
        assert all(time <= (1.05 if errors else 1) * least for time, least in zip(row, best, strict=True))
    assert infinite[0] != infinite[-1]


def test_the_front_descends():
    for shape, errors in itertools.product(SHAPES, (False, True)):
        tables = chain_of_126(random.Random(2), shape, errors=errors, regions=30)
        front = solve(tables, None, buckets=256)["front"]
        assert 2 <= len(front) <= 4096
        budgets = [budget for budget, _, _ in front]
        assert budgets == sorted(budgets)
        if not errors:
            times = [time for _, time, _ in front]
            assert times == sorted(set(times), reverse=True)
            assert len(set(budgets)) == len(budgets)


def digest():
    """Of plans of all kinds."""
    found = hashlib.sha256()
    for shape, errors, buckets in itertools.product(SHAPES, (False, True), (64, 1024)):
        tables = chain_of_126(random.Random(4), shape, errors=errors, regions=40)
        for budget in budgets_of(tables, shares=(0.2, 0.6)):
            error_budget = sum(map(max, tables["error"])) // 5 if errors else 0
            found.update(repr(solve(tables, budget, error_budget, buckets)).encode())
    return found.hexdigest()


def test_every_process_finds_the_same():
    program = "import sys; sys.path[:0] = sys.argv[1:]; import test_planner; print(test_planner.digest())"
    paths = [str(ROOT / "tests" / "planner"), str(HELPERS)]
    seen = {digest()}
    for seed in ("1", "77"):
        out = subprocess.run(
            [sys.executable, "-c", program, *paths],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "MALLOC_PERTURB_": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        seen.add(out.stdout.strip())
    assert len(seen) == 1


# ---- ties, edges, hostile input


def test_ties_take_the_earlier_option():
    tables = {"kept": [[4, 4, 4]] * 5, "need": [[4] * 3] * 5, "time": [[7, 7, 7]] * 5, "error": None, "last_need": 0}
    assert solve(tables, 100)["choices"] == (0,) * 5
    # Of two that are as fast, the one that needs less.
    tables["kept"] = [[4, 3, 3]] * 5
    assert solve(tables, 100)["choices"] == (1,) * 5


def test_no_region():
    tables = {"kept": [], "need": [], "time": [], "error": None, "last_need": 5}
    found = solve(tables, 5)
    assert found == {
        "choices": (),
        "time": 0,
        "peak": 5,
        "error": 0,
        "lower_bound": 0,
        "smallest_budget": 5,
        "front": [(5, 0, 0)],
        "exact": True,
    }
    assert solve(tables, 4)["choices"] is None
    tables["last_need"] = UNAVAILABLE
    assert solve(tables, 2**62)["smallest_budget"] is None


def test_one_option_and_none():
    tables = {"kept": [[3], [-2]], "need": [[3], [1]], "time": [[1], [2]], "error": [[0], [9]], "last_need": 2}
    found = solve(tables, 4, 9)
    assert (found["choices"], found["time"], found["peak"], found["error"]) == ((0, 0), 3, 4, 9)
    assert solve(tables, 3, 9)["choices"] is None
    assert solve(tables, 4, 8)["choices"] is None
    assert solve(tables, 4, 8)["smallest_budget"] is None
    assert solve(tables, 4, -1)["choices"] is None
    tables["need"][1][0] = UNAVAILABLE
    found = solve(tables, 2**63 - 1, 2**63 - 1)
    assert found["choices"] is None
    assert (found["smallest_budget"], found["front"], found["exact"]) == (None, [], True)


def test_budgets_beyond_64_bits():
    """They decide as a large one does, also where regions free bytes (kept < 0)."""
    for errors in (False, True):
        tables = chain_of_126(random.Random(1), "encoder_decoder", errors=errors, regions=40)
        tables["kept"] = [[-each for each in row] for row in tables["kept"]]
        for buckets in (64, 512):
            most = sum(map(max, tables["error"])) // 5 if errors else 0
            within = solve(tables, 2**59, most, buckets)
            assert sums_of(tables, within["choices"]) == (within["peak"], within["time"], within["error"])
            for budget in (2**60, 2**63 - 1, 2**63, 2**64 + 5, 10**30):
                assert solve(tables, budget, most, buckets) == within
            assert solve(tables, -(2**63) - 1, most, buckets)["choices"] is None
            assert solve(tables, -(10**30), most, buckets)["choices"] is None


def test_smallest_error_has_a_plan():
    """Also thinned, and where no option is free of error."""
    tables = chain_of_126(random.Random(1), "different", errors=True, regions=40)
    tables["error"] = [[error + 3 for error in row] for row in tables["error"]]
    least = sum(map(min, tables["error"]))
    found = solve(tables, 2**60, least, 64)
    assert not found["exact"]
    assert found["error"] == least
    assert solve(tables, 2**60, least - 1, 64)["choices"] is None


def test_large_numbers():
    """Just below the limit of sums, and where an unavailable option has any numbers."""
    big = 2**59
    tables = {
        "kept": [[big - 9, -big + 9], [-(2**63), 5]],
        "need": [[big - 1, 1], [UNAVAILABLE, 5]],
        "time": [[0, big - 1], [-(2**63), big]],
        "error": [[0, big], [2**63 - 1, big - 1]],
        "last_need": 0,
    }
    found = solve(tables, 2**63 - 1, 2**63 - 1)
    assert (found["choices"], found["time"], found["peak"]) == ((0, 1), big, big - 1)
    found = solve(tables, big - 2, 2**63 - 1)
    assert (found["choices"], found["time"], found["peak"]) == ((1, 1), 2**60 - 1, 1)


@pytest.mark.parametrize(
    ("table", "value"),
    [
        ("kept", 2**60),
        ("kept", -(2**63)),
        ("need", 2**60),
        ("need", -(2**63)),
        ("need", 2**63 - 2),
        ("time", -1),
        ("time", 2**60),
        ("time", 2**63 - 1),
        ("error", -1),
        ("error", 2**63 - 1),
        ("last_need", -(2**63)),
        ("last_need", 2**60),
    ],
)
def test_numbers_beyond_the_limits(table, value):
    tables = {"kept": [[1, 2]], "need": [[1, 2]], "time": [[1, 2]], "error": [[1, 2]], "last_need": 1}
    tables[table] = value if table == "last_need" else [[1, value]]
    with pytest.raises(ValueError, match=r"^gradckpt: .* negative, or a sum reaches 2\*\*60; pass"):
        solve(tables, 10)


def test_wrong_arguments():
    row = array.array("q", [1, 2])
    with pytest.raises(ValueError, match=r"^gradckpt: kept has 16 bytes; pass regions \* options \* 8 = 32$"):
        _C.choose_options(2, 2, row, row, row, None, 0, 1)
    with pytest.raises(ValueError, match=r"^gradckpt: error has 8 bytes"):
        _C.choose_options(1, 2, row, row, row, array.array("q", [1]), 0, 1)
    with pytest.raises(ValueError, match=r"^gradckpt: time is not of 64-bit integers; pass"):
        _C.choose_options(1, 2, row, row, array.array("d", [1, 2]), None, 0, 1)
    with pytest.raises(ValueError, match=r"^gradckpt: -1 regions with 2 options; pass"):
        _C.choose_options(-1, 2, row, row, row, None, 0, 1)
    with pytest.raises(ValueError, match=r"^gradckpt: 1 regions with 0 options; pass"):
        _C.choose_options(1, 0, b"", b"", b"", None, 0, 1)
    with pytest.raises(ValueError, match=r"^gradckpt: 4294967296 regions"):
        _C.choose_options(2**32, 2**32, b"", b"", b"", None, 0, 1)
    for buckets in (0, -5, 63, 2**18 + 1):
        with pytest.raises(ValueError, match=rf"^gradckpt: buckets={buckets}; pass 64 to"):
            _C.choose_options(1, 2, row, row, row, None, 0, 1, buckets=buckets)
    with pytest.raises(TypeError):
        _C.choose_options(1, 2, [1, 2], row, row, None, 0, 1)
    with pytest.raises(TypeError):
        _C.choose_options(1, 2, row, row, row, None, 0, "1")
    with pytest.raises(BufferError):
        _C.choose_options(1, 2, memoryview(array.array("q", range(4)))[::2], row, row, None, 0, 1)


def test_tables_may_lie_anywhere():
    """bytes, and a view that is not aligned."""
    tables = {"kept": [[3, 1]], "need": [[3, 2]], "time": [[1, 2]], "error": None, "last_need": 2}
    arguments = arguments_of(tables)
    shifted = [memoryview(b"x" + bytes(each))[1:] if isinstance(each, array.array) else each for each in arguments]
    assert _C.choose_options(*shifted, 2) == solve(tables, 2)


def test_every_cpu_finds_the_same(tmp_path):
    """Buckets and options with this CPU's vector instructions, and without."""
    said = []
    for name, flags in {"vector": [], "plain": ["-D__builtin_cpu_supports(name)=0"]}.items():
        gcc("-O3", *flags, NATIVE / "planner_buckets.c", CSRC / "planner" / "chain.c", "-o", tmp_path / name)
        said.append(output_of(tmp_path / name).splitlines())
    assert said[0] == said[1]
    assert len(said[0]) == 4000


def test_memory_may_fail(tmp_path):
    """Each allocation in turn; and random chains under sanitizers."""
    sources = sorted((CSRC / "planner").glob("*.c"))
    said = said_of_failing_memory(tmp_path, "planner_faults.c", sources, "300")
    chains, faults = (int(word) for word in said.replace(",", "").split() if word.isdigit())
    assert chains == 300
    assert faults > 1000
