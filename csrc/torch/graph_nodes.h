/* graph_nodes.h: numbers of autograd's nodes. */
#ifndef GRADCKPT_GRAPH_NODES_H
#define GRADCKPT_GRAPH_NODES_H

#include "torch/objects.h"

/* The sequence number of a node; INT64_MAX for nodes without one; -1 with an exception.  Numbers
 * grow within a thread. */
int64_t gck_node_number(const gck_py *py, PyObject *node);

/* The number of the node that this thread made last, -1 with an exception. */
int64_t gck_last_node_number(const gck_py *py);

#endif
