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

/* The first is the host's. */
static uint32_t host_words[GCK_OVERFLOW_FLAGS];
static pool pools[1 + GCK_KINDS] = {{.words = host_words}};
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* The pool of a word, and its number there; NULL: it is none. */
static pool *pool_of(const uint32_t *word, int *i)
{
    for (pool *p = pools; p <= pools + GCK_KINDS; p++) {
        if (p->words != NULL && word >= p->words && word < p->words + GCK_OVERFLOW_FLAGS) {
            *i = (int)(word - p->words);
            return p;
        }
    }
    return NULL;
}

/* Host words start as PENDING without an owner: what counts then is that none was ever used. */
static int is_ready(const pool *p, int i)
{
    return p->use[i] == FREE && (p == pools || *(volatile uint32_t *)(p->words + i) != GCK_OVERFLOW_PENDING);
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

static void allocate_locked(pool *p, int device)
{
    const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(device));

    p->words = kind != NULL && kind->words != NULL ? kind->words(gck_device_index(device), GCK_OVERFLOW_FLAGS) : NULL;
    for (int i = 0; p->words != NULL && i < GCK_OVERFLOW_FLAGS; i++) {
        p->words[i] = GCK_OVERFLOW_NONE;
    }
}

uint32_t *gck_overflow_take(int device)
{
    pool *p = device < 0 ? pools : &pools[1 + gck_device_kind_of(device)];

    pthread_mutex_lock(&mutex);
    if (p->words == NULL) {
        allocate_locked(p, device);
    }
    uint32_t *word = p->words != NULL ? take_locked(p) : NULL;
    pthread_mutex_unlock(&mutex);
    return word;
}

void gck_overflow_give(uint32_t *word)
{
    int i;

    pthread_mutex_lock(&mutex);
    pool *p = pool_of(word, &i);
    if (p != NULL && p->use[i] == TAKEN) {
        p->use[i] = FREE;
    }
    pthread_mutex_unlock(&mutex);
}

int gck_overflow_slot(const uint32_t *word)
{
    int i = -1;

    return pool_of(word, &i) != pools ? i : -1;
}

static void retire(const uint32_t *word)
{
    int i;

    pthread_mutex_lock(&mutex);
    pool *p = pool_of(word, &i);
    if (p != NULL) {
        p->use[i] = RETIRED;
    }
    pthread_mutex_unlock(&mutex);
}

int gck_overflow_listen(const gck_tensor *x, const gck_how *how, int n)
{
    const gck_device_kind *kind = gck_device_kind_at(gck_device_kind_of(x->device));
    int captured = -1, status = GCK_OK;

    for (int i = 0; how != NULL && i < n; i++) {
        if (how[i].overflow == NULL) {
            continue;
        }
        if (captured < 0) {                    /* faster: asked once */
            status = kind->is_captured(gck_device_index(x->device), x->stream, &captured);
        }
        if (status != GCK_OK) {
            return status;
        }
        if (captured) {
            retire(how[i].overflow);
        }
    }
    return GCK_OK;
}

int gck_overflow_is_captured(const uint32_t *word)
{
    int i;

    pthread_mutex_lock(&mutex);
    const pool *p = pool_of(word, &i);
    const int captured = p != NULL && p->use[i] == RETIRED;
    pthread_mutex_unlock(&mutex);
    return captured;
}
