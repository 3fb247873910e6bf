/* prices.c: errors as time. */
#include "planner/prices.h"

#include "planner/buckets.h"

gck_price gck_price_of(int64_t k)
{
    const int64_t octave = gck_floor_div(k, GCK_PRICES_IN_OCTAVE);

    return (gck_price){8 + (k - octave * GCK_PRICES_IN_OCTAVE), (int)octave - 3};
}

int64_t gck_priced(gck_price price, int64_t error, int up)
{
    const __int128 product = (__int128)error * price.mantissa;
    const int down = price.exponent < 0 ? -price.exponent : 0;
    const __int128 rest = up ? ((__int128)1 << down) - 1 : 0;
    const __int128 value = price.exponent > 0 ? product << price.exponent : (product + rest) >> down;

    return value > GCK_NEVER ? GCK_NEVER : (int64_t)value;
}

/* The smallest error of an option that the region has. */
static int64_t least_error(const gck_chain *chain, int64_t region)
{
    int64_t least = INT64_MAX;

    for (int64_t at = region * chain->options; at < (region + 1) * chain->options; at++) {
        if (chain->need[at] != GCK_UNAVAILABLE) {
            least = gck_smaller(least, chain->error[at]);
        }
    }
    return least;
}

int gck_priced_options(const gck_chain *chain, int64_t region, gck_price price, int64_t most, gck_option *options)
{
    int n = 0;

    if (price.mantissa < 0) {
        most = gck_smaller(most, least_error(chain, region));
        price.mantissa = 0;
    }
    for (int64_t o = 0; o < chain->options; o++) {
        const int64_t at = region * chain->options + o, error = chain->error != NULL ? chain->error[at] : 0;
        if (chain->need[at] != GCK_UNAVAILABLE && error <= most) {
            const gck_option option = {chain->kept[at], chain->need[at],
                                       chain->time[at] + gck_priced(price, error, 0), 0, (uint32_t)o};
            n = gck_options_add(options, n, &option);
        }
    }
    for (int i = 0; i < n && chain->error != NULL; i++) {
        options[i].error = chain->error[region * chain->options + options[i].index];
    }
    return n;
}
