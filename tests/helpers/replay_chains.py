"""Chains of regions whose plans are tried by what they are for: every block of memory that a step
allocates and frees, one event after another. Nothing here is known to csrc/planner."""

import itertools
from dataclasses import dataclass, field

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
