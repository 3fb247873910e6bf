/* graphs.cpp: captures.  Operators run at once, too, so values exist during a capture: what CUDA would not
 * compute then is not hidden. */
#include "graphs.h"

#include "accesses.h"
#include "memory.h"

#include <stdexcept>

namespace virtual_device {

void refuse_in_capture(const char *what)
{
    if (this_thread().capturing > 0) {
        throw std::runtime_error(std::string("operation not permitted when stream is capturing: ") + what);
    }
}

void keep_in_graph(Stream *s, Node &&node) { s->capture->nodes.push_back(std::move(node)); }

void begin_capture(Stream *s)
{
    if (s->capture != nullptr) {
        throw std::runtime_error("the stream is being captured already");
    }
    drain(s);
    s->capture = new Graph{s, {}, {}};
    this_thread().capturing++;
}

/* Tell those who asked. */
static void end(Graph *graph)
{
    for (std::function<void()> &told : graph->at_end) {
        told();
    }
    graph->at_end.clear();
}

/* Streams that joined the capture must have joined its origin again. */
Graph *end_capture(Stream *s)
{
    Graph *graph = s->capture;
    bool joined = true;

    if (graph == nullptr || graph->origin != s) {
        throw std::runtime_error("no capture began on this stream");
    }
    this_thread().capturing--;
    for (Stream *each : all_streams()) {
        if (each->capture == graph) {
            joined = joined && s->clock.of(each->number) >= each->clock.of(each->number);
            drain(each);
            each->capture = nullptr;
        }
    }
    forget_capture(graph);
    if (!joined) {
        end(graph);
        throw std::runtime_error("capturing stream has unjoined work");
    }
    return graph;
}

void replay(Graph *graph, Stream *s)
{
    for (const Node &node : graph->nodes) {
        const Operation op = begin_operation(s, node.name);
        for (const Range &r : node.ranges) {
            use_memory(op, r.first, r.nbytes, r.writes);
        }
        drain(s);
        node.run();
    }
}

void destroy(Graph *graph)
{
    Lock lock;

    end(graph);
    for (Node &node : graph->nodes) {
        Lock::drop(std::move(node.run));
    }
    graph->nodes.clear();                  /* the graph itself stays: its address names the pool of its blocks */
    release_pool_of(graph);
}

}  /* namespace virtual_device */
