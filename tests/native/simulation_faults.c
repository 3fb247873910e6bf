/* simulation_faults.c: the simulation of a step with offload over a malloc that can be made to fail.
 *
 * For random steps each allocation fails in turn: the status says so, and nothing is left. */
#include "offload/simulate.h"

#include "failing_malloc.h"

enum { REGIONS = 40 };

static int run(const void *step)
{
    gck_offload_time found;

    return gck_simulate_offload(step, &found);
}

int main(void)
{
    gck_offload_region regions[REGIONS];

    for (int seed = 0; seed < 500; seed++) {
        const int64_t n = draw(0, REGIONS);
        for (int64_t l = 0; l < n; l++) {
            regions[l] = (gck_offload_region){draw(0, 99), draw(0, 99), draw(0, 9), draw(0, 9), draw(0, 99), draw(0, 1)};
        }
        const gck_offload_step step = {regions, n, draw(1, 2000000000), draw(1, 2000000000), draw(0, 9), draw(0, 400),
                                       draw(0, 400), draw(0, 99)};
        if (!each_may_fail(run, &step, GCK_E_MEMORY)) {
            return 1;
        }
    }
    printf("500 steps, every allocation failed once\n");
    return 0;
}
