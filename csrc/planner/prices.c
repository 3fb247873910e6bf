/* prices.c: errors as time. */
#include "planner/prices.h"

#include "planner/buckets.h"

#define MOST (INT64_C(1) << 59)

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
    while (gck_priced(price, errors, 1) > MOST) {
        price.exponent--;
    }
    return price;
}

gck_price gck_price_beside(gck_price price, int side)
{
    return (gck_price){price.mantissa + side * (price.mantissa / 64), price.exponent};
}

int64_t gck_priced(gck_price price, int64_t error, int up)
{
    const __int128 product = (__int128)error * price.mantissa;
    const int down = price.exponent < 0 ? -price.exponent : 0;
    const __int128 rest = up ? ((__int128)1 << down) - 1 : 0;
    const __int128 value = price.exponent > 0 ? product << price.exponent : (product + rest) >> down;

    return value > GCK_NEVER ? GCK_NEVER : (int64_t)value;
}

int64_t gck_priced_time(gck_price price, int64_t time, int64_t error)
{
    return price.mantissa < 0 ? error : time + gck_priced(price, error, 0);
}

/* The smallest and the largest error of an option that the region has; 0 if none. */
static void errors_of(const gck_chain *chain, int64_t region, int64_t *least, int64_t *most)
{
    *least = INT64_MAX;
    *most = 0;
    for (int64_t at = region * chain->options; at < (region + 1) * chain->options; at++) {
        if (chain->need[at] != GCK_UNAVAILABLE) {
            *least = gck_smaller(*least, chain->error[at]);
            *most = gck_larger(*most, chain->error[at]);
        }
    }
    *least = gck_smaller(*least, *most);
}

void gck_error_sums(const gck_chain *chain, int64_t *least, int64_t *most)
{
    *least = *most = 0;
    for (int64_t l = 0; l < chain->regions; l++) {
        int64_t low, high;
        errors_of(chain, l, &low, &high);
        *least += low;
        *most += high;
    }
}

int gck_priced_options(const gck_chain *chain, int64_t region, gck_price price, int64_t most, gck_option *options)
{
    int64_t least = 0, largest = 0;
    int n = 0;

    if (chain->error != NULL) {
        errors_of(chain, region, &least, &largest);
    }
    for (int64_t o = 0; o < chain->options; o++) {
        const int64_t at = region * chain->options + o, error = chain->error != NULL ? chain->error[at] : 0;
        if (chain->need[at] != GCK_UNAVAILABLE && error - least <= most) {
            const gck_option option = {chain->kept[at], chain->need[at], gck_priced_time(price, chain->time[at], error),
                                       0, (uint32_t)o};
            n = gck_options_add(options, n, &option);
        }
    }
    for (int i = 0; i < n && chain->error != NULL; i++) {
        options[i].error = chain->error[region * chain->options + options[i].index];
    }
    return n;
}
