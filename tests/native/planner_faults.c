/* planner_faults.c: csrc/planner over a malloc that can be made to fail.
 *
 * Solves random chains without and with errors, with few and many labels; for some, each allocation
 * fails in turn: the status then says so, and nothing is left.  Prints how many solves and faults
 * there were.  Built with sanitizers, csrc/planner with -Dmalloc=malloc_or_fail -Dfree=free_counted. */
#include "planner/planner.h"

#include "failing_malloc.h"

static void check(int good, const char *what)
{
    if (!good) {
        printf("%s\n", what);
        exit(1);
    }
}

/* 1 when it was solved, 0 when memory failed. */
static int solve(const gck_chain *chain, int64_t buckets, int64_t budget, int64_t error_budget)
{
    gck_front *front;
    int status = gck_front_new(chain, buckets, &front);
    uint32_t choices[64];
    gck_solution plan = {.choices = choices};
    int64_t bound = 0;

    if (status == GCK_OK) {
        status = gck_front_plan(front, budget, error_budget, &plan, &bound);
    }
    if (status == GCK_OK && plan.found) {
        int64_t kept = 0, peak = INT64_MIN, time = 0, error = 0;
        for (int64_t l = 0; l < chain->regions; l++) {
            const int64_t at = l * chain->options + choices[l];
            check(chain->need[at] != GCK_UNAVAILABLE, "an option that the region does not have");
            peak = gck_larger(peak, kept + chain->need[at]);
            kept += chain->kept[at];
            time += chain->time[at];
            error += chain->error != NULL ? chain->error[at] : 0;
        }
        peak = gck_larger(peak, kept + chain->last_need);
        check(peak == plan.bytes && time == plan.time && error == plan.error, "a plan is not what it says");
        check(peak <= budget && (chain->error == NULL || error <= error_budget), "a plan is beyond a budget");
        check(bound <= time, "the bound is above the plan");
    }
    gck_front_free(front);
    check(status == GCK_OK || status == GCK_E_MEMORY, "another status");
    check(alive == 0, "memory is left");
    return status == GCK_OK;
}

int main(int argc, char **argv)
{
    const long chains = argc > 1 ? atol(argv[1]) : 300;
    long faults = 0;

    for (long i = 0; i < chains; i++) {
        int64_t tables[4][64 * 8];
        const int64_t regions = draw(0, i % 3 == 0 ? 40 : 8), options = draw(1, 8), most = draw(1, 4) * draw(1, 1000000);
        const gck_chain chain = {regions, options, tables[0], tables[1], tables[2], i % 2 ? tables[3] : NULL,
                                 draw(0, most)};
        for (int64_t at = 0; at < regions * options; at++) {
            tables[0][at] = draw(-most / 8, most);
            tables[1][at] = draw(0, 12) ? gck_larger(tables[0][at], 0) + draw(0, most) : GCK_UNAVAILABLE;
            tables[2][at] = draw(0, 1000000);
            tables[3][at] = draw(0, 2) ? draw(0, 1000) : 0;
        }
        const int64_t buckets = 64 << draw(0, 5), budget = draw(0, (regions + 2) * most);
        failing = allocations = 0;
        check(solve(&chain, buckets, budget, draw(0, regions * 600 + 1)), "out of memory");
        const long used = allocations;
        for (long k = 1; i < 60 && k <= used; k += 1 + used / 200) {
            allocations = 0;
            failing = k;
            check(!solve(&chain, buckets, INT64_MAX, INT64_MAX) || allocations < k, "a fault that had no effect");
            faults++;
        }
    }
    printf("%ld chains, %ld faults\n", chains, faults);
    return 0;
}
