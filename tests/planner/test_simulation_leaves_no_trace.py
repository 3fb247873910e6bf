"""A simulated step and a trial step change nothing that a later step can see: after each, models
that keep something give the losses and gradients of a model that was never planned."""

import gc

import pytest
import torch
from caching_programs import PROGRAMS, TOKENS, WIDTH, loss_of, make
from small_models import measured_briefly

import gradckpt
from gradckpt import _settings, _trial_process
from gradckpt._planning import comparison, profile, simulation

X = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(5))

#: What each does with a model before its next steps.
WAYS = {
    "plan": lambda model: gradckpt.plan(model, (X,), modules=model.regions),
    "plan with a budget": lambda model: gradckpt.plan(model, (X,), budget="1GiB", modules=model.regions),
    "enable with a budget": lambda model: gradckpt.enable(model, budget="1GiB", modules=model.regions),
    "gradient_error": lambda model: gradckpt.gradient_error(model, (X,), "lossless", modules=model.regions),
}

#: What only a child leaves alone: here it is refused, by name.
REFUSED = {"Generator": "numbers"}


@pytest.fixture(autouse=True)
def _briefly(monkeypatch):
    measured_briefly(monkeypatch)
    monkeypatch.setitem(simulation._SMALL, True, 32)  # simulated tables have no values, as large ones
    monkeypatch.setattr(profile, "_MOST", 2)
    monkeypatch.setattr(comparison, "READY", _settings.READY[:3:2])
    yield
    gc.collect()


def steps(name, way=None, before=0):
    """The losses and gradients of two steps after ``before`` ones, and what is done in between."""
    model, found = make(name), []
    for i in range(before + 2):
        if i == before and way is not None:
            WAYS[way](model)
        torch.manual_seed(i)
        loss = loss_of(model, X)
        loss.backward()
        found.append((loss.detach(), {key: p.grad for key, p in model.named_parameters()}))
        model.zero_grad()
    return found[before:]


def assert_equal(found, fresh):
    for (loss, gradients), (expected, others) in zip(found, fresh, strict=True):
        assert torch.equal(loss, expected)
        assert gradients.keys() == others.keys()
        for key, gradient in gradients.items():
            assert (gradient is None) == (others[key] is None), key
            assert gradient is None or torch.equal(gradient, others[key]), key


def check(name, way, forks, before):
    fresh = steps(name, before=before)
    if not forks and name in REFUSED:
        with pytest.raises(RuntimeError, match=f"{REFUSED[name]}, which cannot be put back"):
            steps(name, way, before)
    else:
        assert_equal(steps(name, way, before), fresh)


@pytest.mark.parametrize("name", PROGRAMS)
def test_next_steps_are_a_fresh_models(name, monkeypatch):
    """In a child all programs are alike, and each is tried in one way; here, in all."""
    ways = list(WAYS)
    monkeypatch.setattr(_trial_process, "can_fork", lambda: True)  # another test may have left a thread
    check(name, ways[list(PROGRAMS).index(name) % len(ways)], True, 0)
    monkeypatch.setattr(_trial_process, "can_fork", lambda: False)
    for way in ways:
        check(name, way, False, 0)


@pytest.mark.soak
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("forks", [True, False], ids=["apart", "here"])
@pytest.mark.parametrize("before", [0, 1])
def test_next_steps_are_a_fresh_models_in_every_way(name, forks, before, monkeypatch):
    monkeypatch.setattr(_trial_process, "can_fork", lambda: forks)
    for way in WAYS:
        check(name, way, forks, before)
