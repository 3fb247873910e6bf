/* nonzeros.cuh: which values are not zero, on a device: sparse.h.
 *
 * A block of threads is a block of the format.  Two launches in a row: bitmaps and the number of each
 * block; places, by one block.  The values follow in a third.  So nothing is allocated and no block
 * waits for another, and the second read of the values is mostly from L2. */
#ifndef GRADCKPT_NONZEROS_CUH
#define GRADCKPT_NONZEROS_CUH

#include "codec/format/sparse.h"
#include "codec/cuda/overflow.cuh"

static_assert(GROUPS_PER_BLOCK == GCK_BLOCK_GROUPS, "a block of threads is a block of the format");

typedef gck_sparse_parts nonzeros_parts;

/* Values of words of type T in the registers of a lane. */
template <typename T> struct lane_words {
    enum { N = VALUES * (int)sizeof(T) / 4 };
};

/* Bit j: value j of this lane is not zero.  UNSIGNED: -0 is zero. */
template <typename T, bool UNSIGNED, int N>
GCK_LANE_FN uint32_t nonzeros_of_lane(const uint32_t (&w)[N])
{
    constexpr uint32_t top = UNSIGNED ? 0x7FFFFFFFu : ~0u, half = UNSIGNED ? 0x7FFFu : 0xFFFFu;
    uint32_t bits = 0;

#pragma unroll
    for (int k = 0; k < N; k++) {
        if (sizeof(T) == 4) {
            bits |= (uint32_t)((w[k] & top) != 0) << k;
        } else {
            bits |= (uint32_t)((w[k] & half) != 0) << (2 * k) | (uint32_t)((w[k] >> 16 & half) != 0) << (2 * k + 1);
        }
    }
    return bits;
}

/* The values whose bits are set, from `at` on. */
template <typename T, int N>
GCK_LANE_FN void pack_lane(const uint32_t (&w)[N], uint32_t bits, uint32_t at, T *values)
{
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        if (bits >> j & 1u) {
            values[at++] = (T)(sizeof(T) == 4 ? w[j * N / VALUES] : w[j * N / VALUES] >> (j % 2 * 16));
        }
    }
}

/* Those of this block, side by side in shared memory: how many. */
template <bool UNSIGNED, typename T, typename VIEW>
GCK_LANE_FN uint32_t pack_block(const VIEW &x, T *values)
{
    __shared__ uint32_t of_warp[WARPS];
    uint32_t w[lane_words<T>::N], all;

    load_words(x, first_of_lane(), w);
    const uint32_t bits = nonzeros_of_lane<T, UNSIGNED>(w);
    pack_lane(w, bits, sum_before((uint32_t)__popc(bits), of_warp, &all), values);
    __syncthreads();
    return all;
}

/* And back: zeros elsewhere. */
template <typename T, int N>
GCK_LANE_FN void unpack_lane(const T *values, uint32_t bits, uint32_t at, uint32_t (&w)[N])
{
#pragma unroll
    for (int k = 0; k < N; k++) {
        w[k] = 0;
    }
#pragma unroll
    for (int j = 0; j < VALUES; j++) {
        if (bits >> j & 1u) {
            const uint32_t value = values[at++];
            w[j * N / VALUES] |= sizeof(T) == 4 ? value : value << (j % 2 * 16);
        }
    }
}

/* Where the bitmap of this lane's values is, or NULL: their group does not exist. */
GCK_LANE_FN uint16_t *bits_of_lane(const nonzeros_parts &payload, int64_t numel)
{
    const int64_t i = first_of_lane();

    return i < gck_groups_of(numel) * GCK_GROUP ? (uint16_t *)(void *)(payload.bitmap + i / 8) : NULL;
}

template <typename T, bool UNSIGNED, typename VIEW>
static __global__ void __launch_bounds__(THREADS)
nonzeros_bitmap_kernel(const __grid_constant__ VIEW x, const __grid_constant__ nonzeros_parts out)
{
    __shared__ uint32_t of_warp[WARPS];
    uint32_t w[lane_words<T>::N], all;
    uint16_t *bitmap = bits_of_lane(out, x.numel);

    load_words(x, first_of_lane(), w);
    const uint32_t bits = nonzeros_of_lane<T, UNSIGNED>(w);
    if (bitmap != NULL) {
        *bitmap = (uint16_t)bits;
    }
    sum_before((uint32_t)__popc(bits), of_warp, &all);
    if (threadIdx.x == 0) {
        out.before[blockIdx.x] = all;
    }
}

/* One block: each thread adds some numbers that lie side by side, then the next THREADS x EACH. */
static __global__ void __launch_bounds__(THREADS)
nonzeros_places_kernel(uint64_t *before, int64_t blocks)
{
    constexpr int EACH = 16;
    __shared__ uint32_t of_warp[WARPS];
    uint64_t sum = 0;

    for (int64_t first = 0; first < blocks; first += THREADS * EACH) {
        const int64_t mine = first + (int)threadIdx.x * EACH;
        uint32_t numbers = 0, all;
        for (int k = 0; k < EACH; k++) {
            numbers += mine + k < blocks ? (uint32_t)before[mine + k] : 0u;
        }
        uint64_t at = sum + sum_before(numbers, of_warp, &all);
        for (int k = 0; k < EACH && mine + k < blocks; k++) {
            const uint64_t number = before[mine + k];
            before[mine + k] = at;
            at += number;
        }
        sum += all;
        __syncthreads();
    }
}

/* Both launches. */
template <typename T, bool UNSIGNED, typename VIEW>
static void launch_places(const VIEW &x, const nonzeros_parts &parts, cudaStream_t stream)
{
    GCK_LAUNCH((nonzeros_bitmap_kernel<T, UNSIGNED, VIEW>), grid_of(x.numel), THREADS, stream, x, parts);
    GCK_LAUNCH(nonzeros_places_kernel, 1, THREADS, stream, parts.before, gck_blocks_of(x.numel));
}

#endif
