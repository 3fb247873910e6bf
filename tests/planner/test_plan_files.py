"""Plan files with damaged values: each is refused by its name, or is another valid plan."""

import contextlib
import copy
import gc
import json
import math

import pytest
import torch
from small_models import NET_WIDTH, ROWS, fixed_costs, measured_briefly, net
from torch import nn

import gradckpt

BATCH = torch.zeros(ROWS, NET_WIDTH)


@pytest.fixture(scope="module")
def plan():
    """A plan with lossy options, whose errors were measured."""
    gc.collect()  # what earlier tests left would count
    with pytest.MonkeyPatch.context() as patch:
        fixed_costs(patch)
        measured_briefly(patch)
        model = net(3)
        model.embed = nn.Linear(NET_WIDTH, NET_WIDTH)
        budget = gradckpt.plan(model, BATCH, budget="1GiB").smallest_budget + 2**19
        return gradckpt.plan(model, BATCH, budget=budget, error="5%", optimizer=torch.optim.SGD(model.parameters()))


@pytest.fixture(scope="module")
def data(plan):
    """What its file has."""
    return json.loads(json.dumps(plan.to_dict()))


def places_in(tree, path=()):
    """The path of each value in containers."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places_in(value, (*path, key))


def distinct_places(data):
    """One place of each kind: the first and the last element stand for those of a list."""
    for path in places_in(data):
        found = data
        for key in path:
            if isinstance(found, list) and key not in (0, len(found) - 1):
                break
            found = found[key]
        else:
            yield path


def damaged(data, path, damage):
    data = copy.deepcopy(data)
    *outer, last = path
    place = data
    for key in outer:
        place = place[key]
    if damage is del_:
        del place[last]
    else:
        place[last] = damage(place[last])
    return data


def del_(value):
    """Stands for the deletion of a value."""


def negative(value):
    return -value if isinstance(value, (int, float)) and value else -1


DAMAGES = {
    "missing": del_,
    "none": lambda value: None,
    "text": lambda value: "x",
    "bool": lambda value: True,
    "number": lambda value: 1.5,
    "negative": negative,
    "nan": lambda value: math.nan,
    "infinite": lambda value: math.inf,
    "huge": lambda value: 10**30,
    "list": lambda value: [value],
    "nested": lambda value: [[[[]]]],
    "empty list": lambda value: [],
    "empty object": lambda value: {},
    "object": lambda value: {"x": value},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_values(data, damage, tmp_path):
    """No other exception than ValueError, and no plan that cannot be used."""
    refused = 0
    for path in distinct_places(data):
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(damaged(data, path, DAMAGES[damage])))
        try:
            found = gradckpt.Plan.load(file)
        except ValueError as error:
            message = str(error)
            assert message.startswith(f"gradckpt: {file} is "), message
            assert path[0] in message or path == ("version",), (path, message)
            refused += 1
        else:
            str(found)
            found.pareto()
            again = gradckpt.Plan.from_dict(json.loads(json.dumps(found.to_dict())))
            assert str(again) == str(found)
            use(found)
    assert refused > 20


def use(plan):
    """Apply a plan, which may be for another model or overlap itself."""
    model = net(3)
    with contextlib.suppress(ValueError), messages_of_gradckpt():
        plan.apply(model)
        gradckpt.disable(model)


@contextlib.contextmanager
def messages_of_gradckpt():
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("gradckpt: "):
            raise AssertionError(str(error)) from error
        raise


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("regions", 1, "kept"), "big", "regions[1].kept is 'big', not an integer"),
        (
            ("regions", 0, "option", "rule", "compress"),
            "int9",
            "regions[0].option.rule is no option: unknown codec",
        ),
        (("regions", 0, "option"), "keep", "regions[0].option is 'keep', not an option with its name and rule"),
        (("peak",), -5, "peak is -5, not an integer of at least 0"),
        (("seconds",), math.nan, "seconds is nan, not a finite number of at least 0"),
        (("estimated",), 0, "estimated is 0, not true or false"),
        (("front", 0), [1], "front[0] has 1 values instead of 2"),
        (("hints",), {}, "hints is unknown"),
        (("profile", "measured", 0, "seconds"), [1.0], "profile.measured[0] has not one time and one error for each"),
        (("profile", "regions", 0), 9, "profile.regions[0] is 9, and "),
        (("profile", "regions"), [0], "profile.regions has 1 of 3 regions"),
        (("profile", "known", 0, "options", 0), 99, "profile.known[0].options has not one of "),
    ],
)
def test_messages(data, path, value, said):
    changed = copy.deepcopy(data)
    *outer, last = path
    place = changed
    for key in outer:
        place = place[key]
    place[last] = value
    if path == ("profile", "regions"):  # or the known plans would be refused
        place["known"] = []
    with pytest.raises(ValueError, match=r"^gradckpt: this is a damaged plan: .*; make a new plan$") as error:
        gradckpt.Plan.from_dict(changed)
    assert said in str(error.value)


def test_errors_that_are_not_finite_are_read(data, plan):
    """As a step with gradients that are not finite measures them."""
    for value in (math.nan, math.inf):
        changed = damaged(data, ("profile", "measured", 0, "errors", -1), lambda _, value=value: value)
        errors = gradckpt.Plan.from_dict(changed).profile.measured[0].errors
        assert repr(errors[-1]) == repr(value)
    assert gradckpt.Plan.from_dict(data) == plan


NO_PLANS = {
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "many digits": b"9" * 5000,
    "a list": b"[1]",
    "null": b"null",
    "a text": b'"x"',
    "no version": b"{}",
}


@pytest.mark.parametrize("text", NO_PLANS.values(), ids=NO_PLANS)
def test_files_without_a_plan(text, tmp_path):
    file = tmp_path / "plan.json"
    file.write_bytes(text)
    with pytest.raises(ValueError, match=r"^gradckpt: .*plan\.json is no plan; write one with plan\.save"):
        gradckpt.Plan.load(file)
