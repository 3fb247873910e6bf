/* group_kernels.cuh: kernels of the group codecs; group.h is the format.
 *
 * A .cu file includes this, defines lane_encode() and lane_decode() for its formats, and names its codecs by
 * GCK_GROUP_CODEC_CUDA().  Of rotated formats unusual.cuh has the rest. */
#ifndef GRADCKPT_GROUP_KERNELS_CUH
#define GRADCKPT_GROUP_KERNELS_CUH

#include "codec/cuda/rows.cuh"

/* ---- what a format does ---- */

/* The 16 values from i on to a lane's share.  Called by all lanes of a warp.  0 when the
 * group is ordinary; else what encode_unusual() wants to know: the same in its 8 lanes. */
template <gck_format FORMAT, bool NOISY, typename VIEW>
GCK_LANE_FN uint32_t lane_encode(const VIEW &x, int64_t i, const gck_dither &dither, share<FORMAT> &s);

/* The values of ordinary group g of its tensor. */
template <gck_format FORMAT>
GCK_LANE_FN void lane_decode(const share<FORMAT> &s, int64_t g, float (&v)[VALUES]);

/* The last thing that a warp does which has a group that is not ordinary, or perhaps not.  The steps are functions
 * that are not inlined, so that the usual warps keep their registers to themselves, and called by the kernel
 * itself, which has nothing to save for them but what is in memory. */
template <gck_format FORMAT, bool NOISY, typename WORK>
GCK_LANE_FN void encode_unusual(const WORK &work, uint32_t doubt);
template <gck_format FORMAT, typename WORK>
GCK_LANE_FN void decode_unusual(const WORK &work);

template <gck_format FORMAT>
GCK_LANE_FN bool is_ordinary(uint32_t side)
{
    return FORMAT == GCK_INT4 ? (side >> 16 & GCK_INT4_UNUSUAL) != GCK_INT4_UNUSUAL : (side & GCK_ESC) == 0;
}

/* Of a group: RIGHT: it is ordinary, or the share that is stored already was right; BETTER: another one of rotated
 * codes; NUMBERS: of classes; ODD: one lane alone does it. */
enum answer { RIGHT, BETTER, NUMBERS, ODD };

template <gck_format FORMAT>
GCK_LANE_FN answer form_of(const uint16_t *side)
{
    const uint32_t scale = __ldg(side), beside = gck_side_words(FORMAT) == 2 ? __ldg(side + 1) : 0u;

    return is_ordinary<FORMAT>(scale | beside << 16) ? RIGHT
        : !gck_is_rotated(FORMAT) || scale == GCK_ESC_TABLE ? ODD : scale & GCK_UNROTATED ? NUMBERS : BETTER;
}

/* ---- odd groups: one lane, the reference, memory only ----
 *
 * They hold finite values beyond 1e30, or, where nothing is rotated, any escapes (masks merged into biases),
 * or are tiny: slow, but right. */

GCK_LANE_FN void copy_value(gck_dtype dtype, void *to, int i, const void *from, int j)
{
    if (dtype == GCK_F32) {
        ((float *)to)[i] = ((const float *)from)[j];
    } else {
        ((uint16_t *)to)[i] = ((const uint16_t *)from)[j];
    }
}

/* The values of group g side by side; `load`: they are to be read. */
template <gck_dtype DTYPE>
GCK_LANE_FN void *side_by_side(const typed<DTYPE> &x, int64_t g, int, bool) { return x.data + g * GCK_GROUP; }

GCK_LANE_FN void *side_by_side(const untyped &x, int64_t g, int count, bool load)
{
    float *values = scratch<float>();
    const factors by = factors_of(x, g * GCK_GROUP, false);

    if (load) {
        for_each_address(x, g * GCK_GROUP, count, [&](int j, const uint8_t *at) {
            copy_value(x.kind, values, j, at, 0);
            rescale(values, x.kind, j, by.of(j));
        });
    }
    return values;
}

template <gck_dtype DTYPE>
GCK_LANE_FN void spread(const typed<DTYPE> &, int64_t, int, const void *) {}

GCK_LANE_FN void spread(const untyped &x, int64_t g, int count, const void *values)
{
    const factors by = factors_of(x, g * GCK_GROUP, true);

    for_each_address(x, g * GCK_GROUP, count, [&](int j, uint8_t *at) {
        copy_value(x.kind, at, 0, values, j);
        rescale(at, x.kind, 0, by.of(j));
    });
}

/* ---- kernels ---- */

/* Where a group lies in a payload. */
template <gck_format FORMAT>
GCK_LANE_FN uint8_t *codes_of(const gck_bytes &payload, int64_t g)
{
    return (uint8_t *)payload.codes + g * gck_code_bytes(FORMAT);
}

template <gck_format FORMAT>
GCK_LANE_FN uint16_t *side_of(const gck_bytes &payload, int64_t g)
{
    return (uint16_t *)payload.scales + g * gck_side_words(FORMAT);
}

GCK_LANE_FN int count_of(int64_t numel, int64_t g)
{
    return numel - g * GCK_GROUP < GCK_GROUP ? (int)(numel - g * GCK_GROUP) : GCK_GROUP;
}

/* Called by one lane: its group in an odd form; amax: of what does not escape, for rotated formats.  And back, if
 * it has such a form. */
template <gck_format FORMAT, bool NOISY, typename WORK>
static __device__ __noinline__ void encode_odd(const WORK &work, float amax)
{
    const auto [job, g] = work_of_lane(work);
    const int count = count_of(job.x.numel, g);
    uint8_t *codes = codes_of<FORMAT>(job.payload, g);
    uint16_t *side = side_of<FORMAT>(job.payload, g);
    const void *x = side_by_side(job.x, g, count, true);

    if constexpr (gck_is_rotated(FORMAT)) {
        gck_encode_table(FORMAT, x, job.x.dtype(), count, amax, codes);
        gck_put_unusual(FORMAT, side, GCK_ESC_TABLE, 0u);
    } else {
        uint16_t *noise = NULL;
        (void)amax;
        if constexpr (NOISY) {
            noise = scratch<uint16_t>();
            gck_noise_of_group(&job.dither, g, noise);
        }
        gck_encode_unrotated(FORMAT, x, job.x.dtype(), count, noise, codes, side);
    }
}

template <gck_format FORMAT, typename WORK>
static __device__ __noinline__ void decode_odd(const WORK &work)
{
    const auto [job, g] = work_of_lane(work);
    const int64_t ngroups = gck_groups_of(job.x.numel);
    const int count = count_of(job.x.numel, g);
    const uint8_t *codes = codes_of<FORMAT>(job.payload, g);
    void *values = side_by_side(job.x, g, count, false);

    if (g >= ngroups || form_of<FORMAT>(side_of<FORMAT>(job.payload, g)) != ODD) {
        return;
    }
    if constexpr (gck_is_rotated(FORMAT)) {
        gck_decode_table(FORMAT, codes, values, job.x.dtype(), count);
    } else {
        gck_decode_unrotated(FORMAT, codes, *side_of<FORMAT>(job.payload, g), values, job.x.dtype(), count);
    }
    spread(job.x, g, count, values);
}

template <gck_format FORMAT, bool NOISY, typename WORK>
static __global__ void __launch_bounds__(THREADS, blocks_of((const WORK *)NULL, NOISY))
encode_kernel(const __grid_constant__ WORK work)
{
    const auto [job, g] = work_of_lane(work);
    const int64_t ngroups = gck_groups_of(job.x.numel);
    const int lane = (int)threadIdx.x % LANES;
    share<FORMAT> s;

    const uint32_t doubt = lane_encode<FORMAT, NOISY>(job.x, g * GCK_GROUP + lane * VALUES, job.dither, s);
    if (g < ngroups) {
        store_share(s, codes_of<FORMAT>(job.payload, g), side_of<FORMAT>(job.payload, g), lane);
    }
    if (__ballot_sync(ALL_LANES, doubt != 0) != 0) {
        encode_unusual<FORMAT, NOISY>(work, doubt);
    }
}

template <gck_format FORMAT, typename WORK>
static __global__ void __launch_bounds__(THREADS, blocks_of((const WORK *)NULL, false))
decode_kernel(const __grid_constant__ WORK work)
{
    const auto [job, g] = work_of_lane(work);
    const int64_t ngroups = gck_groups_of(job.x.numel);
    const int lane = (int)threadIdx.x % LANES;
    share<FORMAT> s = {};
    float v[VALUES];

    if (g < ngroups) {
        load_share(s, codes_of<FORMAT>(job.payload, g), side_of<FORMAT>(job.payload, g), lane);
    }
    const bool ordinary = is_ordinary<FORMAT>(s.side);
    lane_decode<FORMAT>(s, g, v);
    if (g < ngroups && ordinary) {
        store_values(job.x, g * GCK_GROUP + lane * VALUES, v);
    }
    if (__ballot_sync(ALL_LANES, !ordinary) != 0) {
        decode_unusual<FORMAT>(work);
    }
}

/* ---- launchers ---- */

template <gck_format FORMAT, bool ENCODE, bool NOISY, typename WORK>
static void launch_groups(const WORK &work, unsigned grid, cudaStream_t stream)
{
    if constexpr (ENCODE) {
        GCK_LAUNCH((encode_kernel<FORMAT, NOISY, WORK>), grid, THREADS, stream, work);
    } else {
        GCK_LAUNCH((decode_kernel<FORMAT, WORK>), grid, THREADS, stream, work);
    }
}

static inline const gck_dither *dither_of(const gck_how *how, int i) { return how != NULL ? how[i].dither : NULL; }

/* The length of rows that are scaled apart, or 0. */
template <gck_format FORMAT>
static int64_t rows_of(const gck_tensor *t) { return gck_scales_rows(FORMAT) ? gck_row(t) : 0; }

/* The contiguous tensors of one dtype that are rounded alike: one launch, or several if
 * they are many. */
template <gck_format FORMAT, gck_dtype DTYPE, bool ENCODE, bool NOISY>
static void run_contiguous(const gck_tensor *t, const gck_bytes *payloads, const gck_how *how, int n)
{
    typedef typename element<DTYPE>::type T;
    const cudaStream_t stream = (cudaStream_t)t->stream;
    const auto launch = [=](const auto &work, unsigned grid) {
        launch_groups<FORMAT, ENCODE, NOISY>(work, grid, stream);
    };
    collector<typed<DTYPE>> all;

    for (int i = 0; i < n; i++) {
        const gck_dither *dither = dither_of(how, i);
        strided<T> view;
        if (t[i].dtype == DTYPE && (dither != NULL) == NOISY && t[i].numel != 0 && rows_of<FORMAT>(t + i) == 0
            && strided_view(t + i, &view) == 0) {
            const job<typed<DTYPE>> one = {{{(T *)t[i].data, t[i].numel}}, payloads[i], NOISY ? *dither : gck_dither()};
            all.add(one, grid_for(gck_groups_of(t[i].numel), GROUPS_PER_BLOCK), launch);
        }
    }
    all.flush(launch);
}

/* Each of the others in a launch of its own, and one before it where rows are scaled apart. */
template <gck_format FORMAT, bool ENCODE, bool NOISY>
static int run_others(const gck_tensor *t, const gck_bytes *payloads, const gck_how *how, int n)
{
    for (int i = 0; i < n; i++) {
        const gck_dither *dither = dither_of(how, i);
        if (t[i].numel == 0 || (dither != NULL) != NOISY) {
            continue;
        }
        const int64_t row = rows_of<FORMAT>(t + i), groups = gck_groups_of(t[i].numel);
        const cudaStream_t stream = (cudaStream_t)t->stream;
        job<untyped> one = {{}, payloads[i], NOISY ? *dither : gck_dither()};
        const int kind = strided_view(t + i, static_cast<strided<uint8_t> *>(&one.x));
        if (kind < 0) {
            return GCK_E_DEVICE;
        }
        if (kind == 0 && row == 0) {
            continue;
        }
        if (kind == 0) {
            one.x.ndim = 1, one.x.size[0] = t[i].numel, one.x.stride[0] = 1;
        }
        for (int d = 0; d < one.x.ndim; d++) {
            one.x.stride[d] *= t[i].dtype == GCK_F32 ? 4 : 2;
        }
        one.x.kind = t[i].dtype;
        one.x.row = row;
        one.x.rows = row > 0 ? (int8_t *)((uint16_t *)payloads[i].scales + groups * gck_side_words(FORMAT)) : NULL;
        if constexpr (ENCODE && gck_scales_rows(FORMAT)) {
            if (row > 0) {
                launch_rows(one.x, stream);
            }
        }
        launch_groups<FORMAT, ENCODE, NOISY>(one, grid_for(groups, GROUPS_PER_BLOCK), stream);
    }
    return GCK_OK;
}

template <gck_format FORMAT, bool ENCODE, bool NOISY>
static int run_alike(const gck_tensor *t, const gck_bytes *payloads, const gck_how *how, int n)
{
    run_contiguous<FORMAT, GCK_F32, ENCODE, NOISY>(t, payloads, how, n);
    run_contiguous<FORMAT, GCK_F16, ENCODE, NOISY>(t, payloads, how, n);
    run_contiguous<FORMAT, GCK_BF16, ENCODE, NOISY>(t, payloads, how, n);
    return run_others<FORMAT, ENCODE, NOISY>(t, payloads, how, n);
}

template <gck_format FORMAT, bool ENCODE>
static int run_groups(const gck_tensor *t, const gck_bytes *payloads, const gck_how *how, int n)
{
    if (!are_floats(t, n)) {
        return GCK_E_DTYPE;
    }
    return launch_on(t->device, [=]() {
        const int status = run_alike<FORMAT, ENCODE, false>(t, payloads, how, n);
        if constexpr (ENCODE) {
            return status != GCK_OK ? status : run_alike<FORMAT, ENCODE, true>(t, payloads, how, n);
        }
        return status;
    });
}

/* Both functions of a codec, as cuda_device.h declares them.  The payloads are only read by the
 * second. */
#define GCK_GROUP_CODEC_CUDA(name, format)                                                                        \
    extern "C" int gck_##name##_encode_cuda(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n)  \
    {                                                                                                             \
        return run_groups<format, true>(x, to, how, n);                                                           \
    }                                                                                                             \
    extern "C" int gck_##name##_decode_cuda(const gck_bytes *from, const gck_tensor *out, int n)                  \
    {                                                                                                             \
        return run_groups<format, false>(out, from, NULL, n);                                                     \
    }

#endif
