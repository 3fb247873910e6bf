"""The story: what each way to train a Llama needs, takes, reaches and changes.

Per way, forward and backward of one sequence in bfloat16. Peak: the most that was allocated, in the
first step and in a later one. Needed: what the allocator took from the driver for that, from an
empty cache, expandable segments off. Least limit: of its memory, at which the step ends, by
bisection. Time of a step: the least of some. Longest: tokens of a step within a limit of memory.
Error: of the gradients, beside those without checkpointing.

Checked: exact ways differ no more than repeated runs do; payloads have the bytes of their format; a
checkpointed step needs less than a plain one; no step is faster than its matrix products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import gpu_llama
import guards
import torch
from gpu_device import is_out_of_memory
from gpu_job import Job, cell, difference, gradients
from gpu_llama import Sizes
from gpu_ways import COMPILED, NONE, PERMITTED, PLAN, TORCH, WAYS, Setting, Way

import gradckpt

GIB = 2**30
#: (model, tokens), and those of a rehearsal.
FULL = ((Sizes(12, 2048), 16384), (Sizes(4, 4096, 32), 8192))
TINY = ((Sizes(3, 128), 128), (Sizes(2, 128, 32), 128))
#: Of the longest sequence: bytes; of a rehearsal: the peak of the plain step.
LIMIT = 6 * GIB
#: Longer or shorter by this at each trial; so many trials; tokens are multiples of the grain.
STEP, TRIALS = 1.06, 6
GRAIN, GRAIN_SMALL = 256, 16
#: Trials of the bisection of the least limit.
BISECTIONS = 5
#: Seconds that are left to the picture and the report.
SPARE = 12.0
#: The most that a format changes these gradients by, relative.
MOST = 0.35
TITLES = ("way", "peak GiB", "of torch's", "first step's peak GiB", "needed GiB", "least limit GiB")
MORE = ("step ms", "of none's", "longest, tokens", "gradient error")
#: Devices whose kernels a simulated step knows: what each keeps for its backward.
KNOWN = ("cpu", "cuda")
Row = dict[str, Any]


class Story:
    """Of one model at one length."""

    def __init__(self, job: Job, sizes: Sizes, tokens: int) -> None:
        self.job, self.device, self.sizes, self.tokens = job, job.device, sizes, tokens
        self.model = gpu_llama.build(sizes, job.device.kind)
        self.ids = gpu_llama.batch(tokens, job.device.kind)
        self.peaks: dict[str, int] = {}
        self.rows: list[Row] = []
        self.wanted: list[torch.Tensor] = []
        self.floor = 0.0
        self.limit = LIMIT
        #: Seconds of the stage that are left to others: no trial begins when fewer remain.
        self.ends = 0.0

    # ---- a step

    def step(self, ids: torch.Tensor | None = None) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(self.ids if ids is None else ids).loss.backward()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.device.collect()

    def gradients(self) -> list[torch.Tensor]:
        return gradients(self.model.parameters())

    def reference(self) -> None:
        """Gradients without checkpointing, on the host: on the device they would count."""
        self.step()
        self.wanted = [g.cpu() for g in self.gradients()]
        for _ in range(2):
            self.step()
            self.floor = max(self.floor, 2 * difference(self.gradients(), self.wanted))
        self.clear()
        if self.floor:
            self.job.note(f"{self.sizes.title}: repeated runs without checkpointing differ by {self.floor / 2:.2g}")

    # ---- a way

    def measure(self, way: Way) -> Row:
        title = f"{self.sizes.title}, {way.name}"
        first = self.device.memory_of(self.step)
        error = difference(self.gradients(), self.wanted)
        if way.lossy and way.codec is None:
            good = error < MOST  # a plan may be exact
        else:
            good = 0 < error < MOST if way.lossy else way.name == COMPILED or error <= self.floor
        self.job.check(good, f"{title}: gradients differ by {error:.3g}; repeated runs by {self.floor / 2:.2g}")
        self.step()
        seconds = min(self.device.seconds(self.step) for _ in range(1 if self.job.small else 3))
        self.clear()
        gradckpt.stats.reset()
        later = self.device.memory_of(self.step)
        self.check_bytes(way, title)
        if later.needed is not None:
            self.job.check(
                later.needed >= later.allocated,
                f"{title}: needs {later.needed:,}, of which {later.allocated:,} allocated",
            )
        row = {"way": way.name, "peak": later.allocated, "first": first.allocated, "needed": later.needed}
        return {**row, "before": later.before, "s": seconds, "error": error, "longest": None, "least": None}

    def check_bytes(self, way: Way, title: str) -> None:
        """Of the payloads of block inputs: arithmetic."""
        if way.codec is None:
            return
        found = gradckpt.stats()["peak_live_bytes"]
        values = self.sizes.layers * self.tokens * self.sizes.hidden
        wanted = values * gradckpt.codecs.info(way.codec)["sizes"]["bfloat16"][0] / 8
        good = 0 < found <= wanted if way.codec == "lossless" else found == wanted
        self.job.check(good, f"{title}: payloads have {found:,} bytes; arithmetic gives {wanted:,.0f}")

    def check_plan(self, way: Way, row: Row) -> None:
        if way.name != PLAN:
            return
        if self.device.kind not in KNOWN:
            self.job.skip("peak of the planned step", f"a simulated step knows the kernels of {' and '.join(KNOWN)}")
            return
        budget = self.peaks[PERMITTED]
        good = row["peak"] <= budget
        self.job.check(good, f"{self.sizes.title}: a planned step has {row['peak']:,} bytes, its budget is {budget:,}")

    def safely(self, way: Way, run: Callable[[], Any]) -> Any:
        """None where memory runs out."""
        try:
            return run()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self.clear()  # outside the handler: the error's traceback held the step's tensors
        self.job.note(f"{self.sizes.title}, {way.name}: out of memory")
        return None

    # ---- within a limit

    def least_limit(self, row: Row) -> int | None:
        """Bytes: the least at which a step ends, between what is allocated and what was taken."""
        if self.device.total() is None or row["needed"] is None:
            return None
        low, high = row["peak"], row["needed"]
        for _ in range(BISECTIONS):
            if self.job.left < self.ends:
                break
            middle = (low + high) // 2
            self.model.zero_grad(set_to_none=True)
            if self.device.fits(self.step, middle):
                high = middle
            else:
                low = middle
        self.clear()
        return int(high)

    def longest(self, row: Row) -> int:
        """Tokens of a step within the limit, to one STEP."""
        grain = GRAIN_SMALL if self.job.small else GRAIN
        most = row["needed"] or row["peak"]
        each = (most - row["before"]) / self.tokens
        count = max(grain, int((self.limit - row["before"]) / each) // grain * grain)
        best, fitted = 0, None
        for trial in range(TRIALS):
            self.clear()
            ids = gpu_llama.batch(count, self.device.kind)
            fits = self.device.fits(lambda ids=ids: self.step(ids), self.limit)
            if fits:
                best = max(best, count)
            if fitted not in (None, fits) or (fits and self.job.small and trial) or self.job.left < self.ends:
                break
            fitted = fits
            moved = int(count * STEP if fits else count / STEP) // grain * grain
            count = max(grain, moved if moved != count else count + (grain if fits else -grain))
        self.clear()
        return best

    # ---- all ways

    def run(self, ways: Sequence[Way], ends: float) -> None:
        """Until so many seconds of the stage are left."""
        self.reference()
        for way in ways:
            if self.job.left < ends:
                self.job.skip(f"{self.sizes.title}, {way.name}", "the stage's time is used")
                continue
            with (
                self.job.part(f"{self.sizes.title}, {self.tokens:,} tokens, {way.name}"),
                contextlib.ExitStack() as stack,
            ):
                stack.enter_context(way.active(Setting(self.job, self.model, self.ids, self.peaks)))
                row = self.safely(way, lambda way=way: self.measure(way))
                if row is not None:
                    self.peaks[way.name] = row["peak"]
                    self.rows.append(row)
                    self.check_plan(way, row)
            self.clear()
        if NONE in self.peaks and TORCH in self.peaks:
            good = self.peaks[TORCH] < self.peaks[NONE]
            self.job.check(good, f"{self.sizes.title}: torch's peak {self.peaks[TORCH]:,}, none's {self.peaks[NONE]:,}")

    def limits(self, ends: float) -> None:
        """The longest sequence and the least limit of each way."""
        self.ends = ends
        if self.job.small:
            self.limit = self.peaks[NONE]
        if self.device.total() is None:
            self.job.skip("least limit", self.device.missing("a limit of its memory") or "")
        ways = {way.name: way for way in WAYS}
        for row in self.rows:
            way = ways[row["way"]]
            if self.job.left < ends:
                self.job.note(f"{self.sizes.title}: limits of {way.name} and after were left out, for time")
                return
            if not way.lengths:
                continue  # a plan and a compiled step are for one length
            with self.job.part(f"{self.sizes.title}, limits, {way.name}"):
                with way.active(Setting(self.job, self.model, self.ids, self.peaks)):
                    row["longest"] = self.longest(row)
                    row["least"] = self.least_limit(row)
                self.job.check(row["longest"] > 0, f"{way.name}: no sequence fits in {self.limit:,} bytes")
            self.clear()

    def check_products(self) -> None:
        """No step is faster than its matrix products, at the rate of one."""
        if not self.device.is_cuda:
            return  # a rehearsal judges no time
        ids = gpu_llama.batch(64, self.device.kind)
        ceiling = guards.Products(lambda: self.step(ids), self.device.kind, torch.bfloat16)
        self.job.note(f"{self.sizes.title}: {ceiling}, for each 64 tokens")
        for row in self.rows:
            guards.takes(row["way"], row["s"], ceiling.seconds * self.tokens / 64, ceiling.words)
            self.job.passed += 1

    def show(self) -> None:
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        title = f"{self.sizes.title}, {self.tokens:,} tokens, bfloat16; weights {weights / GIB:.3f} GiB"
        title += f"; longest: within {self.limit / GIB:.3g} GiB"
        add = self.job.table(title, [*TITLES, *MORE])
        found = {row["way"]: row for row in self.rows}
        for row in self.rows:
            digits = 6 if self.job.small else 2
            sizes = [cell(row[key] and row[key] / GIB, digits) for key in ("peak", "first", "needed", "least")]
            ratio = row["peak"] / found[TORCH]["peak"] if TORCH in found else None
            slower = row["s"] / found[NONE]["s"] if NONE in found else None
            add(
                *(row["way"], sizes[0], cell(ratio), *sizes[1:], cell(row["s"] * 1e3, 1), cell(slower)),
                *("-" if row["longest"] is None else f"{row['longest']:,}", cell(row["error"], 6)),
            )


# ---- the picture


def draw(job: Job, stories: list[Story]) -> None:
    """Peak against time of a step, and the longest sequences."""
    try:
        import matplotlib
    except ImportError as error:
        job.note(f"no picture: matplotlib is not installed ({error})")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(stories) + 1, figsize=(6 * (len(stories) + 1), 5), layout="constrained")
    for story, axis in zip(stories, axes, strict=False):
        for row in story.rows:
            ours = row["way"].startswith("gradckpt")
            x, y = row["peak"] / GIB, row["s"] * 1e3
            axis.scatter(x, y, color="#d55e00" if ours else "#0072b2", marker="o" if ours else "s", zorder=3)
            axis.annotate(row["way"], (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
        axis.set_title(f"{story.sizes.title}, {story.tokens:,} tokens")
        axis.set_xlabel("peak of a step, GiB")
        axis.set_ylabel("time of a step, ms")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    rows = [row for row in stories[0].rows if row["longest"]]
    bars = axes[-1].barh([row["way"] for row in rows], [row["longest"] for row in rows])
    for bar, row in zip(bars, rows, strict=True):
        bar.set_color("#d55e00" if row["way"].startswith("gradckpt") else "#0072b2")
    axes[-1].invert_yaxis()
    axes[-1].set_title(f"{stories[0].sizes.title}: longest within {stories[0].limit / GIB:.3g} GiB")
    axes[-1].set_xlabel("tokens")
    figure.suptitle(f"gradckpt on {job.device.facts().get('gpu', job.device)}" + (", a rehearsal" if job.small else ""))
    figure.savefig(job.folder / "story.png", dpi=110)
    plt.close(figure)
    job.pictures.append("story.png")
    job.check((job.folder / "story.png").stat().st_size > 10_000, "the picture is empty")


def run(job: Job) -> None:
    stories: list[Story] = []
    total = job.left
    for number, (sizes, tokens) in enumerate(TINY if job.small else FULL):
        story = Story(job, sizes, tokens)
        stories.append(story)
        # The slice of the larger model has a third of the time.
        with job.part(f"{sizes.title}, {tokens:,} tokens"):
            ways = WAYS[:3] if job.small and number else WAYS
            story.run(ways, total / 3 if number == 0 else SPARE)
        with job.part(f"{sizes.title}, products"):
            story.check_products()
        if number == 0:
            with job.part(f"{sizes.title}, limits"):
                story.limits(total / 3)
        story.show()
        del story.model
        job.device.collect()
    job.figures["story"] = {f"{s.sizes.title}, {s.tokens} tokens": s.rows for s in stories}
    with job.part("picture"):
        draw(job, stories)
