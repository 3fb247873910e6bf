/* blocks.cpp: the caching allocator.  Segments of the device's addresses are cut into blocks; a freed block
 * goes to the pool of its stream and is found there first.  Blocks are filled with 0xFF (NaN) when they are
 * used again, by an operation of that stream. */
#include "memory.h"

#include "accesses.h"
#include "graphs.h"

#include <cstring>
#include <map>
#include <set>
#include <stdexcept>
#include <sys/mman.h>

namespace virtual_device {

namespace {

constexpr size_t KIB = 1024, MIB = 1024 * KIB;
constexpr size_t ROUND = 512, SMALL = MIB, SMALL_SEGMENT = 2 * MIB, LARGE = 10 * MIB, LARGE_SEGMENT = 20 * MIB;

struct Block {
    uintptr_t at;
    size_t    size, requested = 0;
    int       device;
    Stream   *stream;
    Graph    *graph;
    bool      small;
    bool      allocated = false, held = false;
    Block    *previous = nullptr, *next = nullptr;       /* of the segment */
    std::set<Stream *> users;
    std::vector<Event> waits_for;                        /* before it can be used again */

    Block(uintptr_t at, size_t size, int device, Stream *stream, Graph *graph, bool small)
        : at(at), size(size), device(device), stream(stream), graph(graph), small(small)
    {
    }
};

struct Order {
    bool operator()(const Block *a, const Block *b) const
    {
        return a->size != b->size ? a->size < b->size : a->at < b->at;
    }
};
struct PoolKey {
    Stream *stream;
    Graph  *graph;
    bool    small;
    bool operator<(const PoolKey &o) const
    {
        return stream != o.stream ? stream < o.stream : graph != o.graph ? graph < o.graph : small < o.small;
    }
};

std::map<PoolKey, std::set<Block *, Order>> pools;
std::map<uintptr_t, Block *> blocks;                     /* all of them, by address */
std::map<uintptr_t, size_t> unused[DEVICES];             /* addresses without a segment */
std::vector<Block *> held;
Statistics statistics[DEVICES];

void count(int device, Statistic which, int64_t nbytes, int64_t nblocks)
{
    statistics[device].bytes[which].add(nbytes);
    statistics[device].blocks[which].add(nblocks);
}

std::set<Block *, Order> &pool_of(const Block *b) { return pools[{b->stream, b->graph, b->small}]; }

/* An operation of the block's stream. */
void fill(Block *b)
{
    Stream *s = b->stream;
    const Operation op = begin_operation(s, "allocate");
    void *p = writable((void *)b->at);
    const size_t n = b->size;

    note_access(op, b->at, n, true);
    if (s->capture != nullptr) {
        drain(s);
        memset(p, 0xFF, n);
    } else {
        queue(s, [p, n]() { memset(p, 0xFF, n); });
    }
}

Block *new_segment(int device, Stream *s, Graph *graph, size_t size, bool small)
{
    const size_t rounded = (size + SMALL_SEGMENT - 1) / SMALL_SEGMENT * SMALL_SEGMENT;
    const size_t wanted = small ? SMALL_SEGMENT : size < LARGE ? LARGE_SEGMENT : rounded;

    if (unused[device].empty() && statistics[device].bytes[RESERVED].current == 0) {
        unused[device][memory_of(device)] = capacity();
    }
    for (auto range = unused[device].begin(); range != unused[device].end(); ++range) {
        if (range->second >= wanted) {
            Block *b = new Block(range->first, wanted, device, s, graph, small);
            const uintptr_t rest = range->first + wanted;
            const size_t left = range->second - wanted;
            unused[device].erase(range);
            if (left > 0) {
                unused[device][rest] = left;
            }
            blocks[b->at] = b;
            count(device, RESERVED, (int64_t)wanted, 1);
            return b;
        }
    }
    return nullptr;
}

void absorb(Block *b, Block *other)                      /* other follows b */
{
    b->size += other->size;
    b->next = other->next;
    if (b->next != nullptr) {
        b->next->previous = b;
    }
    blocks.erase(other->at);
    delete other;
}

bool is_free(const Block *b) { return b != nullptr && !b->allocated && !b->held; }

void to_pool(Block *b)
{
    count(b->device, ACTIVE, -(int64_t)b->size, -1);
    if (is_free(b->next)) {
        pool_of(b->next).erase(b->next);
        absorb(b, b->next);
    }
    if (is_free(b->previous)) {
        Block *p = b->previous;
        pool_of(p).erase(p);
        absorb(p, b);
        b = p;
    }
    pool_of(b).insert(b);
}

/* Blocks whose other streams are done with them. */
void release_held()
{
    size_t kept = 0;

    for (size_t i = 0; i < held.size(); i++) {
        Block *b = held[i];
        bool done = true;
        for (const Event &e : b->waits_for) {
            done = done && e.stream->done >= e.count;
        }
        if (!done) {
            held[kept++] = b;
            continue;
        }
        for (const Event &e : b->waits_for) {            /* the allocator asked, so this thread knows */
            learn(e.clock);
        }
        b->waits_for.clear();
        b->held = false;
        to_pool(b);
    }
    held.resize(kept);
}

Block *find(int device, Stream *s, Graph *graph, size_t size, bool small)
{
    auto &pool = pools[{s, graph, small}];
    Block key(0, size, device, s, graph, small);
    auto found = pool.lower_bound(&key);
    Block *b;

    if (found != pool.end()) {
        b = *found;
        pool.erase(found);
    } else if ((b = new_segment(device, s, graph, size, small)) == nullptr) {
        return nullptr;
    }
    const size_t rest = b->size - size;
    if (small ? rest >= ROUND : rest > SMALL) {
        Block *other = new Block(b->at + size, rest, device, s, graph, small);
        other->previous = b;
        other->next = b->next;
        if (other->next != nullptr) {
            other->next->previous = other;
        }
        b->next = other;
        b->size = size;
        blocks[other->at] = other;
        pool.insert(other);
    }
    return b;
}

void free_segment(Block *b)
{
    auto &ranges = unused[b->device];
    auto range = ranges.emplace(b->at, b->size).first;

    count(b->device, RESERVED, -(int64_t)b->size, -1);
    madvise(writable((void *)b->at), b->size, MADV_DONTNEED);
    forget_accesses(b->at, b->size);
    blocks.erase(b->at);
    delete b;
    auto next = std::next(range);
    if (next != ranges.end() && range->first + range->second == next->first) {
        range->second += next->second;
        ranges.erase(next);
    }
    if (range != ranges.begin()) {
        auto previous = std::prev(range);
        if (previous->first + previous->second == range->first) {
            previous->second += range->second;
            ranges.erase(range);
        }
    }
}

}  /* namespace */

void Count::add(int64_t n)
{
    current += n;
    peak = current > peak ? current : peak;
    (n > 0 ? total : freed) += n > 0 ? n : -n;
}

Statistics &statistics_of(int device) { return statistics[device]; }

void *allocate(int device, size_t nbytes)
{
    Lock lock;
    Stream *s = current_stream(device);
    Graph *graph = s->capture;
    const size_t size = (nbytes + ROUND - 1) / ROUND * ROUND;
    const bool small = size <= SMALL;

    if (nbytes == 0) {
        return nullptr;
    }
    release_held();
    Block *b = size <= capacity() ? find(device, s, graph, size, small) : nullptr;
    if (b == nullptr && size <= capacity() && s->capture == nullptr) {
        statistics[device].retries++;
        empty_cache();
        b = find(device, s, graph, size, small);
    }
    if (b == nullptr) {
        statistics[device].failures++;
        return nullptr;
    }
    b->allocated = true;
    b->requested = nbytes;
    count(device, ALLOCATED, (int64_t)b->size, 1);
    count(device, ACTIVE, (int64_t)b->size, 1);
    count(device, REQUESTED, (int64_t)nbytes, 1);
    fill(b);
    return (void *)b->at;
}

void deallocate(void *p)
{
    Lock lock;

    if (p == nullptr) {
        return;
    }
    Block *b = blocks.at((uintptr_t)p);
    count(b->device, ALLOCATED, -(int64_t)b->size, -1);
    count(b->device, REQUESTED, -(int64_t)b->requested, -1);
    b->allocated = false;
    b->held = !b->users.empty();
    for (Stream *s : b->users) {
        b->waits_for.emplace_back();
        record(&b->waits_for.back(), s);
    }
    b->users.clear();
    if (b->held) {
        held.push_back(b);
    } else {
        to_pool(b);
    }
}

void use_on_stream(void *p, Stream *s)
{
    Lock lock;
    auto found = blocks.find((uintptr_t)p);

    if (found != blocks.end() && found->second->stream != s) {
        found->second->users.insert(s);
    }
}

void empty_cache()
{
    Lock lock;

    for (Stream *each : all_streams()) {                 /* as cudaFree() */
        drain(each);
        learn(each->clock);
    }
    release_held();
    for (auto &pool : pools) {
        std::set<Block *, Order> left;
        for (Block *b : pool.second) {
            if (b->previous == nullptr && b->next == nullptr && b->graph == nullptr) {
                free_segment(b);
            } else {
                left.insert(b);
            }
        }
        pool.second.swap(left);
    }
}

void release_pool_of(Graph *graph)
{
    for (bool small : {false, true}) {
        for (Stream *s : all_streams()) {
            auto found = pools.find({s, graph, small});
            if (found == pools.end()) {
                continue;
            }
            for (Block *b : found->second) {
                if (b->previous == nullptr && b->next == nullptr) {
                    free_segment(b);
                }
            }
            pools.erase(found);
        }
    }
}

const char *why_outside(uintptr_t first, size_t nbytes)
{
    auto next = blocks.upper_bound(first);

    if (next == blocks.begin()) {
        return "memory that was never allocated";
    }
    const Block *b = std::prev(next)->second;
    if (first >= b->at + b->size) {
        return "memory that was never allocated";
    }
    if (b->graph != nullptr) {             /* a graph uses its blocks again and again */
        return nullptr;
    }
    if (!b->allocated) {
        return "freed memory";
    }
    return first + nbytes > b->at + b->requested ? "bytes beyond the block" : nullptr;
}

}  /* namespace virtual_device */
