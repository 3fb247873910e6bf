/* codec.c: the table of codecs, and the only place that chooses between host and device. */
#include "codec/format/codecs.h"
#include "gradckpt.h"

#include <stdatomic.h>
#include <string.h>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#define DECLARE(_, name, ...) extern const gck_codec gck_codec_##name;
GCK_CODECS(DECLARE, DECLARE, _)

#define ENTRY(_, name, id, ...) {id, &gck_codec_##name},
static const struct { int id; const gck_codec *codec; } codecs[] = {GCK_CODECS(ENTRY, ENTRY, _)};

/* Never used: a repeated id would be a repeated member, which does not compile. */
#define MEMBER(_, name, id, ...) char id_##id;
struct ids_are_unique {
    GCK_CODECS(MEMBER, MEMBER, _)
};

enum { NCODECS = sizeof codecs / sizeof codecs[0], GRAIN = 32768 /* values per host task */ };

_Static_assert(sizeof codecs / sizeof codecs[0] <= GCK_MAX_CODECS, "counters have room for every codec");

const gck_codec *gck_codec_find(const char *name)
{
    for (int i = 0; i < NCODECS; i++) {
        if (strcmp(codecs[i].codec->name, name) == 0) {
            return codecs[i].codec;
        }
    }
    return NULL;
}

const gck_codec *gck_codec_at(int index) { return index >= 0 && index < NCODECS ? codecs[index].codec : NULL; }

int gck_codec_index(const gck_codec *codec)
{
    int i = 0;

    while (codecs[i].codec != codec) {
        i++;
    }
    return i;
}

int gck_codec_id(const gck_codec *codec) { return codecs[gck_codec_index(codec)].id; }

static int64_t ceil_div(int64_t n, int64_t by) { return n / by + (n % by != 0); }

gck_lengths gck_lengths_of(const gck_codec *codec, const gck_tensor *x)
{
    const gck_size size = codec->size[x->dtype];
    const int64_t groups = ceil_div(x->numel, GCK_GROUP), row = gck_row(x);

    return (gck_lengths){size.value * x->numel + size.group * groups + size.block * ceil_div(x->numel, GCK_BLOCK),
                      size.scales * groups + (row > 0 ? size.row * (x->numel / row) : 0)};
}

int64_t gck_nbytes(const gck_codec *codec, const gck_tensor *x)
{
    const gck_lengths lengths = gck_lengths_of(codec, x);

    return lengths.codes + lengths.scales;
}

double gck_bits_per_value(const gck_codec *codec, gck_dtype dtype)
{
    const gck_size size = codec->size[dtype];

    return 8.0 * size.value + 8.0 * (size.group + size.scales) / GCK_GROUP + 8.0 * size.block / GCK_BLOCK;
}

int gck_is_smaller(const gck_codec *codec, const gck_tensor *x)
{
    return codec->counted != NULL && x->room != 0 && x->room < gck_nbytes(codec, x);
}

/* Codecs are defined on IEEE arithmetic: a program that flushes subnormals
 * (torch.set_flush_denormal) must get the same bytes.  The same holds for the rounding mode. */
#if defined(__SSE2__)

typedef unsigned fp_control;
enum { IEEE = 0x1F80 };                       /* all exceptions masked, nearest, no FTZ, no DAZ */
static fp_control get_control(void) { return _mm_getcsr(); }
static void set_control(fp_control control) { _mm_setcsr(control); }  /* sticky flags, too */

#elif defined(__aarch64__)

typedef uint64_t fp_control;
enum { IEEE = 0 };                            /* no traps, nearest, no FZ, no FZ16 */

static fp_control get_control(void)
{
    fp_control control;

    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    return control;
}

static void set_control(fp_control control) { __asm__ volatile("msr fpcr, %0" : : "r"(control) : "memory"); }

#else

typedef int fp_control;
enum { IEEE = 0 };
static fp_control get_control(void) { return IEEE; }
static void set_control(fp_control control) { (void)control; }

#endif

typedef struct {
    const gck_codec  *codec;
    const gck_tensor *tensor;
    gck_bytes         payload;                /* only read when decoding       */
    const gck_how    *how;
    _Atomic int      *status;                 /* when encoding: parts that fail store the same status; else NULL */
    _Atomic int64_t  *values;                 /* when counting                 */
} work;

static void move_part(int64_t first, int64_t last, void *ctx)
{
    const work *w = ctx;
    const fp_control saved = get_control();
    int status = GCK_OK;

    set_control(IEEE);
    if (w->status == NULL) {
        w->codec->decode_host(w->payload, w->tensor, first, last);
    } else {
        status = w->codec->encode_host(w->tensor, w->payload, w->how, first, last);
    }
    if (status != GCK_OK) {
        atomic_store(w->status, status);
    }
    set_control(saved);
}

static void count_part(int64_t first, int64_t last, void *ctx)
{
    const work *w = ctx;

    atomic_fetch_add(w->values, w->codec->counted->count(w->tensor, w->payload.codes, first, last));
}

static void run(const work *w, gck_body *body, gck_parallel_for *parallel)
{
    const int64_t unit = w->codec->unit, numel = w->tensor->numel;
    const int64_t units = ceil_div(numel, unit);

    if (parallel == NULL || numel <= GRAIN) {
        body(0, units, (void *)w);
    } else {
        parallel(0, units, GRAIN / unit, body, (void *)w);
    }
}

/* payload: one whose values begin with their numbers, which are written; or none. */
static int64_t count_all(const gck_codec *codec, const gck_tensor *x, gck_bytes payload, gck_parallel_for *parallel)
{
    _Atomic int64_t values = 0;
    const work w = {codec, x, payload, NULL, NULL, &values};

    run(&w, count_part, parallel);
    return values;
}

int64_t gck_count(const gck_codec *codec, const gck_tensor *x, gck_parallel_for *parallel)
{
    return codec->counted->worth != NULL && !codec->counted->worth(x)
        ? -1 : count_all(codec, x, (gck_bytes){NULL, NULL}, parallel);
}

/* One tensor in host memory.  A payload smaller than the largest begins with the numbers of its values. */
static int move_here(const gck_codec *codec, const gck_tensor *x, gck_bytes payload, const gck_how *how, int encode,
                     gck_parallel_for *parallel)
{
    _Atomic int status = GCK_OK;
    const work w = {codec, x, payload, how, encode ? &status : NULL, NULL};

    if (encode && codec->counted != NULL && (codec->counted->always || gck_is_smaller(codec, x))) {
        count_all(codec, x, payload, parallel);
        status = codec->counted->place(x, payload.codes);
    }
    if (status == GCK_OK) {
        run(&w, move_part, parallel);
    }
    return status;
}

/* n tensors of one device and stream. */
static int move_there(const gck_codec *codec, const gck_tensor *x, const gck_bytes *payloads, const gck_how *how,
                      int encode, int n)
{
    const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(x->device));
    const int status = kind == NULL ? GCK_E_DEVICE : encode ? gck_overflow_listen(x, how, n) : GCK_OK;

    return status != GCK_OK ? status
        : encode ? kind->encode(codec, x, payloads, how, n) : kind->decode(codec, payloads, x, n);
}

/* How many tensors, from the first on, the device can process together. */
static int neighbours(const gck_tensor *x, int n)
{
    int count = 1;

    while (count < n && x[count].device == x->device && x[count].stream == x->stream && x[count].numel > 0) {
        count++;
    }
    return count;
}

static int check_all(const gck_codec *codec, const gck_tensor *x, const gck_how *how, int n)
{
    int status = GCK_OK;

    for (int i = 0; i < n && status == GCK_OK; i++) {
        status = !(codec->dtypes & GCK_BIT(x[i].dtype)) ? GCK_E_DTYPE
            : how != NULL && how[i].dither != NULL && !codec->stochastic ? GCK_E_DITHER : GCK_OK;
    }
    return status;
}

static int move_many(const gck_codec *codec, const gck_tensor *x, const gck_bytes *payloads, const gck_how *how,
                     int encode, int n, gck_parallel_for *parallel)
{
    int status = check_all(codec, x, how, n);

    for (int i = 0, count = 1; i < n && status == GCK_OK; i += count) {
        const gck_how *hows = how != NULL ? how + i : NULL;
        count = x[i].device < 0 || x[i].numel == 0 ? 1 : neighbours(x + i, n - i);
        if (x[i].numel != 0) {
            status = x[i].device < 0 ? move_here(codec, x + i, payloads[i], hows, encode, parallel)
                                     : move_there(codec, x + i, payloads + i, hows, encode, count);
        }
    }
    return status;
}

int gck_encode_many(const gck_codec *codec, const gck_tensor *x, const gck_bytes *to, const gck_how *how, int n,
                    gck_parallel_for *parallel)
{
    return move_many(codec, x, to, how, 1, n, parallel);
}

int gck_decode_many(const gck_codec *codec, const gck_bytes *from, const gck_tensor *out, int n,
                    gck_parallel_for *parallel)
{
    return move_many(codec, out, from, NULL, 0, n, parallel);
}

int gck_encode(const gck_codec *codec, const gck_tensor *x, gck_bytes to, const gck_how *how,
               gck_parallel_for *parallel)
{
    return gck_encode_many(codec, x, &to, how, 1, parallel);
}

int gck_decode(const gck_codec *codec, gck_bytes from, const gck_tensor *out, gck_parallel_for *parallel)
{
    return gck_decode_many(codec, &from, out, 1, parallel);
}

const char *gck_status_text(int status)
{
    static const char *const texts[] = {
        [GCK_OK] = "no error",
        [-GCK_E_DTYPE] = "this codec does not take this dtype",
        [-GCK_E_DEVICE] = "this build of gradckpt has no kernel for this device",
        [-GCK_E_DRIVER] = "the CUDA driver is older than the CUDA runtime built into gradckpt",
        [-GCK_E_OVERFLOW] = "it cannot hold these values",
        [-GCK_E_DITHER] = "this codec never rounds, so there is no stochastic rounding",
        [-GCK_E_RANGE] = "a number is too large or negative",
        [-GCK_E_MEMORY] = "out of memory",
    };

    return status > 0 ? gck_cuda_error(status)
        : status > -(int)(sizeof texts / sizeof texts[0]) ? texts[-status] : "unknown status";
}
