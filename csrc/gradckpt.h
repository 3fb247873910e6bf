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
    GCK_E_FIT = -4,              /* the codec cannot hold these values            */
    GCK_E_DITHER = -5,           /* stochastic rounding asked of a codec that never rounds */
};

/* The floating ones first: tables of kernels are indexed by them. */
typedef enum { GCK_F32 = 0, GCK_F16 = 1, GCK_BF16 = 2, GCK_BOOL = 3, GCK_NDTYPES = 4 } gck_dtype;
enum { GCK_NFLOATS = 3 };
#define GCK_BIT(dtype) (1u << (dtype))

enum { GCK_MAX_DIM = 64 };       /* of a tensor that is encoded */
enum { GCK_PAYLOAD_ALIGNMENT = 16 };   /* bytes: kernels read and write a payload in such pieces */

/* A view: owns nothing.  `sizes` and `strides` (in elements) may be NULL when the
 * values are contiguous; else the contiguous order of the shape defines index i. */
typedef struct {
    void          *data;
    int64_t        numel;
    int            ndim;
    const int64_t *sizes;
    const int64_t *strides;
    const int64_t *steps;        /* the strides, also where `strides` is NULL; no codec reads them */
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

/* Stochastic rounding: Philox4x32-10 keyed by this and the value's index, nothing else. */
typedef struct {
    uint64_t seed;
    uint32_t step, tensor;       /* which tensor of which step: no two alike      */
} gck_dither;

/* How to encode one tensor. */
typedef struct {
    const gck_dither *dither;    /* NULL: to nearest                              */
    /* Device work of a codec that may refuse (`refuses`): a word of gck_verdict_take();
     * becomes GCK_FITS or GCK_REFUSED when the work is done.  NULL: nobody is told.  What a
     * payload could not hold decodes to NaN either way. */
    uint32_t         *verdict;
} gck_how;
enum { GCK_PENDING = 0, GCK_FITS = 1, GCK_REFUSED = 2 };

/* Bytes of a payload: exactly value n + group ceil(n / 128) + block ceil(n / 4096). */
typedef struct {
    int value, group, block;
} gck_size;

/* What a codec is.  One per line of codec/codecs.def. */
typedef struct {
    const char *name;            /* what Python calls it; never renamed           */
    const char *summary;         /* one line, for humans                          */
    uint32_t    dtypes;          /* set of GCK_BIT(dtype) it accepts              */
    double      max_error;       /* |x - x'| / absmax of x's group; 0: bit-exact  */
    gck_size    size[GCK_NDTYPES];
    int64_t     unit;            /* values per independent unit of host work      */
    int         stochastic;      /* takes a gck_dither                            */
    int         refuses;         /* may answer GCK_E_FIT                          */
    /* Units [first, last).  GCK_OK or GCK_E_FIT. */
    int       (*encode_host)(const gck_tensor *x, void *payload, const gck_how *how, int64_t first, int64_t last);
    void      (*decode_host)(const void *payload, const gck_tensor *out, int64_t first, int64_t last);
    /* The device: n tensors of one device and stream, none empty.  NULL: no kernel. */
    int       (*encode)(const gck_tensor *x, void *const *payloads, const gck_how *how, int n);
    int       (*decode)(const void *const *payloads, const gck_tensor *out, int n);
} gck_codec;

/* Borrowed, live for ever.  NULL when there is no such name or index. */
const gck_codec *gck_codec_find(const char *name);
const gck_codec *gck_codec_at(int index);                  /* in the order of codecs.def */
int              gck_codec_id(const gck_codec *codec);

/* Exact size of the payload, for a dtype that the codec takes. */
int64_t gck_nbytes(const gck_codec *codec, int64_t numel, gck_dtype dtype);

/* The part of it that grows with numel, scales included. */
double gck_bits_per_value(const gck_codec *codec, gck_dtype dtype);

/* Write the payload of x, or the values of a payload.  Host work is finished on
 * return; device work is queued on x->stream (out->stream) and never waited for.
 * `payload` is aligned to GCK_PAYLOAD_ALIGNMENT and gck_nbytes(codec, numel, dtype) long.
 * x is never written.  out must be dense or strided without overlap.
 * how: NULL means to nearest.  GCK_E_FIT leaves rubbish in the payload. */
int gck_encode(const gck_codec *codec, const gck_tensor *x, void *payload, const gck_how *how,
               gck_parallel_for *parallel);
int gck_decode(const gck_codec *codec, const void *payload, const gck_tensor *out, gck_parallel_for *parallel);

/* The same for n tensors; how: NULL or one each.  Neighbours on one device and stream share
 * a launch, if they are contiguous and of one dtype.  The first status that is not good;
 * what follows is not done then. */
int gck_encode_many(const gck_codec *codec, const gck_tensor *x, void *const *payloads, const gck_how *how, int n,
                    gck_parallel_for *parallel);
int gck_decode_many(const gck_codec *codec, const void *const *payloads, const gck_tensor *out, int n,
                    gck_parallel_for *parallel);

/* A word for gck_how.verdict, GCK_PENDING; of plain host memory for device -1, else one
 * that every CUDA device can write.  NULL: none is left, or there is no CUDA in this
 * build.  Give it back at any time: it is not used again before it was written, or ever,
 * if the work was captured in a CUDA graph. */
uint32_t *gck_verdict_take(int device);
void      gck_verdict_give(uint32_t *verdict);
/* 1 when the work that writes it was captured in a CUDA graph: it comes when that is launched, or never. */
int       gck_verdict_is_captured(const uint32_t *verdict);

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
