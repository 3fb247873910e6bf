/* lossless.cu: device kernels of lossless: lossless.h is the format.
 *
 * A block of threads is a block of the format: 32 groups of 8 lanes. */
#include "codec/format/lossless.h"
#include "codec/cuda/overflow.cuh"

static_assert(GROUPS_PER_BLOCK == GCK_BLOCK_GROUPS, "a block of threads is a block of the format");

typedef gck_lossless_parts parts;

/* ---- a lane's values ---- */

/* 16 values in N registers: one in each, or two of 16 bits. */
template <gck_dtype DTYPE>
struct packed {
    enum {
        N = DTYPE == GCK_F32 ? VALUES : VALUES / 2,
        ROWS_OF_LANE = DTYPE == GCK_F16 ? 2 : 1,
        LAST = N / ROWS_OF_LANE,                   /* the registers of the last row           */
        LAST_LANES = DTYPE == GCK_BF16 ? 2 : 1,    /* in these lanes of the 8, the last ones  */
        BITS = DTYPE == GCK_F16 ? 1 : 4,           /* of a piece, ABOVE a coded value         */
        ABOVE = DTYPE == GCK_F32 ? 28 : DTYPE == GCK_BF16 ? 12 : 15,
    };
    static constexpr uint32_t piece = DTYPE == GCK_F32 ? 0xFu : DTYPE == GCK_BF16 ? 0x000F000Fu : 0x00010001u;
    static constexpr uint32_t coded = DTYPE == GCK_F32 ? 0x0FFFFFFFu : DTYPE == GCK_BF16 ? 0x0FFF0FFFu : 0x7FFF7FFFu;
};

/* Value j. */
template <int N>
GCK_LANE_FN uint32_t word_of(const uint32_t (&c)[N], int j)
{
    return N == VALUES ? c[j] : j % 2 == 0 ? c[j * N / VALUES] & 0xFFFFu : c[j * N / VALUES] >> 16;
}

/* All of them := f(value, j). */
template <int N, typename F>
GCK_LANE_FN void map_words(uint32_t (&c)[N], F f)
{
    constexpr int EACH = VALUES / N;

#pragma unroll
    for (int k = 0; k < N; k++) {
        const uint32_t first = f(word_of(c, EACH * k), EACH * k);
        c[k] = EACH == 1 ? first : first | f(word_of(c, EACH * k + EACH - 1), EACH * k + EACH - 1) << 16;
    }
}

/* From here on the compiler takes the words from their registers again: else it keeps 16
 * exponents beside them, and spills. */
template <int N>
GCK_LANE_FN void unpack_again(uint32_t (&c)[N])
{
#pragma unroll
    for (int k = 0; k < N; k++) {
        asm volatile("" : "+r"(c[k]));
    }
}

/* ---- groups ---- */

/* The largest exponent up to `most` of a group of rotated values, or 0. */
template <gck_dtype DTYPE, int N>
GCK_LANE_FN uint32_t largest_up_to(uint32_t most, const uint32_t (&c)[N])
{
    uint32_t largest = 0;

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        const uint32_t exponent = word_of(c, j) >> gck_low_bits(DTYPE);
        largest = exponent <= most && exponent > largest ? exponent : largest;
    }
    return group_max(largest);
}

/* Bit j: value j escapes. */
template <gck_dtype DTYPE, int N>
GCK_LANE_FN uint32_t escapes_from(uint32_t base, const uint32_t (&c)[N])
{
    uint32_t escapes = 0;

#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        escapes |= (uint32_t)gck_is_escaped(word_of(c, j) >> gck_low_bits(DTYPE), base) << j;
    }
    return escapes;
}

/* For the groups from whose base more than two values escape: the exponent from which the
 * fewest do.  `e`: the exponents of this lane's values.  Rare, hence in memory and in loops,
 * so that it takes no registers from the others.  The groups of a warp go down their
 * exponents together, each until as many lie above the next one as escape from the best. */
GCK_LANE_FN uint32_t search_base(const uint8_t *e, uint32_t next, uint32_t base, int least)
{
    bool searching = least > 2;

    while (__ballot_sync(ALL_LANES, searching) != 0) {
        uint32_t exponent = 0;
        int escapes = 0, above = 0;
#pragma unroll 1
        for (int j = 0; j < VALUES; j++) {
            exponent = e[j] < next && e[j] > exponent ? e[j] : exponent;
        }
        next = group_max(exponent);
#pragma unroll 1
        for (int j = 0; j < VALUES; j++) {
            escapes += gck_is_escaped(e[j], gck_base_of(next));
            above += e[j] > next;
        }
        escapes = group_sum(escapes), above = group_sum(above);
        if (searching && next != 0 && escapes < least) {
            base = gck_base_of(next);
            least = escapes;
        }
        searching = searching && next != 0 && above < least;
    }
    return base;
}

/* The base of a group, and which of this lane's values escape from it. */
template <gck_dtype DTYPE, int N>
GCK_LANE_FN uint32_t choose_base(uint32_t (&c)[N], uint8_t (&exponents)[VALUES], uint32_t *escapes)
{
    const uint32_t top = largest_up_to<DTYPE>(gck_special(DTYPE) - 1, c);
    uint32_t base = gck_base_of(top);

    unpack_again(c);
    if (__ballot_sync(ALL_LANES, top == 0) != 0) {
        const uint32_t any = largest_up_to<DTYPE>(gck_special(DTYPE), c);
        base = top == 0 ? gck_base_of(any) : base;
        unpack_again(c);
    }
    *escapes = escapes_from<DTYPE>(base, c);
    if (__ballot_sync(ALL_LANES, *escapes != 0) != 0) {
        const int count = group_sum(__popc(*escapes));
        unpack_again(c);
        if (__ballot_sync(ALL_LANES, count > 2) != 0) {
#pragma unroll
            for (int j = 0; j < VALUES; j++) {
                exponents[j] = (uint8_t)(word_of(c, j) >> gck_low_bits(DTYPE));
            }
            base = search_base(exponents, gck_special(DTYPE) + 1, base, count);
            unpack_again(c);
            *escapes = escapes_from<DTYPE>(base, c);
        }
    }
    return base;
}

/* ---- arenas ---- */

/* How many values of the block before this lane's escape, and in all.  Every thread of the block comes here once.
 * Votes bit by bit: sum_before() needs registers that the encode of half precision has not. */
GCK_LANE_FN int escapes_before(uint32_t escapes, int (&of_warp)[WARPS], int *all)
{
    const int warp = (int)threadIdx.x / 32, mine = __popc(escapes);
    const uint32_t lower = (1u << (threadIdx.x % 32)) - 1u;
    int before = 0, sum = 0;

    if (__ballot_sync(ALL_LANES, mine != 0) != 0) {
#pragma unroll
        for (int b = 0; b < 5; b++) {              /* of a number up to 16, bit by bit */
            const uint32_t votes = __ballot_sync(ALL_LANES, mine >> b & 1);
            before += __popc(votes & lower) << b;
            sum += __popc(votes) << b;
        }
    }
    if (threadIdx.x % 32 == 0) {
        of_warp[warp] = sum;
    }
    __syncthreads();
    *all = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        before += w < warp ? of_warp[w] : 0;
        *all += of_warp[w];
    }
    return before;
}

/* ---- words ---- */

/* The first row of this lane. */
template <gck_dtype DTYPE>
GCK_LANE_FN int row_of_lane(void)
{
    return (int)threadIdx.x % LANES * packed<DTYPE>::ROWS_OF_LANE / packed<DTYPE>::LAST_LANES;
}

/* Where this lane's 16 bytes number k are, or NULL: the last row has none. */
template <gck_dtype DTYPE>
GCK_LANE_FN uint4 *words_of_lane(const parts &payload, int groups, int k)
{
    typedef packed<DTYPE> P;
    const int lane = (int)threadIdx.x % LANES, g = (int)threadIdx.x / LANES;
    const int mine = lane < LANES - P::LAST_LANES ? P::N / 4 : (P::N - P::LAST) / 4;
    uint8_t *words = payload.words + (int64_t)blockIdx.x * (GCK_BLOCK_GROUPS * gck_group_bytes(DTYPE));

    return g < groups && k < mine ? (uint4 *)(words + g * gck_group_bytes(DTYPE)) + lane * (P::N / 4) + k : NULL;
}

/* Groups of this block that exist. */
GCK_LANE_FN int groups_of_block(int64_t ngroups)
{
    const int64_t left = ngroups - (int64_t)blockIdx.x * GCK_BLOCK_GROUPS;

    return left < GCK_BLOCK_GROUPS ? (int)left : (int)GCK_BLOCK_GROUPS;
}

/* The last row's bits into the upper bits of the others. */
template <gck_dtype DTYPE, int N>
GCK_LANE_FN void spread_last_row(uint32_t (&c)[N])
{
    typedef packed<DTYPE> P;
    const int lane = (int)threadIdx.x % LANES, first = (int)threadIdx.x % 32 - lane;
    const int from = first + LANES - P::LAST_LANES + lane % P::LAST_LANES;

#pragma unroll
    for (int k = 0; k < P::LAST; k++) {
        const uint32_t last = __shfl_sync(ALL_LANES, c[N - P::LAST + k], from);
#pragma unroll
        for (int r = 0; r < P::ROWS_OF_LANE; r++) {
            c[r * P::LAST + k] |= (last >> (P::BITS * (row_of_lane<DTYPE>() + r)) & P::piece) << P::ABOVE;
        }
    }
}

/* The inverse.  Lanes of the last row have no bits above it. */
template <gck_dtype DTYPE, int N>
GCK_LANE_FN void gather_last_row(uint32_t (&c)[N])
{
    typedef packed<DTYPE> P;
    const bool holds_it = (int)threadIdx.x % LANES >= LANES - P::LAST_LANES;

#pragma unroll
    for (int k = 0; k < P::LAST; k++) {
        uint32_t last = 0;
#pragma unroll
        for (int r = 0; r < P::ROWS_OF_LANE; r++) {
            last |= (c[r * P::LAST + k] >> P::ABOVE & P::piece) << (P::BITS * (row_of_lane<DTYPE>() + r));
        }
        last = across_lanes<P::LAST_LANES, LANES>(last, [](uint32_t a, uint32_t b) { return a | b; });
        c[N - P::LAST + k] = holds_it ? last : c[N - P::LAST + k];
    }
#pragma unroll
    for (int k = 0; k < N; k++) {
        c[k] &= P::coded;
    }
}

/* ---- kernels ---- */

template <gck_dtype DTYPE, typename VIEW>
static __global__ void __launch_bounds__(THREADS, wide_blocks(DTYPE, VIEW::CONTIGUOUS))
lossless_encode_kernel(const __grid_constant__ VIEW x, int64_t ngroups, const __grid_constant__ parts out,
                       const __grid_constant__ listener to)
{
    typedef packed<DTYPE> P;
    __shared__ uint4 arena[GCK_ARENA / 16];
    __shared__ int of_warp[WARPS];
    __shared__ uint8_t bases[GCK_BLOCK_GROUPS], exponents[THREADS][VALUES];
    const int groups = groups_of_block(ngroups);
    uint32_t c[P::N], escapes;
    int all;

    load_words(x, first_of_lane(), c);
    map_words(c, [](uint32_t word, int) { return gck_rotated(word, DTYPE); });
    const uint32_t base = choose_base<DTYPE>(c, exponents[threadIdx.x], &escapes);
    bases[threadIdx.x / LANES] = (uint8_t)base;
    if (threadIdx.x < GCK_ARENA / 4) {
        ((uint32_t *)arena)[threadIdx.x] = 0;
    }
    int at = escapes_before(escapes, of_warp, &all);
    unpack_again(c);
    if (escapes != 0) {
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            if (escapes >> j & 1u) {
                if (at < GCK_ARENA) {
                    ((uint8_t *)arena)[at] = (uint8_t)(word_of(c, j) >> gck_low_bits(DTYPE));
                }
                at++;
            }
        }
    }
    unpack_again(c);
    map_words(c, [=](uint32_t word, int) { return gck_coded(word, base, DTYPE); });
    spread_last_row<DTYPE>(c);
#pragma unroll
    for (int k = 0; k < P::N / 4; k++) {
        uint4 *words = words_of_lane<DTYPE>(out, groups, k);
        if (words != NULL) {
            __stcs(words, make_uint4(c[4 * k], c[4 * k + 1], c[4 * k + 2], c[4 * k + 3]));
        }
    }
    __syncthreads();
    if (threadIdx.x < GCK_ARENA / 16) {
        __stcs((uint4 *)(out.arenas + (int64_t)blockIdx.x * GCK_ARENA) + threadIdx.x, arena[threadIdx.x]);
    }
    if ((int)threadIdx.x < groups) {
        out.bases[(int64_t)blockIdx.x * GCK_BLOCK_GROUPS + threadIdx.x] = all > GCK_ARENA ? (uint8_t)0
                                                                              : bases[threadIdx.x];
    }
    if (threadIdx.x == 0) {
        report(to, all > GCK_ARENA);
    }
}

template <gck_dtype DTYPE, typename VIEW>
static __global__ void __launch_bounds__(THREADS, wide_blocks(DTYPE, VIEW::CONTIGUOUS))
lossless_decode_kernel(const __grid_constant__ parts in, int64_t ngroups, const __grid_constant__ VIEW x)
{
    typedef packed<DTYPE> P;
    __shared__ int of_warp[WARPS];
    const int groups = groups_of_block(ngroups), g = (int)threadIdx.x / LANES;
    const uint32_t base = g < groups ? __ldg(in.bases + (int64_t)blockIdx.x * GCK_BLOCK_GROUPS + g) : 0u;
    const uint8_t *arena = in.arenas + (int64_t)blockIdx.x * GCK_ARENA;
    uint32_t c[P::N], escapes = 0;
    int all;

#pragma unroll
    for (int k = 0; k < P::N / 4; k++) {
        const uint4 *words = words_of_lane<DTYPE>(in, groups, k);
        const uint4 q = words != NULL ? __ldcs(words) : make_uint4(0, 0, 0, 0);
        c[4 * k] = q.x, c[4 * k + 1] = q.y, c[4 * k + 2] = q.z, c[4 * k + 3] = q.w;
    }
    gather_last_row<DTYPE>(c);
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        escapes |= (uint32_t)(word_of(c, j) >> gck_low_bits(DTYPE) == GCK_ESCAPE_CODE) << j;
    }
    int at = escapes_before(escapes, of_warp, &all);
    unpack_again(c);
    map_words(c, [=, &at](uint32_t word, int j) {
        uint32_t escape = 0;
        if (escapes >> j & 1u) {
            escape = __ldg(arena + (at < GCK_ARENA ? at : GCK_ARENA - 1));
            at++;
        }
        return gck_uncoded(word, base, escape, DTYPE);
    });
    store_words(x, first_of_lane(), c);
}

/* ---- launchers ---- */

template <gck_dtype DTYPE, typename VIEW>
static void launch_encode(const VIEW &x, void *payload, const listener &to, cudaStream_t stream)
{
    GCK_LAUNCH((lossless_encode_kernel<DTYPE, VIEW>), grid_of(x.numel), THREADS, stream, x,
               gck_groups_of(x.numel), gck_parts_of(payload, x.numel, DTYPE, 0), to);
}

template <gck_dtype DTYPE, typename VIEW>
static void launch_decode(const void *payload, const VIEW &x, cudaStream_t stream)
{
    GCK_LAUNCH((lossless_decode_kernel<DTYPE, VIEW>), grid_of(x.numel), THREADS, stream,
               gck_parts_of(payload, x.numel, DTYPE, 0), gck_groups_of(x.numel), x);
}

extern "C" {

int gck_lossless_encode_cuda(const gck_tensor *x, const gck_bytes *payloads, const gck_how *how, int n)
{
    return for_each_tensor(x, n, [=](const gck_tensor *t, int i) {
        listener to;
        const int status = listen(how, i, &to);
        return status != GCK_OK ? status : with_floats(t, [=](const auto &view, auto dtype) {
            launch_encode<(gck_dtype)decltype(dtype)::VALUE>(view, payloads[i].codes, to, (cudaStream_t)t->stream);
        });
    });
}

int gck_lossless_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n)
{
    return for_each_tensor(out, n, [=](const gck_tensor *t, int i) {
        return with_floats(t, [=](const auto &view, auto dtype) {
            launch_decode<(gck_dtype)decltype(dtype)::VALUE>(from[i].codes, view, (cudaStream_t)t->stream);
        });
    });
}

}
