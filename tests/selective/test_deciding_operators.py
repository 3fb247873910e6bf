"""Which operators decide, and what is kept of each:
every operator of torch's that looks like one is in a table."""

import re

import pytest
import torch
import torch.nn.functional as F

import gradckpt
from gradckpt._engine.discrete import FORMS, KEPT, NOT_KEPT, ROUNDING, WRITERS, WRITING, overloads
from gradckpt._engine.discrete_forms import narrow, widen
from gradckpt._engine.selective import contexts_of

aten = torch.ops.aten

#: By their names, operators that select, sort, search, compare, pool or draw by values.
SUSPECT = re.compile(
    r"(^|_)(arg|a?max|a?min|cummax|cummin|sort|topk|median|mode|unique|search|bucket|nonzero|kthvalue|quantile|histc"
    r"|histogram|multinomial|bernoulli|poisson|binomial|gamma|dirichlet|norm|isin|threshold|sign|isclose|equal)"
    r"|pool.*indices|max_pool|maximum|minimum|fmax|fmin|aminmax"
)
#: Normalization layers, backwards, and kernels of other layouts and libraries.
ELSEWHERE = re.compile(
    r"(batch|layer|group|instance|rms|native)_norm|_backward|sparse|quantized|mkldnn|miopen_batch|cudnn_batch|foreach"
    r"|cslt|fft|nested|_for_size$"
)


def all_operators():
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if space == "aten" and (op := getattr(getattr(aten, packet, None), overload or "default", None)) is not None:
            yield packet, op


def test_every_operator_that_looks_like_one_is_decided_upon():
    """One that torch adds appears here."""
    known = {name.partition(".")[0] for name in (*KEPT, *ROUNDING, *WRITING)}
    known |= {name for names in NOT_KEPT.values() for name in names}
    undecided = set()
    for packet, op in all_operators():
        draws = torch.Tag.nondeterministic_seeded in op.tags
        suspect = SUSPECT.search(packet) and not ELSEWHERE.search(packet) and not packet.endswith("_")
        if packet not in known and (draws or suspect):
            undecided.add(packet)
    assert not undecided


def test_what_is_kept_is_there():
    newest = {"equal", "unique_dim", "rrelu_with_noise_.default"}
    for name in {*KEPT, *ROUNDING} - newest:
        assert overloads(name, writing=name in WRITERS), name
    assert len(FORMS) > 100


@pytest.mark.parametrize("bound", [1, 256, 257, 1 << 16, (1 << 16) + 1, 1 << 31])
def test_indices_survive_in_few_bytes(bound):
    index = torch.tensor([0, bound // 2, bound - 1])
    kept = narrow(index, bound)
    assert torch.equal(widen(kept), index)
    assert kept.dtype.itemsize == (1 if bound <= 256 else 2 if bound <= 1 << 16 else 4)


# ---- gradients ----


#: Results that one value of the input determines, and whose gradient goes there: those that the
#: sweep of test_jumps.py does not have.
SELECT = {
    "normalize": lambda h: F.normalize(h, p=float("inf")),
    "max_pool2d channels last": lambda h: F.max_pool2d(
        h.view(4, 4, 16, 16).contiguous(memory_format=torch.channels_last), 2
    ).flatten(),
    "quantile": lambda h: h.quantile(0.3, dim=-1),
    "written by out=": lambda h: h.gather(-1, torch.argmax(h.detach(), -1, True, out=h.new_empty(0).long())),
    "compared in place": lambda h: h * h.detach().clone().gt_(0.3),
}


def gradients(select, checkpoint):
    torch.manual_seed(1)
    w = (torch.randn(64, 64) / 8).requires_grad_()
    x = torch.randn(64, 64, requires_grad=True)
    torch.manual_seed(2)
    out = checkpoint(lambda h: select(h @ w), x * 1)
    torch.manual_seed(3)
    return torch.autograd.grad(out, (w, x), torch.randn_like(out))


def nodes_behind(y):
    found, nodes = set(), [y.grad_fn]
    while nodes:
        node = nodes.pop()
        found.add(node.name())
        nodes += [each for each, _ in node.next_functions if each is not None]
    return found


@pytest.mark.parametrize("name", SELECT)
def test_the_gradient_goes_where_the_forward_found_the_result(name):
    select = SELECT[name]
    try:
        exact = gradients(select, lambda f, h: f(h))
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        pytest.skip(f"torch itself: {error}")
    if name == "quantile" and "SortBackward0" not in nodes_behind(select(torch.randn(4, 4, requires_grad=True))):
        pytest.skip("this torch finds the places of quantile in one kernel, which no operator shows")
    for codec, bound in (("int8", 0.03), ("int4", 0.25)):
        found = gradients(select, lambda f, h, codec=codec: gradckpt.checkpoint(f, h, compress=codec))
        for a, b in zip(found, exact, strict=True):
            assert a.isfinite().all()
            assert (a - b).norm() <= bound * b.norm()


def test_what_counts_values_counts_those_of_the_forward():
    seen = []

    def region(h):
        seen.append(torch.stack([h.count_nonzero(), h.logical_not().sum(), h.logical_xor(h > 0).sum(), h[:2].all()]))
        return (h * 2).sin()

    x = torch.randn(64, 64, requires_grad=True)  # small values come back as zeros
    gradckpt.checkpoint(region, x * 1, compress="int4", early_stop=False).sum().backward()
    assert torch.equal(*seen)


def test_ties():
    """Of equal values one gets the gradient, with those equal to it in the restored input:
    the sum is right."""
    x = torch.zeros(64, 64, requires_grad=True)
    gradckpt.checkpoint(lambda h: h.amax(-1), x * 1, compress="int8").sum().backward()
    assert torch.equal(x.grad.sum(-1), torch.ones(64))


def test_a_policy_that_keeps_such_a_result_beside_an_approximate_input():
    """Exactly the maximum of the forward is nowhere in the restored input: its place is kept."""
    x = torch.randn(64, 64, requires_grad=True)
    contexts = contexts_of([aten.amax.default])
    gradckpt.checkpoint(lambda h: h.sin().amax(-1), x * 1, compress="int4", context_fn=contexts).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.count_nonzero() >= 64


def test_integers_and_empty_inputs_run_again():
    def region(h):
        return h * h.detach().long().amax() + h[:0].sum() + h.detach().bool().amax(-1, keepdim=True)

    x = torch.randn(64, 64, requires_grad=True)
    gradckpt.checkpoint(region, x * 1, compress="int8").sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("inplace", [False, True])
def test_what_rounds_is_kept_on_request(inplace):
    seen = []

    def region(h):
        seen.append((h.detach() * 9).round_().sign_() if inplace else (h * 9).round().sign())
        return h * seen[-1]

    x = torch.randn(64, 64, requires_grad=True)
    for replay_discrete, same in ((True, False), ("casts", True)):
        seen.clear()
        gradckpt.checkpoint(
            region, x * 1, compress={"codec": "int4", "replay_discrete": replay_discrete}
        ).sum().backward()
        assert torch.equal(*seen) == same
