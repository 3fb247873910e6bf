"""gradckpt._planning.kernels: what CUDA's kernels save in a simulated step."""

import contextlib

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradckpt
from gradckpt._planning.kernels import cuda_autocast, cuda_kernels
from gradckpt._planning.simulation import SimulationMode
from gradckpt._planning.step_trace import trace_step

B, H, T, D = 2, 8, 72, 64
HALF, FULL = 2, 4


def saved(run, *shapes, dtype=torch.bfloat16, on_cuda=True):
    """What a function of simulated tensors saves; its backward runs, too."""
    mode = SimulationMode()
    inputs = [mode.like(torch.empty(shape, dtype=dtype, device="meta")).requires_grad_() for shape in shapes]
    with cuda_kernels() if on_cuda else contextlib.nullcontext(), mode:
        found = gradckpt.residuals(lambda: run(*inputs))
        run(*inputs).sum().backward()
    assert [x.grad.shape for x in inputs] == [x.shape for x in inputs]
    return found.total_bytes


def attend(**given):
    return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, **given)


def ones_mask(*shape):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, torch.ones(*shape, dtype=torch.bool))


QUERY, SMALL_KEY = (B, H, T, D), (B, 2, T, D)
FLASH = 4 * B * H * T + 24  # logsumexp; seed and offset
# Its logsumexp has rows of a multiple of 32 values.
EFFICIENT = 4 * B * H * 96 + 16
OPERANDS = 4 * B * H * T * D  # query, key, value, output
SCORES = B * H * T * T


@pytest.mark.parametrize(
    ("run", "shapes", "dtype", "expected"),
    [
        (attend(is_causal=True), [QUERY] * 3, torch.bfloat16, HALF * OPERANDS + FLASH),
        (attend(dropout_p=0.1), [QUERY] * 3, torch.float16, HALF * OPERANDS + FLASH),
        # Keys and values are not repeated.
        (
            attend(is_causal=True, enable_gqa=True),
            [QUERY, SMALL_KEY, SMALL_KEY],
            torch.bfloat16,
            HALF * (2 * B * H * T * D + 2 * B * 2 * T * D) + FLASH,
        ),
        # Heads of 60 values are padded to 64.
        (attend(), [(B, H, T, 60)] * 3, torch.bfloat16, HALF * OPERANDS + FLASH),
        (attend(is_causal=True), [QUERY] * 3, torch.float32, FULL * OPERANDS + EFFICIENT),
        # One mask for all heads; it becomes 16 bits.
        (ones_mask(1, 1, T, T), [QUERY] * 3, torch.bfloat16, HALF * OPERANDS + EFFICIENT + HALF * T * T),
        # Its rows begin at multiples of 8 values: 73 of them take 80.
        (
            ones_mask(73, 73),
            [(B, H, 73, D)] * 3,
            torch.bfloat16,
            HALF * 4 * B * H * 73 * D + EFFICIENT + HALF * 73 * 80,
        ),
    ],
    ids=["flash", "dropout", "gqa", "padded", "float32", "mask", "padded mask"],
)
def test_attention_saves_what_cudas_does(run, shapes, dtype, expected):
    assert saved(run, *shapes, dtype=dtype) == expected
    assert saved(run, *shapes, dtype=dtype, on_cuda=False) != expected


@pytest.mark.parametrize(
    "given",
    [
        {"attn_mask": True, "enable_gqa": True},  # no fused kernel of CUDA has both
        {"enable_gqa": True, "wide": True},
    ],
    ids=["masked gqa", "wide gqa"],
)
def test_attention_without_a_fused_kernel_saves_scores(given):
    size = 264 if given.pop("wide", False) else D

    def run(query, key, value):
        mask = torch.ones(T, T, dtype=torch.bool) if "attn_mask" in given else None
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, dropout_p=0.1)

    shapes = [(B, H, T, size), *[(B, 2, T, size)] * 2]
    # In float32: operands of two products with repeated keys and values, scores before and after
    # dropout, whose mask is a byte.
    assert saved(run, *shapes) == FULL * 3 * B * H * T * size + (2 * FULL + 1) * SCORES


def test_wide_heads_take_the_efficient_kernel():
    expected = HALF * 4 * B * H * T * 264 + EFFICIENT
    assert saved(attend(is_causal=True), *[(B, H, T, 264)] * 3) == expected


def test_dropout_saves_a_byte_per_value():
    run = torch.nn.Dropout(0.1)
    assert saved(run, (4, 1000)) == 4000
    assert saved(run, (4, 1000), on_cuda=False) == 8000
    assert saved(run.eval(), (4, 1000)) == 0


def test_rms_norm_saves_its_input():
    def run(x, weight):
        return F.rms_norm(x, (64,), weight)

    assert saved(run, (1000, 64), (64,)) == HALF * 1000 * 64 + HALF * 64 + FULL * 1000
    assert saved(run, (1000, 64), (64,), on_cuda=False) > 2 * FULL * 1000 * 64


def test_norms_whose_rows_share_groups_are_not_compressed():
    """The engine does not read values on a GPU, so it keeps their input."""

    def peak(size, on_cuda, hooks):
        x, weight = torch.randn(1000, size, requires_grad=True), torch.ones(size, requires_grad=True)

        def step(inputs):
            y = inputs[0]
            for _ in range(6):
                with hooks:
                    y = F.layer_norm(y * 1, (size,), inputs[1])
                    y.mean().exp()  # then what uses y is known
            y.square().mean().backward()

        return trace_step(torch.nn.Module(), step, (x, weight), cuda=on_cuda).peak().size

    def saves(size, on_cuda):
        plain = peak(size, on_cuda, contextlib.nullcontext())
        return peak(size, on_cuda, gradckpt.compress_saved("int8")) < plain

    assert saves(128, True)
    assert saves(128, False)
    assert saves(64, False)
    assert not saves(64, True)


def test_autocast_chooses_the_kernel():
    """Attention of float32 tensors is of 16 bits, also where a checkpoint runs it again."""
    seen = []

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(D, D)

        def attend(self, x):
            y = self.project(x)
            output = F.scaled_dot_product_attention(x, y, y)
            dropped = F.dropout(output, 0.1)
            seen.extend([output.grad_fn.name(), dropped.grad_fn.name()])
            return dropped.square()  # saves its input, so that the recompute comes here

        def forward(self, x):
            return checkpoint(self.attend, x, use_reentrant=False)

    def run(x):
        with cuda_kernels(), cuda_autocast():
            with torch.autocast("cpu", torch.bfloat16):
                loss = block(x).float().sum()
            loss.backward()

    block = Block()
    trace_step(block, run, torch.empty(QUERY, requires_grad=True))
    assert seen == 2 * ["ScaledDotProductFlashAttentionBackward0", "NativeDropoutBackward0"]


@pytest.mark.parametrize("codec", ["int8", None])
def test_regions_run_them_again(codec):
    """A compressed region recomputes its operators with the same kernels."""
    seen = []

    def attend(x):
        output = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        if output.grad_fn is not None:
            seen.append(output.grad_fn.name())
        return output

    def run(x):
        with cuda_kernels():
            gradckpt.checkpoint(attend, 2 * x, compress=codec).sum().backward()

    trace_step(torch.nn.Identity(), run, torch.empty(QUERY, dtype=torch.bfloat16, requires_grad=True))
    assert seen == ["ScaledDotProductFlashAttentionBackward0"]


def test_small_inputs_with_values():
    """Values do not help: CUDA's operators have no kernel here."""
    with cuda_kernels(), SimulationMode():
        x = torch.ones(1, 1, 8, 8, dtype=torch.bfloat16)
        assert F.scaled_dot_product_attention(x, x, x).shape == x.shape
        assert F.rms_norm(x, (8,)).shape == x.shape


def test_the_kernels_end_with_the_block():
    x = torch.randn(QUERY, requires_grad=True)
    before = F.scaled_dot_product_attention(x, x, x)
    with cuda_kernels(), pytest.raises(NotImplementedError, match="CUDA's kernels have no values"):
        F.rms_norm(x, (D,))
    torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x), before)
    assert F.rms_norm(x, (D,)).isfinite().all()
    assert F.dropout(x, 0.1).grad_fn.name() == "MulBackward0"
