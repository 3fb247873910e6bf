"""Which operators have a kernel that writes into what an operator that it calls has returned,
and what that one is.

``python writing_kernels.py`` runs the samples of torch's table (OpInfo) and prints them as JSON. A
kernel of Python's stands before every operator, on the key that gradckpt catches on: a process of
its own.
"""

import itertools
import json
import sys
import warnings
from collections import defaultdict

import torch
from opinfo import operators
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
KEY = torch._C.DispatchKey.Negative
BELOW = torch._C._dispatch_keyset_full_after(KEY)
include = torch._C._dispatch_tls_set_dispatch_key_included

#: New memory is there to be written into.
FACTORIES = ("zeros", "new_zeros", "zeros_like", "new_empty", "empty_like", "ones_like", "arange")

depth = 0
returned = []
written = defaultdict(set)


def plain_tensors(out):
    return [x for x in tree_leaves(out) if type(x) is torch.Tensor and x.layout is torch.strided]


def same(x, y):
    return x.shape == y.shape and torch.equal(x.nan_to_num(), y.nan_to_num())


def note(op, out):
    if depth > 0:
        returned.extend((op, x, x.clone()) for x in plain_tensors(out))
        return
    for called, now, then in returned:
        if called._opname not in FACTORIES and not same(now, then):
            written[op._opname].add(str(called))
    returned.clear()


def watcher(op):
    takes_tensor = [str(argument.type) == "Tensor" for argument in op._schema.arguments]

    def kernel(keys, *args, **kwargs):
        global depth
        include(KEY, False)
        wrapped = [
            torch.tensor(x) if t and not isinstance(x, torch.Tensor) and x is not None else x
            for x, t in zip(args, takes_tensor, strict=False)
        ]
        include(KEY, True)
        depth += 1
        try:
            out = op.redispatch(keys & BELOW, *wrapped, **kwargs)
        finally:
            depth -= 1
        include(KEY, False)
        try:
            note(op, out)
        finally:
            include(KEY, True)
        return out

    return kernel


def watch_all(library):
    for packet in sorted(
        {name[6:].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    ):
        for overload in getattr(getattr(aten, packet, None), "overloads", list)():
            op = getattr(getattr(aten, packet), overload)
            if any(argument.alias_info is not None for argument in op._schema.arguments):
                continue
            known = torch._C._dispatch_has_kernel(op.name())  # not so TorchScript's own
            if known and not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "Negative"):
                library.impl(op, watcher(op), "Negative", with_keyset=True)


def run(function, *args, **kwargs):
    global depth
    depth = 0
    include(KEY, True)
    try:
        function(*args, **kwargs)
    except Exception:  # a sample that this machine or the kernel refuses
        returned.clear()
    finally:
        include(KEY, False)


def main():
    table = operators()
    library = torch.library.Library("aten", "IMPL")
    watch_all(library)
    for info in table:
        if torch.float32 in info.supported_dtypes("cpu"):
            samples = info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd)
            for sample in itertools.islice(samples, 30):
                run(info.op, sample.input, *sample.args, **sample.kwargs)
    x = torch.randn(64, 64)
    run(torch.cdist, x, x + 1)
    json.dump({name: sorted(called) for name, called in written.items()}, sys.stdout)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
