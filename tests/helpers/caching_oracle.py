"""torch's caching allocator for CUDA as its documentation and its comments have it, in the
simplest form: segments are lists of pieces, and every question looks at all of them. Nothing here
is known to csrc/planner."""

from dataclasses import dataclass, field

KIB, MIB = 2**10, 2**20


class OutOfMemory(Exception):
    pass


@dataclass
class Piece:
    at: int
    size: int
    used: bool = False


@dataclass
class Segment:
    small: bool
    pieces: list = field(default_factory=list)

    def join(self):
        """Neighbours that are free become one."""
        found = self.pieces[:1]
        for piece in self.pieces[1:]:
            if not found[-1].used and not piece.used:
                found[-1].size += piece.size
            else:
                found.append(piece)
        self.pieces = found

    def cut(self, piece, size):
        """Leave the first bytes to a piece; the others are one of their own."""
        rest = Piece(piece.at + size, piece.size - size, piece.used)
        piece.size = size
        self.pieces.insert(self.pieces.index(piece) + 1, rest)


class Allocator:
    """`capacity`: bytes for segments, None: no limit."""

    def __init__(self, capacity=None):
        self.capacity = float("inf") if capacity is None else capacity
        self.segments = []
        self.end = 0
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0

    def from_device(self, size, small):
        whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.reserved + whole > self.capacity:
            raise OutOfMemory
        self.reserved += whole
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        segment = Segment(small, [Piece(self.end, whole)])
        self.end += whole
        self.segments.append(segment)
        return segment, segment.pieces[0]

    def give_back(self):
        for segment in self.segments[:]:
            if len(segment.pieces) == 1 and not segment.pieces[0].used:
                self.reserved -= segment.pieces[0].size
                self.segments.remove(segment)

    def best(self, size, small):
        free = [
            (piece.size, piece.at, segment, piece)
            for segment in self.segments
            for piece in segment.pieces
            if segment.small == small and not piece.used and piece.size >= size
        ]
        return min(free, key=lambda each: each[:2])[2:] if free else None

    def allocate(self, nbytes):
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        found = self.best(size, small)
        if found is None:
            try:
                found = self.from_device(size, small)
            except OutOfMemory:
                self.give_back()
                found = self.from_device(size, small)
        segment, piece = found
        rest = piece.size - size
        if rest >= 512 if small else rest > MIB:
            segment.cut(piece, size)
        piece.used = True
        self.allocated += piece.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return segment, piece

    def free(self, block):
        segment, piece = block
        piece.used = False
        self.allocated -= piece.size
        segment.join()


def play(changes, capacity=None):
    """What _C.memory_use says: (requested, allocated, reserved); None if the capacity is too
    small."""
    allocator, alive = Allocator(capacity), {}
    requested = most = 0
    for nbytes, name in changes:
        if nbytes == 0:
            size, block = alive.pop(name)
            requested -= size
            allocator.free(block)
            continue
        try:
            alive[name] = nbytes, allocator.allocate(nbytes)
        except OutOfMemory:
            return None
        requested += nbytes
        most = max(most, requested)
    return most, allocator.peak_allocated, allocator.peak_reserved


def needed(changes):
    """The smallest capacity from which on all complete: every multiple of 2 MiB is tried."""
    capacity = play(changes)[2]
    while capacity > 0 and play(changes, capacity - 2 * MIB) is not None:
        capacity -= 2 * MIB
    return capacity
