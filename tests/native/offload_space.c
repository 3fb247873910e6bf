/* Run by test_offloader.py: free ranges (space.c) and those that queued work still uses (ranges.c), beside a naive
 * model of a byte for each unit.
 *
 *     offload_space FIRST LAST [EDGE]     seeds; EDGE is left out (-DGCK_LEAVE_OUT_EDGES)
 *
 * Prints differences from the model, accesses that nothing orders, and how much of it happened. */
#include "link_queues.h"
#include "offload/ranges.h"

#include <unistd.h>

enum { UNITS = 512, PARTS = 64, SEGMENT = 128, TRIES = 400 };

#ifdef GCK_LEAVE_OUT_EDGES
int gck_edge_left_out;
#endif

typedef struct {
    int64_t offset, size;
    void   *stream;              /* NULL: of the host */
} part;

static long different, takes, refusals, waits, joins;
static char has[UNITS], taken[UNITS];            /* units in the space; taken */
static part parts[PARTS];
static int  n;

/* The longest run of units that are free; *best: the shortest of at least so many. */
static int64_t longest(int64_t wanted, int64_t *best)
{
    int64_t most = 0, run = 0;

    *best = UNITS + 1;
    for (int i = 0; i <= UNITS; i++) {
        if (i < UNITS && has[i] && !taken[i]) {
            run++;
        } else {
            most = run > most ? run : most;
            *best = run >= wanted && run < *best ? run : *best;
            run = 0;
        }
    }
    return most;
}

/* The length of the free run that these units were cut from. */
static int64_t run_of(int64_t offset)
{
    int64_t first = offset, last = offset;

    while (first > 0 && has[first - 1] && !taken[first - 1]) {
        first--;
    }
    while (last < UNITS && has[last] && !taken[last]) {
        last++;
    }
    return last - first;
}

static int64_t used(void)
{
    int64_t sum = 0;

    for (int i = 0; i < UNITS; i++) {
        sum += taken[i];
    }
    return sum;
}

/* A part was taken: all of it must be free. */
static void note(int64_t offset, int64_t size, void *stream)
{
    for (int64_t i = offset; i < offset + size; i++) {
        different += i >= UNITS || !has[i] || taken[i];
        taken[i % UNITS] = 1;
    }
    parts[n++] = (part){offset, size, stream};
    takes++;
}

static part forget(int i)
{
    const part found = parts[i];

    memset(taken + found.offset, 0, (size_t)found.size);
    parts[i] = parts[--n];
    return found;
}

/* Segments 0, 2, 3 and, later, 1, which joins its neighbours. */
static int64_t segment_at(int i) { return (i == 1 ? 2 : i == 2 ? 3 : i == 3 ? 1 : 0) * SEGMENT; }

static void begin(uint64_t seed)
{
    memset(has, 0, sizeof has);
    memset(taken, 0, sizeof taken);
    n = 0;
    q_begin(seed, 0, (int)(seed % 17));
}

static void space_run(uint64_t seed)
{
    uint64_t state = seed * 31 + 7;
    gck_space space = {.free = NULL};
    int64_t best;

    begin(seed);
    for (int t = 0, segments = 0; t < TRIES; t++) {
        if (segments < 4 && q_draw(&state, TRIES / 8) == 0) {
            joins += segments == 3;
            different += gck_space_add(&space, segment_at(segments), SEGMENT) != 0;
            memset(has + segment_at(segments++), 1, SEGMENT);
        }
        if (n < PARTS && q_draw(&state, 2)) {
            const int64_t size = 1 + (int64_t)q_draw(&state, q_draw(&state, 3) ? 12 : 140);
            const int64_t most = longest(size, &best), offset = gck_space_take(&space, size);
            different += (offset < 0) != (most < size);
            if (offset >= 0) {
                different += run_of(offset) != best;     /* the smallest range that holds it */
                note(offset, size, NULL);
            } else {
                refusals++;
            }
        } else if (n > 0) {
            const part back = forget((int)q_draw(&state, (uint64_t)n));
            gck_space_give(&space, back.offset, back.size);
        }
        different += space.used != used();
        different += n == 0 && space.n > 3;      /* neighbours have joined */
    }
    gck_space_clear(&space);
}

static void nothing(void *argument) { (void)argument; }

/* Use a part, and give it back: queued work may go on. */
static void use_and_give(gck_ranges *ranges, gck_linked *on, part p, char *memory, uint64_t *state)
{
    gck_event *last = NULL;

    if (p.stream != NULL) {
        q_run(p.stream, nothing, NULL, NULL, memory + p.offset * CELL, p.size * CELL);
        last = gck_event_take(on);
        different += last == NULL || gck_event_record(last, p.stream) != GCK_OK;
    } else {
        q_host_access(memory + p.offset * CELL, p.size * CELL, (int)q_draw(state, 2));
    }
    gck_ranges_give(ranges, p.offset, p.size, last);
}

static void ranges_run(uint64_t seed)
{
    uint64_t state = seed * 31 + 7;
    gck_linked on = {.link = &q_link};
    gck_ranges ranges = {.edge = GCK_EDGE_MEMORY};
    char *memory = aligned_alloc(CELL, UNITS * CELL);
    void *streams[3];

    begin(seed);
    for (int i = 0; i < 3; i++) {
        streams[i] = q_stream_begin();
    }
    for (int t = 0, segments = 0; t < TRIES; t++) {
        void *stream = q_draw(&state, 3) ? streams[q_draw(&state, 3)] : NULL;
        if (segments < 4 && q_draw(&state, TRIES / 8) == 0) {    /* work on it may not be done */
            const part p = {segment_at(segments), SEGMENT, streams[0]};
            gck_event *last = gck_event_take(&on);
            q_run(p.stream, nothing, NULL, NULL, memory + p.offset * CELL, SEGMENT * CELL);
            different += gck_event_record(last, p.stream) != GCK_OK;
            different += gck_ranges_add(&ranges, p.offset, SEGMENT, last) != 0;
            memset(has + segment_at(segments++), 1, SEGMENT);
        }
        if (n < PARTS && q_draw(&state, 2)) {
            const int64_t size = 1 + (int64_t)q_draw(&state, q_draw(&state, 3) ? 12 : 140);
            int64_t best, most = longest(size, &best), offset;
            int status = 0;
            while ((offset = gck_ranges_take(&ranges, size, stream != NULL ? &stream : NULL, &status)) < 0
                   && gck_ranges_wait(&ranges)) {        /* the host waits for the oldest, by and by */
                gck_range_given given = gck_ranges_oldest(&ranges);
                different += stream != NULL;             /* a stream never has to */
                gck_event_finish(given.last);
                gck_ranges_give(&ranges, given.offset, given.nbytes, given.last);
                waits++;
            }
            different += status != 0 || (offset < 0) != (most < size);
            if (offset >= 0) {
                note(offset, size, stream);
            }
            refusals += offset < 0;
        } else if (n > 0) {
            use_and_give(&ranges, &on, forget((int)q_draw(&state, (uint64_t)n)), memory, &state);
        }
    }
    while (n > 0) {
        use_and_give(&ranges, &on, forget(0), memory, &state);
    }
    if (q_draw(&state, 2)) {
        q_drain();
    }
    gck_ranges_finish(&ranges);
    different += ranges.space.used != 0 || ranges.space.taken != 0;
    gck_ranges_clear(&ranges);
    for (int i = 0; i < 3; i++) {
        q_stream_end(streams[i]);
    }
    gck_linked_clear(&on);
    different += q.events != 0;
    free(memory);
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        return 2;
    }
    alarm(60);
#ifdef GCK_LEAVE_OUT_EDGES
    gck_edge_left_out = argc > 3 ? atoi(argv[3]) : 0;
#endif
    for (uint64_t seed = (uint64_t)atoll(argv[1]); seed <= (uint64_t)atoll(argv[2]); seed++) {
        space_run(seed);
        ranges_run(seed);
    }
    printf("{\"different\": %ld, \"races\": %ld, \"takes\": %ld, \"refusals\": %ld, \"waits\": %ld, \"joins\": %ld}\n",
           different, q.races, takes, refusals, waits, joins);
    return 0;
}
