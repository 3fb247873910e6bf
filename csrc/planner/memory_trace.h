/* memory_trace.h: allocations and releases in their order, and what they need of a device. */
#ifndef GRADCKPT_MEMORY_TRACE_H
#define GRADCKPT_MEMORY_TRACE_H

#include "gradckpt.h"

/* Allocate `bytes` > 0 on a stream under a name from 0 on, or release (0) what has this name. */
typedef struct {
    int64_t bytes, name, stream;
} gck_memory_change;

typedef struct {
    const gck_memory_change *changes;
    int64_t                  n;
    int                      expandable;     /* segments */
} gck_memory_trace;

/* What happened with one capacity. */
typedef struct {
    int     completed;
    int64_t requested, allocated, reserved;  /* the most at a time: of what was asked for, of blocks in use, of
                                              * segments */
} gck_memory_use;

/* GCK_OK; GCK_E_RANGE: a name is negative, not below n, allocated twice or released without having
 * been allocated, a stream is negative or not below GCK_MOST_STREAMS, bytes are negative or their
 * sum reaches 2**60. */
int gck_memory_trace_check(const gck_memory_trace *trace);

/* Let a device of this capacity play a trace that was checked.  GCK_OK or GCK_E_MEMORY. */
int gck_memory_trace_play(const gck_memory_trace *trace, int64_t capacity, gck_memory_use *use);

/* Find the smallest capacity from which on the trace completes: with it, and with every larger one.
 * *use is that of a capacity without limit.  One run tells what all capacities between the most that it
 * had reserved and the least that it was refused do, so the search goes down from run to run, over every
 * capacity: what a smaller one completes says nothing of those above it.  GCK_OK or GCK_E_MEMORY. */
int gck_memory_trace_needed(const gck_memory_trace *trace, gck_memory_use *use, int64_t *needed);

#endif
