/* gradckpt.h: the contract between the rooms.
 *
 * Plain C: pointers, integers, and structs of them.  csrc/codec implements it and
 * knows neither Python nor torch; csrc/torch and csrc/engine call it.  The byte
 * layout of every payload is drawn in codec/group.h and described in
 * docs/codecs.md. */
#ifndef GRADCKPT_H
#define GRADCKPT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus               /* the .cu files are C++ to the compiler, C to us */
extern "C" {
#endif

/* Status: 0 good, < 0 ours, > 0 a cudaError_t.  gck_status_text() words it. */
enum {
    GCK_OK = 0,
    GCK_E_DTYPE = -1,            /* the codec does not take this dtype            */
    GCK_E_DEVICE = -2,           /* this build has no kernel for the device       */
    GCK_E_DRIVER = -3,           /* CUDA driver older than the runtime built in   */
};

typedef enum { GCK_F32 = 0, GCK_F16 = 1, GCK_BF16 = 2, GCK_NDTYPES = 3 } gck_dtype;
#define GCK_BIT(dtype) (1u << (dtype))

enum { GCK_MAX_DIM = 64 };       /* torch's own limit on dimensions */

/* A view: owns nothing.  `sizes` and `strides` (in elements) may be NULL when the
 * values are contiguous; else the contiguous order of the shape defines index i. */
typedef struct {
    void          *data;
    int64_t        numel;
    int            ndim;
    const int64_t *sizes;
    const int64_t *strides;
    gck_dtype      dtype;
    int            device;       /* -1: host memory; else the CUDA device index   */
    void          *stream;       /* cudaStream_t of that device; NULL on the host */
} gck_tensor;

/* Do these strides mean the contiguous order?  Then a gck_tensor's may be NULL. */
static inline int gck_is_contiguous(int ndim, const int64_t *sizes, const int64_t *strides)
{
    int64_t expected = 1;

    for (int d = ndim - 1; d >= 0; d--) {
        if (sizes[d] != 1 && strides[d] != expected) {
            return 0;
        }
        expected *= sizes[d];
    }
    return 1;
}

/* How to split host work: calls body(begin, end, ctx) over disjoint parts of
 * [begin, end), each at least `grain` long, from any threads; returns when all are
 * done.  NULL where a gck_parallel_for is asked for means "this thread". */
typedef void gck_body(int64_t begin, int64_t end, void *ctx);
typedef void gck_parallel_for(int64_t begin, int64_t end, int64_t grain, gck_body *body, void *ctx);

/* What a codec is.  One per line of codec/codecs.def. */
typedef struct {
    const char *name;            /* what Python calls it; never renamed           */
    const char *summary;         /* one line, for humans                          */
    uint32_t    dtypes;          /* set of GCK_BIT(dtype) it accepts              */
    double      bits_per_value;  /* scales included; 0 means "those of the dtype" */
    double      max_error;       /* |x - x'| / absmax of x's group; 0: bit-exact  */
    int64_t   (*nbytes)(int64_t numel, gck_dtype dtype);   /* exact, not a bound  */
    int64_t     unit;            /* values per independent unit of host work      */
    void      (*encode_host)(const gck_tensor *x, void *payload, int64_t first, int64_t last);
    void      (*decode_host)(const void *payload, const gck_tensor *out, int64_t first, int64_t last);
    int       (*encode)(const gck_tensor *x, void *payload);         /* device;    */
    int       (*decode)(const void *payload, const gck_tensor *out); /* NULL: none */
} gck_codec;

/* Borrowed, live for ever.  NULL when there is no such name, id or index. */
const gck_codec *gck_codec_find(const char *name);
const gck_codec *gck_codec_by_id(int id);
const gck_codec *gck_codec_at(int index);                  /* in the order of codecs.def */
int              gck_codec_id(const gck_codec *codec);

/* Write the payload of x, or the values of a payload.  Host work is finished on
 * return; device work is queued on x->stream (out->stream) and never waited for.
 * `payload` is 16-byte aligned and codec->nbytes(numel, dtype) long.
 * x is never written.  out must be dense or strided without overlap. */
int gck_encode(const gck_codec *codec, const gck_tensor *x, void *payload, gck_parallel_for *parallel);
int gck_decode(const gck_codec *codec, const void *payload, const gck_tensor *out, gck_parallel_for *parallel);

/* A sentence without a final full stop; borrowed, lives for ever. */
const char *gck_status_text(int status);

/* The instruction set of the host codecs: "scalar", "avx2" or "avx512". */
const char *gck_isa_name(void);
/* Force one (tests, GRADCKPT_ISA); NULL: the best this CPU has.  0, or -1 when the
 * name is unknown or the CPU lacks it; nothing changes then. */
int gck_isa_force(const char *name);
/* 1 when the CPU can run it, else 0; -1: no such name. */
int gck_isa_supported(const char *name);

/* CUDA build facts: "" when built without nvcc, else e.g. "75;80;90;120+PTX". */
const char *gck_cuda_archs(void);
/* Compare driver and built-in runtime (1000*major + 10*minor).  GCK_OK when the
 * codecs can run; GCK_E_DEVICE without CUDA in this build; GCK_E_DRIVER when the
 * driver is too old (or absent: driver 0). */
int gck_cuda_check(int *driver, int *runtime);

#ifdef __cplusplus
}
#endif
#endif
