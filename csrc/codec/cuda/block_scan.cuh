/* block_scan.cuh: sums over the threads before each one of a block. */
#ifndef GRADCKPT_BLOCK_SCAN_CUH
#define GRADCKPT_BLOCK_SCAN_CUH

#include "codec/cuda/launch.cuh"

constexpr int SCAN_WARPS = THREADS / 32;

/* The sum of `mine` of the threads before this one, and in *all of all of them.  Every thread of the
 * block comes here; before it does so again, they meet. */
GCK_LANE_FN uint32_t sum_before(uint32_t mine, uint32_t (&of_warp)[SCAN_WARPS], uint32_t *all)
{
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    uint32_t sum = mine;

#pragma unroll
    for (int back = 1; back < 32; back *= 2) {
        const uint32_t other = __shfl_sync(ALL_LANES, sum, lane >= back ? lane - back : lane);
        sum += lane >= back ? other : 0u;
    }
    if (lane == 31) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    uint32_t before = sum - mine;
    *all = 0;
#pragma unroll
    for (int w = 0; w < SCAN_WARPS; w++) {
        before += w < warp ? of_warp[w] : 0u;
        *all += of_warp[w];
    }
    return before;
}

#endif
