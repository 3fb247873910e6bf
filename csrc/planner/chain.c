/* chain.c: checks of a chain; the options of a region that are worth a look. */
#include "planner/chain.h"

#include <stdlib.h>

#define LIMIT (INT64_C(1) << 60)

void *gck_planner_memory(int64_t count, size_t size)
{
    return malloc((size_t)(count > 0 ? count : 1) * size);
}

/* Add |value| to a maximum; 0 when it is beyond the limit. */
static int widen(int64_t value, int64_t *most)
{
    const int64_t size = value < 0 ? -value : value;

    *most = size > *most ? size : *most;
    return value > -LIMIT && value < LIMIT;
}

int gck_chain_check(const gck_chain *chain)
{
    int64_t kept = 0, need = 0, time = 0, error = 0;

    if (chain->regions < 0 || chain->regions > GCK_MAX_REGIONS || chain->options < 1
        || chain->options > GCK_MAX_OPTIONS) {
        return GCK_E_RANGE;
    }
    if (chain->last_need != GCK_UNAVAILABLE && !widen(chain->last_need, &need)) {
        return GCK_E_RANGE;
    }
    for (int64_t l = 0; l < chain->regions; l++) {
        int64_t most_kept = 0, most_time = 0, most_error = 0;
        for (int64_t at = l * chain->options; at < (l + 1) * chain->options; at++) {
            if (chain->need[at] == GCK_UNAVAILABLE) {
                continue;
            }
            if (!widen(chain->need[at], &need) || !widen(chain->kept[at], &most_kept)
                || chain->time[at] < 0 || !widen(chain->time[at], &most_time)) {
                return GCK_E_RANGE;
            }
            if (chain->error != NULL && (chain->error[at] < 0 || !widen(chain->error[at], &most_error))) {
                return GCK_E_RANGE;
            }
        }
        kept += most_kept;
        time += most_time;
        error += most_error;
        if (kept + need >= LIMIT || time >= LIMIT || error >= LIMIT) {
            return GCK_E_RANGE;
        }
    }
    return GCK_OK;
}

/* Is `a` at least as good as `b` in everything? */
static int covers(const gck_option *a, const gck_option *b)
{
    return a->kept <= b->kept && a->need <= b->need && a->time <= b->time && a->error <= b->error;
}

int gck_options_add(gck_option *options, int n, const gck_option *option)
{
    int left = 0;

    for (int i = 0; i < n; i++) {
        if (covers(&options[i], option)) {
            return n;
        }
    }
    for (int i = 0; i < n; i++) {
        if (!covers(option, &options[i])) {
            options[left++] = options[i];
        }
    }
    options[left++] = *option;
    return left;
}

int gck_chain_options(const gck_chain *chain, int64_t region, gck_option *options)
{
    int n = 0;

    for (int64_t o = 0; o < chain->options; o++) {
        const int64_t at = region * chain->options + o;
        const gck_option option = {chain->kept[at], chain->need[at], chain->time[at],
                                   chain->error != NULL ? chain->error[at] : 0, (uint32_t)o};
        n = option.need == GCK_UNAVAILABLE ? n : gck_options_add(options, n, &option);
    }
    return n;
}
