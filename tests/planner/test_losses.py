"""gradckpt._planning.libraries: losses without all logits, beside those of their libraries."""

import inspect
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradckpt._planning import libraries
from gradckpt._planning.simulation import SimulationMode
from gradckpt._planning.step_trace import trace_step

TOKENS, WORDS, WIDTH = 9000, 128256, 4096

#: dtype, whether the head is trained, whether autocast is on.
FORMS = [
    (torch.bfloat16, False, False),
    (torch.bfloat16, True, False),
    (torch.float32, False, True),
    (torch.float32, True, True),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", libraries.LOSSES)
def test_loss_and_gradients_are_cross_entropys(name, bias, monkeypatch):
    monkeypatch.setattr(libraries, "_TRL_TOKENS", 16)  # several tiles
    monkeypatch.setattr(libraries, "_TRL_WORDS", 32)
    torch.manual_seed(0)
    head = nn.Linear(24, 100, bias=bias)
    hidden = torch.randn(3, 21, 24, requires_grad=True)
    labels = torch.randint(0, 100, (3, 21))
    labels[0, 5:9] = -100
    expected = F.cross_entropy(head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    found = libraries.LOSSES[name].of(hidden, head, labels)
    torch.testing.assert_close(found, expected)
    inputs = [hidden, *head.parameters()]
    torch.testing.assert_close(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs))


def simulated_peak(function, dtype, trained, mixed):
    """Bytes of a step of (hidden, weight, labels) -> loss."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(WORDS, WIDTH, dtype=dtype, device="meta"), requires_grad=trained)
    hidden = torch.empty(TOKENS, WIDTH, dtype=dtype, device="meta").requires_grad_()

    def run(batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = function(batch[0], model.weight, batch[1])
        loss.backward()

    return trace_step(model, run, (hidden, torch.zeros(TOKENS, dtype=torch.long)), cuda=True).peak().size


class _Nothing:
    """A kernel of Triton that does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


@pytest.mark.parametrize(("dtype", "trained", "mixed"), FORMS)
def test_memory_is_trls(dtype, trained, mixed, monkeypatch):
    """Its own function, simulated as it runs on CUDA: kernels fold tiles where they lie."""
    trl = pytest.importorskip("trl.kernels.chunked_logprob")
    monkeypatch.setattr(trl, "_use_triton", lambda device: True)
    monkeypatch.setattr(trl, "triton", types.SimpleNamespace(cdiv=lambda a, b: -(-a // b)), raising=False)
    monkeypatch.setattr(trl, "_forward_kernel", _Nothing())
    monkeypatch.setattr(trl, "_backward_kernel", _Nothing())
    monkeypatch.setattr(trl, "_addmm_fp32", lambda total, a, b: total.addmm_(*libraries._of_one_dtype(total, a, b)))
    outputs = ("log_probs", "entropy", "is_top1")

    def theirs(hidden, weight, labels):
        return trl.ChunkedLogProbFunction.apply(hidden, weight, None, labels, 1.0, 32768, None, 1.0, outputs)[0].sum()

    def ours(hidden, weight, labels):
        return libraries._TrlFunction.apply(hidden, weight, None, labels).sum()

    expected = simulated_peak(theirs, dtype, trained, mixed)
    assert simulated_peak(ours, dtype, trained, mixed) == pytest.approx(expected, rel=0.002)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_torchs(dtype, trained, monkeypatch):
    """Its own loop in a simulated step, told that it is on CUDA."""
    module = pytest.importorskip("torch.nn.modules.linear_cross_entropy")
    name = "_linear_cross_entropy_batch_chunked_accumulator"
    if not hasattr(module, name):
        pytest.skip("this torch computes it in another function")
    source = inspect.getsource(module).replace('device.type == "cuda"', "True").partition("@torch.library.custom_op")[0]
    on_cuda = types.ModuleType("on_cuda")
    monkeypatch.setitem(sys.modules, "on_cuda", on_cuda)
    exec(compile(source, "on_cuda", "exec"), vars(on_cuda))

    def mm(self, a, b, *, out):
        one = torch.empty(1, dtype=out.dtype)
        torch.mm(*((a, b) if a.dtype == out.dtype else (one.expand(a.shape), one.expand(b.shape))), out=out)

    on_cuda._ChunkContext.mm = mm
    chosen = torch.nn.LinearCrossEntropyOptions()._adjust(
        num_batches=TOKENS, in_features=WIDTH, num_classes=WORDS, dtype=dtype, device=torch.device("cuda")
    )
    how = (chosen.batch_chunk_size, chosen.acc_policy, torch.float32)
    assert how[1] == "compact"
    context = types.SimpleNamespace(needs_input_grad=(True, trained, False))

    def peak(function):
        mode = SimulationMode(device_is_cpu=False)
        hidden, weight = (mode.like(torch.empty(n, WIDTH, dtype=dtype, device="meta")) for n in (TOKENS, WORDS))
        with mode, torch.no_grad():
            function(hidden, weight, torch.zeros(TOKENS, dtype=torch.long))
        now = highest = 0
        for event in mode.events:
            now += event.size
            highest = max(highest, now)
        return highest

    expected = peak(
        lambda hidden, weight, labels: getattr(on_cuda, name)(
            hidden, weight, labels, None, None, "mean", -100, 0.0, *how, True, trained, False
        )
    )
    found = peak(lambda hidden, weight, labels: libraries._TorchFunction.forward(context, hidden, weight, None, labels))
    assert found == pytest.approx(expected, rel=0.003)


def test_memory_of_ligers_is_arithmetic():
    """Gradients of the input and the head, and the logits of a chunk, 512 of 9,000 tokens."""
    chunk = 512
    assert chunk * WORDS <= 2 * TOKENS * WIDTH
    logits, gradients = 2 * chunk * WORDS, 2 * TOKENS * WIDTH

    def ours(hidden, weight, labels):
        return libraries._LigerFunction.apply(hidden, weight, None, labels)

    assert simulated_peak(ours, torch.bfloat16, False, False) == pytest.approx(logits + gradients, rel=0.01)
    whole = logits + gradients + 2 * WORDS * WIDTH
    assert simulated_peak(ours, torch.bfloat16, True, False) == pytest.approx(whole, rel=0.01)


def test_one_dtype_for_torchs():
    head = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="takes one dtype, and the hidden states"):
        libraries.LOSSES["torch"].of(
            torch.zeros(1, 4, 8, dtype=torch.bfloat16), head, torch.zeros(1, 4, dtype=torch.long)
        )
