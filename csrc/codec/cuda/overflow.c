/* overflow.c: words in which a device reports later whether values overflowed a codec.  Pinned
 * memory is a fact about the process, so these are statics.
 *
 * A word that is given back before it was written stays out of use until it is: the launch that
 * will write it may still wait in its stream. */
#include "codec/cuda/overflow.h"

#include <pthread.h>

typedef enum { FREE, TAKEN, RETIRED } use;

typedef struct {
    uint32_t     *words;
    unsigned char use[GCK_OVERFLOW_FLAGS];
    int           next;                       /* where the search starts */
} pool;

static uint32_t host_words[GCK_OVERFLOW_FLAGS];
static pool host = {.words = host_words}, devices;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static int index_in(const pool *p, const uint32_t *word)
{
    return p->words != NULL && word >= p->words && word < p->words + GCK_OVERFLOW_FLAGS ? (int)(word - p->words) : -1;
}

/* Host words start as PENDING without an owner: what counts then is that none was ever used. */
static int is_ready(const pool *p, int i)
{
    return p->use[i] == FREE && (p == &host || *(volatile uint32_t *)(p->words + i) != GCK_OVERFLOW_PENDING);
}

static uint32_t *take_locked(pool *p)
{
    for (int n = 0; n < GCK_OVERFLOW_FLAGS; n++) {
        const int i = (p->next + n) % GCK_OVERFLOW_FLAGS;
        if (is_ready(p, i)) {
            p->use[i] = TAKEN;
            p->next = i + 1;
            *(volatile uint32_t *)(p->words + i) = GCK_OVERFLOW_PENDING;
            return p->words + i;
        }
    }
    return NULL;
}

static void allocate_locked(int device)
{
#ifdef GCK_WITH_CUDA
    devices.words = gck_overflow_flags_cuda(device);
    for (int i = 0; devices.words != NULL && i < GCK_OVERFLOW_FLAGS; i++) {
        devices.words[i] = GCK_OVERFLOW_NONE;
    }
#else
    (void)device;
#endif
}

uint32_t *gck_overflow_take(int device)
{
    uint32_t *word = NULL;

    pthread_mutex_lock(&mutex);
    if (device < 0) {
        word = take_locked(&host);
    } else {
        if (devices.words == NULL) {
            allocate_locked(device);
        }
        word = devices.words != NULL ? take_locked(&devices) : NULL;
    }
    pthread_mutex_unlock(&mutex);
    return word;
}

void gck_overflow_give(uint32_t *word)
{
    pthread_mutex_lock(&mutex);
    pool *p = index_in(&host, word) >= 0 ? &host : &devices;
    const int i = index_in(p, word);
    if (i >= 0 && p->use[i] == TAKEN) {
        p->use[i] = FREE;
    }
    pthread_mutex_unlock(&mutex);
}

int gck_overflow_slot(const uint32_t *word) { return index_in(&devices, word); }

void gck_overflow_retire(const uint32_t *word)
{
    pthread_mutex_lock(&mutex);
    const int i = index_in(&devices, word);
    if (i >= 0) {
        devices.use[i] = RETIRED;
    }
    pthread_mutex_unlock(&mutex);
}

int gck_overflow_is_captured(const uint32_t *word)
{
    pthread_mutex_lock(&mutex);
    const int i = index_in(&devices, word), captured = i >= 0 && devices.use[i] == RETIRED;
    pthread_mutex_unlock(&mutex);
    return captured;
}
