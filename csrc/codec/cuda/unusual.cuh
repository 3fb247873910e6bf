/* unusual.cuh: the groups of a warp that are not ordinary, or perhaps not: which form each has. */
#ifndef GRADCKPT_UNUSUAL_CUH
#define GRADCKPT_UNUSUAL_CUH

#include "codec/cuda/centred.cuh"

/* Of a doubt: int4 has lost the rest beside its outlier. */
constexpr uint32_t LOST = 0x80000000u;

/* What the classes of the lane's group are: gck_encode_unrotated_form(), gck_encode_doubtful(). */
template <gck_format FORMAT, bool NOISY, typename WORK>
static __device__ __noinline__ void find_classes(const WORK &work, uint32_t doubt, candidate &group)
{
    const auto [job, g] = work_of_lane(work);
    const float rotated = gck_float(doubt & ~LOST);

    const gck_extent e = extent_of(job.x, g);
    const float amax = gck_max_of(gck_abs(e.low), gck_abs(e.high));
    const bool unrotated = e.escapes > 0 || (FORMAT == GCK_INT4 ? amax : rotated) < GCK_TINY;
    const uint32_t ordinary = unrotated ? 0u : gck_stored(FORMAT, 0, NOISY, rotated);

    group.amax = amax;
    group.centred.one_sign = !NOISY && gck_sign_of_all(&e) != 0;
    group.bound = doubt & LOST || group.centred.one_sign ? GCK_ANY : GCK_BETTER;
    group.ordinary = ordinary;
    group.doubtful = doubt != 0 && !unrotated;
    group.apart = gck_classify(FORMAT, &e, ordinary, NOISY, &group.classes);
    group.found = doubt == 0 ? RIGHT : unrotated ? (e.others > 0 ? ODD : NUMBERS)
        : NOISY && group.apart < group.bound ? NUMBERS : RIGHT;
    group.doubtful = group.doubtful && !NOISY;     /* a header is a bias: classes alone */
    if (unrotated) {
        gck_choose_unrotated(FORMAT, &e, group.apart, amax, &group.classes);
    }
}

template <gck_format FORMAT, bool NOISY, typename WORK>
GCK_LANE_FN void encode_unusual(const WORK &work, uint32_t doubt)
{
    __syncwarp(ALL_LANES);                         /* other lanes than before will store the same bytes */
    if constexpr (!gck_is_rotated(FORMAT)) {
        if (doubt != 0 && threadIdx.x % LANES == 0) {
            encode_odd<FORMAT, NOISY>(work, 0.f);
        }
    } else {
        candidate group;
        find_classes<FORMAT, NOISY>(work, doubt, group);
        if (__ballot_sync(ALL_LANES, group.doubtful) != 0) {
            find_outliers<FORMAT>(work, group, 0);
            if (__ballot_sync(ALL_LANES, group.n > 0) != 0) {
                find_outliers<FORMAT>(work, group, 1);
            }
            encode_centred<FORMAT, NOISY>(work, group);
            if (__ballot_sync(ALL_LANES, group.found == BETTER) != 0) {
                store_centred<FORMAT>(work, group);
            }
        }
        if (__ballot_sync(ALL_LANES, group.found == NUMBERS) != 0) {
            encode_classes<FORMAT, NOISY>(work, group);
            store_classes<FORMAT>(work, group);
        }
        if (group.found == ODD && threadIdx.x % LANES == 0) {
            encode_odd<FORMAT, NOISY>(work, group.amax);
        }
    }
}

template <gck_format FORMAT, typename WORK>
GCK_LANE_FN void decode_unusual(const WORK &work)
{
    if constexpr (gck_is_rotated(FORMAT)) {
        decode_numbers<FORMAT>(work);
        decode_centred<FORMAT>(work);
    }
    if (threadIdx.x % LANES == 0) {
        decode_odd<FORMAT>(work);
    }
}

#endif
