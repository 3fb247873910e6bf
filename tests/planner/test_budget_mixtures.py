"""Budgets of mixtures of experts: kept whatever experts tokens choose."""

import pytest
import torch
import transformers
from small_models import fixed_costs

import gradckpt
from gradckpt._planning import options
from gradckpt._planning.config_model import ConfigModel
from gradckpt._planning.config_profile import plan_source
from gradckpt._planning.device_memory import Budget
from gradckpt._planning.profile import Profile
from gradckpt._training_step import step_of_batch

transformers.utils.logging.set_verbosity_error()

CHOSEN, TOKENS = 2, 128
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "use_cache": False,
}


def mixtral(experts=4, **shape):
    config = transformers.MixtralConfig(**{**SHAPE, **shape}, num_local_experts=experts, num_experts_per_tok=CHOSEN)
    return transformers.MixtralForCausalLM(config)


def qwen():
    own = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    config = transformers.Qwen2MoeConfig(**SHAPE, **own, num_experts=4, num_experts_per_tok=CHOSEN)
    return transformers.Qwen2MoeForCausalLM(config)


@pytest.fixture(autouse=True)
def _few_options(monkeypatch):
    fixed_costs(monkeypatch)
    monkeypatch.setattr(options, "_POLICIES", ("save_matmuls",))


# ---- what tokens choose: experts of each token


def equally_often(tokens, experts):
    return (torch.arange(tokens * CHOSEN) % experts).view(tokens, CHOSEN)


def the_same(tokens, experts):
    return torch.arange(CHOSEN).repeat(tokens, 1)


def nearly_the_same(tokens, experts):
    """Once each of the others, which need gradients then."""
    chosen = the_same(tokens, experts)
    chosen[: experts - CHOSEN, 0] = torch.arange(CHOSEN, experts)
    return chosen


FORCED = [equally_often, the_same, nearly_the_same]

_topk = torch.topk


def force(monkeypatch, choose):
    def topk(x, k, dim=-1):
        values, indices = _topk(x, k, dim)
        indices.data.copy_(choose(indices.numel() // k, x.shape[dim]).view_as(indices))
        return values, indices

    monkeypatch.setattr(torch, "topk", topk)


def peak(model, batch):
    model.zero_grad()
    with gradckpt.track_memory() as memory:
        step_of_batch(model, batch)()
    model.zero_grad()
    return memory.peak


@pytest.mark.parametrize("make", [mixtral, qwen])
def test_a_budget_is_kept_whatever_is_chosen(make, monkeypatch):
    torch.manual_seed(0)
    model = make().train()
    model.config._experts_implementation = "eager"
    ids = torch.randint(0, 128, (2, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    profile = Profile(model, lambda given: step_of_batch(model, given)(), batch)
    profile.measure(batch)
    plain = profile.plan(Budget(2**40, True, ""))
    held = sum(plain.fixed.values())
    least = plain.smallest_budget - held
    for part in (0.0, 0.5) if make is mixtral else (0.0,):
        budget = int(least + part * (plain.peak - held - least))
        plan = profile.plan(Budget(budget, True, ""))
        assert plan.peak < plan.at_most <= budget + held
        with plan.apply(model):
            for choose in FORCED:
                with monkeypatch.context() as patch:
                    force(patch, choose)
                    measured = peak(model, batch)
                assert measured <= budget
                if choose is equally_often:
                    assert 0.99 * measured <= plan.peak - held <= 1.01 * measured
            for layer in model.model.layers:  # a router without training, whose choices are its own
                torch.nn.init.normal_(layer.mlp.gate.weight, std=0.3)
            assert peak(model, batch) <= budget


def test_what_is_said(tmp_path):
    model = mixtral().train()
    model.config._experts_implementation = "eager"
    ids = torch.randint(0, 128, (1, 64))
    batch = {"input_ids": ids, "labels": ids}
    plain = gradckpt.plan(model, batch, budget="1GiB")
    assert "if tokens choose the same experts)" in plain.verdict
    plan = gradckpt.plan(model, batch, budget=plain.smallest_budget)
    assert "if tokens choose the same experts) of " in plan.verdict
    assert "the budget is kept whatever tokens choose." in str(plan)
    plan.save(tmp_path / "plan.json")
    assert gradckpt.Plan.load(tmp_path / "plan.json") == plan
    model.config._experts_implementation = "grouped_mm"  # whose sizes are the same for all choices
    plan = gradckpt.plan(model, batch, budget="1GiB")
    assert plan.at_most is None
    assert "experts" not in str(plan)


def test_a_plan_of_a_function(monkeypatch, tmp_path):
    (tmp_path / "eager_mixture.py").write_text(
        "import test_budget_mixtures, torch\n"
        "def made():\n"
        "    model = test_budget_mixtures.mixtral()\n"
        "    model.config._experts_implementation = 'eager'\n"
        "    ids = torch.zeros(1, 64, dtype=torch.long)\n"
        "    return model, {'input_ids': ids, 'labels': ids}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = ConfigModel("eager_mixture:made")
    plain = plan_source(source, None, 1, Budget(2**40, False, ""))
    assert plain.at_most > plain.peak
    plan = plan_source(source, None, 1, Budget(plain.smallest_budget, False, ""))
    assert plan.peak < plan.at_most <= plan.budget == plain.smallest_budget
