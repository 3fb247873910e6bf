/* prices.h: what an error costs in time, so that a plan within an error budget is one of bytes and
 * time alone. */
#ifndef GRADCKPT_PRICES_H
#define GRADCKPT_PRICES_H

#include "planner/chain.h"

/* ns for each unit of error: mantissa * 2**exponent.  A mantissa < 0: errors count, times do not. */
typedef struct {
    int64_t mantissa;
    int     exponent;
} gck_price;

#define GCK_FREE ((gck_price){0, 0})
#define GCK_PRICELESS ((gck_price){-1, 0})

/* The price at which `error` is worth `time`, both > 0, or less: so much that `errors` are worth
 * no more than 2**59. */
gck_price gck_price_of(int64_t time, int64_t error, int64_t errors);

/* The price with its mantissa a 64th higher (1) or lower (-1). */
gck_price gck_price_beside(gck_price price, int side);

/* The price of so much error, rounded down or up. */
int64_t gck_priced(gck_price price, int64_t error, int up);

/* What a plan of this time and error costs. */
int64_t gck_priced_time(gck_price price, int64_t time, int64_t error);

/* The sums over regions of the smallest and of the largest error. */
void gck_error_sums(const gck_chain *chain, int64_t *least, int64_t *most);

/* As gck_chain_options(), with priced times: an error does not make an option better or worse
 * beyond that.  Without options whose error is larger than the region's smallest by more than
 * `most`. */
int gck_priced_options(const gck_chain *chain, int64_t region, gck_price price, int64_t most, gck_option *options);

#endif
