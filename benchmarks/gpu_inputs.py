"""Values and layouts for gpu_parity.py, made on the host."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "helpers"))

import codec_inputs
import numpy as np
import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "bool": torch.bool}
#: Integers of the same size, to compare bits.
WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
#: Around a lane, a group, a block of lossless, a block of threads.
SIZES = (0, 1, 15, 16, 17, 127, 128, 129, 1000, 4095, 4096, 4097, 8193, 16385)
#: Of storage, in values: 16-byte aligned or not.
OFFSETS = (0, 1, 4)
#: sizes and strides; the last have as many dimensions as a kernel takes.
LAYOUTS = {
    "transposed": ((70, 60), (1, 70)),
    "every third": ((2000,), (3,)),
    "padded rows": ((4, 5, 100), (700, 140, 1)),
    "permuted": ((8, 25, 10), (1, 88, 8)),
    "expanded": ((130, 40), (1, 0)),
    "overlapping": ((100, 40), (3, 1)),
    "channels last": ((2, 15, 12, 12), (2160, 1, 180, 15)),
    "8 dimensions": ((2, 2, 2, 2, 2, 2, 2, 15), (1, 2, 4, 8, 16, 32, 64, 128)),
}
#: (seed, step, tensor): all words of the key matter.
DITHERS = ((0, 0, 0), (0x123456789ABCDEF0, 7, 3))


@dataclasses.dataclass
class Case:
    """A view of flat values, and the noise to round with (None: to nearest)."""

    name: str
    base: torch.Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    dither: tuple[int, int, int] | None = None

    def view(self, base: torch.Tensor) -> torch.Tensor:
        return base.as_strided(self.size, self.stride, self.offset)


def flat(name: str, values: torch.Tensor, offset: int = 0) -> Case:
    return Case(name, values, (values.numel() - offset,), (1,), offset)


def of_bits(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return codec_inputs.tensor(bits, dtype)


def gaussian(dtype: str, n: int, seed: int = 0) -> torch.Tensor:
    if dtype == "bool":
        return of_bytes(n, 2, seed)
    return of_bits(codec_inputs.gaussian(dtype, n, seed=seed), dtype)


def of_bytes(n: int, kinds: int, seed: int = 0) -> torch.Tensor:
    """bool: any byte but 0 is true."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, kinds, (n,), dtype=torch.uint8, generator=generator).view(torch.bool)


def outliers(dtype: str, groups: int, seed: int = 0) -> torch.Tensor:
    """Groups with one value far above the rest."""
    sizes = (30.0, 300.0, 1e4, 6e4 if dtype == "float16" else 1e7)
    parts = [codec_inputs.gaussian(dtype, groups * 127, seed=seed + n) for n in range(len(sizes))]
    made = [codec_inputs.with_dominators(p, size, dtype) for p, size in zip(parts, sizes, strict=True)]
    return of_bits(np.concatenate(made), dtype)


def any_bits(dtype: str, n: int, seed: int = 0) -> torch.Tensor:
    bits = np.random.default_rng([17, seed]).integers(0, 256, n * DTYPES[dtype].itemsize, np.uint8)
    return torch.from_numpy(bits).view(DTYPES[dtype])


def mixed(dtype: str, n: int) -> torch.Tensor:
    """n values, hostile ones among them; bool: any bytes."""
    if dtype == "bool":
        return of_bytes(n, 256)
    groups = -(-n // 128) + 1
    return of_bits(codec_inputs.hostile(dtype, seed=n, groups=max(groups, 8))[:n], dtype)


def shapes(dtype: str, sizes: tuple[int, ...]) -> Iterator[Case]:
    for n in sizes:
        for offset in OFFSETS:
            yield flat(f"{n} from {offset}", mixed(dtype, n + offset), offset)
            yield flat(f"{n} from {offset}, ordinary", gaussian(dtype, n + offset), offset)
    for name, (size, stride) in LAYOUTS.items():
        reach = 2 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        for values in (mixed(dtype, reach), gaussian(dtype, reach)):
            yield Case(name, values, size, stride, 1)


def noisy(dtype: str, groups: int) -> Iterator[Case]:
    size, stride = LAYOUTS["permuted"]
    for dither in DITHERS:
        for values in (mixed(dtype, 128 * groups - 27), gaussian(dtype, 128 * groups - 27), outliers(dtype, groups)):
            yield dataclasses.replace(flat(f"noise {dither}", values), dither=dither)
        yield Case(f"permuted, noise {dither}", gaussian(dtype, 2200), size, stride, 1, dither)


def few(dtype: str) -> Iterator[Case]:
    """Every kernel and every path through it, in seconds under a sanitizer."""
    yield from shapes(dtype, (0, 1, 17, 129, 4097))
    if dtype != "bool":
        yield flat("outliers", outliers(dtype, 3))
        yield flat("unusual", of_bits(codec_inputs.unusual(dtype, groups=27), dtype))
        yield flat("any bits", any_bits(dtype, 1280))
        yield from noisy(dtype, 3)


def many(dtype: str) -> Iterator[Case]:
    """The sets of the CPU's tests: every pattern of 16 bits in order,
    shuffled and under every scale; hostile ones."""
    yield from shapes(dtype, SIZES)
    if dtype == "bool":
        yield flat("every byte", torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.bool))
        yield flat("random", of_bytes(1 << 22, 2))
        return
    yield flat("every pattern", of_bits(codec_inputs.inputs(dtype), dtype))
    yield flat("any bits", any_bits(dtype, 1 << 20))
    yield flat("ordinary", gaussian(dtype, (1 << 22) + 77))
    yield flat("outliers", outliers(dtype, 2000))
    for seed in range(20):
        yield flat("hostile", of_bits(codec_inputs.hostile(dtype, seed), dtype))
        yield flat("unusual", of_bits(codec_inputs.unusual(dtype, seed), dtype))
    yield from noisy(dtype, 2000)


# ---- all float32 values ----


def in_order(i: torch.Tensor) -> torch.Tensor:
    """Index to bits: a group is 128 neighbours."""
    return i


def spread(i: torch.Tensor) -> torch.Tensor:
    """Index to bits, each of 2^32 once: a group has 16 fractions of
    either sign in each of four binades."""
    place, group = i & 127, i >> 7
    sign, fraction, binade = place & 1, place >> 1 & 15, place >> 5
    return sign << 31 | (group >> 19) << 25 | binade << 23 | fraction << 19 | group & 0x7FFFF


ORDERS = {"in order": in_order, "spread": spread}


def float32_of(order: str, first: int, count: int, device: str) -> torch.Tensor:
    bits = ORDERS[order](torch.arange(first, first + count, dtype=torch.int64, device=device))
    return bits.to(torch.int32).view(torch.float32)
