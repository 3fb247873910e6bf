"""enable(parts=, tiles=): a region recomputed in parts, and modules that run in tiles."""

import copy
import functools
import gc
import itertools
import pickle
import weakref

import model_families
import pytest
import torch
import transformers
from model_families import FAMILIES, assert_same, equal
from torch import nn

import gradckpt
from gradckpt._models.working_set import inner_in
from gradckpt._planning import options as region_options

FORMS = ("nested", "sequential", "kept")
WIDTH, TOKENS = 64, 32


class Attention(nn.Module):
    """Mixes tokens, without being called so."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, WIDTH // 4)).movedim(-3, 0).transpose(-3, -2)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


class MLP(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.down_proj(nn.functional.gelu(self.up_proj(x))))


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP(dropout)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, layers=3, dropout=0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def net(**options):
    torch.manual_seed(0)
    return Net(**options).train()


def data(batch=2):
    return torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def step(model, x=None, run=None):
    """The result, and the gradients of all parameters and of the input."""
    torch.manual_seed(2)
    model.zero_grad()
    x = (data() if x is None else x).clone().requires_grad_()
    y = model(x * 1) if run is None else run(model, x * 1)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), torch.get_rng_state()]


def near(a, b, error=1e-6):
    pairs = [(x, y) for x, y in zip(a[:-1], b[:-1], strict=True) if x is not None or y is not None]
    return all(float((x - y).norm()) <= error * float(y.norm()) for x, y in pairs)


# ---- parts ----


@pytest.mark.parametrize("compress", [None, "lossless"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_models_in_parts_are_equal_to_the_bit(family, form, compress):
    """Losses, gradients and the generator; with dropout."""
    if reason := model_families.missing(family, "sdpa"):
        pytest.skip(reason)
    model = model_families.build(family, "sdpa")
    exact = model_families.gradients(family, model)
    with gradckpt.enable(model, compress, parts=form):
        assert inner_in(model)
        assert_same(model_families.gradients(family, model), exact)


@pytest.mark.parametrize("family", ["llama", "t5", "mixtral"])
def test_parts_change_nothing_of_a_lossy_region(family):
    model = model_families.build(family, "sdpa")
    with gradckpt.enable(model, "int8"):
        whole = model_families.gradients(family, model)
    for form in ("nested", "sequential"):
        with gradckpt.enable(model, "int8", parts=form):
            assert_same(model_families.gradients(family, model), whole)


@pytest.mark.parametrize("form", FORMS)
def test_what_runs_how_often(form):
    """The forward and one recompute of the last part; of the others one more, unless kept."""
    model, calls = net(layers=1), []
    for name in ("attention", "mlp"):
        part = getattr(model.blocks[0], name)
        weight = part.out if name == "attention" else part.down_proj
        weight.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    with gradckpt.enable(model, None, modules=Block, parts=form):
        step(model)
    assert calls.count("attention") == (2 if form == "kept" else 3)
    assert calls.count("mlp") == 2  # the recompute of the whole stops before it
    calls.clear()
    with gradckpt.enable(model, None, modules=Block, parts=form, early_stop=False):
        step(model)
    assert calls.count("mlp") == (3 if form == "nested" else 2)


def peak(model, x, **options):
    with gradckpt.enable(model, None, modules=Block, **options), gradckpt.track_memory(model) as memory:
        step(model, x)
    return memory.peak


def test_peaks():
    """One part's tensors are alive at a time; what is kept is one output for each block."""
    model, x = net(layers=4), torch.randn(2, 512, WIDTH)
    whole = peak(model, x)
    token = x.nbytes
    found = {form: peak(model, x, parts=form) for form in FORMS}
    assert whole - found["sequential"] >= 4 * token  # qkv takes three, and the product one
    assert found["nested"] <= found["sequential"] + token // 8
    assert abs(found["kept"] - found["sequential"] - 3 * token) <= token
    assert peak(model, x, tiles=16, parts="sequential") < found["sequential"] - 4 * token


@pytest.mark.parametrize("form", FORMS)
def test_a_part_that_gets_one_tensor_three_times(form):
    """torch's attention asks whether query, key and value are one object."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1) for _ in range(2))).train()
    x = torch.randn(6, 3, 32)
    plain = step(model, x)
    gradckpt.enable(model, parts=form)
    assert equal(step(model, x), plain)


@pytest.mark.parametrize("form", FORMS)
def test_kept_by_keyword(form):
    """A part that is called by keyword holds nothing that the recompute makes again."""

    class ByKeyword(Block):
        def forward(self, x):
            x = x + self.attention(x=self.norm1(x))
            return x + self.mlp(x=self.norm2(x))

    model = net()
    exact = step(model)
    held = []
    for block in model.blocks:
        block.__class__ = ByKeyword
        block.norm1.register_forward_hook(lambda module, args, out: held.append(weakref.ref(out.untyped_storage())))
    with gradckpt.enable(model, None, modules=ByKeyword, parts=form):
        y = model(data().requires_grad_() * 1)
        gc.collect()
        assert len(held) == 3
        assert not any(each() is not None for each in held)
        del y
        assert equal(step(model), exact)


@pytest.mark.parametrize("form", FORMS)
def test_autocast_lora_hooks_and_accumulation(form):
    model = net()
    for name, p in model.named_parameters():
        p.requires_grad_("attention" in name)
    seen = []
    model.blocks[0].attention.register_full_backward_hook(lambda *_: seen.append("module"))
    model.blocks[0].attention.qkv.weight.register_hook(lambda g: seen.append("weight") or 2 * g)

    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def twice():
        first = step(model, run=run)
        y = run(model, data().requires_grad_() * 1)  # gradients add up
        y.float().sum().backward()
        return [*first, *(p.grad for p in model.parameters()), first[-1]]

    exact = twice()
    times = list(seen)
    seen.clear()
    with gradckpt.enable(model, None, modules=Block, parts=form):
        assert equal(twice(), exact)
    assert seen == times


def test_double_backward_in_parts():
    def run(model):
        x = data().double().requires_grad_()
        (first,) = torch.autograd.grad(model(x * 1).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *model.parameters()])

    model = net(layers=2).double()
    for block in model.blocks:
        block.attention = MLP().double()  # fused attention has no second derivative
    exact = run(model)
    for form in ("nested", "sequential"):
        with gradckpt.enable(model, None, modules=Block, parts=form):
            assert equal(run(model), exact)


def test_experts_of_a_decoder_with_three_parts():
    model = model_families.build("t5", "sdpa")
    with gradckpt.enable(model, None, parts="sequential"):
        inside = {type(each.module).__name__ for each in inner_in(model.decoder)}
    assert inside == {"T5LayerSelfAttention", "T5LayerCrossAttention"}


# ---- tiles ----


@pytest.mark.parametrize("tiles", [2, 16])
def test_tiles_are_near(tiles):
    model = net()
    exact = step(model)
    for options in ({}, {"parts": "sequential"}, {"parts": "kept"}):
        with gradckpt.enable(model, None, modules=Block, tiles=tiles, **options):
            found = step(model)
        assert near(found, exact)
        assert torch.equal(found[-1], exact[-1])


def test_tiles_of_bfloat16_sum_weights_in_float32():
    """The error of a weight's gradient is that of one rounding, however many tiles there are."""
    model = net(layers=1).bfloat16()
    x = torch.randn(1, 1024, WIDTH).bfloat16()
    truth = step(copy.deepcopy(model).double(), x.double())
    whole = step(model, x)
    with gradckpt.enable(model, None, modules=Block, tiles=64):
        tiled = step(model, x)

    def error(found):
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found[2:-1], truth[2:-1], strict=True)]

    assert all(t <= 1.1 * w + 1e-3 for t, w in zip(error(tiled), error(whole), strict=True))


def test_memory_of_tiles():
    """Hidden tensors of 16 tiles take a sixteenth."""
    mlp = net(layers=1).blocks[0].mlp
    x = torch.randn(1, 2048, WIDTH)
    hidden = 4 * x.nbytes

    def peak_of(**options):
        with gradckpt.enable(mlp, None, modules=MLP, **options), gradckpt.track_memory(mlp) as memory:
            step(mlp, x)
        return memory.peak

    for p in mlp.parameters():
        p.grad = torch.zeros_like(p)
    whole, tiled = peak_of(), peak_of(tiles=16)
    assert whole - tiled >= 2 * hidden * 13 / 14


def test_dropout_in_tiles_repeats_its_draws():
    """Other draws than in one piece, and the same in both runs."""
    model = net(dropout=0.5)
    with gradckpt.enable(model, None, modules=Block, tiles=4):
        first, again = step(model), step(model)
    assert equal(first, again)
    parts = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    masks = []
    for part in parts:
        part.register_forward_hook(lambda module, args, out: masks.append((out == 0).clone()))
    with gradckpt.enable(model, None, modules=Block, tiles=4):
        step(model)
        masks.clear()  # the first call also ran the modules on two tiles
        step(model)
    count = len(masks)
    forward, backward = masks[: count // 2], masks[count // 2 :]
    assert {tuple(m.flatten().tolist()) for m in backward} <= {tuple(m.flatten().tolist()) for m in forward}


def test_weights_used_elsewhere_frozen_and_hooked():
    model = net()
    shared = model.blocks[0].mlp.up_proj
    model.blocks[1].mlp.up_proj = shared
    model.blocks[2].mlp.down_proj.weight.requires_grad_(False)
    seen = []
    shared.weight.register_hook(lambda g: seen.append(g.clone()) or 3 * g)

    def run(model, x):
        return model(x) + shared(x).mean()

    exact = step(model, run=run)
    times = len(seen)
    with gradckpt.enable(model, None, modules=Block, tiles=8):
        assert near(step(model, run=run), exact)
    assert len(seen) == 2 * times


def test_input_without_grad_and_weights_with():
    mlp = MLP().train()
    x = data()
    mlp(x).square().sum().backward()
    exact = [p.grad.clone() for p in mlp.parameters()]
    mlp.zero_grad()
    with gradckpt.enable(mlp, None, modules=MLP, tiles=8):
        mlp(x).square().sum().backward()
    assert all(torch.allclose(p.grad, e, rtol=1e-5, atol=1e-4) for p, e in zip(mlp.parameters(), exact, strict=True))


@pytest.mark.parametrize("compress", [None, "int8", "lossless"])
def test_tiles_beside_codecs(compress):
    model = net()
    with gradckpt.enable(model, compress, modules=Block):
        whole = step(model)
    for options in ({}, {"parts": "sequential"}):
        with gradckpt.enable(model, compress, modules=Block, tiles=8, **options):
            assert near(step(model), whole)


def test_autocast_in_tiles():
    """Casts that a forward without grad makes are not taken for those of the backward."""
    model = net()

    def run(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
            y.float().square().sum().backward()  # within autocast, which still has its cache
            return y.detach().requires_grad_()

    exact = step(model, run=run)
    with gradckpt.enable(model, None, modules=Block, tiles=8):
        assert near(step(model, run=run), exact, 2e-2)


def test_retained_graphs_and_second_derivatives_in_tiles():
    model = net()
    for block in model.blocks:
        block.attention = MLP()  # fused attention has no second derivative
    x = data().requires_grad_()
    with gradckpt.enable(model, None, modules=Block, tiles=8):
        loss = model(x * 1).square().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        assert torch.equal(torch.autograd.grad(loss, x)[0], first)
        with pytest.raises(RuntimeError, match=r"second time"):
            torch.autograd.grad(loss, x)
        (first,) = torch.autograd.grad(model(x * 1).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"^gradckpt: tiles= has no gradient of its gradient"):
            first.square().sum().backward()


def test_evaluation_runs_in_one_piece():
    model = net()
    plain = model(data()).detach()
    rows = []
    model.blocks[0].mlp.down_proj.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    with gradckpt.enable(model, None, modules=Block, tiles=8, parts="kept"):
        with torch.no_grad():
            assert torch.equal(model(data()), plain)
        assert rows == [TOKENS]


# ---- what is refused ----


class Pooled(MLP):
    def forward(self, x):
        return super().forward(x).mean(1)


class Closed(MLP):
    """Uses a tensor that is not one of its parameters."""

    def forward(self, x):
        return super().forward(x) * self.other[0]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Pooled, "returns something else"),
        (Attention, "beside other tokens"),
    ],
)
def test_modules_that_do_not_treat_each_token_alone(kind, said):
    """More of them: test_working_set_limits.py."""
    model = kind().train()
    named = rf"^gradckpt: tiles= needs modules that treat each token alone, and {kind.__name__} .*{said}"
    with gradckpt.enable(model, None, modules={kind: {"tiles": 4}}), pytest.raises(ValueError, match=named):
        model(data().requires_grad_() * 1)


def test_gradients_that_would_be_lost():
    model = Closed().train()
    model.other = [torch.ones(WIDTH, requires_grad=True)]
    with gradckpt.enable(model, None, modules={Closed: {"tiles": 4}}):
        y = model(data().requires_grad_() * 1)
        with pytest.raises(RuntimeError, match=r"^gradckpt: tiles= would lose the gradient of a tensor"):
            y.sum().backward()


def test_a_number_that_does_not_divide():
    model = net()
    with gradckpt.enable(model, None, modules=Block, tiles=5):
        with pytest.raises(ValueError, match=r"^gradckpt: tiles=5 does not divide the 32 tokens of MLP; pass"):
            model(data().requires_grad_() * 1)
        with torch.no_grad():
            model(data())


def test_weights_changed_before_the_backward():
    model = net()
    with gradckpt.enable(model, None, modules=Block, tiles=4):
        y = model(data().requires_grad_() * 1)
        with torch.no_grad():
            model.blocks[1].mlp.up_proj.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"^gradckpt: a weight of MLP, which runs in tiles, was changed"):
            y.sum().backward()


class Gated(MLP):
    """Chooses by values."""

    def forward(self, x):
        largest, where = x.topk(8, dim=-1)
        return super().forward(torch.zeros_like(x).scatter(-1, where, largest))


def test_a_choice_by_values_beside_a_codec():
    """The backward of restored values would choose otherwise."""
    torch.manual_seed(0)
    model = Gated().train()
    exact = step(model)
    with gradckpt.enable(model, "int8", modules={Gated: {"tiles": 4}}), pytest.raises(ValueError, match="topk"):
        model(data().requires_grad_() * 1)
    for compress in (None, "lossless"):
        with gradckpt.enable(model, compress, modules={Gated: {"tiles": 4}}):
            assert near(step(model), exact)


class Auxiliary(MLP):
    """Leaves a loss of its own for the training loop."""

    def forward(self, x):
        self.loss = x.square().mean()
        return super().forward(x)


def test_what_is_left_elsewhere_would_have_no_gradient():
    model = Auxiliary().train()
    with gradckpt.enable(model, None, modules={Auxiliary: {"tiles": 4}}), pytest.raises(ValueError, match="elsewhere"):
        model(data().requires_grad_() * 1)
    model = model_families.build("mixtral", "eager")  # with the routers' logits
    with gradckpt.enable(model, None, modules={"moe": {"tiles": 4}}), pytest.raises(ValueError, match="SparseMoeBlock"):
        model_families.gradients("mixtral", model)
    with pytest.raises(ValueError, match="has no MLP that is a module of its own"):
        gradckpt.enable(model, None, tiles=4)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"parts": "both"}, ValueError, "parts is 'nested', 'sequential' or 'kept', not 'both'"),
        ({"tiles": 1}, ValueError, "tiles is 2 or more, not 1"),
        ({"tiles": True}, TypeError, "tiles is a number of tiles"),
        ({"parts": "kept", "modules": nn.Linear}, ValueError, "Linear has no parts"),
        ({"parts": "kept", "recompute": False}, ValueError, "recompute=False and parts= exclude each other"),
        ({"tiles": 2, "recompute": False}, ValueError, "recompute=False and tiles= exclude each other"),
        ({"parts": "kept", "policy": "save_matmuls"}, ValueError, "parts= and policy= or context_fn= exclude"),
    ],
)
def test_refused_when_enabled(options, error, said):
    model = net()
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(error) as caught:
        gradckpt.enable(model, None, **{"modules": Block, **options})
    assert str(caught.value).startswith("gradckpt: ")
    assert said in str(caught.value)
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize("family", ["bert", "opt", "whisper"])
def test_layers_without_an_mlp_of_their_own(family):
    model = model_families.build(family, "eager")
    with pytest.raises(ValueError, match="has no MLP that is a module of its own"):
        gradckpt.enable(model, None, tiles=4)
    assert not inner_in(model)
    assert gradckpt.enable(model, None).modules != {}


# ---- on models ----


@pytest.mark.parametrize(
    ("make", "modules"), [(net, {"modules": Block}), (lambda: model_families.build("llama", "sdpa"), {})]
)
def test_settings_are_seen_and_changed(make, modules):
    model = make()
    handle = gradckpt.enable(model, "int8", **modules, parts="sequential", tiles=4)
    assert all(each["parts"] == "sequential" and each["tiles"] == 4 for each in handle.modules.values())
    assert "parts='sequential', tiles=4" in repr(handle)
    before = inner_in(model)
    gradckpt.enable(model, "int8", **modules, parts="sequential", tiles=4)
    assert all(a is b for a, b in zip(inner_in(model), before, strict=True))
    gradckpt.enable(model, "int8", **modules)
    assert not inner_in(model)
    gradckpt.enable(model, "int8", **modules, parts="kept")
    assert not {id(each) for each in before} & {id(each) for each in inner_in(model)}
    handle.remove()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_mapping_gives_each_region_its_own():
    model = net()
    rules = {"blocks.2": {"parts": "kept"}, "blocks.1": {"tiles": 4, "parts": None}, Block: None}
    handle = gradckpt.enable(model, None, modules=rules, parts="sequential")
    found = [(each.get("parts"), each.get("tiles")) for each in handle.modules.values()]
    assert found == [("sequential", None), (None, 4), ("kept", None)]
    exact = step(net())
    assert near(step(model), exact)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_their_own(how):
    model = net()
    exact = step(model)
    gradckpt.enable(model, None, modules=Block, parts="sequential")
    twin = how(model)
    assert {id(each) for each in inner_in(twin)}.isdisjoint(id(each) for each in inner_in(model))
    assert all(any(each.module is part for part in twin.modules()) for each in inner_in(twin))
    gradckpt.disable(model)
    assert equal(step(twin), exact)
    gradckpt.disable(twin)
    assert not any("forward" in vars(module) for module in twin.modules())


def test_a_chosen_mlp_in_tiles_is_one_module_with_both():
    model = net()
    exact = step(model)
    gradckpt.enable(model, "lossless", modules={"mlp": {"tiles": 8}, "blocks.*.attention": {"parts": None}})
    assert near(step(model), exact)
    replica = model.blocks[0].mlp._replicate_for_data_parallel()
    assert vars(replica)["forward"].module is replica
    assert vars(replica)["forward"].own.module is replica
    gradckpt.disable(model)
    assert not any("forward" in vars(module) for module in model.modules())


# ---- plans ----

SHAPE = {"hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}


def llama():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_key_value_heads=2, vocab_size=128, use_cache=False)
    return transformers.LlamaForCausalLM(config).train()


@functools.cache
def ids():
    ids = torch.randint(0, 128, (2, 512), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def test_rows_of_a_plan_and_their_real_peaks():
    model = llama()
    plan = gradckpt.plan(model, ids(), tiles=16)
    names = [row.name for row in plan.rows]
    assert {"torch in parts", "int8 in parts", "int8 in parts, 16 tiles"} <= set(names)
    assert plan["int8 in parts, 16 tiles"].total < plan["int8 in parts"].total < plan["int8"].total
    assert not any("tiles" in row.name for row in gradckpt.plan(model, ids()).rows)
    for name, options in (
        ("torch in parts", {"compress": None, "parts": "sequential"}),
        ("int8 in parts, 16 tiles", {"compress": "int8", "parts": "sequential", "tiles": 16}),
    ):
        assert plan[name].line == f"gradckpt.enable(model, {', '.join(written(options))})"
        with gradckpt.enable(model, **options):
            for _ in range(2):  # the first one runs modules on two tiles more
                model.zero_grad()
                with gradckpt.track_memory(model) as memory:
                    model(**ids()).loss.backward()
        real = memory.peak + sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
        assert abs(plan[name].total - real) <= 0.01 * real, name


def written(options):
    first, *rest = options.items()
    return [f'"{first[1]}"' if first[1] else "None", *(f'{k}="{v}"' if k == "parts" else f"{k}={v}" for k, v in rest)]


def test_budgets_use_parts_and_by_permission_tiles(monkeypatch):
    monkeypatch.setattr(region_options, "_SECONDS", 0.0)
    model = llama()
    exact = gradckpt.plan(model, ids(), budget="1GiB")
    tiled = gradckpt.plan(model, ids(), budget="1GiB", tiles=16)
    assert tiled.smallest_budget < exact.smallest_budget
    plan = gradckpt.plan(model, ids(), budget=exact.smallest_budget, profile=exact)
    assert any(region.option.rule != "skip" and region.option.rule.get("parts") for region in plan.regions)
    assert not any("tiles" in region.option.name for region in plan.regions)
    loaded = gradckpt.Plan.from_dict(plan.to_dict())
    loaded.apply(model)
    assert inner_in(model)
    with gradckpt.track_memory(model) as memory:
        model(**ids()).loss.backward()
    held = sum(p.nbytes for p in (*model.parameters(), *model.buffers()))
    assert abs(plan.peak - memory.peak - held) <= 0.01 * plan.peak
    gradckpt.disable(model)


def test_live_budgets(monkeypatch):
    monkeypatch.setattr(region_options, "_SECONDS", 0.0)
    model = llama()
    model(**ids()).loss.backward()
    exact = [p.grad.clone() for p in model.parameters()]
    smallest = gradckpt.plan(model, ids(), budget="1GiB", tiles=16).smallest_budget
    gradckpt.enable(model, budget=int(smallest * 1.2), tiles=16)
    for _ in range(3):
        model.zero_grad()
        model(**ids()).loss.backward()
    assert inner_in(model)
    found = [p.grad for p in model.parameters()]
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, exact, strict=True))
    gradckpt.disable(model)
    assert not inner_in(model)


def test_pairs_of_forms_and_tiles_over_blocks():
    """Every pair of neighbours' settings is right."""
    exact = step(net())
    kinds = [{}, {"parts": "nested"}, {"parts": "kept"}, {"tiles": 4}, {"tiles": 4, "parts": "sequential"}]
    for first, second in itertools.product(kinds, repeat=2):
        model = net()
        rules = {"blocks.0": {"compress": None, **first}, "blocks.1": {"compress": "lossless", **second}}
        gradckpt.enable(model, None, modules=rules)
        assert near(step(model), exact)
