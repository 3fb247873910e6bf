"""Chains of regions whose plans are tried by what they are for: every block of memory that a step
allocates and frees, one event after another. Nothing here is known to csrc/planner."""

import array
import itertools
from dataclasses import dataclass, field
from itertools import accumulate

from gradckpt import _C

UNAVAILABLE = 2**63 - 1


@dataclass
class Option:
    """Events of a forward and of a backward: (name, bytes) allocates, (name, None) frees."""

    forward: list
    backward: list
    time: int
    error: int = 0


@dataclass
class Chain:
    """`held`: blocks that are alive before the step. An option of None is not available."""

    regions: list
    loss: list
    held: dict = field(default_factory=dict)


class Memory:
    def __init__(self, held):
        self.blocks = dict(held)
        self.alive = sum(held.values())
        self.peak = -(2**62)

    def play(self, events):
        for name, size in events:
            if size is None:
                self.alive -= self.blocks.pop(name)
            else:
                assert name not in self.blocks
                self.blocks[name] = size
                self.alive += size
            self.peak = max(self.peak, self.alive)


def replay(chain, choices):
    """(peak, time, error) of one step; None if an option is not available."""
    chosen = [options[choice] for options, choice in zip(chain.regions, choices, strict=True)]
    if None in chosen:
        return None
    memory = Memory(chain.held)
    for option in chosen:
        memory.play(option.forward)
    memory.play(chain.loss)
    for option in reversed(chosen):
        memory.play(option.backward)
    assert memory.blocks == chain.held
    return memory.peak, sum(o.time for o in chosen), sum(o.error for o in chosen)


def plans(chain):
    """(peak, time, error) of every plan."""
    ways = itertools.product(*(range(len(options)) for options in chain.regions))
    return [found for found in (replay(chain, choices) for choices in ways) if found is not None]


def least_time(found, budget, error_budget):
    """The time of the best of these plans within both budgets; None: no plan."""
    return min((time for peak, time, error in found if peak <= budget and error <= error_budget), default=None)


# ---- random chains


def _events(rng, start, end, name, most):
    """Events that turn the blocks `start` into `end`, with temporary blocks between."""
    gone = [(block, None) for block in start if block not in end]
    new = [(block, size) for block, size in end.items() if block not in start]
    temporary = [[(f"{name}.t{i}", rng.randint(0, most)), (f"{name}.t{i}", None)] for i in range(rng.randint(0, 2))]
    events, queues = [], [[each] for each in gone + new] + temporary
    while queues:
        queue = rng.choice(queues)
        events.append(queue.pop(0))
        queues = [each for each in queues if each]
    return events or [(f"{name}.n", 0), (f"{name}.n", None)]


def _option(rng, region, choice, held, most, errors):
    name = f"{region}.{choice}"
    after = {block: size for block, size in held.items() if rng.random() < 0.7}  # what it frees until its backward
    after |= {f"{name}.k{i}": rng.randint(0, most) for i in range(rng.randint(0, 3))}
    error = rng.randint(1, 20) if errors and rng.random() < 0.6 else 0
    forward = _events(rng, held, after, f"{name}.f", 2 * most)
    return Option(forward, _events(rng, after, held, f"{name}.b", 2 * most), rng.randint(0, 30), error)


def random_chain(rng, errors, most_plans=800, most=40):
    """Up to 6 regions with up to 6 options each, and at most so many plans."""
    count = rng.randint(1, 6)
    while True:
        n = rng.choices((0, 1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 6, 8, 8))[0]
        if count**n <= most_plans:
            break
    held = {f"{region}.h": rng.randint(0, most) for region in range(n) if rng.random() < 0.3}
    regions = []
    for region in range(n):
        own = {block: size for block, size in held.items() if block == f"{region}.h"}
        options = [_option(rng, region, choice, own, most, errors) for choice in range(count)]
        regions.append([None if rng.random() < 0.08 else option for option in options])
    return Chain(regions, _events(rng, {}, {}, "loss", 3 * most), held)


# ---- Tables for gradckpt._C.choose_options: of replayed chains, and of chains like those of
# models.


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
