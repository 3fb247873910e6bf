"""Tables for gradckpt._C.choose_options: of replayed chains, and of chains like those of models."""

import array
from itertools import accumulate

from replay_chains import UNAVAILABLE

from gradckpt import _C


def flat(rows):
    return array.array("q", [value for row in rows for value in row])


def arguments_of(tables):
    regions = len(tables["kept"])
    options = len(tables["kept"][0]) if regions else 1
    rows = [tables[name] if tables[name] is None else flat(tables[name]) for name in ("kept", "need", "time", "error")]
    return (regions, options, *rows, tables["last_need"])


def solve(tables, budget, error_budget=0, buckets=4096):
    return _C.choose_options(*arguments_of(tables), budget, error_budget, buckets)


def sums_of(tables, choices):
    """(peak, time, error) by the definition."""
    kept_so_far, peaks, time, error = 0, [], 0, 0
    for region, choice in enumerate(choices):
        need = tables["need"][region][choice]
        assert need != UNAVAILABLE
        peaks.append(kept_so_far + need)
        kept_so_far += tables["kept"][region][choice]
        time += tables["time"][region][choice]
        error += tables["error"][region][choice] if tables["error"] else 0
    return max([*peaks, kept_so_far + tables["last_need"]]), time, error


def plain_time(tables):
    """Without checkpointing: the fastest option of each region."""
    return sum(
        min(time for time, need in zip(times, needs, strict=True) if need != UNAVAILABLE)
        for times, needs in zip(tables["time"], tables["need"], strict=True)
    )


def _heights(events, sizes):
    """The bytes alive after each event, from those before the first one."""
    sizes = sizes | {name: size for name, size in events if size is not None}
    return list(accumulate(-sizes[name] if size is None else size for name, size in events))


def tables_of(chain, errors):
    """kept and need of each option, by running sums of its events. What a block that was there
    before frees and allocates again counts by its size, which is in the chain."""
    base = sum(chain.held.values())
    tables = {name: [] for name in ("kept", "need", "time", "error")}
    for region in chain.regions:
        rows = {name: [] for name in tables}
        for option in region:
            if option is None:
                row = (7, UNAVAILABLE, 7, 7)
            else:
                forward = _heights(option.forward, chain.held)
                made = {name: size for name, size in option.forward if size is not None}
                kept = forward[-1]
                backward = [kept + each for each in _heights(option.backward, chain.held | made)]
                assert backward[-1] == 0
                highest = max(forward + backward)
                row = (kept, base + highest, option.time, option.error)
            for name, value in zip(rows, row, strict=True):
                rows[name].append(value)
        for name in tables:
            tables[name].append(rows[name])
    tables["error"] = tables["error"] if errors else None
    tables["last_need"] = base + max(_heights(chain.loss, {}))
    return tables


# ---- chains like those of models


def _region(rng, options, errors, scale):
    """Options on a trade-off: the more bytes one keeps, the less time it takes; with errors, two
    of three options are faster than their place and have an error."""
    base = int(scale * rng.uniform(80e6, 120e6))
    kept = sorted((int(base * rng.uniform(0.03, 1)) for _ in range(options)), reverse=True)
    time = [0]
    for i in range(1, options):
        time.append(time[-1] + int((kept[i - 1] - kept[i]) * rng.uniform(0.002, 0.03) * (1 + i / 4)) + 1)
    error = [int(rng.uniform(1, 40) * 1000 * i) if i % 3 else 0 for i in range(options)]
    if errors:
        time = [t // (2 if e else 1) for t, e in zip(time, error, strict=True)]
    return kept, [k + int(base * rng.uniform(0.2, 0.6)) for k in kept], time, error


def chain_of_126(rng, shape, errors=False, regions=126, options=12):
    """different: no two regions are alike; alike: all are; stages: four kinds, each half as large
    as the one before, as in a pyramid of images; encoder_decoder: two kinds, and 24 regions that
    free what others kept; hostile_needs: some options need far more than all the others."""
    kinds = {"alike": 1, "stages": 4, "encoder_decoder": 2}.get(shape, regions)
    made = [_region(rng, options, errors, 0.5**i if shape == "stages" else rng.uniform(0.5, 2)) for i in range(kinds)]
    rows = [made[i * kinds // regions] for i in range(regions)]
    tables = {name: [list(row[i]) for row in rows] for i, name in enumerate(("kept", "need", "time", "error"))}
    if shape == "encoder_decoder":
        for region in range(regions // 2, min(regions, regions // 2 + 24)):
            tables["kept"][region] = [kept // 4 - 20_000_000 for kept in tables["kept"][region]]
    if shape == "hostile_needs":
        for region in range(0, regions, 5):
            tables["need"][region][0] += int(4e9)
            tables["need"][region][options // 2] = UNAVAILABLE
    tables["error"] = tables["error"] if errors else None
    tables["last_need"] = int(5e8)
    return tables
