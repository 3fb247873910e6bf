/* chain.c: which choices are worth a look.
 *
 * A label stands for options of all regions from one on.  Of two labels of a region, one that needs at
 * least as many bytes as the other, takes as long and has as much error is in no best plan, whatever the
 * regions before it choose; likewise of two options.  So the labels of a region come from those of the
 * next one: each is extended by each option, and those that another one beats are dropped.  While nothing
 * else is dropped, the labels hold a best plan for every budget.
 *
 * Without errors the labels of a region are a staircase, by ascending bytes and descending time.  So
 * are their extensions by one option, and staircases are merged one after another.  With errors all
 * extensions are sorted, and a staircase of error and time holds the best of those with fewer bytes.
 *
 * Where errors are priced, time + price * error is the cost of an option or a label, and stands in place
 * of its time: a chain with errors becomes one of bytes and cost.
 *
 * An exchange starts from a plan instead: it changes one option or two while that makes it faster. */
#include "planner/chain.h"

#include <string.h>

enum { SWEEPS = 8 };                         /* of exchanges over all regions, at most */
#define MOST_PRICED (INT64_C(1) << 59)

/* ---- the chain ---- */

/* Add |value| to a maximum; 0 when it is beyond the limit. */
static int widen(int64_t value, int64_t *most)
{
    const int in_range = value > -GCK_LIMIT && value < GCK_LIMIT;

    *most = in_range ? gck_larger(*most, value < 0 ? -value : value) : *most;
    return in_range;
}

int gck_chain_check(const gck_chain *chain, gck_sums *sums)
{
    int64_t kept = 0, need = 0;

    *sums = (gck_sums){.time = 0};
    if (chain->regions < 0 || chain->regions > GCK_MAX_REGIONS || chain->options < 1
        || chain->options > GCK_MAX_OPTIONS
        || (chain->last_need != GCK_UNAVAILABLE && !widen(chain->last_need, &need))) {
        return GCK_E_RANGE;
    }
    for (int64_t l = 0; l < chain->regions; l++) {
        int64_t most_kept = 0, most_time = 0, most_error = 0, least_error = GCK_LIMIT;
        for (int64_t at = l * chain->options; at < (l + 1) * chain->options; at++) {
            const int64_t error = chain->error != NULL ? chain->error[at] : 0;
            if (chain->need[at] == GCK_UNAVAILABLE) {
                continue;
            }
            if (chain->time[at] < 0 || error < 0 || !widen(chain->need[at], &need)
                || !widen(chain->kept[at], &most_kept) || !widen(chain->time[at], &most_time)
                || !widen(error, &most_error)) {
                return GCK_E_RANGE;
            }
            least_error = gck_smaller(least_error, error);
        }
        kept += most_kept;
        sums->time += most_time;
        sums->error += most_error;
        sums->least_error += gck_smaller(least_error, most_error);
        if (kept + need >= GCK_LIMIT || sums->time >= GCK_LIMIT || sums->error >= GCK_LIMIT) {
            return GCK_E_RANGE;
        }
    }
    return GCK_OK;
}

/* ---- options ---- */

gck_price gck_price_of(int64_t time, int64_t error, int64_t errors)
{
    __int128 above = time, below = error;
    gck_price price = {0, 0};

    for (; above < below << 30; above <<= 1) {
        price.exponent--;
    }
    for (; above >= below << 31; below <<= 1) {
        price.exponent++;
    }
    price.mantissa = (int64_t)(above / below);
    while (gck_priced(price, errors, 1) > MOST_PRICED) {
        price.exponent--;
    }
    return price;
}

int64_t gck_priced(gck_price price, int64_t error, int up)
{
    const __int128 product = (__int128)error * price.mantissa;
    const int down = price.exponent < 0 ? -price.exponent : 0;
    const __int128 rest = up ? ((__int128)1 << down) - 1 : 0;
    const __int128 value = price.exponent > 0 ? product << price.exponent : (product + rest) >> down;

    return value > GCK_NEVER ? GCK_NEVER : (int64_t)value;
}

int64_t gck_cost(gck_price price, int64_t time, int64_t error)
{
    return price.mantissa < 0 ? error : time + gck_priced(price, error, 0);
}

/* Is `a` at least as good as `b` in everything? */
static int covers(const gck_option *a, const gck_option *b, int is_priced)
{
    return a->kept <= b->kept && a->need <= b->need && a->time <= b->time && (is_priced || a->error <= b->error);
}

/* Add an option to n others, unless one of them covers it; remove those that it covers.  Returns how
 * many there are then. */
static int add_option(gck_option *options, int n, const gck_option *option, int is_priced)
{
    int left = 0;

    for (int i = 0; i < n; i++) {
        if (covers(&options[i], option, is_priced)) {
            return n;
        }
    }
    for (int i = 0; i < n; i++) {
        if (!covers(option, &options[i], is_priced)) {
            options[left++] = options[i];
        }
    }
    options[left++] = *option;
    return left;
}

int gck_chain_options(const gck_chain *chain, int64_t region, const gck_price *price, int64_t most_error,
                      gck_option *options)
{
    const int64_t first = region * chain->options, end = first + chain->options;
    int64_t least = INT64_MAX;
    int n = 0;

    for (int64_t at = first; at < end && chain->error != NULL; at++) {
        least = chain->need[at] != GCK_UNAVAILABLE ? gck_smaller(least, chain->error[at]) : least;
    }
    for (int64_t at = first; at < end; at++) {
        const int64_t error = chain->error != NULL ? chain->error[at] : 0;
        if (chain->need[at] != GCK_UNAVAILABLE && (price == NULL || error - least <= most_error)) {
            const int64_t time = price != NULL ? gck_cost(*price, chain->time[at], error) : chain->time[at];
            const gck_option option = {chain->kept[at], chain->need[at], time, error, {(uint16_t)(at - first), 0}};
            n = add_option(options, n, &option, price != NULL);
        }
    }
    return n;
}

/* ---- labels ---- */

int gck_labels_reserve(gck_labels *labels, int64_t capacity)
{
    gck_label *at;

    if (capacity <= labels->capacity) {
        return GCK_OK;
    }
    capacity = gck_larger(capacity, 2 * labels->capacity);     /* faster: lists grow from region to region */
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

gck_label gck_label_best(const gck_label *next, int64_t from, const gck_option *options, int n, int by_time)
{
    gck_label best = gck_label_extend(next, from, &options[0]);

    for (int o = 1; o < n; o++) {
        const gck_label new = gck_label_extend(next, from, &options[o]);
        const int is_less = by_time ? new.time < best.time : new.bytes < best.bytes;
        const int is_as_little = by_time ? new.time == best.time : new.bytes == best.bytes;
        if (is_less || (is_as_little && (by_time ? new.bytes < best.bytes : new.time < best.time))) {
            best = new;
        }
    }
    return best;
}

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

/* gck_labels_extend() of bytes and time. */
static int extend_staircase(const gck_labels *next, const gck_option *options, int n, int64_t most, gck_labels *out,
                            gck_labels *spare)
{
    out->n = 0;
    for (int o = 0; o < n && out->n <= most; o++) {
        const int status = gck_labels_reserve(spare, out->n + next->n + 1);
        if (status != GCK_OK) {
            return status;
        }
        spare->n = merge(out, next, &options[o], most, spare->at);
        gck_labels_swap(out, spare);
    }
    return GCK_OK;
}

static int is_ahead(const gck_label *a, const gck_label *b)
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
    } while (from < labels->n && !is_ahead(&labels->at[from], &labels->at[from - 1]));
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
            out[n++] = is_ahead(b, a) ? *b++ : *a++;
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
        spare->n = labels->n;
        gck_labels_swap(labels, spare);
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

int gck_labels_extend(const gck_labels *next, const gck_option *options, int n, int has_errors, int64_t most,
                      gck_labels *out, gck_labels *spare)
{
    int status;

    if (!has_errors) {
        return extend_staircase(next, options, n, most, out, spare);
    }
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

/* ---- plans ---- */

/* What changes when a region takes another option. */
typedef struct {
    int64_t  kept, need, time, error;
    uint32_t option;
} change;

typedef struct {
    const gck_chain *chain;
    gck_solution    *plan;
    int64_t          budget, error_left;
    int64_t         *left;                   /* of the budget at each region, and after the last one; malloc */
    int64_t         *later;                  /* the least of `left` from each region on                      */
    change          *changes[2];             /* of two regions; malloc */
} exchange;

/* Set what is left of the bytes at each region. */
static void find_left(exchange *e)
{
    const gck_chain *chain = e->chain;
    int64_t slack = e->budget;

    for (int64_t l = 0; l < chain->regions; l++) {
        const int64_t at = l * chain->options + e->plan->choices[l];
        e->left[l] = slack - chain->need[at];
        slack -= chain->kept[at];
    }
    e->left[chain->regions] = e->later[chain->regions] = slack - chain->last_need;
    for (int64_t l = chain->regions - 1; l >= 0; l--) {
        e->later[l] = gck_smaller(e->left[l], e->later[l + 1]);
    }
}

/* List the changes of a region; return how many. */
static int list_changes(const exchange *e, int64_t region, change *changes)
{
    const gck_chain *chain = e->chain;
    const int64_t first = region * chain->options, now = first + e->plan->choices[region];
    int n = 0;

    for (int64_t at = first; at < first + chain->options; at++) {
        if (at != now && chain->need[at] != GCK_UNAVAILABLE) {
            changes[n++] = (change){chain->kept[at] - chain->kept[now], chain->need[at] - chain->need[now],
                                    chain->time[at] - chain->time[now], chain->error[at] - chain->error[now],
                                    (uint32_t)(at - first)};
        }
    }
    return n;
}

static void apply(exchange *e, int64_t region, const change *made)
{
    e->plan->choices[region] = made->option;
    e->plan->time += made->time;
    e->plan->error += made->error;
    e->error_left -= made->error;
    find_left(e);
}

/* Make the best change of this region and of none or one of those up to `apart` after it; return
 * whether there is one. */
static int change_best(exchange *e, int64_t region, int64_t apart)
{
    change *a = e->changes[0], *b = e->changes[1], best[2] = {{.time = 0}, {.time = 0}};
    const int n = list_changes(e, region, a);
    const int64_t end = gck_smaller(e->chain->regions, region + apart + 1);
    int64_t other = region, least = 0, between = INT64_MAX; /* least `left` of the regions between the two */

    for (int i = 0; i < n; i++) {
        if (a[i].time < least && a[i].error <= e->error_left && a[i].need <= e->left[region]
            && a[i].kept <= e->later[region + 1]) {
            best[0] = a[i];
            least = a[i].time;
        }
    }
    for (int64_t l = region + 1; l < end; l++) {
        const int m = list_changes(e, l, b);
        for (int i = 0; i < n; i++) {
            if (a[i].need > e->left[region] || a[i].kept > between) {
                continue;
            }
            for (int k = 0; k < m; k++) {
                if (a[i].time + b[k].time < least && a[i].error + b[k].error <= e->error_left
                    && a[i].kept + b[k].need <= e->left[l] && a[i].kept + b[k].kept <= e->later[l + 1]) {
                    best[0] = a[i];
                    best[1] = b[k];
                    least = a[i].time + b[k].time;
                    other = l;
                }
            }
        }
        between = gck_smaller(between, e->left[l]);
    }
    if (least < 0) {
        apply(e, region, &best[0]);
    }
    if (other != region) {
        apply(e, other, &best[1]);
    }
    return least < 0;
}

int gck_exchange(const gck_chain *chain, int64_t budget, int64_t error_budget, int64_t reach, gck_solution *plan)
{
    const int64_t apart = gck_larger(reach / chain->options, 1);
    exchange e = {.chain = chain, .plan = plan, .budget = budget, .error_left = error_budget - plan->error};
    int status = GCK_E_MEMORY, again = 1;

    e.left = gck_planner_memory(2 * (chain->regions + 1), sizeof *e.left);
    e.changes[0] = gck_planner_memory(2 * chain->options, sizeof *e.changes[0]);
    if (e.left != NULL && e.changes[0] != NULL) {
        e.later = e.left + chain->regions + 1;
        e.changes[1] = e.changes[0] + chain->options;
        find_left(&e);
        for (int sweep = 0; sweep < SWEEPS && again; sweep++) {
            again = 0;
            for (int64_t l = 0; l < chain->regions; l++) {
                again |= change_best(&e, l, apart);
            }
        }
        plan->bytes = budget - e.later[0];
        status = GCK_OK;
    }
    free(e.left);
    free(e.changes[0]);
    return status;
}
