"""Codec work that is done together: the arguments of a region, neighbours on a device."""

import ctypes
import shutil
import subprocess

import pytest
import torch
from checkout import CODEC, CSRC
from codec_libraries import FLAGS, NUMBERS, Bytes, How, Tensor
from processes import in_threads
from torch.utils import _pytree

import gradckpt

INT8 = {"codec": "int8", "min_numel": 1}
# Inputs are looked at afterwards; which test has the second backward, in which that counts,
# others decide.
pytestmark = pytest.mark.filterwarnings("ignore:.*compression costs memory")


# ---- the arguments of a region ----


def restored(x):
    return gradckpt.codecs.encode(x.detach(), "int8").decode()


def inputs(n, numel=300):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(numel, generator=generator).requires_grad_() * 1 for _ in range(n)]


def seen_by_backward(function, *args):
    """What the recompute gets for the tensors among args:
    they are what exp() is differentiated at."""
    out = gradckpt.checkpoint(function, *args, compress=INT8)
    tensors = [x for x in _pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
    return [g.log() for g in torch.autograd.grad(out.sum(), tensors)]


def exp_of_all(*args):
    return sum(x.exp() for x in _pytree.tree_leaves(args) if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("n", [1, 2, 16, 17, 40])
def test_each_argument_gets_its_own_values(n):
    xs = inputs(n)
    gradckpt.stats.reset()
    for x, got in zip(xs, seen_by_backward(exp_of_all, *xs), strict=True):
        torch.testing.assert_close(got, restored(x), rtol=0, atol=1e-5)
    assert gradckpt.stats()["compressed"] == n


class Pair:
    """A container of the user. `looks`: called when one is taken apart; `found`:
    sums of those put together."""

    looks, found = None, []

    def __init__(self, a, b):
        self.a, self.b = a, b

    @staticmethod
    def flatten(pair):
        if Pair.looks:
            Pair.looks()
        return [pair.a, pair.b], None

    @staticmethod
    def unflatten(leaves, _):
        a, b = leaves
        if isinstance(a, torch.Tensor):
            Pair.found.append((a.sum().item(), b.sum().item()))
        return Pair(a, b)


_pytree.register_pytree_node(Pair, Pair.flatten, Pair.unflatten)


@pytest.fixture
def _pair():
    yield
    Pair.looks, Pair.found = None, []


@pytest.mark.usefixtures("_pair")
def test_containers_are_put_together_from_finished_values():
    x, a, b = inputs(3)
    out = gradckpt.checkpoint(lambda x, pair: x.exp() + pair.a.exp() * pair.b, x, Pair(a, b), compress=INT8)
    Pair.found.clear()
    torch.autograd.grad(out.sum(), x)
    assert Pair.found == [(restored(a).sum().item(), restored(b).sum().item())]


@pytest.mark.usefixtures("_pair")
def test_an_argument_that_fails_leaves_no_payload_without_bytes():
    x, a, b = inputs(3)

    def fail():
        raise ZeroDivisionError

    Pair.looks = fail
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            gradckpt.checkpoint(exp_of_all, x, Pair(a, b), compress=INT8)
    Pair.looks = None
    torch.testing.assert_close(seen_by_backward(exp_of_all, x)[0], restored(x), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("_pair")
def test_bytes_that_are_not_there_yet_are_not_shared():
    """While one thread still looks at its second argument,
    another one's region takes the first, too."""
    x, a, b = inputs(3)
    results = []

    def meanwhile():
        Pair.looks = None
        in_threads(lambda: results.append(seen_by_backward(exp_of_all, x)[0]))

    Pair.looks = meanwhile
    out = gradckpt.checkpoint(lambda x, pair: x.exp() + pair.a, x, Pair(a, b), compress=INT8)
    torch.testing.assert_close(results[0], restored(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], restored(x).exp())


# ---- neighbours on a device ----

STUBS = """
#include "codec/format/codecs.h"
#include "gradckpt.h"

/* What was called: host work -1, device work the number of tensors. */
int calls[64], ncalls, failing;

static int encode_host(const gck_tensor *x, gck_bytes p, const gck_how *how, int64_t first, int64_t last)
{
    (void)x, (void)p, (void)how, (void)first, (void)last;
    calls[ncalls++] = -1;
    return GCK_OK;
}
static void decode_host(gck_bytes p, const gck_tensor *out, int64_t first, int64_t last)
{
    (void)encode_host(out, p, NULL, first, last);
}
static int device(const gck_tensor *x, int n)
{
    for (int i = 0; i < n; i++) {
        if (x[i].numel == 0 || x[i].device != x->device || x[i].stream != x->stream) {
            return 99;
        }
    }
    calls[ncalls++] = n;
    return ncalls == failing ? 77 : GCK_OK;
}
static int encode(const gck_tensor *x, const gck_bytes *p, const gck_how *how, int n)
{
    return p[0].codes != x[0].data || (how != NULL && how->overflow != x[0].data) ? 98 : device(x, n);
}
static int decode(const gck_bytes *p, const gck_tensor *out, int n)
{
    return p[0].codes != out[0].data || (char *)p[0].scales != (char *)p[0].codes + 1 ? 98 : device(out, n);
}
#define DEFINE(_, name, id, ...)                                                                               \\
    const gck_codec gck_codec_##name = {#name, "", GCK_BIT(GCK_BF16), 0.0, {{0}}, NULL, 128, id == 1, 0,         \\
                                        encode_host, decode_host, encode, decode};
GCK_CODECS(DEFINE, DEFINE, _)

/* A kind of device whose kernels are the codecs' own. */
static int encode_of(const gck_codec *codec, const gck_tensor *x, const gck_bytes *p, const gck_how *how, int n)
{
    return codec->encode(x, p, how, n);
}
static int decode_of(const gck_codec *codec, const gck_bytes *p, const gck_tensor *out, int n)
{
    return codec->decode(p, out, n);
}
static const gck_device_kind kind = {.name = "stub", .encode = encode_of, .decode = decode_of};
const gck_device_kind *gck_device_kind_at(int number) { return number == 0 ? &kind : NULL; }
int gck_overflow_listen(const gck_tensor *x, const gck_how *how, int n) { return (void)x, (void)how, (void)n, GCK_OK; }
const char *gck_cuda_error(int status) { return (void)status, ""; }

int run(const gck_tensor *x, const gck_bytes *payloads, const gck_how *how, int n, int decodes)
{
    const gck_codec *codec = gck_codec_find("fp8_e4m3");

    ncalls = 0;
    return decodes ? gck_decode_many(codec, payloads, x, n, NULL)
                   : gck_encode_many(codec, x, payloads, how, n, NULL);
}
"""


class Stubs:
    def __init__(self, folder):
        (folder / "stubs.c").write_text(STUBS)
        command = [shutil.which("gcc"), *FLAGS, f"-I{CSRC}", "-shared", folder / "stubs.c", CODEC / "codec.c"]
        subprocess.run([*command, "-o", folder / "stubs.so"], check=True)
        self.library = ctypes.CDLL(str(folder / "stubs.so"))

    def run(self, tensors, failing=0, dtype="bfloat16"):
        """tensors: (device, stream, numel). The calls of encoding,
        which those of decoding must equal; the status."""
        n = len(tensors)
        views = (Tensor * n)(
            *(
                Tensor(8 * i + 8, numel, 0, None, None, None, NUMBERS[dtype], device, stream)
                for i, (device, stream, numel) in enumerate(tensors)
            )
        )
        payloads = (Bytes * n)(*(Bytes(8 * i + 8, 8 * i + 9) for i in range(n)))
        hows = (How * n)(*(How(None, 8 * i + 8) for i in range(n)))
        ctypes.c_int.in_dll(self.library, "failing").value = failing
        results = []
        for how, decodes in ((None, 0), (hows, 0), (None, 1)):
            status = self.library.run(views, payloads, how, n, decodes)
            ncalls = ctypes.c_int.in_dll(self.library, "ncalls").value
            results.append((list((ctypes.c_int * 64).in_dll(self.library, "calls"))[:ncalls], status))
        assert results[0] == results[1] == results[2]
        return results[0]


@pytest.fixture(scope="module")
def stubs(tmp_path_factory):
    return Stubs(tmp_path_factory.mktemp("stubs"))


HOST = (-1, None)
#: (device, stream, numel) of each tensor, and the calls.
TENSORS = {
    "one": ([(0, 1, 5)], [1]),
    "many": ([(0, 1, 5)] * 40, [40]),
    "by device and stream": ([(0, 1, 5), (0, 1, 6), (0, 2, 5), (1, 2, 5), (1, 2, 5), (1, 2, 5)], [2, 1, 3]),
    "host and device": ([(*HOST, 5), (*HOST, 6), (0, 1, 5), (*HOST, 5), (0, 1, 5)], [-1, -1, 1, -1, 1]),
    "none": ([], []),
    "an empty one": ([(0, 1, 0)], []),
    "empty ones between": ([(*HOST, 0), (0, 1, 0), (0, 1, 3), (0, 1, 0), (0, 1, 3), (0, 1, 3)], [1, 2]),
}


@pytest.mark.parametrize("name", TENSORS)
def test_neighbours_on_one_device_and_stream_go_together(stubs, name):
    tensors, calls = TENSORS[name]
    assert stubs.run(tensors) == (calls, 0)


def test_a_failure_ends_it_and_a_wrong_dtype_begins_nothing(stubs):
    assert stubs.run([(0, 1, 5), (1, 1, 5), (2, 1, 5)], failing=2) == ([1, 1], 77)
    assert stubs.run([(0, 1, 5), (*HOST, 5)], dtype="float32") == ([], -1)
