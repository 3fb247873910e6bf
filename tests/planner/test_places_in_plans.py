"""Plans that may offload: against all plans, by traces of each and the simulation of its link."""

import itertools

import pytest
import torch
from small_models import Net, PlannedBlock

import gradckpt
from gradckpt._offload import plain_data
from gradckpt._planning import options as planning_options
from gradckpt._planning import profile as planning_profile
from gradckpt._planning.device_memory import Budget
from gradckpt._planning.devices import LINKS, Call, Link, Placement, parse_link
from gradckpt._planning.options import KEEP, RECOMPUTE, allowed
from gradckpt._training_step import alone, step_of_batch

ROWS, LAYERS = 512, 4
SECONDS = (0.03, 0.032, 0.034, 0.036)  # of the blocks, which differ


def _cost(i, option):
    """Of a block: a time that does not depend on the machine."""
    again = 0.01 + 0.001 * i if option.recomputes else 0.0
    return planning_options.Cost(SECONDS[i] + again + (0.001 if option.place else 0.0), 0.0)


def link(rate):
    return Link(int(rate), int(rate), 10_000, "as the test has it")


def placement(rate, host_budget="768KiB", limit=None):
    offload = gradckpt.Offload("disk", host_budget=host_budget, min_bytes=4096)
    return Placement(offload, link(rate), True, limit)


@pytest.fixture(scope="module")
def profile():
    """Of a net in four options, with the trace of each of its plans."""
    torch.manual_seed(0)
    model = Net(LAYERS).train()
    batch = torch.randn(ROWS, 128)
    place = placement(1e9)
    with pytest.MonkeyPatch.context() as patch, alone(model):
        few = [
            o for o in allowed(None, False, place.offload) if o.name.removesuffix(", offload") in ("keep", "recompute")
        ]
        patch.setattr(planning_profile, "allowed", lambda *_: few)
        made = planning_profile.Profile(model, lambda b: step_of_batch(model, b)(), batch, placement=place)
        made.costs = {(id(block), o): _cost(i, o) for i, block in enumerate(made.blocks) for o in made.options}
        for choice in every_choice(made):
            made.trace_of(choice)
        yield made


def every_choice(profile):
    return list(itertools.product(range(len(profile.options)), repeat=len(profile.calls)))


def set_link(profile, place):
    """Let the profile have another link, and know no plan."""
    profile.placement = place
    for known in (profile._waits, profile._peaks, profile._errors, profile.seen):
        known.clear()


def base(profile):
    return max(profile.step_seconds - sum(profile.cost(i, RECOMPUTE).seconds for i in profile.calls), 0.0)


@pytest.mark.parametrize("rate", [20e6, 100e6, 10e9])
def test_plans_are_the_fastest_of_all(profile, rate):
    """Or their certificate says how much faster one could be; none is above its budget."""
    set_link(profile, placement(rate))
    choices = every_choice(profile)
    sizes = {each: profile.size_of(profile.trace_of(each)) for each in choices}
    seconds = {each: profile.seconds(each) for each in choices}
    least, most = min(sizes.values()), max(sizes.values())
    missed = 0
    for i in range(17):
        limit = least + (most - least) * i // 16
        set_link(profile, profile.placement)
        plan = profile.plan(Budget(limit, True, "the test's"))
        best = min(time for each, time in seconds.items() if sizes[each] <= limit)
        found = tuple(profile.options.index(region.option) for region in plan.regions)
        assert sizes[found] <= limit
        assert plan.peak <= plan.budget
        assert plan.seconds - base(profile) == pytest.approx(seconds[found])
        assert plan.bound - base(profile) <= best + 1e-9
        missed += seconds[found] > best * (1 + 1e-9)
        assert plan.seconds * (1 - plan.gap) <= best + base(profile) + 1e-9
    assert missed <= 1


@pytest.mark.parametrize("rate", [20e6, 100e6, 10e9])
def test_other_budgets(profile, rate):
    """Each point has the seconds of a plan with that budget, which is about the fastest of all."""
    set_link(profile, placement(rate))
    choices = every_choice(profile)
    sizes = {each: profile.size_of(profile.trace_of(each)) for each in choices}
    seconds = {each: profile.seconds(each) + base(profile) for each in choices}
    set_link(profile, profile.placement)
    plan = profile.plan(Budget(max(sizes.values()), True, "the test's"))
    points = [(point["budget"] - profile.held, point["seconds"]) for point in plan.pareto()]
    assert points == sorted(points)
    assert [time for _, time in points] == sorted((time for _, time in points), reverse=True)
    assert points[0][0] == min(sizes.values())
    for size, time in points:
        assert any(sizes[each] == size and seconds[each] == pytest.approx(time) for each in choices)
        again = profile.plan(Budget(size, True, "the test's"))
        assert again.peak <= size + profile.held
        assert again.seconds <= time * (1 + 1e-9)
    slower = []
    for limit in sorted(set(sizes.values())):
        best = min(time for each, time in seconds.items() if sizes[each] <= limit)
        slower.append(min(time for size, time in points if size <= limit) / best - 1)
    assert min(slower) > -1e-9
    assert max(slower) < (1e-9 if rate > 20e6 else 0.07)  # on a busy link waits decide
    assert sum(slower) / len(slower) < 0.01


def test_the_same_plan_again(profile):
    plans = []
    for _ in range(2):
        set_link(profile, placement(100e6))
        sizes = [profile.size_of(trace) for trace in profile.largest.values()]
        plans.append(profile.plan(Budget((min(sizes) + max(sizes)) // 2, True, "the test's")).to_dict())
    assert plans[0] == plans[1]


def test_a_faster_link_gives_no_slower_plan(profile):
    sizes = [profile.size_of(trace) for trace in profile.largest.values()]
    gained = 0
    for part in (0.1, 0.2, 0.4, 0.6, 0.8, 0.95):
        budget = Budget(int(min(sizes) + (max(sizes) - min(sizes)) * part), True, "the test's")
        seconds = []
        for rate in (1e6, 1e12):
            set_link(profile, placement(rate))
            seconds.append(profile.plan(budget).seconds)
        assert seconds[1] <= seconds[0]
        gained += seconds[1] < seconds[0]
    assert gained


def test_host_memory_counts(profile):
    """Of the budget's bytes: what the store holds, at most its own budget."""
    for host_budget, memory in (("768KiB", 768 << 10), ("1GiB", None)):
        set_link(profile, placement(1e9, host_budget))
        for choice in every_choice(profile)[:: len(profile.options) + 1]:
            options = profile.of_choice(choice)
            trace = profile.placement.note(profile.trace_of(choice), options)
            kinds = {o.recomputes for o in options if o.place is not None}
            if memory is None:
                assert trace.placed <= trace.ring <= trace.placed + 4096 * len(kinds)
            else:
                assert trace.ring <= memory * len(kinds)
            assert profile.size_of(trace) == trace.peak().size + trace.ring
    set_link(profile, placement(1e9))
    for choice in every_choice(profile):
        profile.placement.note(profile.trace_of(choice), profile.of_choice(choice))


def test_no_plan_has_more_on_the_host_than_it_holds(profile):
    most = max(trace.placed for trace in profile.largest.values())
    sizes = [profile.size_of(trace) for trace in profile.largest.values()]
    for part in (0.0, 0.3, 0.7):
        set_link(profile, placement(1e9, limit=int(part * most)))
        plan = profile.plan(Budget(min(sizes) + (max(sizes) - min(sizes)) // 2, True, "x"))
        assert plan.offloaded.bytes <= part * most


# ---- what a place takes of a device


def _trace(profile, name):
    option = next(o for o in profile.options if o.name == name)
    return profile.largest[option], [option] * len(profile.blocks)


@pytest.mark.parametrize(("name", "count"), [("recompute, offload", 3), ("keep, offload", 16)])
def test_the_ring_of_a_device_holds_some_of_the_largest_payload(profile, name, count):
    trace, options = _trace(profile, name)
    largest = max(segment.largest for segment in trace.segments)
    before = trace.ring, trace.placed
    for ring, expected in (("auto", count * largest), ("8MiB", 8 << 20)):
        place = Placement(gradckpt.Offload("cpu", ring=ring, min_bytes=4096), link(1e9), False, None)
        assert place.note(trace, options).ring == expected
    trace.ring, trace.placed = before


# ---- waits


def calls(n, size, seconds=0.03, recompute=0.04):
    return [Call(seconds, recompute, recompute, 0.0, True, size, size) for _ in range(n)]


def test_waits_are_never_assumed_to_be_none():
    slow, fast = placement(1e6), placement(1e12)
    many = calls(16, 256 << 10)
    assert fast.exposed(many) == 0.0
    # 16 payloads, of which 3 stay in memory, and a link that needs 0.26 s for each way of one
    assert slow.exposed(many) > 2 * 10 * (256 << 10) / 1e6 - 16 * 0.04
    assert slow.exposed(calls(16, 0)) == 0.0
    rates = [placement(rate).exposed(many) for rate in (1e6, 1e7, 1e8, 1e9)]
    assert rates == sorted(rates, reverse=True)


def test_what_fits_into_half_of_the_memory_is_not_written():
    assert placement(1e3, "8MiB").exposed(calls(16, 256 << 10)) == 0.0
    assert placement(1e3, "2MiB").exposed(calls(16, 256 << 10)) > 0.0


# ---- links


def test_links():
    assert parse_link("PCIe4").rate_out == 25 * 10**9
    assert parse_link("nvlink-c2c").rate_in == 300 * 10**9
    assert parse_link(12.5).rate_out == parse_link("12.5").rate_out == 12_500_000_000
    assert str(parse_link("pcie5")) == "50 GB/s, as pcie5 reaches"
    assert str(Link(10**9, 2 * 10**9, 0, "measured")) == "1 GB/s out and 2 GB/s back, measured"


@pytest.mark.parametrize("link", ["fast", "", 0, -1, True, "nan", None])
def test_what_is_no_link(link):
    with pytest.raises(
        ValueError, match=rf"^gradckpt: link={link!r} is no link; pass GB/s, as in 25, or one of: pcie3"
    ):
        parse_link(link)
    assert set(LINKS) == {"pcie3", "pcie4", "pcie5", "nvlink-c2c", "nvme"}


def test_options_of_a_place():
    place = gradckpt.Offload("disk", host_budget="1MiB")
    found = [option for option in allowed("int8", False, place) if option.place is not None]
    assert all(option.place == place for option in found)
    assert {option.name for option in found} == {
        "keep, offload",
        "recompute, offload",
        "compress lossless, offload",
        "compress int8, offload",
        "recompute int8, offload",
    }
    for option in found:
        again = planning_options.find_option(option.name, option.rule)
        assert (again, again.place) == (option, place)
    assert not any(option.place for option in allowed("int8", False))
    assert KEEP.place is None


def test_rules_of_modules_name_places():
    """So that one model has regions in several."""
    torch.manual_seed(0)
    model = Net(3)
    place = gradckpt.Offload("disk", host_budget="1MiB", min_bytes=4096)
    first, second, third = model.blocks
    rules = {
        first: {"compress": None, "offload": place},
        second: {"compress": "raw", "recompute": False, "offload": plain_data(place)},
        third: {"compress": None},
    }
    handle = gradckpt.enable(model, None, modules=rules)
    offloads = {name: settings.get("offload") for name, settings in handle.modules.items()}
    assert offloads == {"blocks.0": place, "blocks.1": place, "blocks.2": None}
    assert gradckpt.enable(model, None, modules=rules).modules == handle.modules
    handle = gradckpt.enable(model, None, modules={PlannedBlock: {"compress": None, "offload": None}}, offload=place)
    assert all("offload" not in settings for settings in handle.modules.values())
