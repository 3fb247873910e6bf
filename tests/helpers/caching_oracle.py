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
    mapped: bool = True


@dataclass
class Segment:
    small: bool
    stream: int
    pieces: list = field(default_factory=list)

    def join(self):
        """Neighbours that are free, or that have no pages, become one."""
        found = self.pieces[:1]
        for piece in self.pieces[1:]:
            last = found[-1]
            if not last.used and not piece.used and last.mapped == piece.mapped:
                last.size += piece.size
            else:
                found.append(piece)
        self.pieces = found

    def cut(self, piece, size):
        """Leave the first bytes to a piece; the others are one of their own."""
        rest = Piece(piece.at + size, piece.size - size, piece.used, piece.mapped)
        piece.size = size
        self.pieces.insert(self.pieces.index(piece) + 1, rest)
        return rest


class Allocator:
    """`capacity`: bytes for segments, None: no limit."""

    SPACE = 20 * MIB << 38  #: addresses of an expandable segment: more than any trace fills

    def __init__(self, capacity=None, expandable=False):
        self.capacity = float("inf") if capacity is None else capacity
        self.expandable = expandable
        self.segments = []
        self.end = 0
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0

    # ---- the device

    def take(self, size):
        if self.reserved + size > self.capacity:
            raise OutOfMemory
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def new_segment(self, small, stream, size, mapped):
        segment = Segment(small, stream, [Piece(self.end, size, mapped=mapped)])
        self.end += size
        self.segments.append(segment)
        return segment

    def give_back(self):
        for segment in self.segments[:]:
            if not self.expandable:
                if len(segment.pieces) == 1 and not segment.pieces[0].used:
                    self.reserved -= segment.pieces[0].size
                    self.segments.remove(segment)
                continue
            page = 2 * MIB if segment.small else 20 * MIB
            for piece in segment.pieces[:]:
                first, end = -(-piece.at // page) * page, (piece.at + piece.size) // page * page
                if piece.used or not piece.mapped or first >= end:
                    continue
                if first > piece.at:
                    piece = segment.cut(piece, first - piece.at)
                if end < piece.at + piece.size:
                    segment.cut(piece, end - first)
                piece.mapped = False
                self.reserved -= end - first
            segment.join()

    # ---- pieces

    def pool(self, small, stream):
        return [each for each in self.segments if (each.small, each.stream) == (small, stream)]

    def best(self, size, small, stream):
        free = [
            (piece.size, piece.at, segment, piece)
            for segment in self.pool(small, stream)
            for piece in segment.pieces
            if not piece.used and piece.mapped and piece.size >= size
        ]
        free.sort(key=lambda each: each[:2])
        if not self.expandable or not free:
            return free[0][2:] if free else None

        def grown(each):
            segment, piece = each[2:]
            i = segment.pieces.index(piece) + 1
            return piece.size + (segment.pieces[i].size if segment.pieces[i:] and not segment.pieces[i].mapped else 0)

        i = 0
        while i + 1 < len(free) and grown(free[i + 1]) < grown(free[i]):
            i += 1
        return free[i][2:]

    def grow(self, size, small, stream):
        """A free piece of at least this size, under which new pages lie, at the lowest address."""
        page = 2 * MIB if small else 20 * MIB
        segments = self.pool(small, stream) or [self.new_segment(small, stream, self.SPACE, False)]
        assert len(segments) == 1
        segment = segments[0]
        for i, piece in enumerate(segment.pieces):
            if piece.used or (piece.mapped and (i + 1 == len(segment.pieces) or segment.pieces[i + 1].mapped)):
                continue
            room = 0
            for each in segment.pieces[i:]:
                if each.used:
                    break
                room += each.size
            if room >= size:
                break
        else:
            raise AssertionError("no addresses are left")
        while not piece.mapped or piece.size < size:
            target = piece if not piece.mapped else segment.pieces[segment.pieces.index(piece) + 1]
            wanted = size - (piece.size if piece.mapped else 0)
            pages = -(-min(wanted, target.size) // page) * page
            self.take(pages)
            if pages < target.size:
                segment.cut(target, pages)
            target.mapped = True
            start = piece.at
            segment.join()
            piece = next(each for each in segment.pieces if each.at <= start < each.at + each.size)
        return segment, piece

    def from_device(self, size, small, stream):
        if self.expandable:
            return self.grow(size, small, stream)
        whole = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        self.take(whole)
        segment = self.new_segment(small, stream, whole, True)
        return segment, segment.pieces[0]

    def allocate(self, nbytes, stream=0):
        size = -(-nbytes // 512) * 512
        small = size <= MIB
        found = self.best(size, small, stream)
        if found is None:
            try:
                found = self.from_device(size, small, stream)
            except OutOfMemory:
                self.give_back()
                found = self.from_device(size, small, stream)
        segment, piece = found
        rest = piece.size - size
        if rest >= 512 if small or self.expandable else rest > MIB:
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


def play(changes, capacity=None, expandable=False):
    """What _C.memory_use says of one capacity: (completed, requested, allocated, reserved)."""
    allocator, alive = Allocator(capacity, expandable), {}
    requested = most = 0
    completed = True
    for nbytes, name, stream in changes:
        if nbytes == 0:
            size, block = alive.pop(name)
            requested -= size
            allocator.free(block)
            continue
        try:
            alive[name] = nbytes, allocator.allocate(nbytes, stream)
        except OutOfMemory:
            completed = False
        requested += nbytes
        most = max(most, requested)
        if not completed:
            break
    return completed, most, allocator.peak_allocated, allocator.peak_reserved


def needed(changes, expandable=False):
    """The smallest capacity from which on all complete: every multiple of 2 MiB is tried."""
    capacity = play(changes, None, expandable)[3]
    while capacity > 0 and play(changes, capacity - 2 * MIB, expandable)[0]:
        capacity -= 2 * MIB
    return capacity
