/* centred.cuh: centred.h by the 8 lanes of a group.
 *
 * The values are loaded again and again rather than kept: a lane has room for 16, and one load more comes from
 * the cache.  Outlier k is the business of lane k, whatever lane its value belongs to. */
#ifndef GRADCKPT_CENTRED_CUH
#define GRADCKPT_CENTRED_CUH

#include "codec/cuda/classes.cuh"

/* ---- mean and outliers ---- */

/* The lane that is number k of this lane's group. */
GCK_LANE_FN int lane_of_group(int k) { return (int)(threadIdx.x % 32) / LANES * LANES + k; }

/* gck_mean_of() of n values: those that `taken` names, bit j for value j, become zero. */
GCK_LANE_FN float mean_of(float (&v)[VALUES], uint32_t taken, int n)
{
    uint32_t largest = 0;
    int32_t sum = 0;

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = taken >> j & 1u ? 0.f : v[j];
        const uint32_t size = gck_bits(gck_abs(v[j]));
        largest = size > largest ? size : largest;
    }
    largest = group_max(largest);
    const int exponent = gck_exponent(gck_float(largest));
    const bool tiny = gck_float(largest) < GCK_TINY;
    const float scale = tiny ? 0.f : gck_to_scale(exponent, 15), back = gck_from_scale(exponent, 15);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        sum += gck_round_product(v[j], scale);
    }
    sum = group_sum(sum);
    return tiny || n == 0 ? 0.f : gck_float((uint32_t)gck_to_bf16((float)sum / (float)n * back) << 16);
}

/* Which of the lane's values are among the places of the first n lanes. */
GCK_LANE_FN uint32_t taken_of_lane(int place, int n)
{
    const int before = (int)threadIdx.x % LANES * VALUES;
    uint32_t taken = 0;

#pragma unroll
    for (int k = 0; k < GCK_MOST_OUTLIERS; k++) {
        const int j = (int)__shfl_sync(ALL_LANES, (uint32_t)place, lane_of_group(k)) - before;
        taken |= k < n && j >= 0 && j < VALUES ? 1u << (j & (VALUES - 1)) : 0u;
    }
    return taken;
}

/* ---- the header ---- */

/* Of a header that has `value` from bit `at` on: 16 bits from `first` on. */
GCK_LANE_FN uint32_t part_of(uint64_t value, int at, int first)
{
    const int up = at - first;

    return (uint32_t)(up >= VALUES || up <= -64 ? 0u : up >= 0 ? value << up : value >> -up) & 0xFFFFu;
}

/* Of n bits from `first` on: which of 16 a header of `end` bits has. */
GCK_LANE_FN uint32_t mask_of(int end, int first)
{
    const int n = end - first;

    return n <= 0 ? 0u : n >= VALUES ? 0xFFFFu : (1u << n) - 1u;
}

/* gck_put_header(): its bits as the lowest and the second bits of this lane's codes; returns those that are not
 * in codes. */
template <gck_format FORMAT, typename VIEW>
GCK_LANE_FN uint32_t put_header(const VIEW &x, int64_t g, const gck_centred &c, int at, uint32_t (&codes)[4])
{
    const int lane = (int)threadIdx.x % LANES, first = gck_bits_beside(FORMAT) + lane * VALUES;
    const int end = gck_header_bits(c.n, c.mean_bits), size = 7 + gck_outlier_bits(c.n);
    int nfront;

    const uint32_t bits = gck_outlier(c.n, lane < c.n ? load_value(x, g * GCK_GROUP + at) : 0.f);
    const uint32_t top = group_max(lane < c.n ? bits >> 23 & 0xFFu : 0u);
    const uint64_t mine = (uint64_t)gck_outlier_field(c.n, bits, top) << 7 | (uint64_t)at;
    const uint32_t front = gck_put_front(&c, top, &nfront);
    uint32_t beside = part_of(front, 0, 0), lowest = part_of(front, 0, first);
    uint32_t second = part_of(front, 0, first + GCK_GROUP);

#pragma unroll 1
    for (int k = 0; k < GCK_MOST_OUTLIERS; k++) {
        const int place = nfront + k * size;
        const uint32_t lower = __shfl_sync(ALL_LANES, (uint32_t)mine, lane_of_group(k));
        const uint32_t upper = __shfl_sync(ALL_LANES, (uint32_t)(mine >> 32), lane_of_group(k));
        const uint64_t one = k < c.n ? (uint64_t)upper << 32 | lower : 0u;
        beside |= part_of(one, place, 0);
        lowest |= part_of(one, place, first);
        second |= part_of(one, place, first + GCK_GROUP);
    }
    const uint32_t in_lowest = mask_of(end, first), in_second = mask_of(end, first + GCK_GROUP);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        codes[w] = (codes[w] & ~to_bytes(in_lowest >> (4 * w))) | to_bytes(lowest >> (4 * w));
        codes[w] = (codes[w] & ~(to_bytes(in_second >> (4 * w)) << 1)) | to_bytes(second >> (4 * w)) << 1;
    }
    return beside & 0xFFu;
}

/* Bits of the header from `at` on, 32 of them: planes: the lowest bits of the lane's codes, and in the upper
 * half the second ones.  Called by the whole warp. */
template <gck_format FORMAT>
GCK_LANE_FN uint32_t header_bits(uint32_t planes, uint32_t beside, int at)
{
    const int from = at - gck_bits_beside(FORMAT), place = from < 0 ? 0 : from;
    uint64_t bits = 0;

#pragma unroll
    for (int k = 0; k < 3; k++) {
        const int piece = place / VALUES + k;
        const uint32_t both = __shfl_sync(ALL_LANES, planes, lane_of_group(piece % LANES));
        bits |= (uint64_t)(piece < LANES ? both & 0xFFFFu : both >> 16) << (VALUES * k);
    }
    bits >>= place % VALUES;
    return (uint32_t)(from < 0 ? bits << -from | beside >> at : bits);
}

/* ---- encode ---- */

/* gck_measure() and the choice of outliers; the values are lost. */
template <gck_format FORMAT>
GCK_LANE_FN void choose_outliers(float (&v)[VALUES], float mean, candidate &group)
{
    const int lane = (int)threadIdx.x % LANES;
    uint32_t largest = 0, sum = 0, mine = 0, key[VALUES], last = 0x80000000u;

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = gck_abs(v[j] - mean);
        largest = gck_bits(v[j]) > largest ? gck_bits(v[j]) : largest;
    }
    largest = group_max(largest);
    const float scale = gck_float(largest) < GCK_TINY ? 0.f : gck_to_scale(gck_exponent(gck_float(largest)), 11);
    group.scale = scale;
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const uint32_t q = (uint32_t)(int32_t)(v[j] * scale);
        sum += q * q;
        key[j] = q << 7 | (uint32_t)(GCK_GROUP - 1 - lane * VALUES - j);
    }
    sum = (uint32_t)group_sum((int)sum);
#pragma unroll 1
    for (int k = 0; k < GCK_MOST_OUTLIERS; k++) {
        uint32_t below = 0;                        /* the largest key below `last`, less `last`: others are less */
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            below = key[j] - last > below ? key[j] - last : below;
        }
        last += group_max(below);
        mine = lane == k ? last : mine;
    }
    gck_outlier_choice choice = gck_no_outlier(FORMAT, sum);
#pragma unroll 1
    for (int k = 0; k < GCK_MOST_OUTLIERS; k++) {
        gck_consider(FORMAT, &choice, k + 1, __shfl_sync(ALL_LANES, mine, lane_of_group(k)) >> 7);
    }
    group.n = choice.n;
    group.rest = choice.rest;
    group.place = GCK_GROUP - 1 - (int)(mine & 127u);
}

/* gck_centre(), up to the choice: once, or again.  Lanes of groups that are not doubtful see nothing but zeros. */
template <gck_format FORMAT, typename WORK>
static __device__ __noinline__ void find_outliers(const WORK &work, candidate &group, int again)
{
    const auto [job, g] = work_of_lane(work);
    const int lane = (int)threadIdx.x % LANES;
    float v[VALUES];

    const int64_t i = group.doubtful ? g * GCK_GROUP + lane * VALUES : job.x.numel;
    load_values(job.x, i, v);
    const int n = again ? group.n : 0;
    const float mean = mean_of(v, again ? taken_of_lane(group.place, n) : 0u, GCK_GROUP - n);
    load_values(job.x, i, v);
    choose_outliers<FORMAT>(v, mean, group);
}

/* The rest of gck_centre(), and the codes, where nothing is better. */
template <gck_format FORMAT, bool NOISY, typename WORK>
static __device__ __noinline__ void encode_centred(const WORK &work, candidate &group)
{
    const auto [job, g] = work_of_lane(work);
    const int lane = (int)threadIdx.x % LANES;
    const uint32_t taken = taken_of_lane(group.place, group.n);
    gck_centred c = {};
    float v[VALUES];

    load_values(job.x, group.doubtful ? g * GCK_GROUP + lane * VALUES : job.x.numel, v);
    c.n = group.n;
    c.one_sign = group.centred.one_sign;
    c.mean = mean_of(v, taken, GCK_GROUP - c.n);
    gck_settle_mean(&c, group.rest, group.scale);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = !(taken >> j & 1u) ? v[j] - c.mean : 0.f;
    }
    rotate(v, g);
    const float beside = gck_settle_step(FORMAT, &c, gck_float(group_max(lane_amax(v))), group.ordinary);
    const bool good = group.doubtful && (group.apart < group.bound || beside < group.bound);
    const bool exact = group.apart == 0.f, few = exact && group.classes.near <= GCK_MOST_OUTLIERS;
    const bool better = good && !(exact && !few) && (!(group.apart <= beside) || (few && beside == 0.f));

    if (good) {
        group.found = better ? BETTER : NUMBERS;
    }
    group.centred = c;
    if (__ballot_sync(ALL_LANES, better) != 0) {
        const float inv = c.stored > 0 ? gck_inverse(FORMAT, 0, c.stored) : 0.f;
        uint32_t codes[4] = {};
        if constexpr (!NOISY) {
            integers(v, inv, codes);
        }
        to_codes<FORMAT, NOISY>(v, inv, 0, job.dither, g * GCK_GROUP + lane * VALUES, codes);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            group.codes[w] = c.stored > 0 ? codes[w] : 0u;
        }
    }
}

/* gck_encode_centred(), if that is better. */
template <gck_format FORMAT, typename WORK>
static __device__ __noinline__ void store_centred(const WORK &work, const candidate &group)
{
    const auto [job, g] = work_of_lane(work);
    const gck_centred c = group.centred;
    uint32_t codes[4] = {group.codes[0], group.codes[1], group.codes[2], group.codes[3]};
    uint16_t side[2] = {0, 0};
    share<FORMAT> s;

    const uint32_t beside = put_header<FORMAT>(job.x, g, c, group.place, codes);
    pack_codes<FORMAT>(codes, true, s);
    gck_put_unusual(FORMAT, side, c.stored | (c.n > 0 ? GCK_HAS_OUTLIERS : 0u), beside);
    s.side = side[0] | (uint32_t)side[1] << 16;
    if (group.found == BETTER) {
        store_share(s, codes_of<FORMAT>(job.payload, g), side_of<FORMAT>(job.payload, g),
                    (int)threadIdx.x % LANES);
    }
}

/* ---- decode ---- */

/* gck_decode_centred(), if the lane's group is such. */
template <gck_format FORMAT, typename WORK>
static __device__ __noinline__ void decode_centred(const WORK &work)
{
    const auto [job, g] = work_of_lane(work);
    const int64_t ngroups = gck_groups_of(job.x.numel);
    const int lane = (int)threadIdx.x % LANES;
    const answer form = g < ngroups ? form_of<FORMAT>(side_of<FORMAT>(job.payload, g)) : RIGHT;
    share<FORMAT> s = {};

    if (__ballot_sync(ALL_LANES, form == BETTER) == 0) {
        return;
    }
    if (form == BETTER) {
        load_share(s, codes_of<FORMAT>(job.payload, g), side_of<FORMAT>(job.payload, g), lane);
    }
    const uint16_t side[2] = {(uint16_t)s.side, (uint16_t)(s.side >> 16)};
    const uint32_t beside = gck_unusual_bits(FORMAT, side), stored = s.side & 0x7FFCu;
    uint32_t codes[4], other[4], planes = 0;
    int32_t pair[PAIRS], second[PAIRS], y[VALUES];
    float v[VALUES];

    unpack_codes<FORMAT>(s, codes);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        planes |= from_bytes(codes[w]) << (4 * w) | from_bytes(codes[w] >> 1) << (16 + 4 * w);
    }
    const uint32_t front = header_bits<FORMAT>(planes, beside, 0);
    const gck_header_front f = gck_take_front(front, (s.side & GCK_HAS_OUTLIERS) != 0, stored);
    const int place = f.bits + lane * (7 + gck_outlier_bits(f.n));
    const int end = gck_header_bits(f.n, f.mean_bits) - gck_bits_beside(FORMAT);
    const int at = (int)(header_bits<FORMAT>(planes, beside, place) & 127u);
    const uint32_t field = header_bits<FORMAT>(planes, beside, place + 7);
    const float outlier = gck_outlier_of_field(f.n, f.n > GCK_EXACT_OUTLIERS ? field & 0xFFFu : field, f.top);

    /* A code that lends bits is the middle of two others. */
    const uint32_t one = mask_of(end, lane * VALUES), two = mask_of(end, GCK_GROUP + lane * VALUES);
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const uint32_t lent = to_bytes(one >> (4 * w)), both = to_bytes(two >> (4 * w));
        const uint32_t whole = codes[w] & ~(lent | both << 1);
        codes[w] = whole | both;
        other[w] = FORMAT == GCK_INT8 ? whole | (lent & ~both) | both << 1 : whole | lent;
        codes[w] = FORMAT == GCK_INT6 ? int6_levels(codes[w], 0) : codes[w];
        other[w] = FORMAT == GCK_INT6 ? int6_levels(other[w], 0) : other[w];
    }
    if constexpr (FORMAT == GCK_INT4) {
        int4_levels_of_bytes(codes);
        int4_levels_of_bytes(other);
    }
    pairs_of_bytes(codes, pair);
    pairs_of_bytes(other, second);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        pair[j] += second[j];
    }
    rotate_pairs(pair, y);
    y[0] += gck_has_levels(FORMAT) ? 2 * sum_of_halves(lane) : 0;
    unrotated_values(y, gck_float(stored << 16) * 0x1p-33f, g, v);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = f.mean != 0.f ? v[j] + f.mean : v[j];
        v[j] = f.one_sign ? gck_of_sign(v[j], f.mean) : v[j];
    }
    if (form == BETTER) {
        store_values(job.x, g * GCK_GROUP + lane * VALUES, v);
    }
    __syncwarp(ALL_LANES);                         /* one lane overwrites what another has stored */
    if (form == BETTER && lane < f.n && at < count_of(job.x.numel, g)) {
        store_value(job.x, g * GCK_GROUP + at, outlier);
    }
}

#endif
