"""The virtual device computes as the CPU does."""

import copy
import io
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def long(values, like):
    return torch.tensor(values, device=like.device)


def set_items(x):
    y = x.clone()
    y[0] = 5
    y[:, 1].mul_(3)
    y[y > 1] = 0
    return y


def running(x, w, b):
    return F.batch_norm(x, torch.zeros(4, device=x.device), torch.ones(4, device=x.device), w, b, training=True)


def into_out(x):
    with torch.no_grad():
        out = torch.empty(0, device=x.device)
        torch.mul(x, 2, out=out)
    return x + out


Q = (2, 2, 5, 8)
#: name -> function, shapes of its arguments
OPERATORS = {
    "add": (lambda x, y: x + 2 * y, (3, 4), (4,)),
    "mul": (lambda x, y: x * y, (3, 4), (3, 1)),
    "div": (lambda x, y: x / (y.abs() + 1), (3, 4), (3, 4)),
    "pow": (lambda x: x.abs().pow(1.5), (3, 4)),
    "exp": (torch.exp, (3, 4)),
    "log": (lambda x: x.abs().log1p(), (3, 4)),
    "sqrt": (lambda x: (x.abs() + 1).sqrt(), (3, 4)),
    "rsqrt": (lambda x: (x.abs() + 1).rsqrt(), (3, 4)),
    "tanh": (torch.tanh, (3, 4)),
    "sigmoid": (torch.sigmoid, (3, 4)),
    "relu": (F.relu, (3, 4)),
    "gelu": (F.gelu, (3, 4)),
    "silu": (F.silu, (3, 4)),
    "leaky_relu": (F.leaky_relu, (3, 4)),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), (3, 4)),
    "where": (lambda x: torch.where(x > 0, x, 0.0), (3, 4)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, -1.0), (3, 4)),
    "matmul": (torch.matmul, (3, 4), (4, 5)),
    "bmm": (torch.bmm, (2, 3, 4), (2, 4, 5)),
    "addmm": (torch.addmm, (5,), (3, 4), (4, 5)),
    "linear": (F.linear, (2, 3, 4), (5, 4), (5,)),
    "einsum": (lambda x, y: torch.einsum("bij,kj->bik", x, y), (2, 3, 4), (5, 4)),
    "outer": (torch.outer, (3,), (4,)),
    "sum": (lambda x: x.sum(0), (3, 4)),
    "mean": (lambda x: x.mean(-1, keepdim=True), (3, 4)),
    "var": (lambda x: x.var(0), (3, 4)),
    "norm": (lambda x: x.norm(), (3, 4)),
    "max": (lambda x: x.max(1)[0], (3, 4)),
    "amax": (lambda x: x.amax(0), (3, 4)),
    "cumsum": (lambda x: x.cumsum(1), (3, 4)),
    "logsumexp": (lambda x: x.logsumexp(0), (3, 4)),
    "softmax": (lambda x: x.softmax(-1), (3, 4)),
    "log_softmax": (lambda x: x.log_softmax(-1), (3, 4)),
    "sort": (lambda x: x.sort(descending=True)[0], (3, 4)),
    "topk": (lambda x: x.topk(2)[0], (3, 4)),
    "gather": (lambda x: x.gather(1, long([[0, 1], [2, 0], [3, 3]], x)), (3, 4)),
    "scatter_add": (lambda x, y: x.scatter_add(0, long([[0, 1, 2, 0]], x), y), (3, 4), (1, 4)),
    "index": (lambda x: x[long([0, 2, 2], x)], (3, 4)),
    "index by the host's": (lambda x: x[torch.tensor([0, 2, 2])], (3, 4)),
    "index by a mask": (lambda x: x[x > 0], (3, 4)),
    "index_select": (lambda x: x.index_select(1, long([3, 0], x)), (3, 4)),
    "set items": (set_items, (3, 4)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (3, 4), (3, 2)),
    "stack": (lambda x, y: torch.stack([x, y]), (3, 4), (3, 4)),
    "split": (lambda x: torch.stack(x.chunk(2)) * 2, (4, 4)),
    "transpose": (lambda x: x.t().reshape(2, 6), (3, 4)),
    "permute": (lambda x: x.permute(2, 0, 1).contiguous() * 2, (2, 3, 4)),
    "expand": (lambda x: x[:, None].expand(3, 5, 4) * 2, (3, 4)),
    "unfold": (lambda x: x.unfold(0, 2, 1) * 2, (6,)),
    "flip": (lambda x: x.flip(0), (3, 4)),
    "roll": (lambda x: x.roll(1, 0), (3, 4)),
    "tril": (torch.tril, (4, 4)),
    "diagonal": (lambda x: x.diagonal() * 2, (4, 4)),
    "pad": (lambda x: F.pad(x, (1, 2)), (3, 4)),
    "inverse": (lambda x: torch.linalg.inv(x + 4 * torch.eye(4, device=x.device)), (4, 4)),
    "out": (into_out, (3, 4)),
    "bfloat16": (lambda x: (x.bfloat16() @ x.bfloat16().t()).float(), (4, 4)),
    "float64": (lambda x: (x.double() * 2).float(), (4, 4)),
    "complex": (lambda x: torch.fft.fft(x).conj().real, (8,)),
    "conjugate": (lambda x: torch.view_as_real(torch.fft.fft(x).conj().clone()), (8,)),
    "a gradient of zeros": (lambda x: x.sgn() + x, (3, 4)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (3, 8), (8,), (8,)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), (3, 8), (8,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 5, 5), (4,), (4,)),
    "batch_norm": (running, (2, 4, 5, 5), (4,), (4,)),
    "conv1d": (F.conv1d, (2, 3, 9), (4, 3, 3), (4,)),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 3, 8, 8), (4, 3, 3, 3), (4,)),
    "conv2d in groups": (lambda x, w: F.conv2d(x, w, groups=2), (2, 4, 8, 8), (4, 2, 3, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 3, 8, 8), (3, 4, 3, 3), (4,)),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), (1, 2, 4, 4)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (1, 2, 4, 4)),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (1, 2, 4, 4)),
    "attention": (F.scaled_dot_product_attention, Q, Q, Q),
    "causal attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), Q, Q, Q),
    "embedding": (lambda w: F.embedding(long([[1, 2], [3, 1]], w), w), (5, 8)),
    "embedding_bag": (lambda w: F.embedding_bag(long([[0, 1], [2, 2]], w), w), (4, 8)),
    "cross_entropy": (lambda x: F.cross_entropy(x, long([1, 0, 2], x)), (3, 5)),
    "mse_loss": (F.mse_loss, (3, 4), (3, 4)),
    "dropout": (lambda x: F.dropout(x, 0.5), (50, 50)),
    "rrelu": (lambda x: F.rrelu(x, training=True), (5, 5)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_as_the_cpu(name):
    function, *shapes = OPERATORS[name]
    torch.manual_seed(0)
    here = [torch.randn(shape, requires_grad=True) for shape in shapes]
    there = [x.detach().to("virtual").requires_grad_() for x in here]
    torch.manual_seed(1)
    want = function(*here)
    torch.manual_seed(1)
    got = function(*there)
    assert got.device == torch.device("virtual:0")
    assert got.stride() == want.stride()
    torch.testing.assert_close(got.cpu(), want)
    want.pow(2).sum().backward()
    got.pow(2).sum().backward()
    for x, y in zip(here, there, strict=True):
        assert y.grad.device == torch.device("virtual:0")
        torch.testing.assert_close(y.grad.cpu(), x.grad)


def test_views_share_memory():
    x = torch.zeros(4, 6, device="virtual")
    x.t()[1].fill_(1)
    x.view(-1)[0] = 2
    x[2:, 3:].add_(3)
    x.unfold(1, 2, 2)[3, 0].mul_(2)
    y = torch.zeros(4, 6)
    y.t()[1].fill_(1)
    y.view(-1)[0] = 2
    y[2:, 3:].add_(3)
    y.unfold(1, 2, 2)[3, 0].mul_(2)
    assert torch.equal(x.cpu(), y)
    assert x.t().untyped_storage().data_ptr() == x.untyped_storage().data_ptr() == x.data_ptr()


def test_in_place_is_the_same_tensor():
    x = torch.ones(3, device="virtual")
    before = x._version
    assert x.add_(1) is x
    assert x._version == before + 1
    assert torch.add(x, 1, out=x) is x
    assert x.tolist() == [3, 3, 3]


def test_out_is_resized():
    out = torch.empty(0, device="virtual")
    torch.arange(100, out=out)
    assert torch.equal(out.cpu(), torch.arange(100.0))
    out = torch.empty(5, device="virtual")[:0]
    torch.add(torch.ones(3, 2, device="virtual"), 1, out=out)
    assert out.tolist() == [[2, 2], [2, 2], [2, 2]]


def test_storages_are_resized():
    x = torch.arange(8.0, device="virtual")
    storage = x.untyped_storage()
    storage.resize_(16)
    assert storage.nbytes() == 16
    storage.resize_(32)
    assert x[:4].tolist() == [0, 1, 2, 3]
    assert x[4:].isnan().all()
    storage.resize_(0)
    assert x.data_ptr() == 0
    y = torch.empty(0, device="virtual").set_(torch.ones(4, 2, device="virtual"))
    assert y.sum().item() == 8
    assert y.resize_(2, 2).shape == (2, 2)


def test_new_memory_is_not_a_number():
    assert torch.empty(1000, device="virtual").isnan().all()
    x = torch.ones(1000, device="virtual")
    at = x.data_ptr()
    del x
    y = torch.empty(1000, device="virtual")
    assert y.data_ptr() == at
    assert y.isnan().all()


def test_devices_are_not_mixed():
    x, y = torch.ones(3, 3, device="virtual"), torch.ones(3, 3, device="virtual:1")
    for wrong in (
        lambda: x + y,
        lambda: x + torch.ones(3, 3),
        lambda: torch.ones(3, 3) @ x,
        lambda: torch.cat([x, y]),
        lambda: torch.cat([x, torch.ones(3, 3)]),
        lambda: torch.add(x, 1, out=torch.empty(3, 3)),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            wrong()
    assert (x + torch.tensor(1.0)).sum().item() == 18
    assert (torch.tensor(1.0) + x).device == x.device


def test_two_devices():
    x = torch.arange(4.0, device="virtual:1", requires_grad=True)
    y = x.to("virtual:0") * 2
    z = y.to("virtual:1") + x
    assert (x.device.index, y.device.index, z.device.index) == (1, 0, 1)
    z.sum().backward()
    assert x.grad.tolist() == [3, 3, 3, 3]
    assert torch.virtual.current_device() == 0
    with torch.virtual.device(1):
        assert torch.empty(1, device="virtual").device.index == 1
        assert torch.accelerator.current_device_index() == 1
    assert torch.empty(1, device="virtual").device.index == 0


def test_random_numbers_are_the_seeds():
    before = torch.get_rng_state()
    torch.virtual.manual_seed(3)
    state = torch.virtual.get_rng_state()
    first = [torch.rand(5, device="virtual"), torch.randn(5, device="virtual"), torch.randperm(9, device="virtual")]
    first += [F.dropout(first[0], 0.5), torch.rand_like(first[0]), first[0].softmax(0).multinomial(3)]
    first += [F.rrelu(first[1], training=True), torch.native_dropout(first[1], 0.5, True)[0]]
    torch.virtual.set_rng_state(state)
    again = [torch.rand(5, device="virtual"), torch.randn(5, device="virtual"), torch.randperm(9, device="virtual")]
    again += [F.dropout(again[0], 0.5), torch.rand_like(again[0]), again[0].softmax(0).multinomial(3)]
    again += [F.rrelu(again[1], training=True), torch.native_dropout(again[1], 0.5, True)[0]]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], torch.rand(5, device="virtual"))
    assert torch.equal(before, torch.get_rng_state())
    torch.virtual.set_rng_state(state)
    other = torch.rand(5, device="virtual:1")
    assert torch.equal(torch.virtual.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(torch.virtual.get_rng_state(), state)
    generator = torch.Generator("virtual:1").manual_seed(3)
    torch.virtual.default_generators[1].manual_seed(3)
    assert torch.equal(torch.rand(5, device="virtual:1", generator=generator), torch.rand(5, device="virtual:1"))
    assert other.device.index == 1


def test_seeds_of_all():
    torch.manual_seed(5)
    first = torch.rand(3, device="virtual:1")
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3, device="virtual:1"))
    with torch.random.fork_rng(device_type="virtual"):
        torch.rand(3, device="virtual:1")
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3, device="virtual:1"))


def test_backward_runs_in_the_threads_of_its_devices():
    names = {}

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            names.setdefault(grad.device.index, threading.get_ident())
            return grad * 1

    x = torch.ones(3, device="virtual:0", requires_grad=True)
    Note.apply(Note.apply(x).to("virtual:1")).sum().backward()
    assert x.grad.tolist() == [1, 1, 1]
    assert len({names[0], names[1], threading.get_ident()}) == 3


def test_a_model_trains_as_on_the_cpu():
    torch.manual_seed(0)
    layers = (
        torch.nn.Linear(8, 16),
        torch.nn.LayerNorm(16),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(16, 8),
    )
    here = torch.nn.Sequential(*layers)
    there = copy.deepcopy(here).to("virtual")
    x = torch.randn(4, 8)
    for make in (torch.optim.SGD, torch.optim.AdamW, lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)):
        for model, where in ((here, "cpu"), (there, "virtual")):
            optimizer = make(model.parameters(), lr=0.1)
            for step in range(3):
                torch.manual_seed(step)
                checkpoint(model, x.to(where), use_reentrant=False).pow(2).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(here.parameters(), there.parameters(), strict=True):
            torch.testing.assert_close(b.cpu(), a)
    file = io.BytesIO()
    torch.save(there.state_dict(), file)
    file.seek(0)
    assert torch.load(file)["0.weight"].device == torch.device("virtual:0")


def test_autocast():
    x = torch.randn(4, 4, device="virtual", requires_grad=True)
    with torch.autocast("virtual", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        assert F.linear(x, x).dtype == torch.bfloat16
        assert F.conv1d(x[None], x[:, :, None]).dtype == torch.bfloat16
        assert F.scaled_dot_product_attention(x[None], x[None], x[None]).dtype == torch.bfloat16
        assert F.layer_norm(x.bfloat16(), (4,)).dtype == torch.float32
        assert F.softmax(x @ x, -1).dtype == torch.float32
        assert torch.cat([x, x @ x]).dtype == torch.float32
        assert (x + x).dtype == torch.float32
        F.linear(x, x).sum().backward()
    assert x.grad.dtype == torch.float32
    assert (x @ x).dtype == torch.float32


def test_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device("virtual")
    assert torch.accelerator.device_count() == torch.virtual.device_count() == 2
    assert torch.get_device_module("virtual") is torch.virtual
    torch.virtual.empty_cache()
    torch.virtual.reset_peak_memory_stats()
    before, reserved = torch.virtual.memory_allocated(), torch.virtual.memory_reserved()
    x = torch.empty(1 << 20, device="virtual")
    assert torch.virtual.memory_allocated() == before + x.nbytes
    assert torch.virtual.memory_reserved() >= reserved + x.nbytes
    peak = torch.virtual.max_memory_allocated()
    del x
    assert torch.virtual.memory_allocated() == before
    assert torch.virtual.max_memory_allocated() == peak == before + (4 << 20)
    torch.virtual.empty_cache()
    assert torch.virtual.memory_reserved() == reserved


def test_out_of_memory():
    with pytest.raises(torch.OutOfMemoryError, match="virtual out of memory"):
        torch.empty(1 << 40, device="virtual")


def test_pinned_memory():
    assert torch.ones(4).pin_memory().is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()
    assert not torch.ones(4).is_pinned()
