/* classes.cuh: classes.h by the 8 lanes of a group.
 *
 * A lane's 16 values are four numbers of four codes, whose bytes lie one after the other.  Loops over them
 * that are not unrolled take the first values and move the others up, since no register has an index. */
#ifndef GRADCKPT_CLASSES_CUH
#define GRADCKPT_CLASSES_CUH

#include "codec/cuda/group_kernels.cuh"
#include "codec/cuda/rotate.cuh"

enum { NUMBERS_OF_LANE = VALUES / 4 };

/* ---- across the lanes of a group ---- */

GCK_LANE_FN uint32_t group_or(uint32_t bits)
{
    return across_lanes<1, LANES>(bits, [](uint32_t a, uint32_t b) { return a | b; });
}

GCK_LANE_FN uint64_t group_or(uint64_t bits)
{
    return group_or((uint32_t)bits) | (uint64_t)group_or((uint32_t)(bits >> 32)) << 32;
}

/* The least; no zero has a sign. */
GCK_LANE_FN float group_low(float low)
{
    return across_lanes<1, LANES>(low, [](float a, float b) { return b < a ? b : a; });
}

GCK_LANE_FN float group_high(float high) { return 0.f - group_low(0.f - high); }

/* ---- what a group's values are ---- */

/* gck_extent_of(). */
template <typename VIEW>
GCK_LANE_FN gck_extent extent_of(const VIEW &x, int64_t g)
{
    const int lane = (int)threadIdx.x % LANES;
    const float none = gck_float(0x7F800000u), not_one = gck_float(0x7FC00000u);
    gck_extent e = {0, 0, 0, none, -none, -none, none, 0};
    uint32_t counts = 0;                           /* a byte each */
    uint64_t used = 0;
    float v[VALUES];

    load_values(x, g * GCK_GROUP + lane * VALUES, v);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const bool escapes = gck_escapes(v[j], x.dtype());
        counts += escapes ? 1u << 8 | (gck_escape_kind(v[j], x.dtype()) == 5 ? 1u << 16 : 0u) : 1u;
        v[j] = escapes ? not_one : v[j] + 0.f;                         /* no comparison is true */
        e.low = v[j] < e.low ? v[j] : e.low;
        e.high = v[j] > e.high ? v[j] : e.high;
    }
    counts = (uint32_t)group_sum((int)counts);
    e.n = (int)(counts & 0xFFu), e.escapes = (int)(counts >> 8 & 0xFFu), e.others = (int)(counts >> 16);
    e.low = group_low(e.low);
    e.high = group_high(e.high);
    const float range = e.high - e.low, scale = e.n > 0 && range >= GCK_TINY ? 64.f / range : 0.f;

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        used |= v[j] == v[j] ? (uint64_t)1 << gck_place(e.low, scale, v[j]) : 0u;
    }
    const int last = gck_last_of_lower(group_or(used));

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        if (v[j] == v[j]) {
            const bool lower = gck_place(e.low, scale, v[j]) <= last;
            e.lower += lower;
            e.inner_low = lower && v[j] > e.inner_low ? v[j] : e.inner_low;
            e.inner_high = !lower && v[j] < e.inner_high ? v[j] : e.inner_high;
        }
    }
    e.lower = group_sum(e.lower);
    e.inner_low = group_high(e.inner_low);
    e.inner_high = group_low(e.inner_high);
    e.inner_high = e.inner_high == none ? e.high : e.inner_high;       /* no value belongs to the upper class */
    if (e.n == 0) {
        e.low = e.high = e.inner_low = e.inner_high = 0.f;
    }
    return e;
}

/* ---- numbers ---- */

/* The lowest number; the others move down, and zeros come. */
template <gck_format FORMAT>
GCK_LANE_FN uint32_t take_number(share<FORMAT> &s)
{
    constexpr int BITS = 4 * gck_code_bits(FORMAT), LAST = share<FORMAT>::WORDS - 1;
    const uint32_t number = s.word[0] & (0xFFFFFFFFu >> (32 - BITS));

#pragma unroll
    for (int w = 0; w < LAST; w++) {
        s.word[w] = BITS == 32 ? s.word[w + 1] : s.word[w] >> (BITS % 32) | s.word[w + 1] << (32 - BITS);
    }
    s.word[LAST] = BITS == 32 ? 0u : s.word[LAST] >> (BITS % 32);
    return number;
}

/* As the uppermost one: after four such calls the first number is the lowest. */
template <gck_format FORMAT>
GCK_LANE_FN void put_number(share<FORMAT> &s, uint32_t number)
{
    constexpr int BITS = 4 * gck_code_bits(FORMAT);

    take_number(s);
    s.word[share<FORMAT>::WORDS - 1] |= number << (32 - BITS);
}

/* ---- encode ---- */

/* A group on its way through the steps. */
struct candidate {
    gck_classes classes;
    float       apart, bound;            /* the error as classes; what is good enough          */
    float       amax;                    /* of what does not escape                            */
    uint32_t    ordinary;                /* the step of an ordinary group                      */
    bool        doubtful;                /* else `found` is known from the start               */
    answer      found;
    float       scale;                   /* see gck_distances                                  */
    uint32_t    rest;
    int         n, place;                /* outliers; the place of the one that is the lane's  */
    gck_centred centred;                 /* all but the places                                 */
    uint32_t    codes[4];                /* of the lane                                        */
};

/* Value k of those that such words hold. */
template <gck_dtype DTYPE>
GCK_LANE_FN float value_of_words(const typed<DTYPE> &, const uint32_t *w, int k)
{
    return DTYPE == GCK_F32 ? gck_float(w[k]) : half_value<DTYPE>(w[k / 2], k % 2);
}

GCK_LANE_FN float value_of_words(const untyped &, const uint32_t *w, int k) { return gck_float(w[k]); }

/* The codes of the lane's values, a byte each, if its group has classes. */
template <gck_format FORMAT, bool NOISY, typename WORK>
static __device__ __noinline__ void encode_classes(const WORK &work, candidate &group)
{
    enum { WORDS = WORK::view::WORDS };
    const auto [job, g] = work_of_lane(work);

    if (group.found != NUMBERS) {
        return;
    }
    const int64_t i = g * GCK_GROUP + (int)threadIdx.x % LANES * VALUES;
    const gck_classes c = group.classes;
    const float inv = c.stored > 0 ? gck_inverse(FORMAT, 1, c.stored) : 0.f;
    const float far_inv = c.far_step != 0.f ? 1.f / c.far_step : 0.f;
    uint32_t codes[4] = {}, w[WORDS], noise[VALUES / 2] = {};

    load_words(job.x, i, w);
    if constexpr (NOISY) {
        gck_philox(&job.dither, (uint64_t)i / GCK_PHILOX_VALUES, noise);
        gck_philox(&job.dither, (uint64_t)i / GCK_PHILOX_VALUES + 1, noise + GCK_PHILOX_VALUES / 2);
    }
#pragma unroll 1
    for (int m = 0; m < NUMBERS_OF_LANE; m++) {
        uint32_t next = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int u = NOISY ? (int)(noise[k / 2] >> (16 * (k % 2)) & 0xFFFFu) : GCK_NEAREST;
            const float v = value_of_words(job.x, w, k);
            const uint32_t code = gck_escapes(v, job.x.dtype()) ? (uint32_t)gck_kind_code(&c, v, job.x.dtype())
                                : (uint32_t)gck_class_code(&c, v, gck_limit(job.x.dtype()), inv, far_inv, u);
            next |= code << (8 * k);
        }
#pragma unroll
        for (int k = 0; k < VALUES / 2 - 2; k++) {
            noise[k] = noise[k + 2];
        }
        codes[0] = codes[1], codes[1] = codes[2], codes[2] = codes[3], codes[3] = next;
#pragma unroll
        for (int k = 0; k < WORDS - WORDS / 4; k++) {
            w[k] = w[k + WORDS / 4];
        }
    }
#pragma unroll
    for (int m = 0; m < NUMBERS_OF_LANE; m++) {
        group.codes[m] = codes[m];
    }
}

/* gck_encode_classes(), if the lane's group has classes. */
template <gck_format FORMAT, typename WORK>
static __device__ __noinline__ void store_classes(const WORK &work, const candidate &group)
{
    const auto [job, g] = work_of_lane(work);

    if (group.found != NUMBERS) {
        return;
    }
    const int lane = (int)threadIdx.x % LANES;
    const int spare = gck_form_spare_bits(group.classes.form);
    uint32_t header = (uint32_t)(gck_class_header(&group.classes) >> (spare * NUMBERS_OF_LANE * lane));
    uint16_t side[2] = {0, 0};
    share<FORMAT> s = {};

#pragma unroll
    for (int m = 0; m < NUMBERS_OF_LANE; m++) {
        uint8_t code[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            code[k] = (uint8_t)(group.codes[m] >> (8 * k));
        }
        put_number(s, gck_join_four(FORMAT, spare, code, header & ((1u << spare) - 1u)));
        header >>= spare;
    }
    gck_put_unusual(FORMAT, side, gck_class_scale(&group.classes), 0u);
    s.side = side[0] | (uint32_t)side[1] << 16;
    store_numbers(s, codes_of<FORMAT>(job.payload, g), side_of<FORMAT>(job.payload, g),
                  lane);
}

/* ---- decode ---- */

/* The last four of a lane's values move up, four come. */
template <gck_dtype DTYPE>
GCK_LANE_FN void append_four(const typed<DTYPE> &, uint32_t (&w)[typed<DTYPE>::WORDS], const float (&v)[4])
{
    constexpr int WORDS = typed<DTYPE>::WORDS;

#pragma unroll
    for (int k = 0; k < WORDS - WORDS / 4; k++) {
        w[k] = w[k + WORDS / 4];
    }
#pragma unroll
    for (int k = 0; k < WORDS / 4; k++) {
        w[WORDS - WORDS / 4 + k] = DTYPE == GCK_F32 ? gck_bits(v[k])
            : DTYPE == GCK_F16 ? gck_to_f16(v[2 * k % 4]) | (uint32_t)gck_to_f16(v[(2 * k + 1) % 4]) << 16
                               : gck_to_bf16(v[2 * k % 4]) | (uint32_t)gck_to_bf16(v[(2 * k + 1) % 4]) << 16;
    }
}

GCK_LANE_FN void append_four(const untyped &, uint32_t (&w)[VALUES], const float (&v)[4])
{
#pragma unroll
    for (int k = 0; k < VALUES; k++) {
        w[k] = k < VALUES - 4 ? w[(k + 4) % VALUES] : gck_bits(v[k % 4]);
    }
}

/* gck_decode_classes(), if the lane's group has them. */
template <gck_format FORMAT, typename WORK>
static __device__ __noinline__ void decode_numbers(const WORK &work)
{
    const auto [job, g] = work_of_lane(work);
    const int64_t ngroups = gck_groups_of(job.x.numel);
    constexpr int BITS = 4 * gck_code_bits(FORMAT);
    const int lane = (int)threadIdx.x % LANES;
    const gck_dtype dtype = job.x.dtype();
    const bool here = g < ngroups && form_of<FORMAT>(side_of<FORMAT>(job.payload, g)) == NUMBERS;
    share<FORMAT> s = {};
    uint32_t mine = 0, w[WORK::view::WORDS] = {};

    if (__ballot_sync(ALL_LANES, here) == 0) {
        return;
    }
    if (here) {
        load_numbers(s, codes_of<FORMAT>(job.payload, g), side_of<FORMAT>(job.payload, g), lane);
    }
    const int spare = gck_form_spare_bits(gck_form_of(s.side));
#pragma unroll
    for (int m = 0; m < NUMBERS_OF_LANE; m++) {                        /* once around */
        const uint32_t number = s.word[0] & (0xFFFFFFFFu >> (32 - BITS));
        mine |= spare > 0 ? number >> (BITS - spare) << (spare * m) : 0u;
        put_number(s, number);
    }
    const uint64_t header = group_or((uint64_t)mine << (spare * NUMBERS_OF_LANE * lane));
    if (here) {
        const gck_classes c = gck_classes_of(FORMAT, s.side & 0xFFFFu, header);
#pragma unroll 1
        for (int m = 0; m < NUMBERS_OF_LANE; m++) {
            uint8_t code[4];
            float v[4];
            gck_split_four(FORMAT, spare, take_number(s), code);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int kind = gck_kind_of_code(&c, code[k]);
                const float value = gck_class_value(FORMAT, &c, code[k]);
                v[k] = kind >= 0 ? gck_escape_value(kind, dtype)
                    : dtype == GCK_F16 ? fminf(fmaxf(value, -65472.f), 65472.f) : value;
            }
            append_four(job.x, w, v);
        }
        store_words(job.x, g * GCK_GROUP + lane * VALUES, w);
    }
}

#endif
