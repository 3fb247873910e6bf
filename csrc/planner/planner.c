/* planner.c: from the last region to the first, the labels of all plans. */
#include "planner/planner.h"

#include "planner/error_grid.h"
#include "planner/slack_grid.h"

#include <stdlib.h>
#include <string.h>

/* What solving needs beside the front. */
typedef struct {
    gck_option    *options;                  /* of one region */
    gck_labels     next, labels, spare;      /* of the next region and of this one */
    int64_t       *first;                    /* for each region, the fewest bytes of a label */
    int64_t        range;                    /* the most bytes between two labels of one region */
    gck_slack_grid slack;
    gck_error_grid errors;
    int            thinned;                  /* a grid is in use */
} solver;

/* Set `first` and `range`; GCK_UNAVAILABLE as first: no label. */
static void find_ranges(const gck_chain *chain, solver *s)
{
    int64_t first = chain->last_need, last = first;

    s->first[chain->regions] = first;
    for (int64_t l = chain->regions - 1; l >= 0; l--) {
        const int n = gck_chain_options(chain, l, s->options);
        int64_t least = GCK_UNAVAILABLE, most = GCK_UNAVAILABLE, time = INT64_MAX;
        for (int o = 0; o < n && first != GCK_UNAVAILABLE; o++) {
            const gck_option *option = &s->options[o];
            const int64_t low = first + option->kept, high = last + option->kept;
            const int64_t low_bytes = low > option->need ? low : option->need;
            const int64_t high_bytes = high > option->need ? high : option->need;
            least = low_bytes < least ? low_bytes : least;
            /* The last label is the fastest; with errors, others may have more bytes. */
            if (chain->error != NULL ? most == GCK_UNAVAILABLE || high_bytes > most
                                     : option->time < time || (option->time == time && high_bytes < most)) {
                most = high_bytes;
                time = option->time;
            }
        }
        s->first[l] = first = least;
        last = most;
        s->range = last - first > s->range ? last - first : s->range;
    }
}

/* Thin labels from region l on: the labels of the region after it are the last exact ones. */
static int begin_to_thin(gck_front *front, solver *s, int64_t l)
{
    int status = gck_labels_reserve(&front->exact, s->next.n);

    if (status != GCK_OK) {
        return status;
    }
    memcpy(front->exact.at, s->next.at, (size_t)s->next.n * sizeof *s->next.at);
    front->exact.n = s->next.n;
    front->exact_from = l + 1;
    s->thinned = 1;
    return front->chain->error != NULL
               ? gck_error_grid_init(&s->errors, front->chain, front->buckets / 4, s->range)
               : gck_slack_grid_init(&s->slack, front->buckets, s->range / front->buckets + 1);
}

/* Set s->labels to those of region l. */
static int extend(gck_front *front, solver *s, int64_t l)
{
    const int n = gck_chain_options(front->chain, l, s->options), errors = front->chain->error != NULL;
    int status = GCK_OK;

    if (!s->thinned) {
        status = errors ? gck_labels_extend_with_errors(&s->next, s->options, n, front->buckets, &s->labels, &s->spare)
                        : gck_labels_extend(&s->next, s->options, n, front->buckets, &s->labels, &s->spare);
        if (status != GCK_OK || s->labels.n <= front->buckets) {
            return status;
        }
        if ((status = begin_to_thin(front, s, l)) != GCK_OK) {
            return status;
        }
    }
    return errors ? gck_error_grid_extend(&s->errors, &s->next, s->options, n, s->first[l], &s->labels)
                  : gck_slack_grid_extend(&s->slack, &s->next, s->options, n, &s->labels);
}

/* Write down how the labels of region l were made. */
static int keep_steps(gck_front *front, const solver *s, int64_t l)
{
    gck_step *steps = gck_planner_memory(s->labels.n, sizeof *steps);

    if (steps == NULL) {
        return GCK_E_MEMORY;
    }
    front->steps[l] = steps;
    for (int64_t i = 0; i < s->labels.n; i++) {
        steps[i] = (gck_step){s->labels.at[i].from, s->labels.at[i].option};
    }
    return GCK_OK;
}

static int solve(gck_front *front, solver *s)
{
    const gck_chain *chain = front->chain;
    int status = gck_labels_reserve(&s->next, 1);

    if (status != GCK_OK) {
        return status;
    }
    s->next.at[s->next.n++] = (gck_label){.bytes = chain->last_need};
    for (int64_t l = chain->regions - 1; l >= 0; l--) {
        if ((status = extend(front, s, l)) != GCK_OK || (status = keep_steps(front, s, l)) != GCK_OK) {
            return status;
        }
        const gck_labels used = s->next;
        s->next = s->labels;
        s->labels = used;
    }
    if (s->thinned && chain->error != NULL) {
        status = gck_labels_sort_out(&s->next, INT64_MAX - 1, &s->spare);
    }
    front->plans = s->next;
    s->next = (gck_labels){.at = NULL};
    return status;
}

int gck_front_new(const gck_chain *chain, int64_t buckets, gck_front **out)
{
    solver s = {.range = 0};
    gck_front *front = NULL;
    int status = gck_chain_check(chain);

    *out = NULL;
    if (status == GCK_OK && (buckets < GCK_LEAST_BUCKETS || buckets > GCK_MOST_BUCKETS)) {
        status = GCK_E_RANGE;
    }
    if (status != GCK_OK) {
        goto exit;
    }
    status = GCK_E_MEMORY;
    s.options = gck_planner_memory(chain->options, sizeof *s.options);
    s.first = gck_planner_memory(chain->regions + 1, sizeof *s.first);
    front = gck_planner_memory(1, sizeof *front);
    if (s.options == NULL || s.first == NULL || front == NULL) {
        goto exit;
    }
    *front = (gck_front){.chain = chain, .buckets = buckets};
    if ((front->steps = gck_planner_memory(chain->regions, sizeof *front->steps)) == NULL) {
        goto exit;
    }
    for (int64_t l = 0; l < chain->regions; l++) {
        front->steps[l] = NULL;
    }
    find_ranges(chain, &s);
    status = s.first[0] == GCK_UNAVAILABLE ? GCK_OK : solve(front, &s);
    if (status == GCK_OK) {
        *out = front;
        front = NULL;
    }
exit:
    gck_front_free(front);
    gck_slack_grid_free(&s.slack);
    gck_error_grid_free(&s.errors);
    gck_labels_free(&s.next);
    gck_labels_free(&s.labels);
    gck_labels_free(&s.spare);
    free(s.first);
    free(s.options);
    return status;
}

void gck_front_free(gck_front *front)
{
    if (front == NULL) {
        return;
    }
    for (int64_t l = 0; front->steps != NULL && l < front->chain->regions; l++) {
        free(front->steps[l]);
    }
    free(front->steps);
    gck_labels_free(&front->plans);
    gck_labels_free(&front->exact);
    free(front);
}

int64_t gck_front_find(const gck_front *front, int64_t budget, int64_t error_budget)
{
    const gck_label *plans = front->plans.at;
    int64_t found = -1;

    for (int64_t i = 0; i < front->plans.n && plans[i].bytes <= budget; i++) {
        if (plans[i].error <= error_budget && (found < 0 || plans[i].time < plans[found].time)) {
            found = i;
        }
    }
    return found;
}

int64_t gck_front_least(const gck_front *front, int64_t error_budget)
{
    for (int64_t i = 0; i < front->plans.n; i++) {
        if (front->plans.at[i].error <= error_budget) {
            return front->plans.at[i].bytes;
        }
    }
    return GCK_UNAVAILABLE;
}

void gck_front_choices(const gck_front *front, int64_t plan, uint32_t *choices)
{
    const gck_label *label = &front->plans.at[plan];
    gck_step step = {label->from, label->option};

    for (int64_t l = 0; l < front->chain->regions; l++) {
        choices[l] = step.option;
        if (l + 1 < front->chain->regions) {
            step = front->steps[l + 1][step.from];
        }
    }
}
