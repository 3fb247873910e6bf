"""Plans beside torch's checkpointing of the same regions, at the peak that torch reaches."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import guards
import machine
import torch
from frontier_ways import SAC
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as torch_contexts

from gradckpt._planning.region_plan import NoPlan

EQUAL = 0.05  # a difference that is not claimed
STATE = torch.get_rng_state().nbytes  # of which a first step may need one more than a later one
PERMITTED = 0.02  # error of the lossy plans
LOSSY = ("int8", "int6", "int4")


class Peer:
    """torch's checkpoint around each region, or its selective one."""

    def __init__(self, name: str, blocks: list[Any], operators: list[Any] | None) -> None:
        self.name, self.blocks = name, blocks
        contexts = {} if operators is None else {"context_fn": functools.partial(torch_contexts, operators)}
        self.call = functools.partial(torch_checkpoint, use_reentrant=False, **contexts)

    @contextlib.contextmanager
    def active(self, model: Any, modules: Any = None) -> Iterator[None]:
        for block in self.blocks:
            block.forward = functools.partial(self.call, type(block).forward.__get__(block))
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward


def peers_of(blocks: list[Any]) -> list[Peer]:
    found = [Peer("checkpoint", blocks, None)]
    # addmm computes what mm does where there is a bias; convolutions are of neither.
    return found + [Peer(f"SAC {{{name}}}", blocks, operators) for name, operators in SAC.items()]


def _plan(profile: Any, case: Any, budget: int, error: float | None, plan_of: Callable[..., Any]) -> Any:
    """A plan for the budget, or for the smallest one if that is a random state more."""
    for size in (budget, budget + STATE):
        with contextlib.suppress(NoPlan):
            return plan_of(profile, case, size, error)
    return None


def beside_torch(o: argparse.Namespace, cases: Callable[..., Any], plan_of: Callable[..., Any]) -> None:
    rows = []
    for case, _ in cases(o):
        profiles = {"exact": case.profile(), "lossy": case.profile(o.codecs or LOSSY, limits_error=True)}
        ways: dict[tuple[str, str], Any] = {}
        sizes: dict[tuple[str, str], int] = {}
        for peer in peers_of(profiles["exact"].blocks)[: 1 if o.quick else None]:
            ways[peer.name, "torch"] = peer
            budget = sizes[peer.name, "torch"] = case.peak(peer)
            for kind, profile in profiles.items():
                plan = _plan(profile, case, budget, PERMITTED if kind == "lossy" else None, plan_of)
                if plan is None:
                    rows.append([f"{case.name}, {peer.name}", kind, f"{budget / 2**20:.2f}", *[""] * 4, "NO PLAN"])
                    continue
                ways[peer.name, kind] = profile.setting([region.option for region in plan.regions])
                sizes[peer.name, kind] = case.peak(ways[peer.name, kind])
                guards.at_most(f"{case.name}: peak of a plan", sizes[peer.name, kind], budget + STATE, "its peer's")
        found = [{key: case.seconds(way) for key, way in ways.items()} for _ in range(o.rounds + 2)][2:]
        ceiling = guards.Products(case.step)
        print(f"  {case.name}: {ceiling}")
        for key in ways:
            ceiling.check(f"{case.name}, {' '.join(key)}", min(each[key] for each in found))
        for (name, kind), size in sizes.items():
            if kind == "torch":
                continue
            ratios = [each[name, kind] / each[name, "torch"] for each in found]
            least = min(each[name, kind] for each in found) / min(each[name, "torch"] for each in found)
            ratio = statistics.median(ratios)
            verdict = "faster" if ratio < 1 - EQUAL else "SLOWER" if ratio > 1 + EQUAL else "equal"
            peer_size = sizes[name, "torch"]
            rows.append(
                [
                    f"{case.name}, {name}",
                    kind,
                    f"{peer_size / 2**20:.2f}",
                    f"{size / peer_size - 1:+.2%}",
                    f"{statistics.median(each[name, 'torch'] for each in found) * 1e3:.1f}",
                    f"{ratio:.3f}",
                    f"{least:.3f}",
                    verdict,
                ]
            )
            print("  " + "  ".join(rows[-1]), flush=True)
    print(f"  load {os.getloadavg()[0]:.1f}, threads {torch.get_num_threads()}")
    heads = ["model, peer", "plan", "peer, MiB", "peak", "peer, ms", "of its time", "of its least", ""]
    for kind in ("exact", "lossy"):
        machine.print_table(f"{kind} plans at a peer's peak", heads, [row for row in rows if row[1] == kind])
