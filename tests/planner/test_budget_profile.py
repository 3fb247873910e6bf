"""plan(profile=): plans from what was measured for an earlier one, and the search within errors."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import dataclasses
import itertools
import json
import math
import random
import re
import subprocess
import sys

import pytest
import torch
from checkout import ROOT
from small_models import (  # noqa: F401 (a fixture of every test here)
    NET_WIDTH,
    ROWS,
    Net,
    PlannedBlock,
    fixed_costs,
    net,
    short_measurements,
)

import gradckpt
from gradckpt import _apart
from gradckpt._planning import options, profile
from gradckpt._planning.chain import Chosen, approach
from gradckpt._planning.profile import Profile
from gradckpt._planning.region_plan import NoPlan
from gradckpt._planning.segments import KINDS, Segment, StepTrace, condensed

BATCH = torch.randn(ROWS, NET_WIDTH, generator=torch.Generator().manual_seed(0))
CODECS = ["int8", "int4"]


pytestmark = pytest.mark.usefixtures("short_measurements")


def never(*_, **__):
    raise AssertionError("measured again")


def part_of(plan, part):
    """A budget between the smallest and what the step takes without checkpointing."""
    held = sum(plan.fixed.values())
    least = plan.smallest_budget - held
    return f"activations:{math.ceil(least + part * (plan.plain - held - least))}"


# ---- the plan's file is the profile


def test_a_plan_is_a_profile(tmp_path, monkeypatch):
    """Nothing is measured again, and times keep all their digits."""
    model = net(4)
    first = gradckpt.plan(model, BATCH, budget="1GiB")
    path = tmp_path / "plan.json"
    first.save(path)
    assert gradckpt.Plan.load(path).profile == first.profile
    monkeypatch.setattr(Profile, "measure", never)
    budget = part_of(first, 0.5)
    plans = [gradckpt.plan(model, BATCH, budget=budget, profile=each) for each in (first, path, str(path))]
    assert plans[0].to_dict() == plans[1].to_dict() == plans[2].to_dict()
    assert plans[0].plain_seconds == first.plain_seconds
    assert not plans[0].is_plain
    assert plans[0].peak <= plans[0].budget
    again = gradckpt.plan(model, BATCH, budget="1GiB", profile=plans[0])
    assert dataclasses.replace(again, profile=None) == dataclasses.replace(first, profile=None)


def test_the_file_is_short(tmp_path, monkeypatch):
    fixed_costs(monkeypatch)
    path = tmp_path / "plan.json"
    gradckpt.plan(net(), BATCH, budget="1GiB").save(path)
    made = gradckpt.Plan.load(path)
    lines = path.read_text().splitlines()
    saved = json.loads(path.read_text())["profile"]
    assert len(saved["measured"]) == 1, "layers that are alike share what was measured"
    assert len([line for line in lines if re.search(r"\d, \d", line)]) > 5
    dataclasses.replace(made, profile=None).save(path)
    assert len(lines) - len(path.read_text().splitlines()) < 7 * len(saved["options"]) + 30


def test_the_same_file_gives_the_same_bytes(tmp_path, monkeypatch):
    """In any process, with any hash seed and number of threads; errors are measured there."""
    fixed_costs(monkeypatch)
    model = net(4)
    path = tmp_path / "plan.json"
    gradckpt.plan(model, BATCH, budget="1GiB", compress=CODECS).save(path)
    program = (
        "import sys; sys.path[:0] = ['tests/planner', 'tests/helpers']; import test_budget_profile as t\n"
        "t.torch.set_num_threads(int(sys.argv[1])); t.torch.manual_seed(0); model = t.net(4)\n"
        "for part, error in ((0.3, None), (0.1, '1%')):\n"
        "    first = t.gradckpt.Plan.load(sys.argv[2])\n"
        "    plan = t.gradckpt.plan(model, t.BATCH, budget=t.part_of(first, part), compress=t.CODECS, error=error,\n"
        "                           profile=first)\n"
        "    assert len({region.option.name for region in plan.regions}) > 1, str(plan)\n"
        "    assert plan.error is not None and plan.error > 0, str(plan)\n"
        "    plan.save(f'{sys.argv[3]}.{error}')\n"
    )
    running = []
    for seed, threads in ((1, 1), (7, 2)):
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        command = [sys.executable, "-c", program, str(threads), str(path), str(tmp_path / f"plan{seed}")]
        running.append(subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True))
    for each in running:
        _, said = each.communicate()
        assert each.returncode == 0, said
    for error in (None, "1%"):
        one, other = ((tmp_path / f"plan{seed}.{error}").read_bytes() for seed in (1, 7))
        assert one == other


def other_blocks():
    model = net(2)
    model.blocks[1].up, model.blocks[1].down = (
        torch.nn.Linear(NET_WIDTH, NET_WIDTH),
        torch.nn.Linear(NET_WIDTH, NET_WIDTH),
    )
    return model


@pytest.mark.parametrize(
    ("model", "batch", "keywords", "said"),
    [
        (lambda: net(3), BATCH, {}, "another model: 'blocks.2.norm.weight', 128, is not in it; make a new plan"),
        (lambda: net(2), BATCH, {"modules": "blocks.0"}, "with other modules: 'blocks.1' is no region here"),
        (
            other_blocks,
            BATCH,
            {"modules": PlannedBlock},
            "another model: 'blocks.1' has other parameters; make a new plan",
        ),
        (
            lambda: net(2),
            BATCH[:64],
            {},
            "in another step, where 'blocks.0' had .* 256x128 float32.*, and now has .* 64x128",
        ),
        (lambda: net(2).double(), BATCH.double(), {}, "'blocks.0' had 6 of 6 .*float32.*, and now has .*float64"),
        (lambda: net(2).requires_grad_(False), BATCH, {}, "had 6 of 6 parameters trained.*now has 0 of 6"),
        (lambda: net(2), BATCH, {"error": "1%"}, "without the option 'compress int6'; pass the same compress="),
        (lambda: net(2), BATCH, {"compress": "int8"}, "with the option 'compress int4'; pass the same compress="),
    ],
)
def test_a_profile_of_something_else(model, batch, keywords, said, monkeypatch):
    fixed_costs(monkeypatch)
    made = gradckpt.plan(net(2), BATCH, budget="1GiB", compress=CODECS)
    if said.startswith("had 6 of 6"):
        keywords = {"modules": PlannedBlock}
        changed = model()
        changed.embed.requires_grad_(True)
        model = lambda: changed  # noqa: E731
    if "error" not in keywords:
        keywords = {"compress": CODECS, **keywords}
    with pytest.raises(ValueError, match=f"^gradckpt: .*{said}"):
        gradckpt.plan(model(), batch, budget="1GiB", profile=made, **keywords)


def test_a_plan_with_estimated_times_is_no_profile(monkeypatch):
    fixed_costs(monkeypatch)
    made = dataclasses.replace(gradckpt.plan(net(2), BATCH, budget="1GiB"), profile=None)
    with pytest.raises(ValueError, match="profile= is a plan with estimated times; leave it out"):
        gradckpt.plan(net(2), BATCH, budget="1GiB", profile=made)
    with pytest.raises(ValueError, match="profile= needs budget="):
        gradckpt.plan(net(2), BATCH, profile=made)


# ---- more is never slower


def test_more_is_never_slower(monkeypatch):
    """More bytes or more error; and no budget of a smaller error is smaller."""
    fixed_costs(monkeypatch)
    model = net(3)
    made = gradckpt.plan(model, BATCH, budget="1GiB", error="0.1%")
    parts, errors = (0.0, 0.3, 0.7), (0.001, 0.03)
    budgets = [part_of(made, part) for part in parts]
    grid = []
    for error in errors:
        row = []
        for budget in budgets:
            made = gradckpt.plan(model, BATCH, budget=budget, error=error, profile=made)
            assert made.error <= error
            assert made.peak <= made.budget
            row.append(made)
        grid.append(row)
    for row in (*grid, *zip(*grid, strict=True)):
        for less, more in itertools.pairwise(row):
            assert more.seconds <= less.seconds
            assert more.smallest_budget <= less.smallest_budget
    assert grid[0][0].seconds > grid[-1][0].seconds
    assert grid[0][0].seconds > grid[0][-1].seconds
    assert grid[-1][-1].smallest_budget < grid[0][0].smallest_budget
    smallest = made.smallest_budget - sum(made.fixed.values())
    assert gradckpt.plan(model, BATCH, budget=f"activations:{smallest}", error=errors[-1], profile=made).error <= 0.03
    with pytest.raises(ValueError, match=rf"the smallest budget is .* \({smallest} bytes\)"):
        gradckpt.plan(model, BATCH, budget=f"activations:{smallest - 1}", error=errors[-1], profile=made)


def test_plans_that_a_profile_knows_are_considered(monkeypatch):
    """Also where the planner would find a slower one, or none."""
    fixed_costs(monkeypatch)
    model = net(4)
    whole = gradckpt.plan(model, BATCH, budget="1GiB", error="1%")
    made = gradckpt.plan(model, BATCH, budget=part_of(whole, 0.3), error="1%", profile=whole)
    bytes_alone = gradckpt.plan(model, BATCH, budget=part_of(whole, 0.3), compress=["int8", "int6", "int4"])
    monkeypatch.setattr(profile, "approach", lambda *_: None)
    more = gradckpt.plan(model, BATCH, budget=part_of(whole, 0.5), error="2%", profile=made)
    assert (more.regions, more.seconds, more.error) == (made.regions, made.seconds, made.error)
    least = min(each.peak for each in made.profile.known if each.error is not None and each.error <= 0.02)
    assert more.smallest_budget - sum(more.fixed.values()) >= least
    assert more.peak <= more.budget
    with pytest.raises(NoPlan):
        gradckpt.plan(model, BATCH, budget="activations:1MiB", error="2%", profile=made)

    def slow(self, chain, limit, squares):
        choice = (1,) * 4
        return Chosen(choice, self.trace_of(choice), self.seconds(choice), 0.0, (0, choice), ())

    def nothing(self, chain, limit, squares):
        trace = self.trace_of((0,) * 4)
        return dataclasses.replace(slow(self, chain, limit, squares), trace=trace)

    for planner in (nothing, slow):
        monkeypatch.setattr(Profile, "cheapest", planner)
        codecs = ["int8", "int6", "int4"]
        more = gradckpt.plan(model, BATCH, budget=part_of(whole, 0.4), compress=codecs, profile=bytes_alone)
        assert (more.regions, more.seconds) == (bytes_alone.regions, bytes_alone.seconds)


def test_peaks_of_a_profile_count_while_the_step_is_the_same(monkeypatch):
    """Where it adds other bytes, as with gradients that exist, plans are traced again."""
    fixed_costs(monkeypatch)
    model = net(3)
    made = gradckpt.plan(model, BATCH, budget="1GiB")
    saved = made.profile

    def with_peaks_of(saved, plain, peak):
        known = tuple(dataclasses.replace(each, peak=peak) for each in saved.known)
        changed = dataclasses.replace(made, profile=dataclasses.replace(saved, plain=plain, known=known))
        return gradckpt.plan(model, BATCH, budget="1GiB", profile=changed)

    wrong = with_peaks_of(saved, saved.plain, 7)
    assert (wrong.peak, wrong.smallest_budget) == (made.peak, made.smallest_budget), "what is chosen is traced"
    assert with_peaks_of(saved, saved.plain + 1, 7).profile == saved


# ---- the search within an error budget


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_an_error_budget_is_used(power, scale):
    """However errors grow with what regions' errors say, in a few measurements."""
    counts = []

    def measure(choice):
        counts.append(choice)
        return scale * (choice[0] / 1000) ** power

    for error in (0.003, 0.03):
        counts.clear()
        known = {}
        approach(
            error,
            lambda limit: (1000 if limit is None else math.floor(1000 * limit),),
            lambda choice: choice[0] / 1000,
            known,
            measure,
            6,
        )
        assert len(counts) <= 6
        assert len(set(counts)) == len(counts), "an error is measured once"
        best = max((each for each in known.values() if each <= error), default=0.0)
        steps = [scale * (i / 1000) ** power for i in range(1001)]
        most = max(each for each in steps if each <= error)  # of all choices
        assert best >= 0.85 * min(most, error)


def test_where_no_lossy_plan_is_within_an_error_budget():
    """The exact one is asked for; where there is none, the search ends."""
    asked = []

    def pick(limit):
        asked.append(limit)
        return (0,) if limit == 0 else (1,)

    approach(1e-9, pick, float_of, {(0,): 0.0}, lambda choice: 0.5, 8)
    assert asked[0] is None
    assert asked[-1] == 0
    approach(1e-9, lambda limit: None, float_of, {}, never, 8)
    approach(1e-9, lambda limit: (1,) if limit is None else None, float_of, {}, lambda choice: math.inf, 8)


def float_of(choice):
    return float(choice[0])


def test_a_condensed_trace_has_the_same_peaks():
    draw = random.Random(0)
    for _ in range(200):
        segments = [
            Segment(
                f"s{i}",
                None,
                [(draw.randint(-9, 9), draw.randrange(len(KINDS))) for _ in range(draw.randint(0, 9))],
                [],
            )
            for i in range(4)
        ]
        whole = StepTrace(segments, False)
        short = condensed(whole)
        assert short.peaks() == whole.peaks()
        assert all(len(each.events) <= 2 * len(KINDS) for each in short.segments)


# ---- errors of regions


def test_a_regions_error_is_that_of_a_gradient_like_no_other(monkeypatch):
    """The gradient of a sum is almost zero before a normalization: its relative error says
    nothing.
    """

    class Normed(Net):
        def __init__(self):
            super().__init__(2)
            for block in self.blocks:
                block.forward = lambda x, block=block: torch.nn.functional.layer_norm(
                    PlannedBlock.forward(block, x), (NET_WIDTH,)
                )

    found = []
    measured = options._measure

    def measure(*args):
        found.append(measured(*args))
        return found[-1]

    monkeypatch.setattr(options, "_measure", measure)
    monkeypatch.setattr(_apart, "can_fork", lambda: False)  # or a child would find it
    torch.manual_seed(0)
    gradckpt.plan(Normed().train(), BATCH, budget="1GiB", compress="int4", modules=PlannedBlock)
    errors = {option.name: cost.error for option, cost in found[0].items() if option.codec}
    assert 0.001 < errors["recompute int4"] < 0.5
    assert 0.001 < errors["compress int4"] < 0.5


# ---- options


class Attending(PlannedBlock):
    def forward(self, x):
        heads = x.view(1, len(x), 4, -1).transpose(1, 2)
        found = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return super().forward(found.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("attending", [0, 1, 4])
def test_options_that_do_what_another_does_are_left_out(attending):
    """Policies for attention are options where a block has one."""
    model = Net(4)
    for i in range(attending):
        model.blocks[i] = Attending()
    blocks = list(model.blocks)
    found = Profile(model, lambda x: model(x).backward(), BATCH, modules=blocks)
    names = [option.name for option in found.options]
    assert names[:3] == ["keep", "recompute", "recompute lossless"]
    assert "recompute (save_matmuls)" in names
    for policy in ("save_attention", "save_attention|save_matmuls"):
        assert (f"recompute ({policy})" in names) == (attending > 0)
    assert found.traces.keys() == set(found.options)
