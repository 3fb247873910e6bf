/* Run by test_offload_programs.py: random programs that capture graphs with payloads, and launch them in turn with reads
 * and payloads outside of any graph, on a device that does all work at once.
 *
 *     offload_graphs FIRST LAST [DIRECTORY]       seeds; with a directory, the store has a file
 *
 * What a graph writes depends on the launch; each read compares.  Prints sums over all runs. */
#define _GNU_SOURCE
#include "offload/offloader.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { NODES = 4000, GRAPHS = 5, MOST = 8, RING = 16 << 10 };

/* ---- a device that does all work at once ---- */

typedef struct {
    uint64_t graph;
    int      used;
} stream;

typedef struct {
    uint64_t graph;
    int      recorded;
} event;

typedef enum { COPY, WRITE, READ } kind;

typedef struct {
    kind        what;
    char       *to;
    const char *from;
    int64_t     nbytes;
    uint64_t    payload;
} node;

typedef struct {
    node  nodes[NODES];
    int   n, open, ended;
    void (*told[GRAPHS + 1])(void *);
    void *data[GRAPHS + 1];
    int   listeners;
} graph;

static graph graphs[GRAPHS];
static uint64_t input;                           /* of the launch that runs now             */
static long wrong, misused, checked, launched, errors, missed, leaks, outside, streams, events;
static stream compute;

static char byte_of(uint64_t payload, uint64_t of, int64_t i)
{
    return (char)(payload * 31 + of * 101 + (uint64_t)i * 7 + (uint64_t)(i >> 8));
}

static void do_node(const node *one)
{
    int64_t i = 0;

    if (one->what == COPY) {
        memcpy(one->to, one->from, (size_t)one->nbytes);
    } else if (one->what == WRITE) {
        for (; i < one->nbytes; i++) {
            one->to[i] = byte_of(one->payload, input, i);
        }
    } else {
        while (i < one->nbytes && one->from[i] == byte_of(one->payload, input, i)) {
            i++;
        }
        wrong += i < one->nbytes;
        checked++;
    }
}

static void queue(const stream *s, node one)
{
    if (s->graph != 0) {
        graph *of = &graphs[s->graph - 1];
        if (of->n == NODES) {
            abort();
        }
        of->nodes[of->n++] = one;
    }
    do_node(&one);
}

static void launch(uint64_t number)
{
    for (int i = 0; i < graphs[number - 1].n; i++) {
        do_node(&graphs[number - 1].nodes[i]);
    }
    launched++;
}

static int misuse(int is)
{
    misused += is;
    return is ? 905 : GCK_OK;
}

#define ALL_STREAMS 64
static stream all[ALL_STREAMS];

static int stream_new(int index, void **made)
{
    stream *s = all;

    while (s->used) {
        s++;
    }
    *s = (stream){0, 1};
    *made = s;
    streams++;
    return GCK_OK;
}

static void stream_free(int index, void *s)
{
    ((stream *)s)->used = 0;
    streams--;
}

static int event_new(int index, void **made)
{
    *made = calloc(1, sizeof(event));
    events++;
    return GCK_OK;
}

static void event_free(int index, void *e)
{
    free(e);
    events--;
}

static int record(int index, void *e, void *s)
{
    *(event *)e = (event){((stream *)s)->graph, 1};
    return GCK_OK;
}

/* An event of a capture takes a stream into it; it orders nothing outside, and nothing outside orders it. */
static int wait(int index, void *s, void *e)
{
    const event *first = e;
    stream *then = s;

    if (first->graph == 0) {
        return misuse(then->graph != 0);
    }
    if (!graphs[first->graph - 1].open || (then->graph != 0 && then->graph != first->graph)) {
        return misuse(1);
    }
    then->graph = first->graph;
    return GCK_OK;
}

static int is_done(int index, void *e, int *done)
{
    *done = 1;
    return misuse(((event *)e)->graph != 0);
}

static int finish(int index, void *e)
{
    return misuse(((event *)e)->graph != 0);
}

static int copy(int index, void *s, void *to, const void *from, int64_t nbytes)
{
    queue(s, (node){COPY, to, from, nbytes, 0});
    return GCK_OK;
}

static int pin(int index, void *memory, int64_t nbytes) { return GCK_OK; }
static void unpin(int index, void *memory) {}
static int is_shared(int index, int *shared) { return *shared = 0, GCK_OK; }
static int graph_of(int index, void *s, uint64_t *number) { return *number = ((stream *)s)->graph, GCK_OK; }
static int unjoin(int index, void *s) { return misuse(((stream *)s)->graph == 0); }

static int at_end_of_graph(int index, void *s, void (*ended)(void *), void *data)
{
    const uint64_t number = ((stream *)s)->graph;

    if (number == 0) {
        return misuse(1);
    }
    graph *of = &graphs[number - 1];
    of->told[of->listeners] = ended;
    of->data[of->listeners++] = data;
    return GCK_OK;
}

static const gck_link at_once = {
    stream_new, stream_free, event_new, event_free, record, wait, is_done, finish, copy, copy, pin, unpin,
    is_shared, graph_of, unjoin, at_end_of_graph,
};

static void end_capture(uint64_t number)
{
    graphs[number - 1].open = 0;
    compute.graph = 0;
    for (int i = 0; i < ALL_STREAMS; i++) {
        if (all[i].graph == number) {
            all[i].graph = 0;
        }
    }
}

static void end_graph(uint64_t number)
{
    graph *of = &graphs[number - 1];

    for (int i = 0; i < of->listeners; i++) {
        of->told[i](of->data[i]);
    }
    of->listeners = 0;
    of->ended = 1;
}

/* ---- programs ---- */

typedef struct {
    gck_offloaded *bytes;
    uint64_t       id, input;                    /* input 0: of a graph, so that of the launch        */
} payload;

static uint64_t state, ids;
static gck_byte_store *store;
static gck_offloader *outer, *inner;             /* for work outside of graphs; of the first graph    */
static payload held[2][MOST];                    /* of each                                           */
static int n_held[2];
static char *copies[4096];                       /* owned: what reads past the ring copied            */
static int n_copies;

static uint64_t draw(uint64_t n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % n;
}

static void ended(void) {}

static void make(int which)
{
    gck_offloader *in = which ? inner : outer;
    payload *p = &held[which][n_held[which]];
    const int64_t nbytes = 1 + (int64_t)draw(RING / 2);

    if (n_held[which] == MOST) {
        return;
    }
    if (gck_offloader_take(in, nbytes, &compute, &p->bytes) != 0) {
        missed++;
        return;
    }
    p->id = ++ids;
    p->input = which ? 0 : input;
    n_held[which]++;
    queue(&compute, (node){WRITE, gck_offloaded_memory(p->bytes), NULL, nbytes, p->id});
    errors += gck_offloaded_written(p->bytes, &compute) != 0;
}

static void look(int which)
{
    const uint64_t now = input;

    if (n_held[which] == 0) {
        return;
    }
    const payload *p = &held[which][draw((uint64_t)n_held[which])];
    const int64_t nbytes = gck_offloaded_nbytes(p->bytes);
    input = p->input != 0 ? p->input : input;
    const int status = gck_offloaded_bring(p->bytes, &compute);
    outside += which && compute.graph != 1;
    if (status == 0) {
        queue(&compute, (node){READ, NULL, gck_offloaded_memory(p->bytes), nbytes, p->id});
        errors += gck_offloaded_let_go(p->bytes, &compute) != 0;
    } else if (status == GCK_STORE_RING) {
        char *to = malloc((size_t)nbytes);
        copies[n_copies++] = to;
        errors += gck_offloaded_copy(p->bytes, 0, nbytes, to, &compute) != 0;
        queue(&compute, (node){READ, NULL, to, nbytes, p->id});
    } else {
        errors++;
    }
    input = now;
}

static void drop(int which, uint64_t i)
{
    gck_offloaded_drop(held[which][i].bytes);
    held[which][i] = held[which][--n_held[which]];
}

/* Something with payloads of one kind; no new ones of a graph outside of it. */
static void work(int which, int makes)
{
    const uint64_t what = draw(5);

    if (what < 2 && makes) {
        make(which);
    } else if (what == 4 && n_held[which] > 0 && draw(2)) {
        drop(which, draw((uint64_t)n_held[which]));
    } else {
        look(which);
    }
}

/* It may be too small for some payloads. */
static void add_ring(gck_offloader *to)
{
    const int64_t nbytes = (1 + (int64_t)draw(8)) * RING / 4;

    copies[n_copies] = malloc((size_t)nbytes);
    errors += gck_offloader_add(to, copies[n_copies++], nbytes, &compute) != 0;
}

static void capture(uint64_t number, int makes)
{
    graphs[number - 1].open = 1;
    compute.graph = number;
    if (number == 1) {
        const gck_offloader_options options = {(int64_t)draw(3) * RING / 3 - 1, (int)draw(4), 1, &compute, ended};
        errors += gck_offloader_new(&at_once, 0, store, &options, &inner) != 0;
        add_ring(inner);
    }
    for (int i = 0; i < 4 + (int)draw(12); i++) {
        work(1, makes);
    }
    end_capture(number);
}

static void run(uint64_t seed, const char *directory)
{
    state = seed * 104729 + 11;
    const gck_byte_store_options room = {(1 + (int64_t)draw(4)) * (64 << 10), (int)draw(3), 2, directory, NULL};
    const gck_offloader_options options = {(int64_t)draw(2) * RING, (int)draw(4), 0, NULL, NULL};
    int captured = 1;

    memset(graphs, 0, sizeof graphs);
    input = 1;
    if (gck_byte_store_new(&room, &store) != 0) {
        abort();
    }
    errors += gck_offloader_new(&at_once, 0, store, &options, &outer) != 0;
    add_ring(outer);
    for (int i = 0; i < (int)draw(4); i++) {
        work(0, 1);
    }
    capture(1, 1);
    for (int i = 0; i < 40; i++) {
        switch (draw(6)) {
        case 0:
            if (captured < GRAPHS && draw(3) == 0) {
                capture((uint64_t)++captured, 0);
            }
            break;
        case 1: case 2:                          /* the first one writes; the others read that, in any order */
            input++;
            launch(1);
            for (uint64_t n = 0, m = draw(6); n < m && captured > 1; n++) {
                launch(2 + draw((uint64_t)captured - 1));
                if (draw(2)) {
                    work(1, 0);
                }
            }
            break;
        case 3:
            work(1, 0);
            break;
        default:
            work(0, 1);
        }
    }
    for (int which = 0; which < 2; which++) {    /* payloads and graphs end in any order */
        while (n_held[which] > 0 && draw(8)) {
            drop(which, draw((uint64_t)n_held[which]));
        }
    }
    while (captured > 0) {
        leaks += gck_offloader_is_over(inner);
        end_graph((uint64_t)captured--);
    }
    leaks += gck_offloader_is_over(inner) != (n_held[1] == 0);
    while (n_held[0] + n_held[1] > 0) {
        drop(n_held[0] == 0, 0);
    }
    leaks += !gck_offloader_is_over(inner);
    gck_offloader_free(inner);
    gck_offloader_free(outer);
    gck_byte_store_figures f;
    for (int i = 0; i < 1000; i++) {             /* threads end what they write */
        gck_byte_store_read_figures(store, 0, &f);
        if (f.memory_used == 0) {
            break;
        }
        usleep(1000);
    }
    leaks += f.memory_used != 0;
    gck_byte_store_free(store);
    leaks += streams != 0 || events != 0;
    while (n_copies > 0) {
        free(copies[--n_copies]);
    }
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        return 2;
    }
    alarm(300);
    for (uint64_t seed = (uint64_t)atoll(argv[1]); seed <= (uint64_t)atoll(argv[2]); seed++) {
        run(seed, argc > 3 ? argv[3] : NULL);
    }
    printf("{\"wrong\": %ld, \"misused\": %ld, \"errors\": %ld, \"leaks\": %ld, \"checked\": %ld, \"launched\": %ld, "
           "\"outside\": %ld, \"missed\": %ld}\n", wrong, misused, errors, leaks, checked, launched, outside, missed);
    return 0;
}
