/* gradckpt.h: the contract between the folders.
 *
 * Plain C: pointers, integers, and structs of them.  csrc/codec implements it and knows neither
 * Python nor torch; csrc/torch and csrc/engine call it.  codec/format/group.h draws the byte layout
 * of every payload, and docs/codecs.md describes it. */
#ifndef GRADCKPT_H
#define GRADCKPT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus               /* the .cu files are C++ to the compiler, C to us */
extern "C" {
#endif

/* Status: 0 good, < 0 one of ours, > 0 a cudaError_t. gck_status_text() describes it. */
enum {
    GCK_OK = 0,
    GCK_E_DTYPE = -1,     /* the codec does not take this dtype            */
    GCK_E_DEVICE = -2,    /* this build has no kernel for the device       */
    GCK_E_DRIVER = -3,    /* the CUDA driver is older than the built-in runtime */
    GCK_E_OVERFLOW = -4,  /* overflow: the codec cannot hold these values  */
    GCK_E_DITHER = -5,    /* stochastic rounding was requested of a codec that never rounds */
    GCK_E_RANGE = -6,     /* a number is too large, or negative where it must not be */
    GCK_E_MEMORY = -7,    /* malloc had no memory */
};

/* Floating dtypes come first, because tables of kernels are indexed by them. */
typedef enum { GCK_F32 = 0, GCK_F16 = 1, GCK_BF16 = 2, GCK_BOOL = 3, GCK_NDTYPES = 4 } gck_dtype;
enum { GCK_NFLOATS = 3 };
#define GCK_BIT(dtype) (1u << (dtype))

static inline size_t gck_itemsize(gck_dtype dtype) { return dtype == GCK_F32 ? 4 : dtype == GCK_BOOL ? 1 : 2; }

/* The dtypes that every codec of activations takes. */
enum { GCK_FLOATS = GCK_BIT(GCK_F32) | GCK_BIT(GCK_F16) | GCK_BIT(GCK_BF16) };

enum { GCK_GROUP = 128, GCK_BLOCK = 4096 };  /* values that share scales; values that share an arena */
enum { GCK_MAX_DIM = 64 };                   /* of a tensor that is encoded */
enum { GCK_LEAST_ROW = 64 };                 /* shorter rows are not scaled apart */
enum { GCK_PAYLOAD_ALIGNMENT = 16, GCK_SCALES_ALIGNMENT = 4 };  /* bytes: pieces that kernels read and write */

/* A view, which owns nothing.  `sizes` and `strides` (in elements) may be NULL when the values are
 * contiguous; else the contiguous order of the shape defines index i. */
typedef struct {
    void          *data;
    int64_t        numel;
    int            ndim;
    const int64_t *sizes;
    const int64_t *strides;
    const int64_t *steps;        /* the strides, also where `strides` is NULL; codecs do not read them */
    gck_dtype      dtype;
    int            device;       /* -1: host memory; else gck_device_number()     */
    void          *stream;       /* of that device (CUDA: cudaStream_t); NULL on the host */
    int64_t        room;         /* bytes of its payload, of a codec whose size depends on the values; 0: the most */
} gck_tensor;

/* 1 when these strides are the contiguous order; then a gck_tensor's may be NULL. */
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

/* The length of rows (the last of several dimensions) that groups do not end with, if it counts: then the
 * codecs that scale rows apart (format/rows.h) have a byte for each; else 0. */
static inline int64_t gck_row(const gck_tensor *x)
{
    const int64_t row = x->ndim > 1 && x->sizes != NULL ? x->sizes[x->ndim - 1] : 0;

    return row >= GCK_LEAST_ROW && row % GCK_GROUP != 0 ? row : 0;
}

/* Splits host work: it calls body(begin, end, ctx) over disjoint parts of [begin, end), each at
 * least `grain` long, from any threads, and returns when all are done.  Where a gck_parallel_for is
 * a parameter, NULL means "this thread". */
typedef void gck_body(int64_t begin, int64_t end, void *ctx);
typedef void gck_parallel_for(int64_t begin, int64_t end, int64_t grain, gck_body *body, void *ctx);

/* Stochastic rounding: Philox4x32-10, keyed only by this and the value's index. */
typedef struct {
    uint64_t seed;
    uint32_t step, tensor;       /* the tensor and its step: each pair is used once */
} gck_dither;

/* How to encode one tensor. */
typedef struct {
    const gck_dither *dither;    /* NULL: to nearest                              */
    /* Device work of a codec that may overflow (`may_overflow`): a word of gck_overflow_take(),
     * which becomes GCK_OVERFLOW_NONE or GCK_OVERFLOW_FOUND (overflow) when the work is done.
     * NULL: overflow is not reported.  Values that a payload cannot hold decode to NaN either
     * way. */
    uint32_t         *overflow;
} gck_how;
enum { GCK_OVERFLOW_PENDING = 0, GCK_OVERFLOW_NONE = 1, GCK_OVERFLOW_FOUND = 2 };

/* Above those two bits a codec whose size depends on the values says how many of them its payload
 * holds, or would hold: the part of all, in units of 2^-16, rounded up. */
enum { GCK_OVERFLOW_BITS = 2, GCK_WHOLE = 1 << 16 };

static inline uint32_t gck_overflow_answer(uint32_t word) { return word & ((1u << GCK_OVERFLOW_BITS) - 1u); }
static inline uint32_t gck_overflow_part(uint32_t word) { return word >> GCK_OVERFLOW_BITS; }

/* A payload: two arrays.  Codes grow with the values, and of a 16-bit dtype are exactly half of them (int8) or
 * less; scales are small, and one allocation may hold those of many payloads.  `scales` is NULL where the codec
 * has none. */
typedef struct {
    void *codes, *scales;
} gck_bytes;

/* Their sizes: exactly value n + group ceil(n / 128) + block ceil(n / 4096) codes, and scales ceil(n / 128) + row r
 * scales of a tensor of r rows that count. */
typedef struct {
    int value, group, block, scales, row;
} gck_size;

/* Bytes of both. */
typedef struct {
    int64_t codes, scales;
} gck_lengths;

/* Of a codec whose size depends on the values: it stores one by one those that are not zero, a
 * number of values that gck_count() counts. */
typedef struct {
    /* Host: how many such values units [first, last) have.  payload: a number for each unit is
     * written there, too, for place(); or NULL. */
    int64_t (*count)(const gck_tensor *x, void *payload, int64_t first, int64_t last);
    /* From numbers to places.  GCK_OK, or GCK_E_OVERFLOW when x->room is too little. */
    int     (*place)(const gck_tensor *x, void *payload);
    /* Bytes of a payload of so many values: at most `size`. */
    int64_t (*nbytes)(int64_t numel, gck_dtype dtype, int64_t values);
    /* Host: is it worth counting the values of x?  0: hardly any is zero.  NULL: always. */
    int     (*worth)(const gck_tensor *x);
    int       always;            /* the largest payload has the same form: it begins with the numbers, too */
    int       host_only;         /* on a device its payloads have `size` */
} gck_counted;

/* The description of a codec.  One per line of codec/format/codecs.h. */
typedef struct {
    const char *name;          /* its name in Python; never renamed             */
    const char *summary;       /* one line for the user                         */
    uint32_t    dtypes;        /* set of GCK_BIT(dtype) it accepts              */
    double      max_error;     /* |x - x'| / absmax of x's group; 0: bit-exact  */
    gck_size    size[GCK_NDTYPES];
    const gck_counted *counted; /* NULL: the size does not depend on the values */
    int64_t     unit;          /* values per independent unit of host work      */
    int         stochastic;    /* accepts a gck_dither                          */
    int         may_overflow;  /* may return GCK_E_OVERFLOW                     */
    /* Units [first, last).  GCK_OK or GCK_E_OVERFLOW. */
    int       (*encode_host)(const gck_tensor *x, gck_bytes to, const gck_how *how, int64_t first, int64_t last);
    void      (*decode_host)(gck_bytes from, const gck_tensor *out, int64_t first, int64_t last);
    /* The device: n tensors of one device and stream, none of them empty.  NULL: no kernel. */
    int       (*encode)(const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n);
    int       (*decode)(const gck_bytes *from, const gck_tensor *out, int n);
} gck_codec;

enum { GCK_MAX_CODECS = 16 };

/* Borrowed, valid for ever.  NULL for an unknown name or index. */
const gck_codec *gck_codec_find(const char *name);
const gck_codec *gck_codec_at(int index);                  /* in the order of codecs.h */
int              gck_codec_index(const gck_codec *codec);  /* the inverse                  */
int              gck_codec_id(const gck_codec *codec);

/* Exact size of the payload of x, for a dtype that the codec takes: of both arrays, and their sum.  Only numel,
 * dtype and shape count. */
gck_lengths gck_lengths_of(const gck_codec *codec, const gck_tensor *x);
int64_t  gck_nbytes(const gck_codec *codec, const gck_tensor *x);

/* The arrays in one buffer: the scales follow the codes. */
static inline gck_bytes gck_in_one(void *buffer, gck_lengths lengths)
{
    return (gck_bytes){buffer, lengths.scales > 0 ? (char *)buffer + lengths.codes : NULL};
}

/* Where it does (codec->counted): how many values of x in host memory the payload will hold, for
 * codec->counted->nbytes(); -1: it is not worth counting, and the payload gets the largest size. */
int64_t gck_count(const gck_codec *codec, const gck_tensor *x, gck_parallel_for *parallel);

/* 1 when x->room says that its payload is smaller than the largest one. */
int gck_is_smaller(const gck_codec *codec, const gck_tensor *x);

/* The part of the size that grows with numel, scales included, in bits per value. */
double gck_bits_per_value(const gck_codec *codec, gck_dtype dtype);

/* Write the payload of x, or the values of a payload.  Host work is finished on return; device
 * work is queued on x->stream (out->stream) and never waited for.
 * Both arrays are as long as gck_lengths_of() says; codes are aligned to GCK_PAYLOAD_ALIGNMENT, scales
 * to GCK_SCALES_ALIGNMENT.
 * (Of codes x->room or out->room bytes, where that is not 0.)
 * x is never written.  out has the shape of the tensor that was encoded, dense or strided without overlap.
 * how: NULL rounds to nearest.  After GCK_E_OVERFLOW the payload's contents are undefined. */
int gck_encode(const gck_codec *codec, const gck_tensor *x, gck_bytes to, const gck_how *how,
               gck_parallel_for *parallel);
int gck_decode(const gck_codec *codec, gck_bytes from, const gck_tensor *out, gck_parallel_for *parallel);

/* The same for n tensors; how: NULL or one each.  Neighbours on one device and stream share a
 * launch, if they are contiguous and of one dtype.  Returns the first status that is not good;
 * later tensors are then not processed. */
int gck_encode_many(const gck_codec *codec, const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n,
                    gck_parallel_for *parallel);
int gck_decode_many(const gck_codec *codec, const gck_bytes *from, const gck_tensor *out, int n,
                    gck_parallel_for *parallel);

/* A word for gck_how.overflow, set to GCK_OVERFLOW_PENDING: in plain host memory for device -1,
 * else one that every CUDA device can write.  NULL: none is left, or this build has no CUDA. It may
 * be given back at any time: it is not used again before it was written, or never, if the work was
 * captured in a CUDA graph. */
uint32_t *gck_overflow_take(int device);
void      gck_overflow_give(uint32_t *overflow);
/* 1 when the work that writes it was captured in a CUDA graph: the word is written when that is
 * launched, or never. */
int       gck_overflow_is_captured(const uint32_t *overflow);

/* Before the work that writes these words is queued on x->stream of a device: those of work that is captured in a
 * graph are never used again, since it may run again and again.  GCK_OK or what asking the device said. */
int gck_overflow_listen(const gck_tensor *x, const gck_how *how, int n);

/* What a status means; borrowed until this thread asks again. */
const char *gck_status_text(int status);

/* The instruction set of the host codecs: "scalar", "avx2" or "avx512". */
const char *gck_isa_name(void);
/* Force an instruction set (tests, GRADCKPT_ISA); NULL: the best that this CPU has.  0, or -1 when
 * the name is unknown or the CPU lacks it; nothing changes then. */
int gck_isa_force(const char *name);
/* 1 when the CPU supports it, else 0; -1: unknown name. */
int gck_isa_supported(const char *name);

/* Copies between a device of a kind and host memory, for offload/.  Each function returns GCK_OK or a status > 0, and
 * waits for nothing unless it says so.  Streams and events are the device's own. */
typedef struct {
    int  (*stream_new)(int index, void **stream);        /* one that waits for no other                     */
    void (*stream_free)(int index, void *stream);
    int  (*event_new)(int index, void **event);
    void (*event_free)(int index, void *event);
    int  (*record)(int index, void *event, void *stream);
    int  (*wait)(int index, void *stream, void *event);  /* the stream waits                                */
    int  (*is_done)(int index, void *event, int *done);
    int  (*finish)(int index, void *event);              /* the caller waits                                */
    /* Where the host's memory is not pinned they may wait. */
    int  (*copy_out)(int index, void *stream, void *host, const void *device, int64_t nbytes);
    int  (*copy_in)(int index, void *stream, void *device, const void *host, int64_t nbytes);
    int  (*pin)(int index, void *memory, int64_t nbytes);   /* for copies of all devices of the kind      */
    void (*unpin)(int index, void *memory);
    int  (*is_shared)(int index, int *shared);           /* the device's memory is the host's               */
    /* The graph that work on this stream is captured into: a number that no other capture gets; 0: none. */
    int  (*graph_of)(int index, void *stream, uint64_t *graph);
    /* A stream that takes part in a capture begins anew there: its next work comes after what it waits for from now
     * on, and what was captured on it need not be joined. */
    int  (*unjoin)(int index, void *stream);
    /* Call ended(data) when the graph that this stream is captured into is gone, and no copy of it will run.  Of any
     * thread; it may not call the device. */
    int  (*at_end_of_graph)(int index, void *stream, void (*ended)(void *data), void *data);
} gck_link;

/* A kind of device: what codecs and engine need of it.  Launch, stream and memory of devices go through this
 * table alone.  CUDA is the first kind, and tests add one of their own (tests/device). */
typedef struct {
    const char *name;            /* torch's name of the device type, e.g. "cuda"; for ever        */
    int         dlpack;          /* its number in DLPack (dlpack.h, DLDeviceType)                 */
    /* GCK_OK when its codecs can run; as gck_cuda_check(). */
    int       (*check)(int *driver, int *runtime);
    /* torch's current stream of a device.  0; not 0: it cannot be told.  NULL: torch's DLPack table tells it. */
    int       (*stream)(int index, void **stream);
    /* Make it torch's current one; *before: what it was.  0; not 0: it cannot.  NULL: torch's C interface does. */
    int       (*set_stream)(int index, void *stream, void **before);
    /* Is work on this stream being captured in a graph?  GCK_OK and *captured. */
    int       (*is_captured)(int index, void *stream, int *captured);
    /* n tensors of one device and stream, none of them empty: as the codec's own. */
    int       (*encode)(const gck_codec *codec, const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n);
    int       (*decode)(const gck_codec *codec, const gck_bytes *from, const gck_tensor *out, int n);
    /* Queue a comparison of two payloads of one codec: the word becomes GCK_OVERFLOW_NONE (they are equal) or
     * GCK_OVERFLOW_FOUND.  NULL: none. */
    int       (*compare)(int index, void *stream, gck_bytes a, gck_bytes b, gck_lengths lengths, uint32_t *word);
    /* Memory for n words that the host and all devices of the kind can write; never freed.  NULL: none. */
    uint32_t *(*words)(int index, int n);
    /* A sentence about a status > 0, borrowed until this thread asks again. */
    const char *(*error)(int status);
    const gck_link *link;        /* NULL: nothing is offloaded from it                            */
} gck_device_kind;

/* The number of device `index` of a kind, as gck_tensor.device has it, and back. */
enum { GCK_KINDS = 2, GCK_DEVICES_OF_KIND = 256 };
static inline int gck_device_number(int kind, int index) { return kind * GCK_DEVICES_OF_KIND + index; }
static inline int gck_device_kind_of(int device) { return device / GCK_DEVICES_OF_KIND; }
static inline int gck_device_index(int device) { return device % GCK_DEVICES_OF_KIND; }

/* The kind with this number, borrowed; NULL: there is none. */
const gck_device_kind *gck_device_kind_at(int number);

/* Add a kind, borrowed for ever.  Its number; GCK_E_RANGE: there is no room. */
int gck_device_add(const gck_device_kind *kind);

/* Built-in CUDA architectures: "" when built without nvcc, else e.g. "75;80;90;120+PTX". */
const char *gck_cuda_archs(void);
/* Compare driver and built-in runtime (1000*major + 10*minor).  GCK_OK when the codecs can run;
 * GCK_E_DEVICE when this build has no CUDA; GCK_E_DRIVER when the driver is too old (or absent:
 * driver 0). */
int gck_cuda_check(int *driver, int *runtime);
/* What a status > 0 means, by CUDA's name and text, and what to do; as gck_status_text(). */
const char *gck_cuda_error(int status);
enum { GCK_CUDA_OUT_OF_MEMORY = 2 };         /* of these the one that is raised as torch.OutOfMemoryError */

#ifdef __cplusplus
}
#endif
#endif
