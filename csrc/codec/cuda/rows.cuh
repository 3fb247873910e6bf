/* rows.cuh: how much the shares of a group are scaled: rows.h, by a warp for each group. */
#ifndef GRADCKPT_ROWS_CUH
#define GRADCKPT_ROWS_CUH

#include "codec/cuda/lane_group.cuh"

enum { WARP = 32, VALUES_OF_LANE = GCK_GROUP / WARP, GROUPS_OF_BLOCK = THREADS / WARP };

/* Four keys of a lane: of values lane, lane + 32, lane + 64, lane + 96; and which of all belong to a share. */
struct share_keys {
    int      key[VALUES_OF_LANE];
    uint32_t members[VALUES_OF_LANE];
};

/* How many keys of the share satisfy a condition. */
template <typename F>
GCK_LANE_FN int count_keys(const share_keys &s, F condition)
{
    int count = 0;

#pragma unroll
    for (int j = 0; j < VALUES_OF_LANE; j++) {
        count += __popc(__ballot_sync(ALL_LANES, condition(s.key[j])) & s.members[j]);
    }
    return count;
}

/* The largest key of the share below `end`. */
GCK_LANE_FN int largest_below(const share_keys &s, int end)
{
    int largest = 0;

#pragma unroll
    for (int j = 0; j < VALUES_OF_LANE; j++) {
        const bool mine = s.members[j] >> (threadIdx.x % WARP) & 1u;
        largest = mine && s.key[j] < end && s.key[j] > largest ? s.key[j] : largest;
    }
    return across_lanes<1, WARP>(largest, [](int a, int b) { return b > a ? b : a; });
}

/* gck_share_level(). */
GCK_LANE_FN int level_of(const share_keys &s)
{
    const int not_zero = count_keys(s, [](int key) { return key > 0; });
    const int above = gck_row_outliers(not_zero), gap = gck_row_gap(not_zero);
    int level = 0;

#pragma unroll 1
    for (int bit = 1 << (GCK_KEY_BITS - 1); bit > 0; bit /= 2) {
        level += count_keys(s, [=](int key) { return key >= level + bit; }) > above ? bit : 0;
    }
#pragma unroll 1
    for (int gaps = 0; gaps < GCK_MOST_GAPS; gaps++) {
        const int within = count_keys(s, [=](int key) { return key >= level - gap && key < level - GCK_KEY_NEAR; });
        const int below = largest_below(s, level - gap);
        level = within == 0 && below > 0 ? below : level;
    }
    return level;
}

/* The bytes of the rows that begin in each group.  A template: formats that scale no rows do not have it. */
template <typename VIEW>
static __global__ void rows_kernel(const __grid_constant__ VIEW x)
{
    const int64_t g = (int64_t)blockIdx.x * GROUPS_OF_BLOCK + (int)threadIdx.x / WARP;
    const int lane = (int)threadIdx.x % WARP;
    int end[GCK_SHARES], level[GCK_SHARES] = {}, largest[GCK_SHARES] = {}, shift[GCK_SHARES] = {};
    int64_t row;
    share_keys s;
    bool special = false;

    if (g >= gck_groups_of(x.numel)) {
        return;                                    /* the whole warp */
    }
    const int n = gck_shares_of(g, x.row, x.numel, end, &row);
    if (lane == 0 && row * x.row == g * GCK_GROUP) {
        x.rows[row] = 0;
    }
    if (n == 1) {
        return;
    }
#pragma unroll
    for (int j = 0; j < VALUES_OF_LANE; j++) {
        const int64_t i = g * GCK_GROUP + j * WARP + lane;
        int64_t run = 0;
        const float v = i < x.numel ? gck_load(x.data + offset_of(x, i, &run), x.kind, 0) : 0.f;
        special |= (gck_bits(v) & 0x7FFFFFFFu) > gck_limit(x.kind);
        s.key[j] = gck_magnitude_key(v);
    }
    if (__ballot_sync(ALL_LANES, special) == 0) {
#pragma unroll
        for (int k = 0; k < GCK_SHARES; k++) {
            const int first = k > 0 ? end[k - 1] : 0;
            if (k < n) {
#pragma unroll
                for (int j = 0; j < VALUES_OF_LANE; j++) {
                    const int i = j * WARP + lane;
                    s.members[j] = __ballot_sync(ALL_LANES, i >= first && i < end[k]);
                }
                largest[k] = largest_below(s, 1 << GCK_KEY_BITS);
                level[k] = level_of(s);
            }
        }
        gck_shifts_of(n, level, largest, shift);
    }
    for (int k = 1; k < n && lane == 0; k++) {
        x.rows[row + k] = (int8_t)(shift[k] - shift[k - 1]);
    }
}

/* Find them, before a tensor with rows is encoded. */
template <typename VIEW>
static void launch_rows(const VIEW &x, cudaStream_t stream)
{
    const int64_t groups = gck_groups_of(x.numel);

    GCK_LAUNCH((rows_kernel<VIEW>), grid_for(groups, GROUPS_OF_BLOCK), THREADS, stream, x);
}

#endif
