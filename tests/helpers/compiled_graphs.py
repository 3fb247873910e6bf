"""Backends of torch.compile that let a test look at the graphs."""

import torch
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

PARTITIONS = {"default": default_partition, "min cut": min_cut_rematerialization_partition}


class Graphs:
    """A backend: AOTAutograd, its graphs kept and run as they are."""

    def __init__(self, partition="min cut"):
        self.forward, self.backward = [], []
        self.backend = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=PARTITIONS[partition],
        )

    @staticmethod
    def _keep(modules):
        def compiler(module, inputs):
            modules.append(module)
            return make_boxed_func(module.forward)

        return compiler

    def compile(self, function, **options):
        return torch.compile(function, backend=self.backend, **{"fullgraph": True, **options})

    @property
    def saved(self):
        """What the last forward graph hands to its backward and made itself:
        tensors without data."""
        backward = {node.name for node in self.backward[-1].graph.find_nodes(op="placeholder")}
        nodes = self.forward[-1].graph.output_node().all_input_nodes
        values = [node.meta["val"] for node in nodes if node.op != "placeholder" and node.name in backward]
        return [x for x in values if isinstance(x, torch.Tensor)]

    @property
    def payloads(self):
        return [x for x in self.saved if x.dtype == torch.uint8]

    @property
    def exact(self):
        """What is saved as it is: floating tensors that the forward graph made."""
        return [x for x in self.saved if x.is_floating_point()]

    def calls(self, name, modules=None):
        """The operators of that name in gradckpt's namespace, over all graphs or these."""
        op = getattr(torch.ops.gradckpt, name).default
        modules = [*self.forward, *self.backward] if modules is None else modules
        return [node for m in modules for node in m.graph.find_nodes(op="call_function", target=op)]

    def calls_of(self, name, modules):
        """The operators of that name among torch's own."""
        packet = getattr(torch.ops.aten, name)
        return [
            node for m in modules for node in m.graph.nodes if getattr(node.target, "overloadpacket", None) is packet
        ]
