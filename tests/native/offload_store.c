/* Run by test_offload_programs.py: threads put, get and drop bytes of a store; its file's calls may fail.
 *
 *     offload_store DIRECTORY SEED THREADS STEPS MEMORY_KIB [CALL FAULT]
 *
 * DIRECTORY: "" for a store without a file.
 * CALL: the number of the call of the file that goes wrong, counted from 1; FAULT: the errno that it sets, "short" or
 * "flip" (a read gives less, or one other bit), "forever": this call and all after it set ENOSPC; "full": so do writes
 * from there on; "memory": CALL is the number of a request for memory, or for a thread (built with FAILING), and all is
 * done once more after it.  Prints figures. */
#define _GNU_SOURCE
#include "failing_memory.h"
#include "offload/store.h"
#include "offload/store_parts.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 64 };

static atomic_long calls, errors, wrong, refused, full, past;
static long bad_call;
static const char *fault = "";
static int steps;
static gck_byte_store *store;

static int goes_wrong(void)
{
    const long n = ++calls;
    return bad_call > 0 && strcmp(fault, "full") != 0 && strcmp(fault, "memory") != 0
        && (n == bad_call || (n > bad_call && strcmp(fault, "forever") == 0));
}

static int fails(void)
{
    if (!goes_wrong()) {
        return 0;
    }
    if (strcmp(fault, "short") != 0 && strcmp(fault, "flip") != 0) {
        errno = strcmp(fault, "forever") == 0 ? ENOSPC : atoi(fault);
        return 1;
    }
    return 2;
}

static int faulty_open(const char *directory) { return fails() == 1 ? -1 : gck_file_system_calls.open(directory); }

static int faulty_file_system(int fd, int64_t *magic)
{
    return fails() == 1 ? -1 : gck_file_system_calls.file_system(fd, magic);
}

static ssize_t faulty_write(int fd, const void *from, size_t nbytes, off_t offset)
{
    if (fails() == 1) {
        return -1;
    }
    if (strcmp(fault, "full") == 0 && calls >= bad_call) {
        errno = ENOSPC;
        return -1;
    }
    return gck_file_system_calls.write(fd, from, nbytes, offset);
}

static ssize_t faulty_read(int fd, void *to, size_t nbytes, off_t offset)
{
    const int kind = fails();
    ssize_t got;

    if (kind == 1) {
        return -1;
    }
    got = gck_file_system_calls.read(fd, to, nbytes, offset);
    if (kind == 2 && strcmp(fault, "short") == 0) {
        return got / 2 + 7;
    }
    if (kind == 2 && got > 0) {
        ((char *)to)[(size_t)calls * 7919 % (size_t)got] ^= (char)(1 << calls % 8);
    }
    return got;
}

static const gck_file_calls faulty = {faulty_open, faulty_file_system, faulty_write, faulty_read, close};

static uint64_t next(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

static void fill(char *bytes, int64_t nbytes, uint64_t id)
{
    for (int64_t i = 0; i < nbytes; i++) {
        bytes[i] = (char)(id * 31 + (uint64_t)i * 7 + (uint64_t)(i >> 8));
    }
}

/* 0, or why it is refused. */
static int put(int64_t nbytes, uint64_t id, gck_byte_store_item **stored)
{
    const int status = gck_byte_store_reserve(store, nbytes, stored);

    if (status == 0) {
        fill(gck_byte_store_memory(*stored), nbytes, id);
        gck_byte_store_filled(*stored);
    }
    return status;
}

/* 1 when its bytes are in memory until release(). */
static int hold(gck_byte_store_item *stored)
{
    const int status = gck_byte_store_hold(stored);

    if (status == 0) {
        pthread_mutex_lock(&store->lock);
        past += stored->past != NULL;
        pthread_mutex_unlock(&store->lock);
    }
    errors += status != 0;
    return status == 0;
}

static void compare(const gck_byte_store_item *held, uint64_t id, char *want)
{
    const int64_t nbytes = gck_byte_store_nbytes(held);

    fill(want, nbytes, id);
    wrong += memcmp(gck_byte_store_memory(held), want, (size_t)nbytes) != 0;
}

static void check(gck_byte_store_item *stored, uint64_t id, char *want)
{
    if (hold(stored)) {
        compare(stored, id, want);
        gck_byte_store_release(stored);
    }
}

/* Several are held at once, one of them twice: no memory may be left for the last ones.  Some are dropped while they
 * are held. */
static void check_at_once(gck_byte_store_item **all, const uint64_t *ids, int n, int dropped, char *want)
{
    int held[MOST];

    for (int i = 0; i < n; i++) {
        held[i] = hold(all[i]);
    }
    if (hold(all[0])) {
        gck_byte_store_release(all[0]);
    }
    for (int i = 0; i < dropped; i++) {
        gck_byte_store_drop(all[i]);
    }
    for (int i = 0; i < n; i++) {
        if (held[i]) {
            compare(all[i], ids[i], want);
            gck_byte_store_release(all[i]);
        }
    }
}

/* A forward puts, a backward gets in reverse; some are asked for twice, out of order, at once, or never. */
static void *work(void *argument)
{
    uint64_t state = (uint64_t)(uintptr_t)argument * 977 + 5, id = state << 20;
    char *want = malloc(1 << 20);
    gck_byte_store_item *all[MOST];
    uint64_t ids[MOST];

    for (int step = 0; step < steps; step++) {
        int n = 0;
        for (uint64_t i = 0, count = 1 + next(&state) % MOST; i < count; i++) {
            const int64_t nbytes = 1 + (int64_t)(next(&state) % (next(&state) % 4 ? 20000 : 300000));
            ids[n] = ++id;
            const int status = put(nbytes, id, &all[n]);
            n += status == 0;
            full += status == GCK_STORE_FULL || status == GCK_STORE_LARGE;       /* others hold what it has */
            refused += status != 0 && status != GCK_STORE_FULL && status != GCK_STORE_LARGE;
            if (n > 1 && next(&state) % 8 == 0) {
                const int which = (int)(next(&state) % (uint64_t)n);
                check(all[which], ids[which], want);
            }
        }
        if (n > 0 && next(&state) % 3 == 0) {
            const int dropped = (int)(next(&state) % (uint64_t)n);
            check_at_once(all, ids, n, dropped, want);
            n -= dropped;
            memmove(all, all + dropped, (size_t)n * sizeof *all);
            memmove(ids, ids + dropped, (size_t)n * sizeof *ids);
        }
        while (n > 0) {
            n--;
            for (uint64_t times = next(&state) % 10 == 0 ? next(&state) % 3 : 1; times > 0; times--) {
                check(all[n], ids[n], want);
            }
            gck_byte_store_drop(all[n]);
        }
    }
    free(want);
    return NULL;
}

static void work_all(int seed, int n)
{
    pthread_t threads[16];

    for (int i = 0; i < n; i++) {
        pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)(seed * 16 + i));
    }
    for (int i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
    }
}

int main(int argc, char **argv)
{
    gck_byte_store_figures f;
    long again = 0;
    const int n = atoi(argv[3]);
    const gck_byte_store_options options = {(int64_t)atoi(argv[5]) << 10, 2, 2, argv[1][0] != 0 ? argv[1] : NULL,
                                            &faulty};
    int status;

    steps = atoi(argv[4]);
    bad_call = argc > 7 ? atol(argv[6]) : 0;
    fault = argc > 7 ? argv[7] : "";
    f_memory.failing = strcmp(fault, "memory") == 0 ? bad_call : 0;
    if ((status = gck_byte_store_new(&options, &store)) != 0) {
        printf("{\"new\": \"%s\", ", gck_byte_store_text(status));
        f_print();
        return 0;
    }
    work_all(atoi(argv[2]), n);
    if (f_memory.failing > 0) {
        f_memory.failing = 0;
        again = errors + refused;
        work_all(atoi(argv[2]), n);
        again = errors + refused - again;
    }
    gck_byte_store_read_figures(store, 0, &f);
    for (int tries = 0; tries < 1000 && (f.memory_used > 0 || f.file_used > 0); tries++) {
        usleep(1000);                            /* threads end their moves */
        gck_byte_store_read_figures(store, 0, &f);
    }
    gck_byte_store_free(store);
    printf("{\"calls\": %ld, \"errors\": %ld, \"wrong\": %ld, \"refused\": %ld, \"full\": %ld, \"past\": %ld, ",
           (long)calls, (long)errors, (long)wrong, (long)refused, (long)full, (long)past);
    printf("\"again\": %ld, ", again);
    printf("\"puts\": %lld, \"gets\": %lld, \"from_memory\": %lld, \"memory_used\": %lld, \"memory_peak\": %lld, "
           "\"file_used\": %lld, \"file_peak\": %lld, \"written\": %lld, \"read\": %lld, \"write_error\": %d, ",
           (long long)f.puts, (long long)f.gets, (long long)f.from_memory, (long long)f.memory_used,
           (long long)f.memory_peak, (long long)f.file_used, (long long)f.file_peak, (long long)f.written,
           (long long)f.read, f.write_error);
    f_print();
    return wrong > 0;
}
