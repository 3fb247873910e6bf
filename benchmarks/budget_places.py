"""Plans whose payloads may go to a disk, within half the budget: peaks, gradients and times."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import budget_models
import guards
import machine

import gradckpt
from gradckpt._planning.device_memory import device_of
from gradckpt._planning.devices import placement_of
from gradckpt._planning.options import KEEP
from gradckpt._settings import EXACT

MIB = 2**20
STEPS = 9
WITHIN = 0.25
#: Host memory of the place counts in the budget: this part of what the plain step adds.
HOST = 100


def with_places(o: argparse.Namespace, cases: Callable[..., Any], tools: Any) -> None:
    """``tools``: the functions of bench_budget that all rows use."""
    budget_models.use_clock(time.perf_counter)  # the processor's does not see waits
    rows, off = [], []
    for case, _ in cases(o):
        before = case.profile(measure=False)
        plain = before.traces[KEEP].peak().size
        without = min(trace.peak().size for trace in before.traces.values())
        offload = gradckpt.Offload("disk", host_budget=max(plain // HOST, MIB), min_bytes=4096)
        placement = placement_of(offload, device_of(case.model))
        assert placement is not None
        print(f"  {case.name}: {placement.link}")
        profile = case.profile(placement=placement)
        least = tools.smallest_of(profile, case)
        for i in range(o.budgets):
            half = (without + (plain - without) * i // o.budgets) // 2
            budget = max(half, least)
            plan = tools.plan_of(profile, case, budget)
            with tools.plan_applied(case, plan):
                measured = case.peak(tools.AS_IT_IS) + plan.offloaded.room
            guards.at_most(f"{case.name}: peak of a plan", measured, budget, "its budget")
            setting = profile.setting([region.option for region in plan.regions])
            guards.gradients(f"{case.name}: a plan", tools.measured_error(case, setting, 0), False)
            seconds: dict[str, list[float]] = {"plan": [], "exact": []}
            for _ in range(2 if o.quick else STEPS):
                for name, each in (("plan", setting), ("exact", EXACT)):
                    seconds[name].append(case.seconds(each))
            medians = {name: statistics.median(found) for name, found in seconds.items()}
            errors = plan.seconds / medians["plan"] - 1, plan.seconds / profile.step_seconds
            beside = errors[1] / (medians["plan"] / medians["exact"]) - 1
            off.append((abs(errors[0]), abs(beside)))
            rows.append(
                [
                    case.name,
                    f"{budget / MIB:.2f}" + ("" if half >= least else " (least)"),
                    f"{plan.offloaded.bytes / MIB:.2f}",
                    f"{plan.offloaded.room / MIB:.2f}",
                    f"{measured / budget - 1:+.2%}",
                    f"{plan.offloaded.seconds * 1e3:.1f}",
                    f"{plan.seconds * 1e3:.1f}",
                    f"{medians['plan'] * 1e3:.1f}",
                    f"{errors[0]:+.1%}",
                    f"{beside:+.1%}",
                ]
            )
            print("  " + "  ".join(rows[-1]), flush=True)
    heads = ["model", "budget, MiB", "offloaded", "host memory", "measured", "waits, ms", "predicted, ms", "median, ms"]
    heads += ["error", "beside recomputing"]
    machine.print_table("plans with a disk, at half the budget", heads, rows)
    for name, errors in zip(("error", "error beside recomputing"), zip(*off, strict=True), strict=True):
        print(f"  {name}: {sum(each <= WITHIN for each in errors)} of {len(errors)} within {WITHIN:.0%}")
