/* mask.cu: device kernels of mask.  A group is 8 lanes x 16 bools, as everywhere; one lane
 * of them stores its 16 bytes.  The payload is an eighth of the bools: only those count. */
#include "codec/cuda/launch.cuh"

/* Loads of 16 bools in flight for each lane; strides take the registers for more than one. */
template <typename VIEW> struct rounds {
    enum { N = VIEW::CONTIGUOUS ? 4 : 1, BOOLS_PER_BLOCK = THREADS * VALUES * N };
};

/* 4 bools, bytes of a word, to 4 bits. */
GCK_LANE_FN uint32_t bits_of_word(uint32_t w) { return from_bytes((w | ((w & 0x7F7F7F7Fu) + 0x7F7F7F7Fu)) >> 7); }

/* The first bool of this lane in a round. */
template <typename VIEW>
GCK_LANE_FN int64_t first_of_round(int round)
{
    return (int64_t)blockIdx.x * rounds<VIEW>::BOOLS_PER_BLOCK + (round * THREADS + (int)threadIdx.x) * VALUES;
}

template <typename VIEW>
static __global__ void __launch_bounds__(THREADS, wide_blocks(GCK_BF16, VIEW::CONTIGUOUS))
mask_encode_kernel(const __grid_constant__ VIEW x, uint8_t *payload)
{
    constexpr int ROUNDS = rounds<VIEW>::N;
    uint32_t w[ROUNDS][VALUES / 4];

#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        load_words(x, first_of_round<VIEW>(r), w[r]);
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int64_t i = first_of_round<VIEW>(r);
        uint32_t bits = 0;
#pragma unroll
        for (int k = 0; k < VALUES / 4; k++) {
            bits |= bits_of_word(w[r][k]) << (4 * k);
        }
        bits |= __shfl_xor_sync(ALL_LANES, bits, 1) << 16;         /* even lanes: 32 bools */
        const uint32_t second = __shfl_xor_sync(ALL_LANES, bits, 2);
        const uint32_t third = __shfl_xor_sync(ALL_LANES, bits, 4);
        const uint32_t fourth = __shfl_xor_sync(ALL_LANES, second, 4);
        if (threadIdx.x % LANES == 0 && i < x.numel) {
            __stcs((uint4 *)(payload + i / 8), make_uint4(bits, second, third, fourth));
        }
    }
}

template <typename VIEW>
static __global__ void __launch_bounds__(THREADS, wide_blocks(GCK_BF16, VIEW::CONTIGUOUS))
mask_decode_kernel(const uint8_t *payload, const __grid_constant__ VIEW x)
{
    constexpr int ROUNDS = rounds<VIEW>::N;
    uint32_t bits[ROUNDS];

#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        const int64_t i = first_of_round<VIEW>(r);
        bits[r] = i < x.numel ? __ldg((const uint16_t *)(payload + i / 8)) : 0u;
    }
#pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
        uint32_t w[VALUES / 4];
#pragma unroll
        for (int k = 0; k < VALUES / 4; k++) {
            w[k] = to_bytes(bits[r] >> (4 * k));
        }
        store_words(x, first_of_round<VIEW>(r), w);
    }
}

template <typename VIEW>
static void launch_mask(bool encode, const VIEW &x, void *payload, cudaStream_t stream)
{
    const unsigned grid = grid_for(x.numel, rounds<VIEW>::BOOLS_PER_BLOCK);

    if (encode) {
        GCK_LAUNCH((mask_encode_kernel<VIEW>), grid, THREADS, stream, x, (uint8_t *)payload);
    } else {
        GCK_LAUNCH((mask_decode_kernel<VIEW>), grid, THREADS, stream, (const uint8_t *)payload, x);
    }
}

static int mask(bool encode, const gck_tensor *x, const gck_bytes *payloads, int n)
{
    return for_each_tensor(x, n, [=](const gck_tensor *t, int i) {
        return t->dtype != GCK_BOOL ? (int)GCK_E_DTYPE : with_view<uint8_t>(t, [=](const auto &view) {
            launch_mask(encode, view, payloads[i].codes, (cudaStream_t)t->stream);
        });
    });
}

extern "C" {

int gck_mask_encode_cuda(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n)
{
    (void)how;
    return mask(true, x, to, n);
}

int gck_mask_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n)
{
    return mask(false, out, from, n);
}

}
