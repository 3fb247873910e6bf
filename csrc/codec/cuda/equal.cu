/* equal.cu: are the bytes of two payloads the same?  The answer comes later, in a word. */
#include "codec/cuda/cuda_device.h"
#include "codec/cuda/overflow.cuh"

constexpr int EQUAL_VECTORS = 4;         /* of 16 bytes, per thread */
constexpr int EQUAL_BYTES = THREADS * EQUAL_VECTORS * 16;

typedef struct {
    const uint8_t *a, *b;
    int64_t        nbytes;
    unsigned       blocks;               /* that compare them */
} pair;

/* Do this thread's bytes of the block differ?  Both are aligned to 16 bytes, or compared one by one. */
GCK_LANE_FN bool differ(const pair &p, unsigned block)
{
    const int64_t first = (int64_t)block * EQUAL_BYTES, left = p.nbytes - first;
    const uint8_t *a = p.a + first, *b = p.b + first;
    uint32_t bits = 0;

    if (left >= EQUAL_BYTES && ((uintptr_t)a | (uintptr_t)b) % 16 == 0) {
#pragma unroll
        for (int k = 0; k < EQUAL_VECTORS; k++) {
            const uint4 u = ((const uint4 *)a)[k * THREADS + threadIdx.x];
            const uint4 v = ((const uint4 *)b)[k * THREADS + threadIdx.x];
            bits |= (u.x ^ v.x) | (u.y ^ v.y) | (u.z ^ v.z) | (u.w ^ v.w);
        }
    } else {
        for (int i = (int)threadIdx.x; i < EQUAL_BYTES && i < left; i += THREADS) {
            bits |= (uint32_t)(a[i] ^ b[i]);
        }
    }
    return bits != 0;
}

static __global__ void __launch_bounds__(THREADS)
equal_kernel(const __grid_constant__ pair codes, const __grid_constant__ pair scales,
             const __grid_constant__ listener to)
{
    const bool mine = blockIdx.x < codes.blocks ? differ(codes, blockIdx.x) : differ(scales, blockIdx.x - codes.blocks);
    const bool any = __syncthreads_or(mine) != 0;

    if (threadIdx.x == 0) {
        report(to, any);
    }
}

extern "C" int gck_compare_cuda(int index, void *stream, gck_bytes a, gck_bytes b, gck_lengths lengths, uint32_t *word)
{
    const gck_how how = {NULL, word};
    const pair codes = {(const uint8_t *)a.codes, (const uint8_t *)b.codes, lengths.codes,
                        grid_for(lengths.codes, EQUAL_BYTES)};
    const pair scales = {(const uint8_t *)a.scales, (const uint8_t *)b.scales, lengths.scales,
                         grid_for(lengths.scales, EQUAL_BYTES)};
    listener to;
    const int status = listen(&how, 0, &to);

    return status != GCK_OK ? status : launch_on(index, [=]() {
        GCK_LAUNCH(equal_kernel, codes.blocks + scales.blocks, THREADS, (cudaStream_t)stream, codes, scales, to);
        return (int)GCK_OK;
    });
}
