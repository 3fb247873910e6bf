"""track_memory(): the peak is the profiler's, kinds add up to the total,
and the program does what it does without."""

import contextlib
import copy
import functools
import pickle
import sys
import threading

import pytest
import torch

import gradckpt
from gradckpt import _memory
from gradckpt._allocations import KINDS, OUTSIDE

WIDTH, ROWS, LAYERS = 64, 256, 4
INPUT = ROWS * WIDTH * 4
PAYLOAD = gradckpt.codecs.encode(torch.zeros(ROWS, WIDTH), "int8").nbytes

#: Of the two products in a layer.
PRODUCTS = sum(gradckpt.codecs.encode(torch.zeros(ROWS, n * WIDTH), "int8").nbytes for n in (1, 4))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self, call=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.call = call or plain

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return x.square().mean()


def plain(layer, x):
    return layer(x)


def saving_products(layer, x):
    contexts = functools.partial(gradckpt.compat.create_selective_checkpoint_contexts, "save_matmuls:int8")
    return gradckpt.checkpoint(layer, x, compress="int8", context_fn=contexts)


CALLS = {
    "plain": plain,
    "torch": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "exact": gradckpt.checkpoint,
    "int8": functools.partial(gradckpt.checkpoint, compress="int8"),
    "node": lambda layer, x: gradckpt.SelectiveRecompute.apply(layer, None, x, compress="int8"),
    "policy": saving_products,
    "saved": lambda layer, x: gradckpt.compress_saved("int8")(layer)(x),
}


def data():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def program(call):
    """A training step, on a model that has taken one."""
    net = Net(CALLS[call])
    optimizer = torch.optim.AdamW(net.parameters())
    x = data().requires_grad_()

    def step():
        loss = net(x * 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None
        return loss.item()

    step()
    return net, step


def profiled(step):
    """The highest sum of what torch's profiler says was allocated and released,
    and how many times it says so."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = highest = 0
    for size in sizes:
        now += size
        highest = max(highest, now)
    return highest, len(sizes)


def at_most(memory, kind):
    return max(getattr(point, kind) for point in memory.timeline)


@functools.cache
def memory_of(call):
    """Of a step."""
    net, step = program(call)
    with gradckpt.track_memory(net) as memory:
        step()
    return memory


# ---- right ----


@pytest.mark.parametrize("call", CALLS)
def test_peak_is_the_profilers_and_kinds_add_up(call):
    net, step = program(call)
    want, events = profiled(step)
    with gradckpt.track_memory(net) as memory:
        step()
    assert memory.peak == want == max(point.total for point in memory.timeline)
    assert len(memory.timeline) == events
    assert all(point.total == sum(point[2:]) and min(point[2:]) >= 0 for point in memory.timeline)
    assert [point.seconds for point in memory.timeline] == sorted(point.seconds for point in memory.timeline)
    assert list(memory.by_kind) == list(KINDS)
    assert sum(memory.by_kind.values()) == sum(memory.by_region.values()) == memory.peak
    assert memory.timeline[-1].total == 0


@pytest.mark.parametrize(
    ("call", "each"), [("exact", INPUT), ("int8", PAYLOAD), ("node", PAYLOAD), ("policy", PAYLOAD)]
)
def test_boundaries_are_what_regions_keep_of_their_inputs(call, each):
    states = LAYERS * torch.get_rng_state().nbytes
    assert 0 <= at_most(memory_of(call), "boundaries") - LAYERS * each <= states


def test_saves_are_what_autograd_and_policies_keep():
    found = {call: at_most(memory_of(call), "saves") for call in CALLS}
    for call in ("plain", "torch", "saved"):
        assert not at_most(memory_of(call), "boundaries")
    one = ROWS * WIDTH * 4
    # The input of a layer (or the sum before it), the input of the gelu and its output.
    assert 9 * LAYERS * one <= found["plain"] <= 9 * LAYERS * one + 2 * one
    assert LAYERS * PRODUCTS <= found["policy"] <= LAYERS * PRODUCTS + 2 * one
    assert found["int8"] <= 2 * one
    assert found["saved"] < found["plain"] / 3
    assert found["torch"] >= LAYERS * one  # of torch's own checkpoint nothing says which inputs it keeps
    _, step = program("torch")
    with gradckpt.track_memory() as memory, gradckpt.patched(None):
        step()
    assert at_most(memory, "boundaries") >= LAYERS * one > at_most(memory, "saves")


def test_a_forward_alone_saves_what_is_alive_at_its_end():
    net = Net(CALLS["policy"])
    x = data().requires_grad_()
    with gradckpt.track_memory() as memory:
        loss = net(x * 1.0)
    last = memory.timeline[-1]
    with gradckpt.track_memory() as evaluated, torch.no_grad():
        kept = net.layers[0](x)
    with gradckpt.track_memory() as built:
        other = Net()
    assert loss.requires_grad
    assert built.timeline[-1].other == sum(p.nbytes for p in other.parameters())
    assert last.boundaries >= LAYERS * PAYLOAD
    assert last.saves >= LAYERS * PRODUCTS
    assert evaluated.timeline[-1].saves == 0
    assert evaluated.timeline[-1].other >= kept.nbytes


def test_gradients_stay_after_the_backward_and_states_of_optimizers_are_other():
    net, x = Net(), data()
    parameters = sum(p.nbytes for p in net.parameters())
    optimizer = torch.optim.AdamW(net.parameters())
    with gradckpt.track_memory() as memory:
        net(x).backward()
        optimizer.step()
    last = memory.timeline[-1]
    assert last.gradients == parameters
    assert 2 * parameters <= last.other <= 2 * parameters + 1000
    assert (last.boundaries, last.saves, last.transient) == (0, 0, 0)
    with gradckpt.track_memory() as memory:
        net(x).backward()  # into gradients that are there
    assert at_most(memory, "gradients") == 0
    with gradckpt.track_memory() as memory:
        net.zero_grad()
        net(x).backward()
        net(x).backward()
        net.zero_grad()
    assert at_most(memory, "gradients") == parameters
    assert memory.timeline[-1].total == 0


def test_what_the_program_holds_beyond_a_backward_is_other():
    net = Net()
    with gradckpt.track_memory() as memory:
        batch = data()
        hidden = net.layers[0](batch)
        hidden.sum().backward()
    assert memory.timeline[-1].other >= batch.nbytes + hidden.nbytes
    assert memory.timeline[-1].saves == 0


def test_a_recompute_is_transient():
    assert at_most(memory_of("exact"), "transient") >= 8 * ROWS * WIDTH * 4  # the layer's two wide tensors


# ---- regions ----


def test_regions_are_modules_in_forward_recompute_and_backward():
    for call in ("plain", "int8"):
        net = Net(CALLS[call])
        with gradckpt.track_memory(net) as memory:
            net(data()).backward()
        names = {name for name, _ in net.named_modules()} | {"Net", OUTSIDE}
        assert memory.by_region.keys() <= names - {""}
        assert sum(size for name, size in memory.by_region.items() if name.startswith("layers.")) > 0.9 * memory.peak
        assert list(memory.by_region.values()) == sorted(memory.by_region.values(), reverse=True)
        assert memory.by_region["layers.0.up"] > 0
    text = str(memory)
    assert "by module:" in text
    assert "layers.*.up" in text


def test_gradients_belong_to_the_module_of_their_parameter():
    net, x = Net(), data()
    with gradckpt.track_memory(net.layers[1]) as memory:
        net(x).backward()
        step = 20 * LAYERS * x.nbytes + sum(p.nbytes for p in net.parameters())
        after = torch.empty(2 * step, dtype=torch.uint8)
    mine = memory.by_region
    assert mine["up"] == sum(p.nbytes for p in net.layers[1].up.parameters())
    assert mine["down"] == sum(p.nbytes for p in net.layers[1].down.parameters())
    assert mine[OUTSIDE] >= after.nbytes


def test_outer_hooks_see_and_unpack_what_they_do_without():
    def hooked(tracked):
        calls = []
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x: calls.append("pack") or x, lambda x: calls.append("unpack") or x
        )
        net, x = Net(CALLS["int8"]), data().requires_grad_()
        with gradckpt.track_memory(net) if tracked else contextlib.nullcontext() as memory:
            with hooks:
                loss = net(x * 1.0)
            loss.backward()
        return calls, memory

    (calls, memory), (without, _) = hooked(True), hooked(False)
    assert calls == without
    assert (at_most(memory, "boundaries"), at_most(memory, "saves") >= LAYERS * PAYLOAD) == (0, True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_scripted_modules_take_no_marks():
    net = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(WIDTH, WIDTH)), torch.nn.Linear(WIDTH, WIDTH))
    x = data()
    with gradckpt.track_memory(net) as memory, torch.no_grad():
        net(x)
    assert memory.by_region.keys() == {"Sequential", "1"}


def test_wrappers_are_no_part_of_a_name_and_without_a_model_there_are_no_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = Net()
    net.layers[0] = checkpoint_wrapper(net.layers[0])
    with gradckpt.track_memory(net) as memory:
        net(data()).backward()
    assert not [name for name in memory.by_region if "wrapped" in name]
    with gradckpt.track_memory() as memory:
        net(data()).backward()
    assert memory.by_region.keys() == {OUTSIDE}
    assert "by module" not in str(memory)


# ---- the program goes on as it was ----


@pytest.mark.parametrize("call", CALLS)
def test_the_program_computes_the_same_and_nothing_is_left_behind(call, monkeypatch):
    (net, step), (_, twin) = program(call), program(call)
    before = [dict(vars(module)) for module in net.modules()]
    with gradckpt.track_memory(net):
        inside = [step() for _ in range(2)]
    assert inside == [twin() for _ in range(2)]
    monkeypatch.setattr(_memory, "mark", lambda text: pytest.fail(text))
    assert step() == twin()
    assert [dict(vars(module)) for module in net.modules()] == before


def test_copies_and_pickles_made_in_the_block_have_no_live_marks():
    net = Net(plain)
    with gradckpt.track_memory(net):
        copied, pickled = copy.deepcopy(net), pickle.dumps(net)
    loaded = pickle.loads(pickled)
    with gradckpt.track_memory() as memory:
        copied(data()).backward()
        loaded(data()).backward()
    assert memory.by_region.keys() == {OUTSIDE}


def test_an_exception_arrives_and_what_was_recorded_is_there():
    net = Net()
    memory = gradckpt.track_memory(net)
    with pytest.raises(ZeroDivisionError), memory:
        kept = net.layers[0](data())
        raise ZeroDivisionError
    assert memory.peak >= kept.nbytes
    with memory:  # and once more
        pass
    assert memory.peak == 0


def test_a_module_that_raises_is_left():
    net = Net()
    with gradckpt.track_memory(net) as memory:
        with pytest.raises(RuntimeError):
            net(torch.randn(3, 5))
        kept = torch.empty(1 << 20)
    assert memory.by_region[OUTSIDE] >= kept.nbytes


def test_a_block_that_does_nothing():
    with gradckpt.track_memory() as memory:
        pass
    assert (memory.peak, memory.seconds, memory.timeline, memory.devices) == (0, 0.0, [], {})
    assert memory.by_kind == dict.fromkeys(KINDS, 0)
    assert memory.by_region == {}
    assert str(memory) == "nothing was allocated"


def test_allocations_of_other_threads_are_not_seen():
    kept = []
    with gradckpt.track_memory() as memory:
        thread = threading.Thread(target=lambda: kept.append(torch.empty(1 << 20)))
        thread.start()
        thread.join()
        kept.append(torch.empty(1000))
    assert memory.peak == 4000


@pytest.mark.parametrize("first", ["compiled before", "compiled in the block"])
def test_compiled_code_runs_as_it_is(first, recwarn):
    from torch._dynamo.testing import CompileCounterWithBackend

    net, x = Net(CALLS["int8"]), data()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    if first == "compiled before":
        compiled(x).backward()
    net.zero_grad()
    with gradckpt.track_memory(compiled) as memory:
        compiled(x).backward()
        compiled(x).backward()
    assert counter.frame_count == 1
    assert at_most(memory, "gradients") == sum(p.nbytes for p in net.parameters())
    compiled(x).backward()
    assert counter.frame_count == (1 if first == "compiled before" else 2)
    assert not [w for w in recwarn if "global hooks" in str(w.message)]


# ---- what is refused ----


def test_an_active_profiler_keeps_its_events():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with pytest.raises(RuntimeError, match="inside a torch profiler"):
            gradckpt.track_memory().__enter__()
        torch.ones(3).sum()
    assert "aten::sum" in {event.key for event in profile.key_averages()}
    with gradckpt.track_memory() as memory:
        torch.empty(1000)
    assert memory.peak == 4000


def test_one_block_at_a_time():
    found = []

    def other():
        with pytest.raises(RuntimeError) as raised:
            gradckpt.track_memory().__enter__()
        found.append(str(raised.value))

    with gradckpt.track_memory() as memory:
        other()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        torch.empty(1000)
    assert len(found) == 2
    assert memory.peak == 4000


def test_a_profiler_inside_is_told_of():
    def profile():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.empty(1000)

    with pytest.raises(RuntimeError, match="took its events"), gradckpt.track_memory():
        profile()
    with pytest.raises(ZeroDivisionError), gradckpt.track_memory():
        profile()
        raise ZeroDivisionError
    with gradckpt.track_memory() as memory:
        torch.empty(1000)
    assert memory.peak == 4000


def test_what_is_no_model_and_what_is_no_result_yet():
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not str"):
        gradckpt.track_memory("int8")
    memory = gradckpt.track_memory()
    with pytest.raises(RuntimeError, match="read it after the block"):
        memory.peak  # noqa: B018
    with memory, pytest.raises(RuntimeError, match="read it after the block"):
        str(memory)


# ---- shown ----


def test_the_table_and_the_picture(tmp_path, monkeypatch):
    net, step = program("int8")
    with gradckpt.track_memory(net) as memory:
        step()
    lines = str(memory).splitlines()
    assert lines[0].startswith(f"cpu: peak {memory.peak / 2**20:.2f} MiB above the start of the block, at ")
    assert [line.split()[0] for line in lines[1:4]] == ["by", "boundaries", "transient"]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        memory.plot(tmp_path / "none.png")
    monkeypatch.undo()
    figure = pytest.importorskip("matplotlib.figure").Figure()
    memory.plot(tmp_path / "memory.svg")
    drawn = (tmp_path / "memory.svg").read_text()
    assert "<svg" in drawn
    with gradckpt.track_memory() as nothing:
        pass
    nothing.plot(str(tmp_path / "nothing.png"))
    gradckpt.track_memory.compare({"a step": memory, "nothing": nothing}, str(tmp_path / "compared.svg"))
    axes = figure.add_subplot()
    gradckpt.track_memory.compare({"a step": memory, "nothing": nothing}, axes)
    named = [line for line in axes.lines if line.get_label() == "a step"]
    assert max(named[0].get_ydata()) * 2**20 == memory.peak
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("nothing.png", "compared.svg"))
