/* codec_parity.c: every instruction set against group_portable.c on random groups, byte by byte.
 *
 *     codec_parity GROUPS SECONDS [SEED]
 *
 * Linked with csrc/codec/ (tests/codec/test_codec_soak.py says how); with GCK_EMULATE_AVX512 its
 * AVX-512 kernels run on any machine.  First every pattern of the 16-bit dtypes, rounded to
 * nearest and stochastically, then random calls of 0 to 17 groups of every format and dtype,
 * aligned or not, streaming or not, rounding to nearest or not, until GROUPS groups or SECONDS seconds are through.  Payloads
 * are decoded as well, and now and then one that no encoder has written.  Prints a line per
 * second; the first difference ends it with status 1. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "codec/format/group.h"
#include "codec/portable/kernels_portable.h"
#include "codec/x86/kernels_avx2.h"
#include "codec/x86/kernels_avx512.h"

enum { MOST = 512, GUARD = 64 };

#define NAME(_, name, ...) #name,
static const char *const formats[] = {GCK_GROUP_CODECS(NAME, _)};
static const char *const dtypes[] = {"float32", "float16", "bfloat16"};
static uint64_t state;

static uint64_t random64(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545F4914F6CDD1Du;
}

static int below(int n) { return (int)((random64() >> 32) * (uint64_t)n >> 32); }
static float uniform(void) { return (float)(random64() >> 40) * 0x1p-24f; }

/* Nearly Gaussian, variance 1. */
static float gaussian(void)
{
    const uint64_t r = random64();
    const int sum = (int)(r & 0xFFFF) + (int)(r >> 16 & 0xFFFF) + (int)(r >> 32 & 0xFFFF) + (int)(r >> 48);

    return ((float)sum - 131070.f) * (1.7320508f / 65536.f);
}

/* ---- groups ---- */

static void gaussian_group(float *v, float size)
{
    for (int i = 0; i < GCK_GROUP; i++) {
        v[i] = gaussian() * size;
    }
}

static float any_size(gck_dtype dtype)
{
    const float spread = uniform();
    return dtype == GCK_F16 ? exp2f(-22 + 36 * spread)
         : below(4) == 0 ? exp2f(-140 + 240 * spread)
                         : exp2f(-20 + 40 * spread);
}

static void fill_group(float *v, gck_dtype dtype)
{
    static const float special[] = {NAN, INFINITY, -INFINITY, 1e31f, -2e38f, 5e33f, -1e31f, 65472.f, -65472.f,
                                    0.f, -0.f, 1e-42f};
    const float size = any_size(dtype), max = gck_max_value(dtype);
    const int kind = below(16);

    gaussian_group(v, size);
    if (kind < 3) {                                /* an outlier, and a few more */
        for (int n = below(3); n >= 0; n--) {
            v[below(GCK_GROUP)] *= exp2f(1 + 19 * uniform());
        }
    } else if (kind == 3) {                        /* the same twice, of either sign */
        const float outlier = size * exp2f(2 + 10 * uniform());
        v[below(GCK_GROUP)] = outlier;
        v[below(GCK_GROUP)] = below(2) ? outlier : -outlier;
    } else if (kind == 4) {                        /* outlier */
        v[below(GCK_GROUP)] = size * exp2f(12 + 20 * uniform());
    } else if (kind == 5) {                        /* escapes and others */
        for (int n = below(9); n >= 0; n--) {
            v[below(GCK_GROUP)] = below(3) ? special[below(12)] : below(2) ? max : -max;
        }
    } else if (kind == 6) {                        /* few values, or one */
        const int few = 1 + below(3);
        for (int i = 0; i < GCK_GROUP; i++) {
            v[i] = below(GCK_GROUP) < few ? v[i] : below(4) ? 0.f : -0.f;
        }
    } else if (kind == 7) {                        /* constant, alternating, zero */
        const int what = below(3);
        for (int i = 0; i < GCK_GROUP; i++) {
            v[i] = what == 0 ? v[0] : what == 1 ? (i % 2 ? -v[0] : v[0]) : (i % 3 ? 0.f : -0.f);
        }
    } else if (kind == 8) {                        /* small integers: ties */
        const float unit = exp2f((float)(below(20) - 10));
        for (int i = 0; i < GCK_GROUP; i++) {
            v[i] = (float)(below(255) - 127) * (below(2) ? unit : unit / 2);
        }
    } else if (kind == 9) {                        /* every exponent at once */
        for (int i = 0; i < GCK_GROUP; i++) {
            v[i] *= exp2f((float)-below(24));
        }
    }
}

static void fill(char *x, gck_dtype dtype, int ngroups)
{
    float v[GCK_GROUP];

    for (int g = 0; g < ngroups; g++) {
        const int raw = below(16) == 0;            /* bits, not values */
        fill_group(v, dtype);
        for (int i = 0; i < GCK_GROUP; i++) {
            const int64_t at = (int64_t)g * GCK_GROUP + i;
            const uint32_t bits = (uint32_t)random64();
            if (!raw) {
                const int clamped = dtype == GCK_F16 && fabsf(v[i]) < 1e30f;
                gck_store_escape(x, dtype, at, clamped ? fminf(fmaxf(v[i], -65504.f), 65504.f) : v[i]);
            } else {
                memcpy(x + at * gck_itemsize(dtype), &bits, gck_itemsize(dtype));
            }
        }
    }
}

/* ---- comparison ---- */

typedef struct {
    const gck_kernels *isa;
    gck_format     format;
    gck_dtype      dtype;
    int            ngroups, shift, streaming, noisy;
    gck_dither     dither;
    int64_t        first;
} call;

static void differ(const call *c, const char *what, const char *a, const char *b, size_t nbytes)
{
    size_t at = 0;

    while (at < nbytes && a[at] == b[at]) {
        at++;
    }
    printf("%s %s %s %s: %d groups, streaming %d, noisy %d, shifted by %d: byte %zu of %zu is %02x, not %02x\n",
           c->isa->name, formats[c->format], dtypes[c->dtype], what, c->ngroups, c->streaming, c->noisy, c->shift, at,
           nbytes, (unsigned char)b[at], (unsigned char)a[at]);
    exit(1);
}

static void encode(const call *c, const gck_kernels *isa, const char *x, uint8_t *codes, uint16_t *side)
{
    isa = isa->encode[c->format][c->dtype] != NULL ? isa : &gck_kernels_portable;
    if (c->noisy) {
        isa->encode_noisy[c->format][c->dtype](x, c->ngroups, codes, side, &c->dither, c->first);
    } else {
        isa->encode[c->format][c->dtype](x, c->ngroups, codes, side, c->first, c->streaming);
    }
}

static _Alignas(64) char values[MOST * GCK_GROUP * 4 + 64], decoded[2][MOST * GCK_GROUP * 4 + 64 + GUARD];
static _Alignas(64) uint8_t payload[2][MOST * (GCK_GROUP + 2) + GUARD];

/* Values at values + shift; the scalar payload stays in payload[0]. */
static void compare(const call *c, int invented)
{
    const size_t ncodes = (size_t)c->ngroups * gck_code_bytes(c->format);
    const size_t nbytes = ncodes + (size_t)c->ngroups * 2 * gck_side_words(c->format);
    const size_t nvalues = (size_t)c->ngroups * GCK_GROUP * gck_itemsize(c->dtype);

    memset(payload, 0xAB, sizeof payload);
    memset(decoded, 0xCD, sizeof decoded);
    if (!invented) {
        for (int i = 0; i < 2; i++) {
            encode(c, i ? c->isa : &gck_kernels_portable, values + c->shift, payload[i], (uint16_t *)(payload[i] + ncodes));
        }
        if (memcmp(payload[0], payload[1], nbytes + GUARD) != 0) {
            differ(c, "payload", (char *)payload[0], (char *)payload[1], nbytes + GUARD);
        }
    } else {
        for (size_t i = 0; i < nbytes; i++) {
            payload[0][i] = (uint8_t)random64();
        }
    }
    for (int i = 0; i < 2; i++) {
        const gck_kernels *isa = i && c->isa->decode[c->format][c->dtype] != NULL ? c->isa : &gck_kernels_portable;
        isa->decode[c->format][c->dtype](payload[0], (uint16_t *)(payload[0] + ncodes), c->ngroups,
                                         decoded[i] + c->shift, c->first, c->streaming);
    }
    if (memcmp(decoded[0], decoded[1], nvalues + GUARD) != 0) {
        differ(c, invented ? "invented payload, decoded" : "decoded", decoded[0], decoded[1], nvalues + GUARD);
    }
}

/* All patterns of a 16-bit dtype, in order and in strides that bring others together, alone
 * and with a value in each group that decides the scale. */
static void exhaust(const gck_kernels *isa, gck_format format, gck_dtype dtype)
{
    static const uint32_t strides[] = {1, 257, 4097, 12345};

    for (int s = 0; s < 4; s++) {
        for (int top = -1; top < 16; top++) {
            call c = {isa, format, dtype, MOST, 0, s % 2, 0, {0x0123456789ABCDEFu, 6, 7}, 0};
            uint16_t *w = (uint16_t *)values;
            for (uint32_t i = 0; i < 65536; i++) {
                w[i] = (uint16_t)(i * strides[s]);
                const int place = i % GCK_GROUP == i / GCK_GROUP % GCK_GROUP;
                if (top >= 0 && (place || gck_escapes(gck_load(w, dtype, i), dtype))) {
                    w[i] = (uint16_t)(top << 11 | (i & 0x87FF));
                }
            }
            compare(&c, 0);
            c.noisy = 1;
            compare(&c, 0);
        }
    }
}

/* A table leaves all kernels of a format to the portable one, or none. */
static int is_complete(const gck_kernels *isa)
{
    for (int format = 0; format < GCK_NFORMATS; format++) {
        for (int dtype = 0; dtype < GCK_NFLOATS; dtype++) {
            const int missing = (isa->encode[format][dtype] == NULL) + (isa->encode_noisy[format][dtype] == NULL)
                + (isa->decode[format][dtype] == NULL);
            if (missing % 3 != 0) {
                printf("%s lacks a kernel: %s, %s\n", isa->name, formats[format], dtypes[dtype]);
                return 0;
            }
        }
    }
    return 1;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int main(int argc, char **argv)
{
    const gck_kernels *isas[2];
    int nisas = 0;
    int64_t groups = 0;

    if (argc < 3) {
        return 2;
    }
    const int64_t want = atoll(argv[1]);
    const double seconds = atof(argv[2]), start = now();
    double told = start;
    state = 0x9E3779B97F4A7C15u * (argc > 3 ? strtoull(argv[3], NULL, 0) : 1u) | 1u;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        isas[nisas++] = &gck_kernels_avx2;
    }
#ifndef GCK_EMULATE_AVX512
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#endif
    {
        isas[nisas++] = &gck_kernels_avx512;
    }
    for (int i = 0; i < nisas; i++) {
        if (!is_complete(isas[i])) {
            return 1;
        }
        for (int format = 0; format < GCK_NFORMATS; format++) {
            for (int dtype = GCK_F16; dtype <= (int)GCK_BF16; dtype++) {
                exhaust(isas[i], (gck_format)format, (gck_dtype)dtype);
            }
        }
        printf("%s: every pattern of 16 bits, %.0f s\n", isas[i]->name, now() - start);
        fflush(stdout);
    }
    while (groups < want && now() - start < seconds) {
        call c = {.ngroups = below(18), .format = (gck_format)below(GCK_NFORMATS),
                  .dtype = (gck_dtype)below(GCK_NFLOATS)};
        c.shift = below(2) ? 0 : below(32) * gck_itemsize(c.dtype) % 64;
        c.streaming = below(2);
        c.noisy = below(3) == 0;
        c.dither = (gck_dither){random64(), (uint32_t)random64(), (uint32_t)below(1000)};
        c.first = below(4) ? below(1 << 20) : (int64_t)(random64() >> 4);
        const int invented = below(8) == 0;
        fill(values + c.shift, c.dtype, c.ngroups);
        for (int i = 0; i < nisas; i++) {
            const uint64_t before = state;
            c.isa = isas[i];
            compare(&c, invented);
            state = i + 1 < nisas ? before : state;
        }
        groups += c.ngroups;
        if (now() - told >= 1) {
            told = now();
            printf("%lld groups, %.0f s\n", (long long)groups, told - start);
            fflush(stdout);
        }
    }
    printf("same bytes: %lld groups, %.0f s\n", (long long)groups, now() - start);
    return 0;
}
