/* prices.h: what an error costs in time, so that a plan within an error budget is one of bytes and
 * time alone. */
#ifndef GRADCKPT_PRICES_H
#define GRADCKPT_PRICES_H

#include "planner/chain.h"

/* ns for each unit of error: mantissa * 2**exponent.  A mantissa < 0 leaves out every option with a
 * larger error than the region's smallest. */
typedef struct {
    int64_t mantissa;
    int     exponent;
} gck_price;

enum { GCK_PRICES_IN_OCTAVE = 8 };

/* The price number k, from 2**(k / 8) on. */
gck_price gck_price_of(int64_t k);

/* The price of so much error, rounded down or up; at most 2**61. */
int64_t gck_priced(gck_price price, int64_t error, int up);

/* As gck_chain_options(), without options of a larger error than `most`, and with the price added
 * to their time: an error does not make an option better or worse beyond that. */
int gck_priced_options(const gck_chain *chain, int64_t region, gck_price price, int64_t most, gck_option *options);

#endif
