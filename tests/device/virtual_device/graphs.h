/* graphs.h: work that is captured, to run again. */
#ifndef VIRTUAL_DEVICE_GRAPHS_H
#define VIRTUAL_DEVICE_GRAPHS_H

#include "streams.h"

namespace virtual_device {

struct Range {
    const void *first;
    size_t      nbytes;
    bool        writes;
};

/* Work with the bytes that it uses. */
struct Node {
    const char           *name;
    std::vector<Range>    ranges;
    std::function<void()> run;
};

struct Graph {
    Stream           *origin;
    std::vector<Node> nodes;
    std::vector<std::function<void()>> at_end;
};

/* The graph that the stream is captured into keeps this, to run it again. */
void keep_in_graph(Stream *s, Node &&node);

void begin_capture(Stream *s);
Graph *end_capture(Stream *s);
void replay(Graph *graph, Stream *s);
void destroy(Graph *graph);

}  /* namespace virtual_device */

#endif
