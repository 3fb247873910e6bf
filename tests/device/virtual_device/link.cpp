/* link.cpp: what gradckpt's offload/ needs of a device: gck_link. */
#include "link.h"

#include "graphs.h"
#include "memory.h"
#include "torch_parts.h"

#include <cstring>

namespace virtual_device {

namespace {

/* The calls that fail: number `failing` from now on, or from there on all; 0: none. */
long long calls, failing;
int misused;                                  /* calls that CUDA would refuse */
bool all_after, no_pinning;

const int refused = 2;                        /* cudaErrorMemoryAllocation */
const int misuse = 905;                       /* cudaErrorStreamCaptureIsolation and such */

int may_fail()
{
    calls++;
    return failing > 0 && (calls == failing || (all_after && calls > failing)) ? refused : (int)GCK_OK;
}

/* gradckpt's link permits to this thread what a capture forbids to others (csrc/codec/cuda/launch.cuh). */
class Relaxed {
public:
    Relaxed() : before(this_thread().capturing) { this_thread().capturing = 0; }
    ~Relaxed() { this_thread().capturing = before; }
    Relaxed(const Relaxed &) = delete;
    Relaxed &operator=(const Relaxed &) = delete;

private:
    int before;
};

int is_misused(bool wrong)
{
    misused += wrong;
    return wrong ? misuse : (int)GCK_OK;
}

int stream_new(int index, void **stream)
{
    Lock lock(Lock::LEAVE);
    const int status = may_fail();

    *stream = status == GCK_OK ? private_stream(index) : nullptr;
    return status;
}

void stream_free(int, void *) {}

int event_new(int, void **event)
{
    Lock lock(Lock::LEAVE);
    const int status = may_fail();

    *event = status == GCK_OK ? new Event : nullptr;
    return status;
}

void event_free(int, void *event) { delete (Event *)event; }

int record_event(int, void *event, void *stream)
{
    Lock lock(Lock::LEAVE);
    const int status = may_fail();

    if (status == GCK_OK) {
        record((Event *)event, (Stream *)stream);
    }
    return status;
}

int wait_event(int, void *stream, void *event)
{
    Lock lock(Lock::LEAVE);
    const int status = may_fail();
    const Event &e = *(Event *)event;
    Stream *s = (Stream *)stream;

    if (status == GCK_OK && e.stream != nullptr
        && (e.capture == nullptr ? s->capture != nullptr : e.stream->capture != e.capture)) {
        return is_misused(true);              /* an event of a capture orders no work outside of it, and vice versa */
    }
    if (status == GCK_OK) {
        wait(s, e);
    }
    return status;
}

/* What the host asks of an event, which is not one of a capture. */
template <typename F> int ask(void *event, F f)
{
    Lock lock(Lock::LEAVE);
    const int status = may_fail();
    const bool captured = ((Event *)event)->capture != nullptr;
    Relaxed relaxed;

    if (status == GCK_OK && !captured) {
        f((Event *)event);
    }
    return status == GCK_OK ? is_misused(captured) : status;
}

int is_done(int, void *event, int *done)
{
    *done = 0;
    return ask(event, [done](Event *e) { *done = query(e); });
}

int finish(int, void *event)
{
    return ask(event, [](Event *e) { synchronise(*e); });
}

/* As cudaMemcpyAsync(): it blocks where the host's side is not pinned. */
int copy(Stream *s, const char *name, void *to, const void *from, int64_t nbytes, const void *host)
{
    Lock lock(Lock::LEAVE);
    const int status = may_fail();
    const bool later = is_pinned(host) && is_pinned((const char *)host + nbytes - 1);

    if (status != GCK_OK) {
        return status;
    }
    const Operation op = begin_copy(s, intern(name), host == to, (size_t)nbytes);
    use_memory(op, from, (size_t)nbytes, false);
    use_memory(op, to, (size_t)nbytes, true);
    void *target = writable(to);
    const void *source = writable(from);
    const auto run = [=]() { memcpy(target, source, (size_t)nbytes); };
    if (s->capture != nullptr) {              /* now, and again by the graph */
        const int status = is_misused(!later);
        drain(s);
        run();
        keep_in_graph(s, {op.name, {{from, (size_t)nbytes, false}, {to, (size_t)nbytes, true}}, run});
        return status;
    }
    queue(s, run);
    if (!later) {
        synchronise(s);
    }
    return GCK_OK;
}

int copy_out(int, void *stream, void *host, const void *device, int64_t nbytes)
{
    return copy((Stream *)stream, "copy out", host, device, nbytes, host);
}

int copy_in(int, void *stream, void *device, const void *host, int64_t nbytes)
{
    return copy((Stream *)stream, "copy in", device, host, nbytes, host);
}

int pin(int, void *memory, int64_t nbytes)
{
    Lock lock(Lock::LEAVE);
    const int status = no_pinning ? refused : may_fail();

    if (status == GCK_OK) {
        remember_pinned(memory, (size_t)nbytes);
    }
    return status;
}

void unpin(int, void *memory)
{
    Lock lock(Lock::LEAVE);
    forget_pinned(memory);
}

int is_shared(int, int *shared)
{
    *shared = 0;
    return GCK_OK;
}

int graph_of(int, void *stream, uint64_t *graph)
{
    Lock lock(Lock::LEAVE);
    const int status = may_fail();

    *graph = status == GCK_OK ? (uint64_t)(uintptr_t)((Stream *)stream)->capture : 0;     /* which stays, see destroy() */
    return status;
}

int unjoin(int, void *stream)
{
    Lock lock(Lock::LEAVE);
    const int status = may_fail();
    const bool captured = ((Stream *)stream)->capture != nullptr;

    if (status == GCK_OK && captured) {
        forget_order((Stream *)stream);
    }
    return status == GCK_OK ? is_misused(!captured) : status;
}

int at_end_of_graph(int, void *stream, void (*ended)(void *), void *data)
{
    Lock lock(Lock::LEAVE);
    const int status = may_fail();

    if (status == GCK_OK) {
        ((Stream *)stream)->capture->at_end.push_back([=]() { ended(data); });
    }
    return status;
}

}  /* namespace */

const gck_link device_link = {
    .stream_new = stream_new, .stream_free = stream_free, .event_new = event_new, .event_free = event_free,
    .record = record_event, .wait = wait_event, .is_done = is_done, .finish = finish, .copy_out = copy_out,
    .copy_in = copy_in, .pin = pin, .unpin = unpin, .is_shared = is_shared, .graph_of = graph_of, .unjoin = unjoin,
    .at_end_of_graph = at_end_of_graph,
};

}  /* namespace virtual_device */

#pragma GCC visibility push(default)
extern "C" {

/* How many calls there were; the one with number `call` from now on fails (0: none does), and with `all` those after it. */
long long virtual_link_fails(long long call, int all)
{
    virtual_device::Lock lock;
    const long long before = virtual_device::calls;

    virtual_device::calls = 0;
    virtual_device::failing = call;
    virtual_device::all_after = all != 0;
    return before;
}

/* How many calls CUDA would have refused. */
int virtual_link_misused(void) { return virtual_device::misused; }

void virtual_link_refuses_to_pin(int on) { virtual_device::no_pinning = on != 0; }

}
#pragma GCC visibility pop
