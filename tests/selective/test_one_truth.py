"""Parts of a region that are kept, beside restored values: no gradient is much worse than where the
whole region runs again. In processes of their own, as those of test_opinfo.py."""

import pytest
import torch
from checkout import HELPERS
from processes import printed_by

import gradckpt
from gradckpt import _C, policies
from gradckpt._engine import op_mixing
from gradckpt._engine.torch_private import node_types

aten = torch.ops.aten
CPU_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


def worse(*options):
    printed = printed_by(HELPERS / "kept_parts.py", "one_truth", *options)
    assert printed.splitlines()[-1].endswith(" 0 worse"), printed


@pytest.mark.parametrize("part", range(4))
def test_no_way_to_keep_a_part_is_worse_than_to_keep_nothing(part):
    worse("--part", f"{part}/4")


@pytest.mark.parametrize("part", range(4))
def test_of_every_operator(part):
    worse("--operators", "--part", f"{part}/4")


# ---- which operators ----


def test_what_nodes_save_is_read_from_their_types():
    assert node_types is not None
    for op in (CPU_ATTENTION, aten.amax.default, aten.native_layer_norm.default, aten._cdist_forward.default):
        assert op_mixing.mixing_of(op) == _C.OP_JOINT, op
    for op in (aten.exp.default, aten.mul.Tensor, aten.sum.dim_IntList, aten.gelu.default):
        assert op_mixing.mixing_of(op) == _C.OP_SEPARATE, op
    for op in (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default):
        assert op_mixing.mixing_of(op) == _C.OP_PRODUCT, op


def test_every_product_of_the_ready_policies_is_one():
    named = [*policies.save_matmuls.rules, *policies.every_other_matmul.rules]
    assert {op_mixing.mixing_of(op) for op in named} == {_C.OP_PRODUCT}


# ---- operators that are not torch's ----


def custom(name, saves):
    """y = x.exp(), whose node saves these of x and y."""
    op = torch.library.custom_op(
        f"gradckpt_tests::{name}", lambda x: x.exp(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )

    def setup(ctx, inputs, output):
        ctx.save_for_backward(*[{"x": inputs[0], "y": output}[which] for which in saves])

    def backward(ctx, grad):
        return grad * (ctx.saved_tensors[-1] if "y" in saves else ctx.saved_tensors[0].exp())

    op.register_autograd(backward, setup_context=setup)
    return getattr(torch.ops.gradckpt_tests, name).default


@pytest.mark.parametrize("compress", ["int8", None])
@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("saves", ["x", "y", "xy", "yx"])
def test_an_operator_whose_node_saves_its_result_beside_an_argument_is_refused(saves, as_function, compress):
    op = custom(f"exp_{saves}_{as_function}_{compress}", saves)
    keeps = {op: "int8"} if compress is None else {op: True}
    policy = (lambda ctx, each, *args, **kwargs: keeps.get(each, False)) if as_function else keeps
    x = torch.randn(64, 64, requires_grad=True)

    def run():
        return gradckpt.checkpoint(lambda t: op(t).sin(), x * 1, compress=compress, policy=policy).sum()

    if len(saves) == 2:
        with pytest.raises(RuntimeError, match=rf"{op} saves its result beside its arguments.*compress=None"):
            run()
    else:
        run().backward()
        assert gradckpt.stats()["policy_outputs"] > 0


# ---- what runs again, and what is kept ----


def attend(x):
    return torch.nn.functional.scaled_dot_product_attention(x, x.sin(), x.cos()).tanh()


def runs_of_attention(**options):
    op_mixing.ran_again.clear()
    runs = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal runs
            runs += op is CPU_ATTENTION
            return op(*args, **(kwargs or {}))

    x = torch.randn(2, 4, 32, 32, requires_grad=True)
    with Count():
        gradckpt.checkpoint(attend, x * 1, **options).sum().backward()
    return runs


FAKE = {"codec": "int8", "fake_quantize": True}


@pytest.mark.parametrize("compress", [None, "lossless", FAKE], ids=str)
def test_attention_is_kept_where_both_runs_have_the_same_values(compress):
    assert runs_of_attention(compress=compress, policy="save_attention") == 1
    assert runs_of_attention(compress=compress, policy="save_attention:int8") == 1


@pytest.mark.parametrize("policy", ["save_attention", "save_attention:int8", [CPU_ATTENTION]], ids=str)
def test_attention_runs_again_beside_restored_inputs_and_a_warning_says_so(policy):
    with pytest.warns(gradckpt.GradckptInactiveWarning, match="runs again: a backward could mix"):
        assert runs_of_attention(compress="int8", policy=policy) == 2


def test_torchs_checkpoint_within_compress_saved_restores_its_inputs_too():
    op_mixing.ran_again.clear()
    contexts = gradckpt.compat.create_selective_checkpoint_contexts

    @gradckpt.compress_saved("int8")
    def function(x):
        return torch.utils.checkpoint.checkpoint(
            attend, x * 1, use_reentrant=False, context_fn=lambda: contexts(policies.save_attention)
        )

    with pytest.warns(gradckpt.GradckptInactiveWarning, match="runs again: a backward could mix"):
        function(torch.randn(2, 4, 32, 32, requires_grad=True)).sum().backward()


def test_a_kept_call_is_exact_beside_restored_values():
    def function(x):
        return policies.region(lambda t: t - t.amax(-1, keepdim=True), "call", recompute=False)(x.sin() * 1)

    x = torch.randn(64, 64, requires_grad=True)
    exact, grads = torch.autograd.grad(function(x).square().sum(), x)[0], {}
    for compress in (None, "lossless", "int8"):
        y = gradckpt.checkpoint(function, x * 1, compress=compress)
        (grads[compress],) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(grads[None], exact)
    assert torch.equal(grads["lossless"], exact)
    assert (grads["int8"] - exact).norm() <= 0.1 * exact.norm()  # of the sine before it
