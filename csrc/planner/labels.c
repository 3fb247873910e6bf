/* labels.c: lists of labels, extended by the options of a region. */
#include "planner/labels.h"

#include <stdlib.h>
#include <string.h>

int gck_labels_reserve(gck_labels *labels, int64_t capacity)
{
    gck_label *at;

    if (capacity <= labels->capacity) {
        return GCK_OK;
    }
    if (capacity < 2 * labels->capacity) {
        capacity = 2 * labels->capacity;     /* faster: lists grow a little from region to region */
    }
    if ((at = gck_planner_memory(capacity, sizeof *at)) == NULL) {
        return GCK_E_MEMORY;
    }
    if (labels->n > 0) {
        memcpy(at, labels->at, (size_t)labels->n * sizeof *at);
    }
    free(labels->at);
    labels->at = at;
    labels->capacity = capacity;
    return GCK_OK;
}

void gck_labels_free(gck_labels *labels)
{
    free(labels->at);
    *labels = (gck_labels){.at = NULL};
}

/* ---- bytes and time ---- */

/* Merge `sorted` with the extensions of `next` by one option; more than `most` labels: stop.  Each
 * list has ascending bytes and descending times, and so has what is written. */
static int64_t merge(const gck_labels *sorted, const gck_labels *next, const gck_option *option, int64_t most,
                     gck_label *out)
{
    const gck_label *a = sorted->at, *const end = a + sorted->n;
    int64_t n = 0, i = 0, time = INT64_MAX;

    /* Of all that the option's own need raises to the same bytes, the last is the fastest. */
    for (int64_t high = next->n; i < high;) {
        const int64_t middle = i + (high - i) / 2;
        if (next->at[middle].bytes + option->kept <= option->need) {
            i = middle + 1;
        } else {
            high = middle;
        }
    }
    i -= i > 0;
    for (; i < next->n; i++) {
        if (next->at[i].time + option->time >= time) {
            continue;                        /* faster: most are no better than the last one written */
        }
        const gck_label new = gck_label_extend(&next->at[i], i, option);
        while (a < end && a->time >= time) {
            a++;
        }
        while (a < end && (a->bytes < new.bytes || (a->bytes == new.bytes && a->time <= new.time))) {
            time = a->time;
            out[n++] = *a++;
        }
        if (new.time < time) {
            time = new.time;
            out[n++] = new;
        }
        if (n > most) {
            return n;
        }
    }
    while (a < end && a->time >= time) {
        a++;
    }
    if (a < end) {
        memcpy(out + n, a, (size_t)(end - a) * sizeof *a);
        n += end - a;
    }
    return n;
}

int gck_labels_extend(const gck_labels *next, const gck_option *options, int n, int64_t most, gck_labels *out,
                      gck_labels *spare)
{
    out->n = spare->n = 0;
    for (int o = 0; o < n && out->n <= most; o++) {
        const int status = gck_labels_reserve(spare, out->n + next->n + 1);
        if (status != GCK_OK) {
            return status;
        }
        spare->n = merge(out, next, &options[o], most, spare->at);
        const gck_labels merged = *spare;
        *spare = *out;
        *out = merged;
    }
    return GCK_OK;
}

/* ---- bytes, error and time ---- */

static int is_before(const gck_label *a, const gck_label *b)
{
    return a->bytes != b->bytes ? a->bytes < b->bytes
         : a->error != b->error ? a->error < b->error
                                : a->time < b->time;
}

/* The end of the sorted labels that begin at `from`. */
static int64_t run_end(const gck_labels *labels, int64_t from)
{
    do {
        from++;
    } while (from < labels->n && !is_before(&labels->at[from], &labels->at[from - 1]));
    return from;
}

/* Merge neighbouring runs, each into one; return 1 if there was more than one.  Equal labels keep
 * their order. */
static int merge_runs(const gck_labels *labels, gck_label *out)
{
    int64_t n = 0, end = 0;

    while (end < labels->n) {
        const int64_t begin = end, middle = run_end(labels, begin);
        const gck_label *a = labels->at + begin, *b = labels->at + middle;
        end = middle < labels->n ? run_end(labels, middle) : middle;
        const gck_label *const a_end = b, *const b_end = labels->at + end;
        if (begin == 0 && end == middle) {
            return 0;
        }
        while (a < a_end && b < b_end) {
            out[n++] = is_before(b, a) ? *b++ : *a++;
        }
        while (a < a_end) {
            out[n++] = *a++;
        }
        while (b < b_end) {
            out[n++] = *b++;
        }
    }
    return n > 0;
}

/* Errors that are better in time than each smaller error so far: error ascends, time descends. */
typedef struct {
    int64_t error, time;
} stair;

/* Is a label with at most this error and time among the stairs?  If not, add it.  The stairs have
 * room for one more. */
static int is_new(stair *stairs, int64_t *n, const gck_label *label)
{
    int64_t low = 0, high = *n, end;

    while (low < high) {                     /* the first of a larger error */
        const int64_t middle = low + (high - low) / 2;
        if (stairs[middle].error <= label->error) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low > 0 && stairs[low - 1].time <= label->time) {
        return 0;
    }
    low -= low > 0 && stairs[low - 1].error == label->error;
    for (end = low; end < *n && stairs[end].time >= label->time; end++) {
    }
    memmove(&stairs[low + 1], &stairs[end], (size_t)(*n - end) * sizeof *stairs);
    stairs[low] = (stair){label->error, label->time};
    *n += low + 1 - end;
    return 1;
}

int gck_labels_sort_out(gck_labels *labels, int64_t most, gck_labels *spare)
{
    int status = gck_labels_reserve(spare, labels->n);
    int64_t n = 0, n_stairs = 0;
    stair *stairs = NULL;

    if (status != GCK_OK) {
        return status;
    }
    while (merge_runs(labels, spare->at)) {
        const gck_labels sorted = {spare->at, labels->n, spare->capacity};
        *spare = *labels;
        *labels = sorted;
    }
    if ((stairs = gck_planner_memory((most < labels->n ? most : labels->n) + 2, sizeof *stairs)) == NULL) {
        return GCK_E_MEMORY;
    }
    for (int64_t i = 0; i < labels->n && n <= most; i++) {
        if (is_new(stairs, &n_stairs, &labels->at[i])) {
            labels->at[n++] = labels->at[i];
        }
    }
    labels->n = n;
    free(stairs);
    return GCK_OK;
}

int gck_labels_extend_with_errors(const gck_labels *next, const gck_option *options, int n, int64_t most,
                                  gck_labels *out, gck_labels *spare)
{
    int status;

    out->n = 0;
    if ((status = gck_labels_reserve(out, next->n * n)) != GCK_OK) {
        return status;
    }
    for (int o = 0; o < n; o++) {
        for (int64_t i = 0; i < next->n; i++) {
            out->at[out->n++] = gck_label_extend(&next->at[i], i, &options[o]);
        }
    }
    return gck_labels_sort_out(out, most, spare);
}
