/* rounding.c: numbers for the noise of stochastic rounding. */
#include "engine/rounding.h"

/* The state of the innermost region that runs on this thread; NULL: none. */
static _Thread_local gck_rounding *inside;

/* The finaliser of splitmix64 (Steele et al. 2014). */
static uint32_t mix(uint32_t region, uint32_t n)
{
    uint64_t z = ((uint64_t)region << 32 | n) + 0x9E3779B97F4A7C15u;

    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)(z ^ z >> 31);
}

/* A number that is new in this step: counted outside regions, in the upper half inside. */
static uint32_t next(gck_rounding *r, int once)
{
    if (r == inside) {
        return mix(r->region, once ? ~r->once++ : r->tensor++) | 0x80000000u;
    }
    if (r->restored) {
        *r = (gck_rounding){.step = r->step + 1};
    }
    return r->tensor++;
}

const gck_dither *gck_next_dither(gck_state *state, const gck_plan *plan, int once, gck_dither *dither)
{
    gck_rounding *r = inside != NULL ? inside : &state->rounding;

    if (!plan->stochastic) {
        return NULL;
    }
    const uint32_t number = next(r, once);       /* may begin a step */
    *dither = (gck_dither){plan->seed, r->step, number};
    return dither;
}

gck_rounding gck_rounding_of_region(gck_state *state)
{
    gck_rounding *r = inside != NULL ? inside : &state->rounding;
    const uint32_t number = next(r, 0);

    return (gck_rounding){.step = r->step, .region = number};
}

gck_rounding *gck_rounding_swap(gck_rounding *own)
{
    gck_rounding *around = inside;

    inside = own;
    return around;
}
