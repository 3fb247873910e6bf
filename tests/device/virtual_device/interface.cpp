/* interface.cpp: what Python calls through ctypes; errors are texts. */
#include "torch_parts.h"

struct _object;
_object *THPGenerator_Wrap(const at::Generator &generator);      /* torch's, in libtorch_python */

using namespace virtual_device;

namespace {

thread_local std::string last;             /* what a function returned, until the next one does */

template <typename F> const char *guarded(F f)
{
    try {
        Lock lock;
        f();
        return nullptr;
    } catch (const std::exception &e) {
        last = e.what();
        return last.c_str();
    }
}

}  /* namespace */

#pragma GCC visibility push(default)
extern "C" {

/* Before the first backward of the process. */
const char *virtual_start(size_t nbytes_per_device)
{
    return guarded([=]() {
        reserve_memory(nbytes_per_device);
        register_with_torch();
    });
}

void virtual_watch_faults(void) { watch_faults(); }

const char *virtual_set_mode(int random, uint64_t seed)
{
    return guarded([=]() { set_mode(random ? RANDOM : LATE, seed); });
}

void virtual_order_threads(int on)
{
    Lock lock;
    order_threads(on != 0);
}

void virtual_begin_timeline(double rate)
{
    Lock lock;
    begin_timeline(rate);
}

/* Copies in and out, bytes in and out, waits of the host, the end. */
void virtual_read_timeline(double found[6])
{
    Lock           lock;
    const Timeline timeline = read_timeline();

    for (int i = 0; i < 2; i++) {
        found[i] = (double)timeline.copies[i];
        found[2 + i] = (double)timeline.nbytes[i];
    }
    found[4] = (double)timeline.host_waits;
    found[5] = timeline.ends;
}

void virtual_set_place_callback(place_callback *callback) { set_place_callback(callback); }

const char *virtual_take_reports(void)
{
    Lock lock;

    last = take_reports();
    return last.c_str();
}

/* Operations that wait in the queue of a stream. */
int64_t virtual_pending(int device, int64_t stream)
{
    Lock lock;
    const Stream *s = stream_at(device, stream);

    return (int64_t)(s->queued - s->done);
}

/* Called with Python's lock, which it keeps. */
_object *virtual_default_generator(int device) { return THPGenerator_Wrap(default_generator(device)); }

const char *virtual_begin_capture(int device, int64_t stream)
{
    return guarded([=]() { begin_capture(stream_at(device, stream)); });
}

const char *virtual_end_capture(int device, int64_t stream, Graph **graph)
{
    return guarded([=]() { *graph = end_capture(stream_at(device, stream)); });
}

const char *virtual_replay(Graph *graph)
{
    return guarded([=]() { replay(graph, current_stream(graph->origin->device)); });
}

void virtual_destroy_graph(Graph *graph) { destroy(graph); }

}
#pragma GCC visibility pop
