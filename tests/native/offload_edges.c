/* Run by test_offloader.py: for each edge (offload/event.h) a scenario in which it alone is necessary, on a device whose
 * streams are as late as the others allow (link_queues.h).
 *
 *     offload_edges
 *
 * Prints for each scenario and each edge that is left out (0: none) the wrong bytes and the races, as JSON. */
#define _GNU_SOURCE
#include "link_queues.h"
#include "memory_file.h"
#include "offload/event.h"
#include "offload/offloader.h"

#include <unistd.h>

enum { NBYTES = 4096 };

int gck_edge_left_out;

static gck_offloader *offloader;
static gck_byte_store *store;
static long wrong;
static char other[NBYTES];       /* memory of the device beside the ring */

static void write_run(void *argument)
{
    gck_offloaded *const *bytes = argument;

    memset((char *)bytes[0], (int)(intptr_t)bytes[1], NBYTES);
    free(argument);
}

static void check_run(void *argument)
{
    gck_offloaded *const *bytes = argument;

    for (int i = 0; i < NBYTES; i++) {
        wrong += ((char *)bytes[0])[i] != (char)(intptr_t)bytes[1];
    }
    free(argument);
}

static void *arguments(void *memory, int value)
{
    void **made = malloc(2 * sizeof *made);

    made[0] = memory;
    made[1] = (void *)(intptr_t)value;
    return made;
}

static void must(int status)
{
    if (status != 0) {
        fprintf(stderr, "an answer of %d\n", status);
        abort();
    }
}

/* ---- a program ---- */

/* The stream with the lowest rank runs first: those of 900 only when others wait for them. */
static void *stream_of(int rank)
{
    q_stream *s = q_stream_begin();

    s->rank = rank;
    return s;
}

/* Of the offloader's own streams: the first is for copies out. */
static void rank_copies(int out, int in)
{
    q.streams[0].rank = out;
    q.streams[1].rank = in;
}

static gck_offloaded *take(void *stream, int value)
{
    gck_offloaded *b;

    must(gck_offloader_take(offloader, NBYTES, stream, &b));
    q_run(stream, write_run, arguments(gck_offloaded_memory(b), value), NULL, gck_offloaded_memory(b), NBYTES);
    must(gck_offloaded_written(b, stream));
    return b;
}

static void bring(gck_offloaded *b, void *stream, int value)
{
    must(gck_offloaded_bring(b, stream));
    q_run(stream, check_run, arguments(gck_offloaded_memory(b), value), gck_offloaded_memory(b), NULL, NBYTES);
}

static void read_it(gck_offloaded *b, void *stream, int value)
{
    bring(b, stream, value);
    must(gck_offloaded_let_go(b, stream));
}

static void copy(gck_offloaded *b, void *stream, int value)
{
    must(gck_offloaded_copy(b, 0, NBYTES, other, stream));
    q_run(stream, check_run, arguments(other, value), other, NULL, NBYTES);
}

/* The program writes late; the copy out does not wait for that. */
static void copy_out(void)
{
    void *s = stream_of(900);
    gck_offloaded *b;

    rank_copies(1, 950);
    b = take(s, 1);
    q_drain();                                   /* a copy in, later, comes after all of this */
    read_it(b, s, 1);
    gck_offloaded_drop(b);
}

/* The copy out is late; the copy in goes to another part of the ring, of which it waits for nothing. */
static void copy_in(void)
{
    void *s = stream_of(1);
    gck_offloaded *b;

    rank_copies(900, 1);
    b = take(s, 1);
    read_it(b, s, 1);
    gck_offloaded_drop(b);
}

/* The copy in, to a part of the ring that has other bytes, is late. */
static void read_late(void)
{
    void *s = stream_of(1);
    gck_offloaded *b;

    rank_copies(1, 900);
    b = take(s, 1);
    read_it(b, s, 1);
    gck_offloaded_drop(b);
}

/* The copy out is late; a copy to other memory is not. */
static void read_past(void)
{
    void *s = stream_of(1);
    gck_offloaded *b;

    rank_copies(900, 1);
    b = take(s, 1);
    copy(b, s, 1);
    gck_offloaded_drop(b);
}

/* Two read at once; the first to let go is late, and a third writes into the part of the ring. */
static void reads(void)
{
    void *s = stream_of(1), *late = stream_of(900), *third = stream_of(2);
    gck_offloaded *b = take(s, 1), *c;

    bring(b, late, 1);
    bring(b, s, 1);
    must(gck_offloaded_let_go(b, late));
    must(gck_offloaded_let_go(b, s));
    gck_offloaded_drop(b);
    c = take(third, 2);
    gck_offloaded_drop(c);
}

/* The copy out is late; another stream writes into the part of the ring. */
static void ring(void)
{
    void *s = stream_of(1), *t = stream_of(2);
    gck_offloaded *b, *c;

    rank_copies(900, 900);
    b = take(s, 1);
    c = take(t, 2);
    gck_offloaded_drop(c);
    q_drain();
    read_it(b, s, 1);
    gck_offloaded_drop(b);
}

/* A copy from the store to other memory is late; the copy out of another payload takes the memory in the store. */
static void memory(void)
{
    void *s = stream_of(900), *t = stream_of(1);
    gck_offloaded *b, *c;

    rank_copies(1, 1);
    b = take(s, 1);
    copy(b, s, 1);
    gck_offloaded_drop(b);
    c = take(t, 2);
    gck_offloaded_drop(c);
}

/* The copy out is late; the memory is written to the file, for the next one's. */
static void landed(void)
{
    void *s = stream_of(1);
    gck_offloaded *b, *c;

    rank_copies(900, 900);
    b = take(s, 1);
    c = take(s, 2);
    gck_offloaded_drop(c);
    read_it(b, s, 1);
    gck_offloaded_drop(b);
}

static const struct {
    const char *name;
    void      (*run)(void);
    int         held, parts, memories, file;     /* held, memory of ring and store, in payloads */
} scenarios[] = {
    {"COPY_OUT", copy_out, 0, 1, 1, 0}, {"COPY_IN", copy_in, 0, 2, 1, 0},
    {"READ", read_late, 0, 2, 1, 0},    {"READ_PAST", read_past, 0, 1, 1, 0},
    {"READS", reads, 9, 1, 1, 0},       {"RING", ring, 0, 1, 2, 0},
    {"MEMORY", memory, 0, 2, 1, 0},     {"LANDED", landed, 0, 2, 1, 1},
};

static void run(int scenario, int edge)
{
    const gck_byte_store_options room = {scenarios[scenario].memories * NBYTES, 0, 1,
                                         scenarios[scenario].file ? "" : NULL, &m_calls};
    const gck_offloader_options options = {scenarios[scenario].held * NBYTES, 0};
    const int64_t size = scenarios[scenario].parts * NBYTES;
    char *part = aligned_alloc(NBYTES, (size_t)size);

    q_begin(1, 0, 0);
    q.ranks_stay = 1;
    gck_edge_left_out = edge;
    wrong = q.races = 0;
    memset(part, 0x5A, (size_t)size);
    must(gck_byte_store_new(&room, &store));
    must(gck_offloader_new(&q_link, 0, store, &options, &offloader));
    must(gck_offloader_add(offloader, part, size, &q.streams[0]));
    q_drain();
    scenarios[scenario].run();
    q_drain();
    gck_offloader_free(offloader);
    gck_byte_store_free(store);
    free(part);
}

int main(void)
{
    alarm(60);
    for (int scenario = 0; scenario < GCK_EDGES - 1; scenario++) {
        for (int edge = 0; edge < GCK_EDGES; edge++) {
            run(scenario, edge);
            printf("{\"scenario\": \"%s\", \"number\": %d, \"edge\": %d, \"wrong\": %ld, \"races\": %ld}\n",
                   scenarios[scenario].name, scenario + 1, edge, wrong, q.races);
        }
    }
    return 0;
}
