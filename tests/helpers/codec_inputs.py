"""Values for the codec tests, as bits of a dtype (see codec_oracle);
the four sets on which noise is measured."""

import mmap

import codec_oracle as oracle
import numpy as np
import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIGNED = {"float32": np.int32, "float16": np.int16, "bfloat16": np.int16}
EXPONENTS = {"float32": range(-149, 128), "float16": range(-24, 16), "bfloat16": range(-133, 128)}
#: Of the maximum of each format, so that steps are powers of two and ties are met; and others.
TOPS = (448.0, 57344.0, 127.0, 1.0, 1.3203125, 1.9375)


class Sparse:
    """Address space without memory: pages that are never written are zero and cost nothing."""

    def __init__(self, nbytes):
        noreserve = 0x4000  # Linux; Python 3.11 has no name for it
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | noreserve)
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.address = self.bytes.ctypes.data


def tensor(bits, dtype):
    return torch.from_numpy(bits.copy().view(SIGNED[dtype])).view(DTYPES[dtype])


def bits_of(x):
    dtype = str(x.dtype).removeprefix("torch.")
    return (
        x.detach()
        .contiguous()
        .view(-1)
        .view(torch.int32 if dtype == "float32" else torch.int16)
        .numpy()
        .view(oracle.WORDS[dtype])
    )


def every_pattern():
    return np.arange(65536, dtype=np.uint32).astype(np.uint16)


def with_dominators(bits, value, dtype):
    """Groups of 127 of `bits` and one `value`, at a place that wanders;
    the last group is filled up with zeros."""
    rows = -(-bits.size // 127)
    padded = np.zeros(rows * 127, bits.dtype)
    padded[: bits.size] = bits
    out = np.empty((rows, 128), bits.dtype)
    place = np.arange(rows) * 37 % 128
    inside = np.arange(128)[None, :] != place[:, None]
    out[inside] = padded
    out[~inside] = oracle.to_bits([value], dtype)[0]
    return out.ravel()


def all_values(dtype):
    """Every pattern of a 16-bit dtype: in order, shuffled, without escapes,
    and below a value at each scale."""
    every = every_pattern()
    values = oracle.to_float(every, dtype)
    rng = np.random.default_rng(11)
    finite = every[np.abs(values) <= oracle.LIMIT[dtype]]
    ascending = every[np.argsort(np.nan_to_num(np.abs(values), nan=np.inf), kind="stable")]
    parts = [every, ascending, rng.permutation(every), rng.permutation(finite)]
    low, high = EXPONENTS[dtype][0], min(EXPONENTS[dtype][-1], 99)
    for exponent in np.linspace(low + 8, high - 1, 8).astype(int):  # all of them under a spread of scales
        parts.append(with_dominators(ascending, 1.3203125 * 2.0**exponent, dtype))
    for n, exponent in enumerate(range(low, high + 1)):  # the ones that matter under every scale
        for top in (TOPS[n % 3], TOPS[3 + n % 3]):
            value = np.float32(top / 2.0 ** np.floor(np.log2(top)) * 2.0**exponent)
            near = every[(np.abs(values) <= value) & (np.abs(values) >= value * np.float32(2.0**-10))]
            if value <= oracle.LIMIT[dtype]:
                parts.append(with_dominators(near, value, dtype))
    return np.concatenate([np.resize(p, -(-p.size // 128) * 128) for p in parts])


def all_binades():
    """float32: random values of every binade, alone and with the 1, 12, 40 and 300 below it;
    then ties."""
    rng = np.random.default_rng(12)
    parts = []
    for depth in (1, 12, 40, 300):
        top = np.repeat(np.arange(-149, 128), 6 * 128)
        exponent = np.maximum(top - rng.integers(0, depth, top.size), -149)
        mantissa = 1.0 + rng.random(top.size)
        parts.append((mantissa * 2.0**exponent * rng.choice([-1.0, 1.0], top.size)).astype(np.float32))
    for top in TOPS[:3]:
        for exponent in range(-158, 100, 3):
            ties = (
                np.arange(-127, 128) + 0.5
                if top == 127
                else rng.integers(-(2**6), 2**6, 255) * 2.0 ** rng.integers(-12, 9, 255)
            )
            group = np.append(np.clip(ties, -top, top), top)
            parts.append((group * 2.0**exponent).astype(np.float32))
    return oracle.to_bits(np.concatenate(parts), "float32")


def inputs(dtype):
    return all_binades() if dtype == "float32" else all_values(dtype)


def gaussian(dtype, n, magnitude=1.0, seed=0):
    values = np.random.default_rng([seed, n]).standard_normal(n, np.float32) * np.float32(magnitude)
    return oracle.to_bits(values, dtype)


def hostile(dtype, seed=0, groups=40):
    """Gaussian groups sprinkled with NaN, Inf, the dtype's limits, values beyond 1e30,
    zeros and subnormals."""
    rng = np.random.default_rng([13, seed])
    values = (rng.standard_normal((groups, 128)) * 10.0 ** rng.uniform(-6, 3, (groups, 1))).astype(np.float32)
    extremes = [np.nan, np.inf, -np.inf, oracle.MAX[dtype], -oracle.MAX[dtype], 0.0, -0.0, 1e-42, 6e-8]
    extremes += [1e31, -2e38, 5e33, -1e31, 7e37] if dtype != "float16" else [65472.0, -65472.0]
    for g in range(groups):
        for _ in range(int(rng.integers(0, 12))):
            values[g, rng.integers(0, 128)] = extremes[int(rng.integers(0, 5 if g % 2 else len(extremes)))]
    values[5] = 0.0
    values[6, 1:] = -0.0
    return oracle.to_bits(values.ravel(), dtype)


def huge_groups(dtype, ks=range(129), seed=9):
    """Groups of which k values lie beyond 1e30 (float16: beyond 65472) and are finite: of one sign
    or both, few distinct ones or all different, alone, or with the dtype's maxima, infinities and
    NaN; the others ordinary, tiny or zero."""
    rng = np.random.default_rng(seed)
    low, top = (65472.0, 65504.0) if dtype == "float16" else (1e30, float(oracle.MAX[dtype]))
    groups = []
    for k in ks:
        for n in range(6):
            x = rng.standard_normal(128) * [1.0, 1.0, 3e29 if dtype != "float16" else 1e4, 1e-30, 0.0, 1.0][n]
            size = np.exp(rng.uniform(np.log(low * 1.01), np.log(top), k)) if dtype != "float16" else np.full(k, top)
            size = size[rng.integers(0, 3 if n == 1 and k else max(k, 1), k).clip(0, max(k - 1, 0))] if n != 5 else size
            sign = [rng.choice([-1.0, 1.0], k), np.ones(k), -np.ones(k)][n % 3]
            x[rng.permutation(128)[:k]] = np.minimum(size, top) * sign
            if n >= 3:
                at = rng.permutation(128)[: rng.integers(1, 6)]
                x[at] = rng.choice([top, -top, np.inf, -np.inf, np.nan] if n < 5 else [top, -top], at.size)
            groups.append(x)
    with np.errstate(all="ignore"):
        bits = oracle.to_bits(np.clip(np.array(groups, np.float64), -np.inf, np.inf).astype(np.float32).ravel(), dtype)
    return bits


# ---- groups that are not ordinary ----

MASKS = (-100.0, -1e4, -65504.0, -1e9, -1e10, 1e9, -1e30)


def some_values(rng):
    """Gaussian, Laplace or student-t values, or those of an activation function; of any size."""
    x = rng.standard_normal(128)
    sets = [x, x, rng.laplace(size=128), rng.standard_t(2, 128), np.maximum(x, 0), np.abs(x), x * (x > -1) - 0.1]
    e = np.exp(4 * x)
    return [*sets, e / e.sum()][rng.integers(0, 8)] * 10.0 ** rng.uniform(-4, 4)


def with_offset(rng, x):
    """0.3 to 10,000 times the size of the values."""
    return x + rng.choice([-1, 1]) * 10.0 ** rng.uniform(-0.5, 4) * x.std()


def with_outliers(rng, x):
    """1 to 9 of 3 to 10^6 times the size of the values: any, equal, nearly so, each a tenth of
    the one before."""
    n = rng.integers(1, 10)
    size = 10.0 ** rng.uniform(0.5, 6, n)
    size = [size, np.full(n, size[0]), size[0] * rng.uniform(0.9, 1.1, n), size[0] * 0.1 ** np.arange(n)]
    sign = rng.choice([-1, 1], n) if rng.random() < 0.7 else 1
    return placed(rng, x, size[rng.integers(0, 4)] * sign * x.std())


def masked(rng, x):
    """1 to 128 values filled, or added to."""
    mask = np.full(rng.choice([1, 2, 127, 128, rng.integers(1, 129)]), rng.choice(MASKS))
    mask = mask * rng.uniform(0.5, 2, mask.size) if rng.random() < 0.1 else mask
    return placed(rng, x, mask)


def placed(rng, x, values):
    at = rng.permutation(128)[: len(values)]
    x = x.copy()
    x[at] = values if rng.random() < 0.5 else x[at] + values
    return x


def two_clusters(rng, x):
    """Of any sizes and spreads, each perhaps a single value."""
    spread = 10.0 ** rng.uniform(-7, 2, 2) * (rng.random(2) < 0.8)
    middle = rng.standard_normal(2) * 10.0 ** rng.uniform(-1, 4, 2) * (rng.random(2) < 0.9)
    y = rng.standard_normal((2, 128)) * spread[:, None] + middle[:, None]
    return np.where(rng.random(128) < rng.choice([0.5, 0.03, 0.97]), *y) * 10.0 ** rng.uniform(-5, 5)


def sparse(rng, x):
    """Few values beside zeros of both signs."""
    return np.where(rng.random(128) < rng.choice([0.01, 0.05, 0.5]), x, rng.choice([0.0, -0.0], 128))


def alike(rng, x):
    """One value or two, or a ramp; values of few kinds."""
    ramp = np.arange(128.0) + rng.integers(-200, 200)
    return [np.full(128, x[0]), np.where(x > 0, x[0], x[1]), ramp, np.round(x / x.std() * 3)][rng.integers(0, 4)]


def faint(rng, x):
    """About 2^-80, where values are scaled, and subnormal ones."""
    return x / max(np.abs(x).max(), 1e-9) * 2.0 ** rng.choice([rng.uniform(-92, -74), rng.uniform(-150, -80)])


def with_escapes(rng, x, dtype):
    """Some of NaN, infinities and the dtype's limits, once or often."""
    top = float(oracle.MAX[dtype])
    chosen = rng.permutation([np.nan, np.inf, -np.inf, top, -top])[: rng.integers(1, 6)]
    out = x.copy()
    n = rng.choice([1, 2, 5, rng.integers(1, 129)])
    out[rng.permutation(128)[:n]] = rng.choice(chosen, n)
    return out


def unusual(dtype, seed=0, groups=700):
    """Groups of all forms of rotated codecs; some of several of these kinds."""
    rng = np.random.default_rng([14, seed])
    changes = [with_offset, with_outliers, masked, masked, two_clusters, two_clusters, sparse, alike, faint]
    out = np.empty((groups, 128))
    limit = float(oracle.LIMIT[dtype])
    with np.errstate(all="ignore"):
        for g in range(groups):
            x = changes[g % 9](rng, some_values(rng))
            if g % 5 == 0:
                x = changes[rng.integers(0, 9)](rng, x)
            if g % 3 == 0 and np.abs(x).max() > limit:
                x *= limit / np.abs(x).max()
            x = np.clip(x, -limit, limit)
            out[g] = with_escapes(rng, x, dtype) if g % 7 == 0 else x
        return oracle.to_bits(out.astype(np.float32).ravel(), dtype)


# ---- sets on which signal to noise is measured ----

#: Gaussian and Laplace values; R: channels and tokens of lognormal size;
#: X: R with outlier channels.
SETS = ("Gaussian", "Laplace", "R", "X")


def uneven_rows(dtype, rows, width, seed=0):
    """Bits of rows of quite different sizes; some hold zeros, outliers, masks or escapes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width)) * np.exp(1.5 * rng.standard_normal((rows, 1)))
    kind = np.arange(rows) % 12
    x[kind == 1] *= rng.random((np.count_nonzero(kind == 1), width)) < 0.1
    x[kind == 2] = 0
    x[kind == 3] *= np.where(rng.random((np.count_nonzero(kind == 3), width)) < 0.02, 300, 1)
    for k, mask in ((4, -100), (5, -1e4), (6, -3e4)):
        x[kind == k] += np.where(rng.random((np.count_nonzero(kind == k), width)) < 0.4, mask, 0)
    x[kind == 7, width // 3 :] = -1e4
    x[kind == 8] *= 1e-7
    x[kind == 9, ::37] = rng.choice([np.inf, -np.inf, np.nan])
    x[kind == 10] += 10
    return oracle.to_bits(x.astype(np.float32).ravel(), dtype)


def noise_set(name, seed=0, rows=256, columns=4096):
    """bfloat16 [tokens, channels], and the ordinary channels.

    X has six channels 20 to 45 times larger and two massive values in 1 token of 128, in two
    channels more; "bulk" is what remains of it. Which channels meet in a group of 128 matters: take
    the mean of several seeds.
    """
    rng = np.random.default_rng(seed)
    ordinary = np.arange(columns)
    x = rng.laplace(size=(rows, columns)) if name == "Laplace" else rng.standard_normal((rows, columns))
    if name in ("R", "X"):
        x *= np.exp(0.6 * rng.standard_normal(columns))
        x *= np.exp(0.3 * rng.standard_normal((rows, 1)))
    if name == "X":
        chosen = rng.choice(columns, 8, replace=False)
        x[:, chosen[:6]] *= rng.uniform(20, 45, 6)
        x[::128, chosen[6]], x[::128, chosen[7]] = 1500.0, -900.0
        ordinary = np.setdiff1d(ordinary, chosen)
    return torch.from_numpy(x).to(torch.bfloat16), ordinary


def sqnr(x, restored, keep=slice(None)):
    """Signal to noise in dB, of some channels; infinite if nothing is lost."""
    x, restored = x.double()[..., keep], restored.double()[..., keep]
    noise = ((x - restored) ** 2).sum()
    return 10 * torch.log10((x**2).sum() / noise).item() if noise else float("inf")
