"""What stays alive, until when: graphs without the garbage collector, recomputed tensors,
saved ones read by hand."""

import contextlib
import gc
import weakref

import pytest
import torch
from behaviours import OURS, behaviour, leaf
from torch.multiprocessing.reductions import StorageWeakRef


class Watch:
    """Weak references by name; ``look`` logs which objects are gone,
    and of tensors whose memory is."""

    def __init__(self, run):
        self.run, self.refs, self.memory = run, {}, {}

    def __call__(self, name, thing):
        self.refs[name] = weakref.ref(thing)
        if isinstance(thing, torch.Tensor):
            self.memory[name] = StorageWeakRef(thing.untyped_storage())
        return thing

    def look(self, when):
        gone = {name: ref() is None for name, ref in self.refs.items()}
        self.run.log(when, gone, {name: ref.expired() for name, ref in self.memory.items()})


@pytest.fixture(autouse=True)
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Function:
    """A callable that can be weakly referenced."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


@pytest.mark.parametrize("how", ["backward", "dropped", "failed", "partly", "retained"])
@behaviour
def test_graph_dies(run, how):
    watch = Watch(run)
    function = watch("function", Function(lambda t, u, *, k: (t.sin().exp() * u, t.cos().tanh() * k)))
    x, k = watch("x", leaf(4) * 1), watch("k", leaf(4) * 1)
    a, b = run.checkpoint(function, x, watch("u", torch.ones(4)), k=k)
    a.grad_fn.metadata["dies with the node"] = watch("node", Function(None))
    del function
    watch.look("after the forward")
    if how == "backward":
        (a + b).sum().backward()
    elif how == "failed":
        with pytest.raises(RuntimeError):
            a.sum().backward(torch.ones(3))
    elif how == "partly":
        a.sum().backward()
        watch.look("after a part")
    elif how == "retained":
        (a + b).sum().backward(retain_graph=True)
    watch.look("after the backward")
    del a, b
    watch.look("without the results")
    del x, k
    watch.look("without anything")


@behaviour
def test_nested_graph_dies(run):
    watch = Watch(run)

    def outer(t):
        inner = watch("inner", Function(lambda t: t.sin().exp()))
        return run.checkpoint(inner, watch("inner input", t.tanh())).cos()

    x = watch("x", leaf(4) * 1)
    y = run.checkpoint(watch("outer", Function(outer)), x)
    watch.look("after the forward")
    y.sum().backward()
    watch.look("after the backward")
    del x, y
    watch.look("without anything")


@behaviour
def test_double_backward_graph_dies(run):
    watch = Watch(run)
    function = watch("function", Function(lambda t: t.sin().exp()))
    x = watch("x", leaf(4) * 1)
    y = run.checkpoint(function, x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.autograd.grad(g.sum(), x)
    del function
    watch.look("after both")
    del x, y, g
    watch.look("without anything")


@pytest.mark.parametrize("at", [1, 2], ids=["forward", "recompute"])
@behaviour
def test_graph_dies_when_a_run_raises(run, at):
    watch, calls, y = Watch(run), [], None

    def fn(t):
        calls.append(1)
        y = watch(f"inside {len(calls)}", t.sin())
        if len(calls) == at:
            raise LookupError
        return y.exp()

    x = watch("x", leaf(4) * 1)
    with contextlib.suppress(LookupError):
        y = run.checkpoint(watch("function", Function(fn)), x)
        y.sum().backward()
    watch.look("after the error")
    del x, y
    watch.look("without anything")


@behaviour
def test_contexts_die_with_the_graph(run):
    watch = Watch(run)

    class Context:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    def context_fn():
        return watch("forward", Context()), watch("recompute", Context())

    x = leaf(4)
    y = run.checkpoint(lambda t: t.sin().exp(), x, context_fn=watch("context_fn", Function(context_fn)))
    watch.look("after the forward")
    y.sum().backward()
    watch.look("after the backward")
    del y
    watch.look("without the result")


@behaviour
def test_intermediates_are_not_kept(run):
    watch = Watch(run)

    def fn(t):
        a = watch("a", t.sin())
        b = watch("b", a.exp())
        return b.cos()

    y = run.checkpoint(fn, leaf(4))
    watch.look("after the forward")
    y.sum().backward(retain_graph=True)
    watch.look("after the backward")


@pytest.mark.parametrize("retain", [True, False])
@behaviour
def test_recomputed_tensors_die_as_the_backward_passes_them(run, retain):
    """Also with retain_graph: after each step of the backward only needed tensors are alive."""
    watch = Watch(run)

    def fn(t):
        for i in range(4):
            t = t.sin()
            watch(f"value {i}", t)
            t.register_hook(lambda g, i=i: watch.look(f"at {i}"))
        return t.exp().cos()

    x = leaf(4)
    run.checkpoint(fn, x).sum().backward(retain_graph=retain)
    watch.look("after")
    return x.grad


@behaviour
def test_inputs_are_freed_part_by_part(run):
    watch = Watch(run)
    x = leaf(4)
    for i in range(3):
        x = run.checkpoint(lambda t: t.sin().exp(), watch(f"input {i}", x * 1))
        x.register_hook(lambda g, i=i: watch.look(f"at {i}"))
    x.sum().backward()
    watch.look("after")


@pytest.mark.parametrize("early_stop", [True, False])
@behaviour
def test_what_was_freed_is_not_kept_again(run, early_stop):
    """Recomputed tensors of a part that is gone die at once, though the rest of the graph stays."""
    watch = Watch(run)

    def fn(t):
        a = watch("a", t.sin())
        b = watch("b", t.cos())
        return a.cos(), b.sin()

    x = leaf(4)
    a, b = run.checkpoint(fn, x, early_stop=early_stop)
    del a
    b.sum().backward(retain_graph=True)
    watch.look("after the first")
    b.sum().backward(retain_graph=True)
    watch.look("after the second")
    return x.grad


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("how", ["retained", "freed", "raises"])
def test_what_a_partial_backward_did_not_need_goes_when_it_ends(ours, how):
    """Torch keeps it until that part of the graph dies, and recomputes all the same."""
    memory, during = [], []

    def fn(t):
        a, b = t.sin(), t.cos()
        memory.extend(StorageWeakRef(made.untyped_storage()) for made in (a, b))
        return a.cos().sin(), b.sin().cos()

    def fail(grad):
        raise ZeroDivisionError

    leaves = leaf(4)
    x = leaves * 1 if how == "raises" else leaves
    if how == "raises":
        x.register_hook(fail)
    a, b = OURS[ours](fn, x, use_reentrant=False)
    a.register_hook(lambda grad: during.append(len(memory)))
    with pytest.raises(ZeroDivisionError) if how == "raises" else contextlib.nullcontext():
        a.sum().backward(retain_graph=how != "freed")
    assert during == [2]
    assert len(memory) == 4
    assert all(ref.expired() for ref in memory)
    if how != "raises":
        b.sum().backward()
        plain = leaves.detach().requires_grad_()
        first, second = fn(plain)
        first.sum().backward()
        second.sum().backward()
        assert torch.equal(leaves.grad, plain.grad)


@behaviour
def test_last_part_freed_still_stops_where_it_did(run):
    def fn(t):
        run.log("one")
        a = t.sin()
        run.log("two")
        b = t.exp()
        run.log("three")
        return a, b.tanh()

    x = leaf(4)
    a, b = run.checkpoint(fn, x)
    del b
    a.sum().backward()
    return x.grad


# ---- saved tensors read by hand ----


@behaviour
def test_saved_tensors_outside_a_backward(run):
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: t.exp().sin()), x)
    run.log(y.grad_fn._saved_self)
    run.log(y.grad_fn._saved_self)
    run.log(y.grad_fn.next_functions[0][0]._saved_result)
    y.sum().backward()
    with run.error(RuntimeError, "after they have already been freed"):
        y.grad_fn._saved_self  # noqa: B018 - reading it unpacks it
    return x.grad


@behaviour
def test_raw_saved_tensors_are_opaque_but_shareable(run):
    y = run.checkpoint(lambda t: t.exp().sin(), leaf(4))
    raw = y.grad_fn._raw_saved_self
    run.log(type(raw).__name__, raw.unpack_hook is not None, isinstance(raw.data, torch.Tensor))
    run.log(raw.unpack_hook(raw.data))
    with run.error(RuntimeError):
        raw.register_hooks(lambda t: t, lambda t: t)


@pytest.mark.parametrize("ours", OURS)
def test_reading_by_hand_keeps_nothing(ours):
    """Torch keeps what such a recompute made besides until the graph dies; ours lets it go."""
    memory = []

    def fn(t):
        memory.append(StorageWeakRef((a := t.sin()).untyped_storage()))
        return a.cos().tanh()  # saves a, and what it returns

    y = OURS[ours](fn, leaf(4), use_reentrant=False)
    assert torch.equal(y.grad_fn._saved_result, y)
    assert len(memory) == 2
    assert all(ref.expired() for ref in memory)


@behaviour
def test_saved_tensor_read_with_grad_off(run):
    y = run.checkpoint(run.watched(lambda t: t.exp().sin()), leaf(4))
    with torch.no_grad():
        run.log(y.grad_fn._saved_self)


@behaviour
def test_saved_tensor_read_inside_the_region(run):
    def fn(t):
        y = t.exp().sin()
        run.log(y.grad_fn._saved_self)
        return y.cos()

    return run.gradients(fn, leaf(4), early_stop=False)


@behaviour
def test_saved_tensor_read_in_a_node_hook(run):
    x = leaf(4)
    y = run.checkpoint(run.watched(lambda t: t.exp().sin().cos()), x)
    node = y.grad_fn.next_functions[0][0]
    handle = node.register_prehook(lambda g: run.log(node._saved_self))
    with run.error(RuntimeError, "already unpacked once"):
        y.sum().backward()
    handle.remove()  # as above


@behaviour
def test_saved_object_is_the_recomputed_one(run):
    """What a backward gets: neither leaf nor graph of its own,
    with or without a gradient asked for."""

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return tensors[0].clone()

        @staticmethod
        def backward(ctx, g):
            for t in ctx.saved_tensors:
                run.log(t, t._version, t is x, t.grad_fn is None)
            return g, None, None

    x = leaf(4)
    run.checkpoint(lambda t: Look.apply(t, t.sin(), t.detach()).exp(), x).sum().backward()
    return x.grad
