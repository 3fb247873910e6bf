/* codec_bytes.c: the bytes that this machine's codecs make, for comparison with another's.
 *
 *     codec_bytes < tensors > bytes
 *
 * Linked with csrc/codec/ for any machine (tests/codec/test_codec_aarch64.py).  A tensor is a
 * `record` and its values; what comes out are the status, the payload, and the values that it
 * decodes to.  Status 1: the input ends early, or a record is not one. */
#include <stdio.h>
#include <stdlib.h>

#include "gradckpt.h"

#if defined(__aarch64__)
static void flush_subnormals(int on) { __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)on << 24)); }
#else
#include <xmmintrin.h>
static void flush_subnormals(int on) { _mm_setcsr((_mm_getcsr() & ~0x8040u) | (on ? 0x8040u : 0)); }
#endif

typedef struct {
    char    codec[16];
    int32_t dtype, noisy, flush, columns;      /* columns > 1: of a matrix that is stored by column */
    int64_t numel;
} record;

static void *allocate(size_t nbytes)
{
    void *memory = aligned_alloc(64, (nbytes / 64 + 1) * 64);

    if (memory == NULL) {
        exit(1);
    }
    return memory;
}

static int answer(const record *r)
{
    const gck_codec *codec = gck_codec_find(r->codec);
    const size_t nvalues = (size_t)r->numel * gck_itemsize((gck_dtype)r->dtype);
    const int64_t rows = r->numel / r->columns;
    const int64_t sizes[] = {rows, r->columns}, strides[] = {1, rows};
    const gck_dither dither = {7, 3, 2};
    const gck_how how = {&dither, NULL};
    void *values = allocate(nvalues), *payload = NULL;
    gck_tensor x = {.data = values, .numel = r->numel, .dtype = (gck_dtype)r->dtype, .device = -1};
    int32_t status;
    int good;

    if (codec == NULL || fread(values, 1, nvalues, stdin) != nvalues) {
        return 0;
    }
    if (r->columns > 1) {
        x.ndim = 2;
        x.sizes = sizes;
        x.strides = x.steps = strides;
    }
    const size_t nbytes = (size_t)gck_nbytes(codec, &x);
    payload = allocate(nbytes);
    const gck_bytes arrays = gck_in_one(payload, gck_lengths_of(codec, &x));
    flush_subnormals(r->flush);
    status = gck_encode(codec, &x, arrays, r->noisy ? &how : NULL, NULL);
    good = fwrite(&status, sizeof status, 1, stdout) == 1;
    if (good && status == GCK_OK) {
        good = gck_decode(codec, arrays, &x, NULL) == GCK_OK
            && fwrite(payload, 1, nbytes, stdout) == nbytes && fwrite(values, 1, nvalues, stdout) == nvalues;
    }
    free(payload);
    free(values);
    return good;
}

int main(void)
{
    record r;

    while (fread(&r, sizeof r, 1, stdin) == 1) {
        if (!answer(&r)) {
            return 1;
        }
    }
    return !feof(stdin);
}
