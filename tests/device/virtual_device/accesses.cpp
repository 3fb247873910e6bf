/* accesses.cpp: cells of bytes with the same history: the last write, and the reads since. */
#include "accesses.h"

#include <map>
#include <unordered_map>

namespace virtual_device {

namespace {

struct Access {
    int         stream = -1;           /* -1: none */
    uint32_t    count = 0;
    const char *name = "";
    int         place = 0;

    bool operator==(const Access &o) const { return stream == o.stream && count == o.count; }
};

struct Cell {
    uintptr_t           end;
    Access              write;
    std::vector<Access> reads;         /* those that a write may still be unordered with */
};

typedef std::map<uintptr_t, Cell> Cells;
Cells done;                            /* by what runs                                          */
std::map<Graph *, Cells> captured;     /* among the operations of a capture, which do not run yet */

struct Report {
    const char *kind;
    Access      first, second;
    bool        first_writes, second_writes;
    uintptr_t   address;
    size_t      nbytes;
    size_t      times;
};

enum { MOST_REPORTS = 1000 };
std::vector<Report> reports;

std::vector<std::string> places = {""};
std::unordered_map<std::string, int> numbers_of_places;
std::mutex places_mutex;
place_callback *callback;

void report(const char *kind, const Access &first, bool first_writes, const Access &second, bool second_writes,
            uintptr_t address, size_t nbytes)
{
    for (Report &r : reports) {
        if (r.kind == kind && r.first == first && r.second == second) {    /* an operation that reads and writes */
            r.first_writes |= first_writes;
            r.second_writes |= second_writes;
            return;
        }
        if (r.kind == kind && r.first.name == first.name && r.second.name == second.name
            && r.first.stream == first.stream && r.second.stream == second.stream && r.first.place == first.place
            && r.second.place == second.place && r.first_writes == first_writes && r.second_writes == second_writes) {
            r.times++;
            return;
        }
    }
    if (reports.size() < MOST_REPORTS) {
        reports.push_back({kind, first, second, first_writes, second_writes, address, nbytes, 1});
    }
}

/* A cell begins at `at`, if one contains it. */
void split(Cells &cells, uintptr_t at)
{
    auto next = cells.lower_bound(at);

    if (next == cells.begin() || (next != cells.end() && next->first == at)) {
        return;
    }
    auto before = std::prev(next);
    if (before->second.end > at) {
        Cell rest = before->second;
        before->second.end = at;
        cells.emplace_hint(next, at, std::move(rest));
    }
}

bool is_before(const Access &a, const Clock &clock) { return a.stream < 0 || clock.of(a.stream) >= a.count; }

std::string quoted(const std::string &text)
{
    std::string out = "\"";

    for (char c : text) {
        if (c == '"' || c == '\\') {
            out += '\\';
        }
        out += (unsigned char)c < 0x20 ? ' ' : c;
    }
    return out + '"';
}

std::string described(const Access &a, bool writes)
{
    std::string stream = "null", device = "null";

    if (a.stream >= 0) {
        const Stream *s = stream_of_number(a.stream);
        stream = std::to_string(s->id);
        device = std::to_string(s->device);
    }
    std::lock_guard<std::mutex> guard(places_mutex);
    return "{\"name\": " + quoted(a.name) + ", \"device\": " + device + ", \"stream\": " + stream
           + ", \"writes\": " + (writes ? "true" : "false") + ", \"place\": " + quoted(places[(size_t)a.place]) + "}";
}

}  /* namespace */

void note_access(const Operation &op, uintptr_t first, size_t nbytes, bool writes)
{
    const uintptr_t end = first + nbytes;
    const Access mine = {op.stream->number, op.count, op.name, op.place};
    const Clock &clock = op.stream->clock;

    if (nbytes == 0) {
        return;
    }
    Cells &cells = op.stream->capture != nullptr ? captured[op.stream->capture] : done;
    split(cells, first);
    split(cells, end);
    auto at = cells.lower_bound(first);
    for (uintptr_t expected = first; expected < end;) {
        if (at == cells.end() || at->first > expected) {       /* bytes without a history */
            const uintptr_t stop = at == cells.end() || at->first > end ? end : at->first;
            at = cells.emplace_hint(at, expected, Cell{stop, {}, {}});
        }
        Cell &cell = at->second;
        if (!is_before(cell.write, clock)) {
            report("race", cell.write, true, mine, writes, first, nbytes);
        }
        if (writes) {
            for (const Access &r : cell.reads) {
                if (!is_before(r, clock)) {
                    report("race", r, false, mine, true, first, nbytes);
                }
            }
        } else {
            size_t kept = 0;
            for (const Access &r : cell.reads) {
                if (!is_before(r, clock)) {
                    cell.reads[kept++] = r;
                }
            }
            cell.reads.resize(kept);
            cell.reads.push_back(mine);
        }
        expected = cell.end;
        if (!writes && at != cells.begin()) {                  /* as before: one cell again */
            auto before = std::prev(at);
            if (before->second.end == at->first && before->second.write == cell.write
                && before->second.reads == cell.reads) {
                before->second.end = cell.end;
                cells.erase(at);
                at = before;
            }
        }
        ++at;
    }
    if (writes) {
        cells.erase(cells.lower_bound(first), cells.lower_bound(end));
        cells.emplace(first, Cell{end, mine, {}});
    }
}

void forget_accesses(uintptr_t first, size_t nbytes)
{
    split(done, first);
    split(done, first + nbytes);
    done.erase(done.lower_bound(first), done.lower_bound(first + nbytes));
}

void forget_capture(Graph *graph) { captured.erase(graph); }

void report_outside(const Operation &op, uintptr_t first, size_t nbytes, const char *why)
{
    report(why, {}, false, {op.stream->number, op.count, op.name, op.place}, false, first, nbytes);
}

std::string take_reports()
{
    std::string text = "[";

    for (const Report &r : reports) {
        text += text.size() > 1 ? ", " : "";
        text += "{\"kind\": " + quoted(r.kind) + ", \"first\": " + described(r.first, r.first_writes)
                + ", \"second\": " + described(r.second, r.second_writes)
                + ", \"address\": " + std::to_string(r.address) + ", \"nbytes\": " + std::to_string(r.nbytes)
                + ", \"times\": " + std::to_string(r.times) + "}";
    }
    reports.clear();
    return text + "]";
}

void set_place_callback(place_callback *chosen) { callback = chosen; }

void find_place()
{
    char text[256] = "";

    if (callback == nullptr) {
        this_thread().place = 0;
        return;
    }
    callback(text, sizeof text);
    std::lock_guard<std::mutex> guard(places_mutex);
    auto found = numbers_of_places.emplace(text, (int)places.size());
    if (found.second) {
        places.push_back(text);
    }
    this_thread().place = found.first->second;
}

}  /* namespace virtual_device */
