"""Torch's own checkpoint, with which tests compare,
and where the installed torch's differs from that of 2.13."""

import contextlib

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint

#: Before 2.12: by an autograd.Function. Modes see its dummies, nodes around it save them, detach_()
#: of an input goes unnoticed, and in compiled code the inputs of inner regions are kept.
SAVES_INPUTS_BY_A_NODE = hasattr(torch_checkpoint, "_NoopSaveInputs")

#: Each region then looks for tensors of the device, whose generators are put back,
#: on machines without one, too.
BUILT_FOR_A_DEVICE = torch.accelerator.current_accelerator() is not None


def call(function, *args, **kwargs):
    """Call one of torch's that checkpoints. Before 2.13 it leaves its hooks and contexts when the
    forward raises, until the traceback is freed, which is in any later test: here they end at once.
    """
    try:
        return function(*args, **kwargs)
    except BaseException as error:
        entry, generators = error.__traceback__, []
        while entry is not None:
            if entry.tb_frame.f_code.co_filename == torch_checkpoint.__file__:
                generators.append(entry.tb_frame.f_locals.get("gen"))
            entry = entry.tb_next
        for generator in reversed(generators):
            if generator is not None:
                generator.close()
        raise


def checkpoint(function, *args, use_reentrant=False, **options):
    return call(torch_checkpoint.checkpoint, function, *args, use_reentrant=use_reentrant, **options)


def _tells_contexts():
    """Whether the contexts of ``context_fn`` get what the forward raises: 2.13."""
    seen = []

    class Context:
        def __enter__(self):
            pass

        def __exit__(self, kind, *rest):
            seen.append(kind)

    with contextlib.suppress(ZeroDivisionError):
        checkpoint(lambda t: 1 / 0, torch.ones(1, requires_grad=True), context_fn=lambda: (Context(), Context()))
    return seen == [ZeroDivisionError]


TELLS_CONTEXTS = _tells_contexts()
tells_contexts = pytest.mark.skipif(
    not TELLS_CONTEXTS, reason="torch's checkpoint does not tell its contexts what the forward raises"
)
saves_inputs_alone = pytest.mark.skipif(
    SAVES_INPUTS_BY_A_NODE, reason="torch's checkpoint saves its inputs by an autograd.Function, which shows"
)


def _graphs_checkpoint():
    """Whether a region in a graph that runs as Dynamo made it is one: 2.12."""
    seen, stock = [], torch_checkpoint.checkpoint
    torch_checkpoint.checkpoint = lambda function, *args, **options: seen.append(1) or function(*args)
    try:
        region = torch.fx.symbolic_trace(lambda x: x.sin())
        torch.ops.higher_order.tag_activation_checkpoint(region, torch.ones(1), use_reentrant=False)
    finally:
        torch_checkpoint.checkpoint = stock
    return bool(seen)


graphs_checkpoint = pytest.mark.skipif(
    not _graphs_checkpoint(), reason="torch's regions in graphs without a policy do not call its checkpoint"
)


def _replays_devices():
    """Whether the recompute runs in the ``torch.device`` of the forward: 2.11."""
    seen = []

    def function(x):
        seen.append(torch.ones(1).device.type)
        return x.sin().exp()

    with torch.device("meta"):
        y = checkpoint(function, torch.ones(1, device="cpu", requires_grad=True))
    y.backward(torch.ones(1))
    return seen == ["meta", "meta"]


replays_devices = pytest.mark.skipif(
    not _replays_devices(), reason="torch's checkpoint recomputes without the torch.device of the forward"
)
