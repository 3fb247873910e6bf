"""Random programs behave with gradckpt's checkpoint as with torch's: values, gradients, RNG,
calls, exceptions."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from random_operators import CUSTOM
from random_program_endings import BETWEEN, ENDINGS
from random_program_runs import Run, difference, implementation, torchs
from random_programs import CONTEXT, DIVERGENCE, EXCEPTION, INNER_GRAD, SCOPE, features, programs
from torchs_own import saves_inputs_alone
from view_programs import wrong

CHUNK = 300  # programs of one test
CHUNKS = 10  # 3,000 programs in an ordinary run
SOAK_CHUNKS = 67  # 20,100 with -m soak
VIEWS = 150  # programs of views of one test


def drawn(chunk, count, body):
    """body(program) for that many programs, the same in every run; a failing one is shrunk."""
    ran = 0

    @seed(chunk)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(programs())
    def run(program):
        nonlocal ran
        ran += 1
        body(program)

    run()
    assert ran >= count


def check(program):
    found = difference(program, implementation(program))
    assert found is None, f'{found}\npython {Run.__module__}.py "{program}"'


SOAK = [pytest.param(chunk, marks=pytest.mark.soak) for chunk in range(CHUNKS, CHUNKS + SOAK_CHUNKS)]


@saves_inputs_alone
@pytest.mark.parametrize("chunk", [*range(CHUNKS), *SOAK])
def test_random_programs_behave_as_with_torch(chunk):
    drawn(chunk, CHUNK, check)


@pytest.mark.parametrize("share", [*range(4), *(pytest.param(n, marks=pytest.mark.soak) for n in range(4, 60))])
def test_programs_of_views(share):
    """Nothing differs between the two runs, so nothing raises."""
    found = [text for seed in range(share * VIEWS, (share + 1) * VIEWS) for text in wrong(seed)]
    assert found == []


# ---- the generator itself ----

EVERY = {
    *(f"ending {kind}" for kind in ENDINGS),
    *(f"between {kind}" for kind in (*BETWEEN, "nothing", "autocast", "no_grad", "device")),
    *(f"scope {kind}" for kind in SCOPE),
    *(f"Custom {name}" for name in CUSTOM),
    *(f"Diverge {kind}" for kind in DIVERGENCE),
    *(f"Raise {kind}" for kind in EXCEPTION),
    *(f"Raise at call {call}" for call in (1, 2, 3)),
    *(f"InnerGrad {kind}" for kind in INNER_GRAD),
    *(f"option contexts={kind}" for kind in CONTEXT),
    *(f"option {name}={value}" for name in ("early_stop", "preserve_rng_state") for value in (False, True)),
    *(f"option use_reentrant={value}" for value in (False, True)),
    *(f"option determinism_check={value}" for value in ("none", "default")),
    *(f"argument {kind}" for kind in ("list", "tuple", "dict", "pair", "value")),
    *(f"result {kind}" for kind in ("list", "tuple", "dict", "pair", "value", "mask", "detached")),
    *(f"{kind} {where}" for kind in ("view", "random", "operator", "in place") for where in ("inside", "outside")),
    *(f"callable {kind}" for kind in ("function", "partial", "module", "method")),
    *("depth 1", "depth 2", "depth 3", "kwargs", "captured", "operators counted", "running statistics"),
    *("api gradckpt", "api gradckpt, buffers as torch", "api compat"),
}
OFTEN = {"depth 2": 0.4, "depth 3": 0.15, "random inside": 0.5, "view inside": 0.5, "in place inside": 0.2}


def test_every_feature_occurs_in_the_random_programs():
    counts = Counter()
    drawn(0, 800, lambda program: counts.update(features(program)))
    rare = {name: counts[name] / 800 for name in EVERY if counts[name] < 0.01 * 800}
    assert not rare
    assert {name: share for name, share in OFTEN.items() if counts[name] < share * 800} == {}


def test_most_random_programs_end_with_gradients():
    counts = Counter()

    def count(program):
        log = Run(program, torchs).execute().log
        seen = dict(log)
        before, after = seen["calls after forward"], seen["calls after backward"]
        gradients = any(g is not None for g in seen["grads"]) or "grad" in seen
        counts["gradients"] += gradients
        counts["recomputed"] += gradients and after != before
        counts["nothing raised"] += not any(isinstance(v, tuple) and v[:1] == ("raised",) for _, v in log)

    drawn(0, 200, count)
    shares = {name: n / 200 for name, n in counts.items()}
    assert shares["gradients"] > 0.6, shares
    assert shares["recomputed"] > 0.4, shares
    assert shares["nothing raised"] > 0.5, shares


def test_a_program_behaves_the_same_twice():
    """Else the comparison would find differences that are none."""

    def twice(program):
        assert difference(program, torchs) is None

    drawn(1, 100, twice)
