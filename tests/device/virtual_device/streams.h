/* streams.h: streams as queues, events, host threads and the order between them.
 *
 * A clock holds, for each stream, how many of its operations are known to have run before.  A host
 * thread has a clock, too: it learns by synchronisation alone, and hands what it knows to every
 * operation that it queues.  One mutex protects everything of the device. */
#ifndef VIRTUAL_DEVICE_STREAMS_H
#define VIRTUAL_DEVICE_STREAMS_H

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace virtual_device {

enum { DEVICES = 2, POOL = 32 };

/* Held while the device's state is used, and while a kernel runs.  Never take Python's lock under it: what
 * may need Python's lock to be destroyed goes into `dropped`, which is emptied afterwards. */
class Lock {
public:
    enum Dropped { EMPTY, LEAVE };                 /* LEAVE: the caller holds a lock that others want under Python's */
    explicit Lock(Dropped dropped = EMPTY);
    ~Lock();
    Lock(const Lock &) = delete;
    Lock &operator=(const Lock &) = delete;
    static void drop(std::function<void()> &&f);

private:
    Dropped what;
};

struct Clock {
    std::vector<uint32_t> counts;

    uint32_t of(int stream) const { return (size_t)stream < counts.size() ? counts[(size_t)stream] : 0; }
    void     join(const Clock &other);
    uint32_t tick(int stream);
};

struct Graph;
struct Stream;

/* Something in a queue: a function, or to wait until `other` has done `count` operations. */
struct Task {
    std::function<void()> run;
    Stream  *other;
    uint64_t count;
};

struct Stream {
    int              device;
    int64_t          id;               /* of c10::Stream, per device; 0: the default stream */
    int              number;           /* among the streams of all devices                   */
    Clock            clock;
    uint64_t         queued = 0, done = 0;
    std::deque<Task> tasks;
    Graph           *capture = nullptr;
    double           ends = 0;         /* when the timeline has done what is queued */
};

/* Handles of events own one; c10's are pointers to it. */
struct Event {
    Stream  *stream = nullptr;         /* NULL: never recorded */
    uint64_t count = 0;
    Clock    clock;
    int      queries = 0;              /* since it was recorded, answered with no */
    double   time = 0;
    Graph   *capture = nullptr;
    double   ends = 0;                 /* on the timeline */
};

/* What a thread learned, all know from then on: hand-overs between threads are not seen otherwise. */
void order_threads(bool on);

struct HostThread {
    int     device = 0;
    Stream *current[DEVICES] = {};
    Clock   clock;
    int     place = 0;                 /* of the operation that it queues now; see places.h */
    int     capturing = 0;
};
HostThread &this_thread();

/* One queued or executed piece of work, as the checks see it. */
struct Operation {
    Stream     *stream;
    uint32_t    count;                 /* of its stream's clock */
    const char *name;                  /* interned */
    int         place;
};

Stream *stream_at(int device, int64_t id);
Stream *new_stream(int device);
/* One that torch does not know, and that no other caller gets. */
Stream *private_stream(int device);
Stream *current_stream(int device);
const std::vector<Stream *> &all_streams();
/* Whose operations have, or had, this number in clocks. */
const Stream *stream_of_number(int number);

/* Starts an operation on the stream: it comes after what the stream and this thread know. */
Operation begin_operation(Stream *s, const char *name);
/* The same for a copy over the link. */
Operation begin_copy(Stream *s, const char *name, bool out, size_t nbytes);
/* To run later. */
void queue(Stream *s, std::function<void()> &&run);
/* After this all earlier work of the stream has run, and what that waits for: to run something at once. */
void drain(Stream *s);

void record(Event *e, Stream *s);
void wait(Stream *s, const Event &e);
void wait(Stream *s, Stream *other);
/* What it does from now on comes after what it waits for from now on, and after nothing else. */
void forget_order(Stream *s);
bool query(Event *e);
bool query(Stream *s);
void synchronise(const Event &e);
void synchronise(Stream *s);
void synchronise_device(int device);
/* What this thread knows, for a copy that blocks and such. */
void learn(const Clock &clock);

/* When queued work would run: each operation takes 1, and a copy over the link its bytes / rate; streams and
 * directions of the link run beside each other, and the host takes no time. */
struct Timeline {
    double  rate;
    int64_t copies[2], nbytes[2];      /* in, out */
    int64_t host_waits;                /* in which the host waited for a device */
    double  ends;                      /* of the default stream of the first device, and of the host */
};
void begin_timeline(double rate);
Timeline read_timeline();

/* Late: nothing runs before it must.  Random: at every call some of what may run does, as the seed says. */
enum Mode { LATE, RANDOM };
void set_mode(Mode mode, uint64_t seed);

const char *intern(const std::string &name);

/* An error of CUDA while a stream is being captured; see graphs.cpp. */
void refuse_in_capture(const char *what);

}  /* namespace virtual_device */

#endif
