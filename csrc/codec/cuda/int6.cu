/* int6.cu: device kernels of int6. */
#include "codec/cuda/rotated.cuh"

template <gck_format FORMAT, bool NOISY, typename VIEW>
GCK_LANE_FN uint32_t lane_encode(const VIEW &x, int64_t i, const gck_dither &dither, share<FORMAT> &s)
{
    return encode_rotated<FORMAT, NOISY>(x, i, dither, s);
}

template <gck_format FORMAT>
GCK_LANE_FN void lane_decode(const share<FORMAT> &s, int64_t g, float (&v)[VALUES])
{
    decode_rotated<FORMAT>(s, g, v);
}

GCK_GROUP_CODEC_CUDA(int6, GCK_INT6)
