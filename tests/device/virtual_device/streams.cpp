/* streams.cpp: queues and clocks. */
#include "streams.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <random>
#include <unordered_set>

namespace virtual_device {

namespace {

std::recursive_mutex mutex;
int depth;
std::vector<std::function<void()>> *dropped = new std::vector<std::function<void()>>;

std::vector<Stream *> streams;                /* never freed */
std::vector<Stream *> numbered;               /* whose a number is, or was */
std::vector<Stream *> per_device[DEVICES];    /* by id */
int next_of_pool[DEVICES];
Clock of_all_threads;
bool threads_are_ordered;

Mode mode = LATE;
std::mt19937_64 randomness;
enum { QUERIES = 3 };                         /* that answer no before one runs what it asks for */
enum { PRIVATE = 1000 };                      /* ids of streams that torch does not know */

Timeline timeline = {1, {0, 0}, {0, 0}, 0, 0};
double host_time;

void host_waits_until(double ends)
{
    timeline.host_waits += ends > host_time;
    host_time = ends > host_time ? ends : host_time;
}

double now()
{
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

void run_one(Stream *s)
{
    Task task = std::move(s->tasks.front());
    s->tasks.pop_front();
    if (task.other != nullptr) {
        while (task.other->done < task.count) {
            run_one(task.other);
        }
    }
    if (task.run) {
        task.run();
        Lock::drop(std::move(task.run));
    }
    s->done++;
}

void run_until(Stream *s, uint64_t count)
{
    while (s->done < count) {
        run_one(s);
    }
}

void maybe_run(void)
{
    if (mode != RANDOM || randomness() % 2 == 0) {
        return;
    }
    std::vector<Stream *> waiting;
    std::copy_if(streams.begin(), streams.end(), std::back_inserter(waiting),
                 [](const Stream *s) { return !s->tasks.empty(); });
    if (!waiting.empty()) {
        Stream *s = waiting[randomness() % waiting.size()];
        run_until(s, s->done + 1 + randomness() % s->tasks.size());
    }
}

void give_number(Stream *s)
{
    s->number = (int)numbered.size();
    numbered.push_back(s);
}

Stream *add_stream(int device)
{
    Stream *s = new Stream;

    s->device = device;
    s->id = (int64_t)per_device[device].size();
    give_number(s);
    streams.push_back(s);
    per_device[device].push_back(s);
    return s;
}

/* The default streams exist from the start. */
void ensure(void)
{
    for (int d = 0; d < DEVICES; d++) {
        if (per_device[d].empty()) {
            add_stream(d);
        }
    }
}

}  /* namespace */

Lock::Lock(Dropped dropped) : what(dropped)
{
    mutex.lock();
    depth++;
}

Lock::~Lock()
{
    std::vector<std::function<void()>> mine;

    if (depth == 1 && what == EMPTY) {
        mine.swap(*dropped);
    }
    depth--;
    mutex.unlock();
}

void Lock::drop(std::function<void()> &&f) { dropped->push_back(std::move(f)); }

void Clock::join(const Clock &other)
{
    if (counts.size() < other.counts.size()) {
        counts.resize(other.counts.size());
    }
    for (size_t i = 0; i < other.counts.size(); i++) {
        counts[i] = counts[i] < other.counts[i] ? other.counts[i] : counts[i];
    }
}

uint32_t Clock::tick(int stream)
{
    if (counts.size() <= (size_t)stream) {
        counts.resize((size_t)stream + 1);
    }
    return ++counts[(size_t)stream];
}

HostThread &this_thread()
{
    static thread_local HostThread thread;
    return thread;
}

void order_threads(bool on)
{
    threads_are_ordered = on;
    of_all_threads = Clock();
}

/* What the calling thread knows. */
static Clock &known() { return threads_are_ordered ? of_all_threads : this_thread().clock; }

Stream *stream_at(int device, int64_t id)
{
    ensure();
    return per_device[device].at((size_t)id);
}

Stream *new_stream(int device)
{
    ensure();
    const int id = 1 + next_of_pool[device]++ % POOL;
    return (size_t)id < per_device[device].size() ? per_device[device][(size_t)id] : add_stream(device);
}

Stream *private_stream(int device)
{
    Stream *s = new Stream;

    ensure();
    s->device = device;
    give_number(s);
    s->id = PRIVATE + s->number;
    streams.push_back(s);
    return s;
}

Stream *current_stream(int device)
{
    Stream *&s = this_thread().current[device];

    if (s == nullptr) {
        s = stream_at(device, 0);
    }
    return s;
}

const Stream *stream_of_number(int number) { return numbered[(size_t)number]; }

const std::vector<Stream *> &all_streams()
{
    ensure();
    return streams;
}

static Operation begin(Stream *s, const char *name, double takes)
{
    maybe_run();
    s->clock.join(known());
    s->ends = (s->ends > host_time ? s->ends : host_time) + takes;
    return {s, s->clock.tick(s->number), name, this_thread().place};
}

Operation begin_operation(Stream *s, const char *name) { return begin(s, name, 1); }

Operation begin_copy(Stream *s, const char *name, bool out, size_t nbytes)
{
    timeline.copies[out]++;
    timeline.nbytes[out] += (int64_t)nbytes;
    return begin(s, name, (double)nbytes / timeline.rate);
}

void begin_timeline(double rate)
{
    ensure();
    timeline = {rate, {0, 0}, {0, 0}, 0, 0};
    host_time = 0;
    for (Stream *s : streams) {
        s->ends = 0;
    }
}

Timeline read_timeline()
{
    const double ends = stream_at(0, 0)->ends;

    timeline.ends = ends > host_time ? ends : host_time;
    return timeline;
}

void queue(Stream *s, std::function<void()> &&run)
{
    s->tasks.push_back({std::move(run), nullptr, 0});
    s->queued++;
}

void drain(Stream *s) { run_until(s, s->queued); }

void record(Event *e, Stream *s)
{
    maybe_run();
    s->clock.join(known());
    e->stream = s;
    e->count = s->queued;
    e->clock = s->clock;
    e->queries = 0;
    e->time = now();
    e->ends = s->ends;
    e->capture = s->capture;
}

void wait(Stream *s, const Event &e)
{
    maybe_run();
    if (e.stream == nullptr) {
        return;
    }
    s->clock.join(known());
    s->clock.join(e.clock);
    s->ends = e.ends > s->ends ? e.ends : s->ends;
    if (e.capture != nullptr && e.stream->capture == e.capture) {          /* it goes on: the stream joins it */
        s->capture = e.capture;
    }
    if (e.stream != s && e.stream->done < e.count) {
        s->tasks.push_back({nullptr, e.stream, e.count});
        s->queued++;
    }
}

void wait(Stream *s, Stream *other)
{
    Event e;

    record(&e, other);
    wait(s, e);
}

/* A number that no other stream has had: order among its own operations is forgotten, too. */
void forget_order(Stream *s)
{
    drain(s);
    give_number(s);
    s->clock = Clock();
}

void learn(const Clock &clock) { known().join(clock); }

bool query(Event *e)
{
    refuse_in_capture("to query an event");
    maybe_run();
    if (e->stream == nullptr) {
        return true;
    }
    if (e->stream->done < e->count && ++e->queries > QUERIES) {
        run_until(e->stream, e->count);
    }
    if (e->stream->done < e->count) {
        return false;
    }
    learn(e->clock);
    return true;
}

bool query(Stream *s)
{
    static thread_local int queries;

    refuse_in_capture("to query a stream");
    maybe_run();
    if (!s->tasks.empty() && ++queries > QUERIES) {
        queries = 0;
        drain(s);
    }
    if (!s->tasks.empty()) {
        return false;
    }
    learn(s->clock);
    return true;
}

void synchronise(const Event &e)
{
    refuse_in_capture("to wait for an event");
    if (e.stream != nullptr) {
        run_until(e.stream, e.count);
        learn(e.clock);
        host_waits_until(e.ends);
    }
}

void synchronise(Stream *s)
{
    refuse_in_capture("to wait for a stream");
    s->clock.join(known());
    drain(s);
    learn(s->clock);
    host_waits_until(s->ends);
}

void synchronise_device(int device)
{
    refuse_in_capture("to wait for a device");
    ensure();
    for (size_t i = 0; i < streams.size(); i++) {
        if (streams[i]->device == device) {
            synchronise(streams[i]);
        }
    }
}

void set_mode(Mode chosen, uint64_t seed)
{
    mode = chosen;
    randomness.seed(seed);
}

const char *intern(const std::string &name)
{
    static std::unordered_set<std::string> *names = new std::unordered_set<std::string>;
    return names->insert(name).first->c_str();
}

}  /* namespace virtual_device */
