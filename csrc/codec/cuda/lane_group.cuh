/* lane_group.cuh: what a lane has of a group: 16 values in registers, its share of the payload. */
#ifndef GRADCKPT_LANE_GROUP_CUH
#define GRADCKPT_LANE_GROUP_CUH

#include "codec/cuda/launch.cuh"
#include "codec/format/rows.h"

/* ---- views ---- */

/* Contiguous values: the compiler knows the dtype. */
template <gck_dtype DTYPE> struct typed : dense<typename element<DTYPE>::type> {
    enum { WORDS = DTYPE == GCK_F32 ? VALUES : VALUES / 2 };           /* of a lane's values */
    __device__ constexpr gck_dtype dtype(void) const { return DTYPE; }
};

/* Values with strides, which count bytes, or with rows that are scaled apart (rows.h).  One kernel for all
 * dtypes: latency bounds it. */
struct untyped : strided<uint8_t> {
    enum { WORDS = VALUES };
    gck_dtype kind;
    int8_t   *rows;                      /* the bytes of the rows; NULL: none           */
    int64_t   row;                       /* their length                                */

    __device__ gck_dtype dtype(void) const { return kind; }
};

/* Blocks an SM must hold to have 48 KiB in flight: what bounds the registers.  Noisy kernels are bound by
 * arithmetic. */
template <gck_dtype DTYPE>
static constexpr int blocks_per_sm(const typed<DTYPE> *, bool noisy) { return wide_blocks(DTYPE, !noisy); }

static constexpr int blocks_per_sm(const untyped *, bool) { return 4; }

/* Several tensors in one launch: finding one's own takes registers. */
template <typename VIEW> static constexpr int blocks_of(const job<VIEW> *, bool noisy)
{
    return blocks_per_sm((const VIEW *)NULL, noisy);
}

template <typename VIEW> static constexpr int blocks_of(const jobs<VIEW> *, bool noisy)
{
    return blocks_per_sm((const VIEW *)NULL, noisy) > 5 ? 5 : blocks_per_sm((const VIEW *)NULL, noisy);
}

/* Memory for each group of a block.  Shared, since local memory is taken for every thread
 * that a device can hold; static, so that only kernels that use it have it. */
template <typename T>
GCK_LANE_FN T *scratch(void)
{
    __shared__ T values[GROUPS_PER_BLOCK][GCK_GROUP];

    return values[threadIdx.x / LANES];
}

/* ---- values of a lane ---- */

/* The halves of a word as float32 and back.  Hardware where it rounds as group.h does
 * (to nearest even, subnormals kept); the NaN bits differ, but NaN is an escape and
 * never comes here.  sm_75 runs group.h. */
template <gck_dtype DTYPE>
GCK_LANE_FN float half_value(uint32_t word, int upper)
{
    if (DTYPE == GCK_BF16) {
        return gck_float(upper ? word & 0xFFFF0000u : word << 16);
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return ptx_f32_f16((uint16_t)(upper ? word >> 16 : word));
#else
    return gck_from_f16((uint16_t)(upper ? word >> 16 : word));
#endif
}

template <gck_dtype DTYPE>
GCK_LANE_FN uint32_t pack_halves(float lower, float upper)
{
    if (DTYPE == GCK_F16) {                        /* as gck_store(): never an escape */
        lower = fminf(fmaxf(lower, -65472.f), 65472.f);
        upper = fminf(fmaxf(upper, -65472.f), 65472.f);
    }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return DTYPE == GCK_F16 ? ptx_f16x2(lower, upper) : ptx_bf16x2(lower, upper);
#else
    return DTYPE == GCK_F16 ? gck_to_f16(lower) | (uint32_t)gck_to_f16(upper) << 16
                            : gck_to_bf16(lower) | (uint32_t)gck_to_bf16(upper) << 16;
#endif
}

template <gck_dtype DTYPE, int WORDS>
GCK_LANE_FN void values_of_words(const uint32_t (&w)[WORDS], float (&v)[VALUES])
{
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = DTYPE == GCK_F32 ? gck_float(w[j * WORDS / VALUES]) : half_value<DTYPE>(w[j * WORDS / VALUES], j % 2);
    }
}

template <gck_dtype DTYPE>
GCK_LANE_FN void load_values(const typed<DTYPE> &x, int64_t i, float (&v)[VALUES])
{
    uint32_t w[typed<DTYPE>::WORDS];

    load_words(x, i, w);
    values_of_words<DTYPE>(w, v);
}

/* What a lane sees of its values as it loads them: max x and min x, 0 if that lies beyond, without NaN; how
 * many are negative, -0 too. */
struct looks {
    float    high, low;
    uint32_t negative;
};

GCK_LANE_FN looks look_at(const float (&v)[VALUES])
{
    looks seen = {0.f, 0.f, 0u};

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        seen.high = fmaxf(seen.high, v[j]);
        seen.low = fminf(seen.low, v[j]);
        seen.negative += gck_bits(v[j]) >> 31;
    }
    return seen;
}

/* Two values of a word at a time, where the device can. */
template <gck_dtype DTYPE>
GCK_LANE_FN looks look_at_halves(const uint32_t (&w)[VALUES / 2], const float (&v)[VALUES])
{
    uint32_t signs = 0;
    looks seen;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint32_t high = 0, low = 0;
    (void)v;
#pragma unroll
    for (int k = 0; k < VALUES / 2; k++) {
        high = DTYPE == GCK_F16 ? ptx_max_f16x2(high, w[k]) : ptx_max_bf16x2(high, w[k]);
        low = DTYPE == GCK_F16 ? ptx_min_f16x2(low, w[k]) : ptx_min_bf16x2(low, w[k]);
    }
    seen.high = fmaxf(half_value<DTYPE>(high, 0), half_value<DTYPE>(high, 1));
    seen.low = fminf(half_value<DTYPE>(low, 0), half_value<DTYPE>(low, 1));
#else
    seen = look_at(v);
#endif
#pragma unroll
    for (int k = 0; k < VALUES / 2; k += 2) {
        signs |= (__byte_perm(w[k], w[k + 1], 0x7531) & 0x80808080u) >> (k / 2);
    }
    seen.negative = (uint32_t)__popc(signs);
    return seen;
}

template <gck_dtype DTYPE>
GCK_LANE_FN looks load_and_look(const typed<DTYPE> &x, int64_t i, float (&v)[VALUES])
{
    uint32_t w[typed<DTYPE>::WORDS];

    load_words(x, i, w);
    values_of_words<DTYPE>(w, v);
    if constexpr (DTYPE == GCK_F32) {
        return look_at(v);
    } else {
        return look_at_halves<DTYPE>(w, v);
    }
}

/* f(j, address of value i + j): a loop, since one that is unrolled takes too many registers;
 * what f keeps goes to the lane's part of the group's scratch. */
template <typename F>
GCK_LANE_FN void for_each_address(const untyped &x, int64_t i, int count, F f)
{
    int64_t offset = 0, run = 0;

#pragma unroll 1
    for (int j = 0; j < count && i + j < x.numel; j++) {
        if (run == 0) {
            offset = offset_of(x, i + j, &run);
        }
        f(j, x.data + offset);
        offset += x.stride[x.ndim - 1];
        run--;
    }
}

/* What values from one on are multiplied by: those before `first`, before `second`, and the rest. */
struct factors {
    int   first, second;
    float by[GCK_SHARES];

    __device__ float of(int j) const { return j < first ? by[0] : j < second ? by[1] : by[2]; }
};

/* From value i on, within its group.  back: after decoding. */
GCK_LANE_FN factors factors_of(const untyped &x, int64_t i, bool back)
{
    const int64_t g = i / GCK_GROUP;
    const int start = (int)(i % GCK_GROUP);
    int end[GCK_SHARES] = {GCK_GROUP, GCK_GROUP, GCK_GROUP}, shift[GCK_SHARES] = {0, 0, 0};
    int64_t row;

    if (x.rows == NULL || i >= x.numel) {
        return {GCK_GROUP, GCK_GROUP, {1.f, 1.f, 1.f}};
    }
    const int n = gck_shares_of(g, x.row, x.numel, end, &row);
    gck_shifts_from(n, x.rows + row + 1, shift);
    factors f = {end[0] - start, n > 1 ? end[1] - start : GCK_GROUP, {}};
#pragma unroll
    for (int s = 0; s < GCK_SHARES; s++) {
        f.by[s] = back ? gck_two_to_minus(shift[s]) : gck_two_to(shift[s]);
    }
    return f;
}

/* Value i, which is stored, times a power of two: gck_scale_shares(). */
GCK_LANE_FN void rescale(void *values, gck_dtype dtype, int64_t i, float by)
{
    if (by != 1.f) {
        const float v = gck_load(values, dtype, i) * by;
        if ((gck_bits(v) & 0x7FFFFFFFu) <= gck_limit(dtype)) {
            gck_store(values, dtype, i, v);
        }
    }
}

GCK_LANE_FN void load_values(const untyped &x, int64_t i, float (&v)[VALUES])
{
    float *mine = scratch<float>() + (int)threadIdx.x % LANES * VALUES;
    const factors by = factors_of(x, i, false);

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        mine[j] = 0.f;
    }
    for_each_address(x, i, VALUES, [&](int j, const uint8_t *at) { mine[j] = gck_load(at, x.kind, 0) * by.of(j); });
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        v[j] = mine[j];
    }
}

GCK_LANE_FN void load_words(const untyped &x, int64_t i, uint32_t (&w)[VALUES])
{
    float v[VALUES];

    load_values(x, i, v);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        w[j] = gck_bits(v[j]);
    }
}

GCK_LANE_FN looks load_and_look(const untyped &x, int64_t i, float (&v)[VALUES])
{
    load_values(x, i, v);
    return look_at(v);
}

/* The inverse: words are stored as they are, rounded if need be. */
GCK_LANE_FN void store_words(const untyped &x, int64_t i, const uint32_t (&w)[VALUES])
{
    float *mine = scratch<float>() + (int)threadIdx.x % LANES * VALUES;
    const factors by = factors_of(x, i, true);

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        mine[j] = gck_float(w[j]);
    }
    for_each_address(x, i, VALUES, [&](int j, uint8_t *at) {
        gck_store_escape(at, x.kind, 0, mine[j]);
        rescale(at, x.kind, 0, by.of(j));
    });
}

/* Values that are not escapes. */
template <gck_dtype DTYPE>
GCK_LANE_FN void store_values(const typed<DTYPE> &x, int64_t i, const float (&v)[VALUES])
{
    constexpr int WORDS = typed<DTYPE>::WORDS;
    uint32_t w[WORDS];

#pragma unroll
    for (int k = 0; k < WORDS; k++) {
        w[k] = DTYPE == GCK_F32 ? gck_bits(v[k]) : pack_halves<DTYPE>(v[k * VALUES / WORDS], v[k * VALUES / WORDS + 1]);
    }
    store_words(x, i, w);
}

GCK_LANE_FN void store_values(const untyped &x, int64_t i, const float (&v)[VALUES])
{
    float *mine = scratch<float>() + (int)threadIdx.x % LANES * VALUES;
    const factors by = factors_of(x, i, true);

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        mine[j] = v[j];
    }
    for_each_address(x, i, VALUES, [&](int j, uint8_t *at) {
        gck_store(at, x.kind, 0, mine[j]);
        rescale(at, x.kind, 0, by.of(j));
    });
}

/* Value i alone. */
template <gck_dtype DTYPE>
GCK_LANE_FN float load_value(const typed<DTYPE> &x, int64_t i) { return gck_load(x.data, DTYPE, i); }

GCK_LANE_FN float load_value(const untyped &x, int64_t i)
{
    int64_t run = 0;

    return gck_load(x.data + offset_of(x, i, &run), x.kind, 0) * factors_of(x, i, false).of(0);
}

template <gck_dtype DTYPE>
GCK_LANE_FN void store_value(const typed<DTYPE> &x, int64_t i, float v) { gck_store(x.data, DTYPE, i, v); }

GCK_LANE_FN void store_value(const untyped &x, int64_t i, float v)
{
    int64_t run = 0;

    uint8_t *at = x.data + offset_of(x, i, &run);
    gck_store(at, x.kind, 0, v);
    rescale(at, x.kind, 0, factors_of(x, i, true).of(0));
}

/* The largest magnitude of 16 values, as bits: NaN and infinity are larger than any. */
GCK_LANE_FN uint32_t lane_amax(const float (&v)[VALUES])
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float amax = ptx_max_abs(v[0], v[1]);

#pragma unroll
    for (int j = 2; j < VALUES; j++) {
        amax = ptx_max_abs(amax, v[j]);
    }
    return gck_bits(amax);
#else
    uint32_t amax = 0;

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const uint32_t abs = gck_bits(v[j]) & 0x7FFFFFFFu;
        amax = abs > amax ? abs : amax;
    }
    return amax;
#endif
}

/* f(j, noise of value j) for the 16 values from i on; GCK_NEAREST where nothing is noisy. */
template <bool NOISY, typename F>
GCK_LANE_FN void for_each_noise(const gck_dither &dither, int64_t i, F f)
{
#pragma unroll
    for (int half = 0; half < VALUES / GCK_PHILOX_VALUES; half++) {
        uint32_t word[4] = {};
        if (NOISY) {
            gck_philox(&dither, (uint64_t)i / GCK_PHILOX_VALUES + (uint64_t)half, word);
        }
#pragma unroll
        for (int j = 0; j < GCK_PHILOX_VALUES; j++) {
            f(half * GCK_PHILOX_VALUES + j, NOISY ? (int)(word[j / 2] >> (16 * (j % 2)) & 0xFFFFu) : GCK_NEAREST);
        }
    }
}

/* ---- a lane's share of a payload ---- */

template <gck_format FORMAT> struct share {
    enum { WORDS = gck_code_bytes(FORMAT) / LANES / 4 };
    uint32_t word[WORDS];                /* int6: two of nibbles, one of the upper bits */
    uint32_t side;                       /* of the group, the same in its 8 lanes       */
};

/* The payload is read again in the backward pass only, x perhaps at once: stores of
 * the payload are streaming, loads of x are not. */
template <gck_format FORMAT>
GCK_LANE_FN void store_share(const share<FORMAT> &s, uint8_t *codes, uint16_t *side, int lane)
{
    if constexpr (share<FORMAT>::WORDS == 4) {
        __stcs((uint4 *)codes + lane, make_uint4(s.word[0], s.word[1], s.word[2], s.word[3]));
    } else {
        __stcs((uint2 *)codes + lane, make_uint2(s.word[0], s.word[1]));
    }
    if constexpr (share<FORMAT>::WORDS == 3) {
        __stcs((uint32_t *)codes + 2 * LANES + lane, s.word[2]);
    }
    if (lane == 0) {
        if constexpr (gck_side_words(FORMAT) == 2) {
            *(uint32_t *)side = s.side;
        } else {
            *side = (uint16_t)s.side;
        }
    }
}

template <gck_format FORMAT>
GCK_LANE_FN void load_share(share<FORMAT> &s, const uint8_t *codes, const uint16_t *side, int lane)
{
    if constexpr (share<FORMAT>::WORDS == 4) {
        const uint4 q = __ldcs((const uint4 *)codes + lane);
        s.word[0] = q.x, s.word[1] = q.y, s.word[2] = q.z, s.word[3] = q.w;
    } else {
        const uint2 q = __ldcs((const uint2 *)codes + lane);
        s.word[0] = q.x, s.word[1] = q.y;
    }
    if constexpr (share<FORMAT>::WORDS == 3) {
        s.word[2] = __ldcs((const uint32_t *)codes + 2 * LANES + lane);
    }
    s.side = gck_side_words(FORMAT) == 2 ? __ldg((const uint32_t *)side) : (uint32_t)__ldg(side);
}

/* The same of a share that holds numbers: its words lie one after the other.  int8 and int4 have no other
 * order. */
template <gck_format FORMAT>
GCK_LANE_FN void store_numbers(const share<FORMAT> &s, uint8_t *codes, uint16_t *side, int lane)
{
    if constexpr (share<FORMAT>::WORDS == 3) {
#pragma unroll
        for (int w = 0; w < 3; w++) {
            __stcs((uint32_t *)codes + 3 * lane + w, s.word[w]);
        }
        if (lane == 0) {
            *side = (uint16_t)s.side;
        }
    } else {
        store_share(s, codes, side, lane);
    }
}

template <gck_format FORMAT>
GCK_LANE_FN void load_numbers(share<FORMAT> &s, const uint8_t *codes, const uint16_t *side, int lane)
{
    if constexpr (share<FORMAT>::WORDS == 3) {
#pragma unroll
        for (int w = 0; w < 3; w++) {
            s.word[w] = __ldcs((const uint32_t *)codes + 3 * lane + w);
        }
        s.side = __ldg(side);
    } else {
        load_share(s, codes, side, lane);
    }
}

#endif
