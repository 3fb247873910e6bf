"""Parts and tiles of modules for which they would be wrong: each is refused, or is right."""

import copy

import pytest
import torch
from model_families import equal
from torch import nn

import gradckpt
from gradckpt._planning import options as region_options

WIDTH, TOKENS = 16, 32
FORMS = ("nested", "sequential", "kept")


def data(batch=2, tokens=TOKENS):
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def step(model, x):
    torch.manual_seed(2)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x * 1)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def apart(found, exact):
    return max(float((a - b).norm() / b.norm().clamp_min(1e-9)) for a, b in zip(found, exact, strict=True))


def error(kind, x=None, prepare=lambda model: None, **options):
    """How far a step of a model of this class is from one without checkpointing; as a whole, it is
    exact."""
    x = data() if x is None else x
    torch.manual_seed(0)
    model = kind().train()
    prepare(model)
    exact = step(model, x)
    with gradckpt.enable(model, None, modules=kind):
        assert apart(step(model, x), exact) == 0
    with gradckpt.enable(model, None, modules={kind: options}):
        return apart(step(model, x), exact)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def plain(self, x):
        return self.down(torch.tanh(self.up(x)))

    forward = plain


def of(forward, **parameters):
    """A class of MLPs with this forward, and with more parameters."""

    def __init__(self):
        MLP.__init__(self)
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value.clone()))

    return type("Own", (MLP,), {"__init__": __init__, "forward": forward})


#: They do not save their input, write into it, and hand a loss to their caller in a list.
Scaled = of(lambda self, x: self.plain(x * 2))
Writing = of(lambda self, x: self.plain(x.mul_(0.5)))
Listing = of(lambda self, x, losses: losses.append(x.square().mean()) or self.plain(x))


class Layer(nn.Module):
    first, second = Scaled, Scaled

    def __init__(self):
        super().__init__()
        self.a, self.b = self.first(), self.second()

    def forward(self, x):
        x = x + self.a(x)
        return x + self.b(x)


# ---- gradients that autograd hands to several ----


class Sum(nn.Module):
    """Of whose two weights the gradient is one tensor."""

    def __init__(self):
        super().__init__()
        self.base, self.delta = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x):
        return nn.functional.linear(x, self.base + self.delta)


#: The gradient of its bias is that of the output.
Shift = of(lambda self, x: self.plain(x) + self.bias, bias=torch.zeros(1, 1, WIDTH))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Shift()

    def forward(self, x):
        return x + self.mlp(x)


def test_gradients_are_summed_in_memory_of_their_own():
    assert error(Sum, tiles=4) < 1e-6
    assert error(Residual, data(1, 8), tiles=8) < 1e-6


def test_no_gradient_stays_none():
    Detached = of(lambda self, x: self.plain(x.detach()))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Detached()).train()
    with gradckpt.enable(model, None, modules={Detached: {"tiles": 4}}):
        model(data()).sum().backward()
    assert model[0].weight.grad is None
    assert model[1].up.weight.grad is not None


# ---- writes ----


class InPlace(Layer):
    """Legal, since nothing saves the sum itself; a region of its own would."""

    def forward(self, x):
        x = x * 1
        x += self.a(x)
        return x + self.b(x)


class AroundMLP(nn.Module):
    kind = Scaled

    def __init__(self):
        super().__init__()
        self.mlp = self.kind()


class TiledInPlace(AroundMLP):
    def forward(self, x):
        x = x * 1
        x += self.mlp(x)
        return x * torch.sigmoid(x)


class TiledOwnWrite(AroundMLP):
    kind = Writing

    def forward(self, x):
        x = x * 1
        return self.mlp(x) + x


class OwnWrite(Layer):
    first = Writing

    def forward(self, x):
        x = x * 1
        h = self.a(x)
        x = x + h
        return x + self.b(x)


@pytest.mark.parametrize("form", FORMS)
def test_an_input_of_a_part_is_changed(form):
    with pytest.raises(RuntimeError, match=r"^gradckpt: a tensor of shape \(2, 32, 16\) was changed in place after"):
        error(InPlace, parts=form)
    with pytest.raises((ValueError, RuntimeError), match=r"changes an input in place|changed an argument in place"):
        error(OwnWrite, parts=form)


def test_an_input_of_tiles_is_changed():
    with pytest.raises(RuntimeError, match=r"^gradckpt: a tensor of shape \(2, 32, 16\) was changed in place after"):
        error(TiledInPlace, tiles=4)
    with pytest.raises(ValueError, match="Own changes its input in place"):
        error(TiledOwnWrite, tiles=4)


class ListedByFirst(Layer):
    first = second = Listing

    def forward(self, x):
        losses = []
        x = x + self.a(x, losses)
        x = x + self.b(x, [])
        return x * (1 + sum(losses))


class TiledListed(AroundMLP):
    kind = Listing

    def forward(self, x):
        losses = []
        return x + self.mlp(x, losses) * (1 + sum(losses))


@pytest.mark.parametrize(
    ("kind", "options"), [*((ListedByFirst, {"parts": form}) for form in FORMS), (TiledListed, {"tiles": 4})]
)
def test_lists_that_are_written_to(kind, options):
    with pytest.raises(ValueError, match="writes into a list or dict"):
        error(kind, **options)


# ---- kept ----


class Giving(MLP):
    def forward(self, x):
        Giving.h = super().forward(x)
        return Giving.h


class Handing(Layer):
    """Its parts hand a tensor to each other."""

    first, second = Giving, of(lambda self, x: self.plain(x) * torch.sigmoid(Giving.h))


class Twice(Layer):
    def forward(self, x):
        x = x + self.a(x)
        x = x + self.a(x)
        return x + self.b(x)


@pytest.mark.parametrize(
    ("kind", "why"), [(Handing, "leaves a tensor elsewhere than in its result"), (Twice, "runs twice in a region")]
)
def test_parts_that_cannot_be_kept(kind, why):
    assert error(kind, parts="sequential") == error(kind, parts="nested") == 0
    with pytest.raises(ValueError, match=rf'^gradckpt: parts= runs .* {why}; pass parts="sequential", or leave'):
        error(kind, parts="kept")


# ---- tokens ----


class Averaging(MLP):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return super().forward(x)


def with_mask(mlp, x):
    """One for all tokens of a sequence."""
    mask = torch.bernoulli(x.new_full((len(x), 1, WIDTH), 0.5)) if mlp.training else 1
    return mlp.plain(x * mask)


def placed_in_training(mlp, x):
    return mlp.plain(x * torch.linspace(0.5, 1, x.shape[1])[:, None] if mlp.training else x)


class Outer(nn.Module):
    """Makes a weight of its MLP."""

    tiled = of(lambda self, x: nn.functional.linear(self.plain(x), self.made))

    def __init__(self):
        super().__init__()
        self.mlp, self.source = self.tiled(), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        self.mlp.made = torch.tanh(self.source)
        return self.mlp(x)


BEYOND = "has gradients that are no sum over tokens"  # by a weight that is zero at first
CANNOT = {
    "mixing": (of(lambda self, x: self.plain(x + self.a * x.mean(1, keepdim=True)), a=torch.zeros(())), BEYOND),
    "positions": (of(lambda self, x: self.plain(x + self.t[: x.shape[1]]), t=torch.zeros(TOKENS, WIDTH)), BEYOND),
    "counted": (of(lambda self, x: self.plain(x) / x.shape[1]), "goes by how many there are"),
    "in training": (of(placed_in_training), "goes by their places"),
    "buffer": (Averaging, "changes a buffer"),
    "shared draw": (of(with_mask), "draws random numbers that tokens share"),
    "draws": (of(lambda self, x: nn.functional.dropout(self.plain(x))), "draws random numbers in eval mode, too"),
    "outer": (Outer, "uses a tensor with a gradient that code outside of it has made"),
}


@pytest.mark.parametrize(("kind", "why"), CANNOT.values(), ids=CANNOT)
def test_modules_that_cannot_run_in_tiles(kind, why):
    model = kind().train()
    chosen = getattr(kind, "tiled", kind)
    with (
        gradckpt.enable(model, None, modules={chosen: {"tiles": 4}}),
        pytest.raises(ValueError, match=rf"^gradckpt: tiles= needs modules that treat each token alone, and .* {why};"),
    ):
        model(data().requires_grad_() * 1)


def test_small_effects_of_places_are_seen_in_bfloat16():
    """Less than what is often taken for rounding there."""
    places = torch.linspace(0, 0.03, TOKENS, dtype=torch.bfloat16)[:, None]
    SlightlyPlaced = of(lambda self, x: self.plain(x + places[: x.shape[1]]))
    model = SlightlyPlaced().train().bfloat16()
    x = data().bfloat16().requires_grad_()
    with gradckpt.enable(model, None, modules={SlightlyPlaced: {"tiles": 2}}), pytest.raises(ValueError, match="place"):
        model(x * 1)
    plain = MLP().train().bfloat16()
    with gradckpt.enable(plain, None, modules={MLP: {"tiles": 2}}):
        plain(x * 1).sum().backward()


class Normed(MLP):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, mix=False):
        x = x - x.mean(1, keepdim=True) if mix else x
        return super().forward(self.norm(x.mT).mT)


def test_another_mode_or_another_argument_is_another_module():
    model = Normed().train()
    model.norm.eval()
    x = data().requires_grad_()
    with gradckpt.enable(model, None, modules={Normed: {"tiles": 4}}):
        model(x * 1).sum().backward()
        with pytest.raises(ValueError, match="beside other tokens"):
            model(x * 1, mix=True)
        model.norm.train()
        before = copy.deepcopy(model.norm.state_dict())
        with pytest.raises(ValueError, match="beside other tokens"):
            model(x * 1)
        assert equal(model.norm.state_dict(), before)


# ---- plans ----


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize(("kind", "can"), [(InPlace, False), (Layer, True)])
def test_plans_leave_out_parts_that_cannot_be(monkeypatch, kind, can):
    monkeypatch.setattr(region_options, "_SECONDS", 0.0)
    model, x = Net(kind).train(), data()

    def gradients():
        model.zero_grad()
        model(x).backward()
        return [p.grad for p in model.parameters()]

    exact = gradients()
    model.zero_grad()
    plan = gradckpt.plan(model, (x,), modules=kind, budget="1GiB")
    assert any("parts" in each["name"] for each in plan.to_dict()["profile"]["options"]) is can
    gradckpt.enable(model, modules=kind, budget=plan.smallest_budget)
    assert all(apart(gradients(), exact) == 0 for _ in range(3))
    gradckpt.disable(model)
    rows = [row.name for row in gradckpt.plan(model, (x,), modules=kind).rows]
    assert can or not any("parts" in name for name in rows)


def test_tiles_of_a_plan_are_tried():
    model = Net(Layer).train()
    with pytest.raises(ValueError, match="tiles=5 does not divide the 32 tokens"):
        gradckpt.plan(model, (data(),), modules=Scaled, tiles=5)
    assert any("2 tiles" in row.name for row in gradckpt.plan(model, (data(),), modules=Scaled, tiles=2).rows)
