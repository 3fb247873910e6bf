/* sparse_int8.cu: device kernels of sparse_int8: sparse_int8.h is the format.
 *
 * A block of threads is a block of the format, in the launches of sparse.cu: bitmaps and numbers;
 * places; values.  The values that are not zero lie side by side in shared memory, where eight lanes
 * work at a group of 128, as everywhere. */
#include "codec/format/sparse_int8.h"
#include "codec/cuda/nonzeros.cuh"

/* This lane's 16 of the packed values: the first of them, and how many there are. */
GCK_LANE_FN int first_packed(void) { return (int)threadIdx.x * VALUES; }

GCK_LANE_FN int count_packed(uint32_t all)
{
    const int left = (int)all - first_packed();

    return left < 0 ? 0 : left < VALUES ? left : VALUES;
}

/* Where group g of the block is. */
GCK_LANE_FN uint8_t *group_at(const nonzeros_parts &payload, uint64_t before, int g)
{
    return payload.values + gck_packed_place((int64_t)before, blockIdx.x) + g * (GCK_GROUP + 2);
}

template <typename T, typename VIEW>
static __global__ void __launch_bounds__(THREADS)
sparse_int8_values_kernel(const __grid_constant__ VIEW x, gck_dtype dtype, const __grid_constant__ nonzeros_parts out,
                          const __grid_constant__ listener to)
{
    __shared__ T values[GCK_BLOCK];
    const uint64_t before = out.before[blockIdx.x];
    const uint32_t all = pack_block<true>(x, values);
    const bool fits = gck_sparse_fits(before, all, out.room);
    const int first = first_packed(), count = count_packed(all), g = first / GCK_GROUP;
    uint32_t amax = 0, escaped = 0;
    for (int j = 0; j < count; j++) {
        const float v = gck_load(values, dtype, first + j);
        const uint32_t size = gck_bits(v) & 0x7FFFFFFFu;
        escaped |= (uint32_t)gck_escapes(v, dtype);
        amax = !gck_escapes(v, dtype) && size > amax ? size : amax;
    }
    amax = group_max(amax), escaped = group_max(escaped);
    const gck_packed_scale scale = gck_packed_scale_of(gck_float(amax), (int)escaped);
    uint8_t *group = group_at(out, before, g);
    for (int j = 0; fits && j < count; j++) {
        group[2 + first % GCK_GROUP + j] = gck_packed_code_of(gck_load(values, dtype, first + j), dtype, scale);
    }
    if (fits && count > 0 && threadIdx.x % LANES == 0) {
        group[0] = (uint8_t)scale.side, group[1] = (uint8_t)(scale.side >> 8);
    }
    if (threadIdx.x == 0) {
        const bool last = blockIdx.x == gridDim.x - 1;
        uint8_t *end = group_at(out, before, 0) + (int64_t)all + 2 * gck_groups_of(all);
        uint8_t *next = out.values + gck_packed_end((int64_t)before, all, blockIdx.x, gridDim.x);
        for (; fits && end < next; end++) {
            *end = 0;
        }
        report(to, !fits, last ? gck_part_of((int64_t)before + all, x.numel) : 0u);
    }
}

/* The value of a code, as bits of its dtype. */
template <typename T>
GCK_LANE_FN T value_of_code(uint8_t code, uint32_t side, gck_dtype dtype)
{
    T value;

    const int kind = side & GCK_ESC ? gck_escape_of_code(GCK_INT8_PLAIN, code) : -1;
    if (kind >= 0) {
        gck_store_escape(&value, dtype, 0, gck_escape_value(kind, dtype));
    } else {
        gck_store(&value, dtype, 0, gck_times_step(GCK_INT8_PLAIN, (float)(int8_t)code, side & 0x7FFFu));
    }
    return (T)(value << 1) == 0 && code != 0 ? (T)gck_least_bits(code >> 7, dtype) : value;
}

/* It begins as that of sparse.cu, each line of which makes a value of the kernel's own: a function for
 * both would have seven results. */
template <typename T, typename VIEW>
static __global__ void __launch_bounds__(THREADS)
sparse_int8_decode_kernel(const __grid_constant__ nonzeros_parts in, gck_dtype dtype, const __grid_constant__ VIEW x)
{
    __shared__ T values[GCK_BLOCK];
    __shared__ uint32_t of_warp[WARPS];
    const uint64_t before = in.before[blockIdx.x];
    const uint16_t *bitmap = bits_of_lane(in, x.numel);
    const uint32_t bits = bitmap != NULL ? *bitmap : 0u;
    uint32_t w[lane_words<T>::N], all;
    const uint32_t at = sum_before((uint32_t)__popc(bits), of_warp, &all);
    const bool fits = gck_sparse_fits(before, all, in.room);
    const int first = first_packed(), count = count_packed(all);
    const uint8_t *group = fits ? group_at(in, before, first / GCK_GROUP) : NULL;
    const uint32_t side = fits && count > 0 ? gck_packed_side(group[0] | (uint32_t)group[1] << 8) : 0u;

    for (int j = 0; j < count; j++) {
        values[first + j] = fits ? value_of_code<T>(group[2 + first % GCK_GROUP + j], side, dtype)
                                 : (T)gck_quiet_nan(dtype);
    }
    __syncthreads();
    unpack_lane(values, bits, at, w);
    store_words(x, first_of_lane(), w);
}

/* ---- launchers ---- */

/* The parts of the payload of t: GCK_OK, or GCK_E_RANGE. */
static int packed_parts_of(const gck_tensor *t, const void *payload, nonzeros_parts *parts)
{
    const int64_t most = gck_sparse_head(t->numel) + gck_packed_nbytes(t->numel, gck_blocks_of(t->numel));

    *parts = gck_sparse_int8_parts_of(payload, t->numel, t->room != 0 ? t->room : most);
    return parts->room < 0 ? (int)GCK_E_RANGE : (int)GCK_OK;
}

template <typename T, typename VIEW>
static void launch_encode(const VIEW &x, T *, gck_dtype dtype, const nonzeros_parts &parts, const listener &to,
                          cudaStream_t stream)
{
    launch_places<T, true>(x, parts, stream);
    GCK_LAUNCH((sparse_int8_values_kernel<T, VIEW>), grid_of(x.numel), THREADS, stream, x, dtype, parts, to);
}

template <typename T, typename VIEW>
static void launch_decode(const nonzeros_parts &parts, gck_dtype dtype, const VIEW &x, T *, cudaStream_t stream)
{
    GCK_LAUNCH((sparse_int8_decode_kernel<T, VIEW>), grid_of(x.numel), THREADS, stream, parts, dtype, x);
}

extern "C" {

int gck_sparse_int8_encode_cuda(const gck_tensor *x, const gck_bytes *payloads, const gck_how *how, int n)
{
    return for_each_tensor(x, n, [=](const gck_tensor *t, int i) {
        nonzeros_parts parts;
        listener to;
        const int range = packed_parts_of(t, payloads[i].codes, &parts);
        const int status = range != GCK_OK ? range : listen(how, i, &to);
        return status != GCK_OK ? status : with_floats(t, [=](const auto &view, auto) {
            launch_encode(view, view.data, t->dtype, parts, to, (cudaStream_t)t->stream);
        });
    });
}

int gck_sparse_int8_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n)
{
    return for_each_tensor(out, n, [=](const gck_tensor *t, int i) {
        nonzeros_parts parts;
        const int status = packed_parts_of(t, from[i].codes, &parts);
        return status != GCK_OK ? status : with_floats(t, [=](const auto &view, auto) {
            launch_decode(parts, t->dtype, view, view.data, (cudaStream_t)t->stream);
        });
    });
}

}
