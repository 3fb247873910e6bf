"""How much of a training step waits for a link when payloads are offloaded: a simulation.

    python benchmarks/bench_offload_simulation.py [--page docs/offload.md]

Llama-like layers in bfloat16, one sequence of 8192 tokens, a payload per layer. The times of a
layer are arithmetic: the operations of its matrix products and of causal attention, at the share of
the device's peak that a training reaches (DEVICES). The bytes are those of the codec's format. The
order of copies and waits is that of csrc/offload/simulate.h, with two forms of a step:

*Boundaries*: a payload is the input of a layer. It is encoded before the forward, and the backward
runs the forward again: it takes three forwards.
*Saves*: a payload is all that autograd saves of a layer (flash attention, a fused SwiGLU), written
while the forward runs, which therefore is the encode of the simulation. Nothing is recomputed, and
the backward takes two forwards.

The ring holds 2, 3 or 4 payloads, all but one of which may be held; codecs, the loss and the
latency of a copy take no time. *copy / forward* is the time of one copy of a layer's payload in
forwards of the layer. *exposed* is what waiting adds to a step without it.

Beside them stand the figures of an earlier estimate, in whole per cent. It had a ring of four, of
which one (boundaries) or two (saves) were held; and a copy began only after the forward of its
layer, with boundaries too. *as estimated* is what the simulation has with these settings.

Checked: that is at most 0.55 points from the estimate, which was rounded. No step is faster than
its copies. None is above the closed form, for each layer max(0, c - 1) forwards in the forward and
max(0, c - b) in the backward, where c is copy / forward and b the backward. A larger ring is never
slower.
"""

from __future__ import annotations

import argparse
import array
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import guards
import machine

from gradckpt import _C

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
import pages

MARKS = "<!-- by benchmarks/bench_offload_simulation.py -->", "<!-- end -->"
TOKENS = 8192
RINGS = 2, 3, 4
#: FLOP/s in bfloat16 without sparsity by the data sheets, and the share that a training reaches.
DEVICES = {
    "A100": (312e12, 0.5),
    "RTX 4090": (165.2e12, 0.5),
    "H100": (989e12, 0.45),
    "GH200": (989e12, 0.45),
    "B200": (2250e12, 0.4),
}
#: Bytes a second, in each direction.
LINKS = {
    "PCIe 4, 22 GB/s": 22 * 10**9,
    "PCIe 4, 25 GB/s": 25 * 10**9,
    "PCIe 5, 50 GB/s": 50 * 10**9,
    "NVLink C2C, 300 GB/s": 300 * 10**9,
    "one NVMe, 6 GB/s": 6 * 10**9,
}


@dataclass(frozen=True)
class Model:
    width: int
    keys: int  # the width of keys, and of values
    inner: int  # the width between the products of the MLP
    layers: int

    @property
    def flops(self) -> int:
        """Of the forward of a layer: its products, and attention of which half is masked."""
        weights = 2 * self.width * (self.width + self.keys) + 3 * self.width * self.inner
        return 2 * TOKENS * weights + 2 * TOKENS * TOKENS * self.width

    @property
    def saved(self) -> int:
        """Values for each token: the inputs of two norms, of the products and of attention, and
        its output."""
        return 6 * self.width + 2 * self.keys + 3 * self.inner


MODELS = {
    "0.6B": Model(1024, 1024, 3072, 28),
    "8B": Model(4096, 1024, 14336, 32),
    "70B": Model(8192, 1024, 28672, 80),
}
#: (model, device, link): the earlier estimate in per cent by codec, None: it had no figure.
BOUNDARIES: dict[tuple[str, str, str], dict[str, int | None]] = {
    ("0.6B", "H100", "PCIe 5, 50 GB/s"): {"raw": 0, "int8": None, "int4": None},
    ("0.6B", "B200", "PCIe 5, 50 GB/s"): {"raw": 0, "int8": None, "int4": None},
    ("8B", "H100", "PCIe 5, 50 GB/s"): {"raw": 0, "int8": None, "int4": None},
    ("0.6B", "H100", "one NVMe, 6 GB/s"): {"raw": 70, "int8": 17, "int4": 0},
    ("8B", "H100", "one NVMe, 6 GB/s"): {"raw": 4, "int8": 0, "int4": None},
    ("8B", "RTX 4090", "one NVMe, 6 GB/s"): {"raw": 0, "int8": None, "int4": None},
}
SAVES: dict[tuple[str, str, str], dict[str, int | None]] = {
    ("8B", "H100", "PCIe 5, 50 GB/s"): {"raw": 57, "int8": 5, "int6": 0, "int4": 0},
    ("8B", "A100", "PCIe 4, 25 GB/s"): {"raw": 19, "int8": 0, "int6": None, "int4": None},
    ("8B", "RTX 4090", "PCIe 4, 22 GB/s"): {"raw": 0, "int8": None, "int6": None, "int4": None},
    ("8B", "B200", "PCIe 5, 50 GB/s"): {"raw": 214, "int8": 61, "int6": 25, "int4": 7},
    ("8B", "GH200", "NVLink C2C, 300 GB/s"): {"raw": 0, "int8": None, "int6": None, "int4": None},
    ("70B", "H100", "PCIe 5, 50 GB/s"): {"raw": 9, "int8": 0, "int6": None, "int4": None},
    ("70B", "B200", "PCIe 5, 50 GB/s"): {"raw": 75, "int8": 10, "int6": 0, "int4": None},
    ("0.6B", "H100", "PCIe 5, 50 GB/s"): {"raw": 339, "int8": 125, "int6": 70, "int4": 23},
}


@dataclass(frozen=True)
class Case:
    """One row with one codec."""

    model: str
    device: str
    link: str
    codec: str
    recompute: bool
    estimate: int | None

    @property
    def place(self) -> str:
        return f"{self.model}, {self.device}, {self.link}"

    @property
    def name(self) -> str:
        return f"{self.place}, {self.codec}, {'boundaries' if self.recompute else 'saves'}"

    @property
    def forward(self) -> int:
        flops, share = DEVICES[self.device]
        return round(MODELS[self.model].flops * 1e9 / (flops * share))

    @property
    def backward(self) -> int:
        return (3 if self.recompute else 2) * self.forward

    @property
    def bytes(self) -> int:
        model = MODELS[self.model]
        bits = _C.codec_info(self.codec)["sizes"]["bfloat16"][0]
        return int(TOKENS * (model.width if self.recompute else model.saved) * bits / 8)

    @property
    def copy(self) -> float:
        """In forwards."""
        return self.bytes * 1e9 / LINKS[self.link] / self.forward

    def exposed(self, ring: int, held: int, *, before: bool) -> float:
        """The share of the step that waiting adds; `before`: payloads are encoded before the
        forward."""
        layers, rate = MODELS[self.model].layers, LINKS[self.link]
        times = (self.forward, self.backward, 0, 0) if before else (0, self.backward, self.forward, 0)
        found = _C.simulate_offload(
            array.array("q", [*times, self.bytes, 1] * layers),
            rate_out=rate,
            rate_in=rate,
            latency=0,
            ring=ring * self.bytes,
            held=held * self.bytes,
            head=0,
        )
        copies = found["moved"] / rate * 1e9 - found["copies"]
        guards.at_least(f"{self.name}: the time of the step", found["time"], copies, "its copies out")
        return (found["exposed_forward"] + found["exposed_backward"]) / (layers * (self.forward + self.backward))

    def shares(self) -> list[float]:
        """What is exposed, for each ring."""
        found = [self.exposed(ring, ring - 1, before=self.recompute) for ring in RINGS]
        passes = 1, self.backward / self.forward
        bound = sum(max(0.0, self.copy - each) for each in passes) / sum(passes)
        for larger, share in enumerate(found, 1):
            guards.at_most(f"{self.name}: exposed", share, bound + 1e-6, "the closed form")
            guards.at_most(f"{self.name}: a larger ring", max(found[larger:], default=0), share, "a smaller one")
        return found

    def as_estimated(self) -> float:
        """What is exposed with the settings of the earlier estimate."""
        found = self.exposed(4, 1 if self.recompute else 2, before=False)
        if self.estimate is not None:
            guards.at_most(f"{self.name}: exposed", abs(100 * found - self.estimate), 0.55, "beside its estimate")
        return found


def cases(rows: dict[tuple[str, str, str], dict[str, int | None]], recompute: bool) -> list[Case]:
    return [
        Case(*place, codec, recompute, estimate)
        for place, estimates in rows.items()
        for codec, estimate in estimates.items()
    ]


def percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.1f}" if share < 0.0995 else f"{100 * share:.0f}"


# ---- output


def show(title: str, rows: list[Case]) -> None:
    """Print one line for each case."""
    lines = []
    for case in rows:
        shares = [percent(share) for share in (*case.shares(), case.as_estimated())]
        estimate = "" if case.estimate is None else str(case.estimate)
        lines.append([case.place, case.codec, f"{case.bytes / 2**20:,.0f}", f"{case.copy:.2f}", *shares, estimate])
    head = ["layers", "codec", "MiB", "c", *map(str, RINGS), "as estimated", "estimate"]
    machine.print_table(f"{title}: c, copy / forward; % exposed by a ring of 2, 3, 4", head, lines)


def markdown(rows: list[Case]) -> str:
    """Return a table of the page, which has a column for each codec."""
    codecs = list(dict.fromkeys(case.codec for case in rows))
    lines = [
        "| model, device, link | raw GiB a layer | " + " | ".join(codecs) + " |",
        "| --- " * (len(codecs) + 2) + "|",
    ]
    for place in dict.fromkeys(case.place for case in rows):
        of_place = [case for case in rows if case.place == place]
        cells = [place, f"{of_place[0].bytes / 2**30:.3g}"]
        for case in of_place:
            shares = [percent(share) for share in case.shares()]
            cells.append(f"{case.copy:.2f}: {', '.join(shares if len(set(shares)) > 1 else shares[:1])} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page_with(tables: list[list[Case]], page: str) -> str:
    titles = "**Boundaries, which are recomputed from**", "**All that autograd saves, without a recompute**"
    text = "\n\n".join(f"{title}\n\n{markdown(rows)}" for title, rows in zip(titles, tables, strict=True))
    return str(pages.fill(page, (re.escape(MARKS[0]), MARKS[1]), lambda _: text))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables between the marks of this page")
    machine.add_quick(parser)
    options = parser.parse_args(argv)
    tables = [cases(BOUNDARIES, True), cases(SAVES, False)]
    if options.page and options.quick:
        parser.error("--page: only with all rows")
    if options.quick:
        tables = [rows[:2] for rows in tables]
    for title, rows in zip(("boundaries", "saves"), tables, strict=True):
        show(title, rows)
    if options.page:
        options.page.write_text(page_with(tables, options.page.read_text()))
    shares = {case.name: case.shares() for rows in tables for case in rows}
    machine.print_json({"benchmark": "bench_offload_simulation", "rings": RINGS, "exposed": shares})


if __name__ == "__main__":
    main()
