/* Run by test_offloader.py: random programs that write, read and drop payloads through an offloader, whose device is
 * link_queues.h.
 *
 *     offload_link run FIRST LAST lazy|threads [EDGE]     seeds; EDGE is left out (-DGCK_LEAVE_OUT_EDGES)
 *     offload_link fail SEED STRIDE once|forever          each call of the link fails, one in STRIDE
 *     offload_link memory SEED STRIDE once|forever        so does each request for memory, or for a thread (FAILING)
 *
 * Prints sums over all runs. */
#define _GNU_SOURCE
#include "failing_memory.h"
#include "link_queues.h"
#include "memory_file.h"
#include "offload/event.h"
#include "offload/offloader.h"

#include <stdatomic.h>
#include <unistd.h>

enum { MOST = 12, SHARED = 3, STREAMS = 2, THREADS = 3, SEGMENTS = 4 };

#ifdef GCK_LEAVE_OUT_EDGES
int gck_edge_left_out;
#endif

typedef struct {
    gck_offloaded *bytes;
    uint64_t       id;
    int            refs, shared;
} payload;

typedef struct {
    char    *memory;             /* owned where `own`                       */
    int64_t  from, nbytes;       /* of the payload's                        */
    int64_t  size;               /* so much of the memory is overwritten    */
    uint64_t id;
    int      own;
} kernel;

/* What goes wrong: a call of the link, or a request for memory; number 0: nothing does. */
typedef struct {
    long number;
    int  forever, of_memory;
} bad;

static atomic_long wrong, checked, errors, refused, full, copied, bad_figures, leaks, taken, unsaid;
static gck_offloader *offloader;
static gck_byte_store *store;
static int steps, shuffles, threads;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static payload *slots[SHARED];

/* ---- kernels ---- */

static char byte_of(uint64_t id, int64_t i) { return (char)(id * 31 + (uint64_t)i * 7 + (uint64_t)(i >> 8)); }

static void write_run(void *argument)
{
    kernel *k = argument;

    memset(k->memory, 0x5A, (size_t)k->size);
    for (int64_t i = 0; i < k->nbytes; i++) {
        k->memory[i] = byte_of(k->id, i);
    }
    free(k);
}

static void check_run(void *argument)
{
    kernel *k = argument;
    int64_t i = 0;

    while (i < k->nbytes && k->memory[i] == byte_of(k->id, k->from + i)) {
        i++;
    }
    wrong += i < k->nbytes;
    checked++;
    if (k->own) {
        free(k->memory);
    }
    free(k);
}

static kernel *kernel_of(const payload *p, void *memory, int64_t from, int64_t nbytes, int64_t size)
{
    kernel *k = malloc(sizeof *k);

    *k = (kernel){memory, from, nbytes, size, p->id, 0};
    return k;
}

static int64_t size_of(const payload *p) { return (gck_offloaded_nbytes(p->bytes) + 255) / 256 * 256; }

/* ---- what a program does with a payload ---- */

/* A status of the device has a reason that the caller is told. */
static int said(int status)
{
    unsaid += status == GCK_STORE_DEVICE && gck_offloader_status(offloader) == GCK_OK;
    return status;
}

/* Read it on this stream by a copy, in parts. */
static void copy(payload *p, void *stream, uint64_t *state)
{
    const int64_t nbytes = gck_offloaded_nbytes(p->bytes);
    const int64_t from = q_draw(state, 2) ? 0 : (int64_t)q_draw(state, (uint64_t)nbytes);
    const int64_t half = (nbytes - from + 1) / 2;
    kernel *k = kernel_of(p, malloc((size_t)(nbytes - from)), from, nbytes - from, 0);
    int status = 0;

    k->own = 1;
    q_own = 1;
    for (int64_t at = 0; at < k->nbytes && status == 0; at += half) {
        const int64_t n = half < k->nbytes - at ? half : k->nbytes - at;
        status = said(gck_offloaded_copy(p->bytes, from + at, n, k->memory + at, stream));
    }
    q_own = 0;
    copied++;
    errors += status != 0 && status != GCK_STORE_BUSY;
    k->nbytes = status == 0 ? k->nbytes : 0;     /* what came is not looked at, and freed after the copies */
    q_run(stream, check_run, k, NULL, NULL, 0);
}

/* Queue what reads it. */
static void check(payload *p, void *stream)
{
    void *memory = gck_offloaded_memory(p->bytes);

    q_run(stream, check_run, kernel_of(p, memory, 0, gck_offloaded_nbytes(p->bytes), 0), memory, NULL, size_of(p));
}

/* Read it, on two streams at once where `second` is not NULL. */
static void read_it(payload *p, void *stream, void *second, uint64_t *state)
{
    int status;

    if (q_draw(state, 6) == 0) {
        copy(p, stream, state);
        return;
    }
    status = said(gck_offloaded_bring(p->bytes, stream));
    if (status != 0) {
        errors += status != GCK_STORE_RING;
        copy(p, stream, state);
        return;
    }
    if (second != NULL && gck_offloaded_bring(p->bytes, second) != 0) {
        errors++;
        second = NULL;
    }
    check(p, stream);
    if (second != NULL) {
        const int first = (int)q_draw(state, 2);
        check(p, second);
        errors += gck_offloaded_let_go(p->bytes, first ? stream : second) != 0;
        stream = first ? second : stream;
    }
    errors += gck_offloaded_let_go(p->bytes, stream) != 0;
}

static void drop(payload *p)
{
    pthread_mutex_lock(&lock);
    const int last = p != NULL && --p->refs == 0;
    pthread_mutex_unlock(&lock);
    if (last) {
        gck_offloaded_drop(p->bytes);
        free(p);
    }
}

/* NULL: it was refused, or given up. */
static payload *write_it(uint64_t id, int64_t nbytes, void *stream, uint64_t *state)
{
    payload *p = malloc(sizeof *p);
    int status;

    *p = (payload){.id = id, .refs = 1};
    status = said(gck_offloader_take(offloader, nbytes, stream, &p->bytes));
    if (status != 0) {
        full += status == GCK_STORE_RING || status == GCK_STORE_FULL || status == GCK_STORE_LARGE;
        refused += status == GCK_STORE_DEVICE || status == GCK_STORE_NO_MEMORY;
        free(p);
        return NULL;
    }
    taken++;
    q_run(stream, write_run, kernel_of(p, gck_offloaded_memory(p->bytes), 0, nbytes, size_of(p)), NULL,
          gck_offloaded_memory(p->bytes), size_of(p));
    if (q_draw(state, 24) == 0 || (status = gck_offloaded_written(p->bytes, stream)) != 0) {
        errors += status != 0;
        drop(p);
        return NULL;
    }
    return p;
}

/* Share it with other threads, or read one that another shares. */
static void share(payload *p, void *stream, uint64_t *state)
{
    const int which = (int)q_draw(state, SHARED);
    payload *other;

    if (q_draw(state, 3) == 0) {
        pthread_mutex_lock(&lock);
        if (!p->shared) {                        /* else others read it meanwhile */
            p->shared = 1;
        }
        p->refs++;
        other = slots[which];
        slots[which] = p;
        pthread_mutex_unlock(&lock);
    } else {
        pthread_mutex_lock(&lock);
        other = slots[which];
        if (other != NULL) {
            other->refs++;
        }
        pthread_mutex_unlock(&lock);
        if (other != NULL) {
            read_it(other, stream, NULL, state);
        }
    }
    drop(other);
}

/* A forward writes; a backward reads in reverse, or in another order; some twice, at once, or never. */
static void *work(void *argument)
{
    uint64_t state = (uint64_t)(uintptr_t)argument * 977 + 5, id = state << 20;
    void *streams[STREAMS];
    payload *all[MOST];

    for (int i = 0; i < STREAMS; i++) {
        streams[i] = q_stream_begin();
    }
    for (int step = 0; step < steps; step++) {
        int n = 0;
        for (uint64_t i = 0, count = 1 + q_draw(&state, MOST); i < count; i++) {
            const int64_t nbytes = 1 + (int64_t)q_draw(&state, q_draw(&state, 4) ? 3000 : 20000);
            all[n] = write_it(++id, nbytes, streams[q_draw(&state, STREAMS)], &state);
            if (all[n] != NULL) {
                n++;
            }
            if (n > 0 && q_draw(&state, 6) == 0) {
                read_it(all[q_draw(&state, (uint64_t)n)], streams[q_draw(&state, STREAMS)], NULL, &state);
            }
            if (n > 0 && threads > 1) {
                share(all[n - 1], streams[q_draw(&state, STREAMS)], &state);
            }
        }
        while (n > 0) {
            const int which = shuffles ? (int)q_draw(&state, (uint64_t)n) : n - 1;
            for (uint64_t times = q_draw(&state, 6) ? 1 : q_draw(&state, 3); times > 0; times--) {
                const uint64_t s = q_draw(&state, STREAMS);
                read_it(all[which], streams[s], q_draw(&state, 4) ? NULL : streams[1 - s], &state);
            }
            if (q_draw(&state, 16) == 0) {
                copy(all[which], streams[0], &state);
            }
            drop(all[which]);
            all[which] = all[--n];
        }
    }
    for (int i = 0; i < STREAMS; i++) {
        q_stream_end(streams[i]);
    }
    return NULL;
}

/* ---- runs ---- */

static void work_all(uint64_t seed)
{
    pthread_t made[THREADS];

    for (int i = 0; i < threads; i++) {
        pthread_create(&made[i], NULL, work, (void *)(uintptr_t)(seed * THREADS + (uint64_t)i));
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(made[i], NULL);
    }
    for (int i = 0; i < SHARED; i++) {
        drop(slots[i]);
        slots[i] = NULL;
    }
    q_drain();
}

/* 1 when nothing is in use, and nothing lost.  The store's threads may end their moves first. */
static int is_idle(void)
{
    gck_offloader_figures f;
    gck_byte_store_figures g;
    int idle = 0;

    for (int tries = 0; tries < 200 && !idle; tries++) {
        gck_byte_store_item *item;
        if (gck_byte_store_reserve(store, 1, &item) == 0) {    /* the store looks at what is done */
            gck_byte_store_drop(item);
        }
        gck_offloader_read_figures(offloader, 0, &f);
        gck_byte_store_read_figures(store, 0, &g);
        idle = f.ring_used == 0 && f.ring_lost == 0 && g.memory_used == 0 && g.file_used == 0;
        usleep(idle ? 0 : 500);
    }
    return idle;
}

static long copies_in, prefetched, in_ring, misses, file_reads;

static void add_figures(void)
{
    gck_offloader_figures f;

    gck_offloader_read_figures(offloader, 0, &f);
    copies_in += f.copies_in;
    prefetched += f.prefetched;
    in_ring += f.read_in_ring;
    misses += f.misses_in + f.misses_out;
    file_reads += m.reads;
    bad_figures += f.ring_peak > f.ring;
}

static void run(uint64_t seed, int by_threads, bad fault)
{
    static const int64_t rings[] = {2048, 8192, 20224, 65536, 200192}, memories[] = {8192, 32768, 100000, 1 << 20};
    static const int64_t helds[] = {0, 0, -1, 8192, 1 << 30};
    uint64_t state = seed * 104729 + 11;
    const gck_byte_store_options room = {memories[q_draw(&state, 4)], (int)q_draw(&state, 3), 2,
                                         q_draw(&state, 2) ? "" : NULL, &m_calls};
    const gck_offloader_options options = {helds[q_draw(&state, 5)], (int)q_draw(&state, 5)};     /* held, prefetch */
    const int segments = 1 + (int)q_draw(&state, SEGMENTS);
    const int64_t ring = rings[q_draw(&state, 5)];
    char *memory[SEGMENTS] = {NULL};
    void *stream;
    int status;

    q_begin(seed, by_threads, (int)q_draw(&state, 17));
    q.pin_limit = q_draw(&state, 3) ? q.pin_limit : 0;       /* else it cannot be pinned */
    threads = q_draw(&state, 2) ? 1 : 1 + (int)q_draw(&state, THREADS);
    steps = 3;
    shuffles = (int)q_draw(&state, 2);
    m.reads = 0;
    f_memory.asked = 0;
    f_memory.failing = fault.of_memory ? fault.number : 0;
    f_memory.forever = fault.forever;
    if (gck_byte_store_new(&room, &store) != 0) {
        errors++;
        leaks += f_memory.alive != 0;
        if (!fault.of_memory) {
            abort();
        }
        return;
    }
    q.bad_call = fault.of_memory ? 0 : fault.number;
    q.forever = fault.forever;
    stream = q_stream_begin();
    status = gck_offloader_new(&q_link, 0, store, &options, &offloader);
    for (int i = 0; i < segments && status == 0; i++) {
        memory[i] = aligned_alloc(CELL, (size_t)ring);
        q_run(stream, write_run, kernel_of(&(payload){.id = 0}, memory[i], 0, 0, ring), NULL, memory[i], ring);
        errors += said(gck_offloader_add(offloader, memory[i], ring, stream)) != 0;
    }
    if (status == 0) {
        work_all(seed);
        const int idle = fault.number > 0 || q_draw(&state, 2) ? is_idle() : 1;  /* else its end has more to wait for */
        bad_figures += !idle && fault.number == 0;
        if (fault.number > 0) {                  /* the fault ends: only room can be missing */
            const long before = errors + refused;
            q.bad_call = f_memory.failing = 0;
            work_all(seed + 1);
            leaks += !idle;
            bad_figures += idle && errors + refused != before;
        }
        add_figures();
    } else {
        errors++;
    }
    if (offloader != NULL) {
        gck_offloader_free(offloader);           /* without a fault, its copies are done now */
    }
    q_drain();
    gck_byte_store_free(store);
    q_stream_end(stream);
    leaks += (fault.number == 0 || fault.of_memory) && (q.events != 0 || q.pins != 0);
    leaks += f_memory.alive != 0;
    for (int i = 0; i < segments; i++) {
        free(memory[i]);
    }
}

int main(int argc, char **argv)
{
    const uint64_t first = (uint64_t)atoll(argv[2]);
    long calls = 0, runs = 0;

    if (argc < 5) {
        return 2;
    }
    alarm(300);                                  /* a run that hangs ends */
    if (strcmp(argv[1], "run") == 0) {
#ifdef GCK_LEAVE_OUT_EDGES
        gck_edge_left_out = argc > 5 ? atoi(argv[5]) : 0;
#endif
        for (uint64_t seed = first; seed <= (uint64_t)atoll(argv[3]); seed++, runs++) {
            run(seed, strcmp(argv[4], "threads") == 0, (bad){0});
            calls += q.calls;
        }
    } else {
        bad fault = {0, strcmp(argv[4], "forever") == 0, strcmp(argv[1], "memory") == 0};
        run(first, 0, (bad){0});
        calls = fault.of_memory ? f_memory.asked : q.calls;
        for (fault.number = 1; fault.number <= calls; fault.number += atol(argv[3]), runs++) {
            run(first, 0, fault);
        }
    }
    printf("{\"runs\": %ld, \"calls\": %ld, \"wrong\": %ld, \"races\": %ld, \"checked\": %ld, \"errors\": %ld, "
           "\"refused\": %ld, \"full\": %ld, \"copied\": %ld, \"taken\": %ld, \"bad_figures\": %ld, \"leaks\": %ld, "
           "\"copies_in\": %ld, \"prefetched\": %ld, \"in_ring\": %ld, \"misses\": %ld, \"file_reads\": %ld, "
           "\"unsaid\": %ld, ",
           runs, calls, (long)wrong, q.races, (long)checked, (long)errors, (long)refused, (long)full, (long)copied,
           (long)taken, (long)bad_figures, (long)leaks, copies_in, prefetched, in_ring, misses, file_reads,
           (long)unsaid);
    f_print();
    return 0;
}
