/* overflow_words.cpp: what the kernels of csrc/codec/cuda call, for the library that they are compiled into: the
 * words of codecs.cpp, which gives them. */
#include "codec/cuda/overflow.h"

static const uint32_t *words;
static int count;

extern "C" {

void virtual_words_are(const uint32_t *first, int n)
{
    words = first;
    count = n;
}

int gck_overflow_slot(const uint32_t *word) { return word >= words && word < words + count ? (int)(word - words) : -1; }

void gck_overflow_retire(const uint32_t *) {}

}
