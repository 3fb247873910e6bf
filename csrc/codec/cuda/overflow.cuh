/* overflow.cuh: how the last block of a grid tells the host whether all of them could hold
 * their values.
 *
 * The kernel that reports is the last launch of an encode: so a word is written if the encode returned
 * GCK_OK, and else it is free at once.
 *
 * One counter of finished blocks and one of refusals for each word: no two launches in
 * flight have the same.  The last block puts both back to 0, so there is no memset. */
#ifndef GRADCKPT_OVERFLOW_CUH
#define GRADCKPT_OVERFLOW_CUH

#include "codec/cuda/launch.cuh"
#include "codec/cuda/overflow.h"

/* One of each per .cu file that includes this, and device. */
static __device__ uint32_t finished[GCK_OVERFLOW_FLAGS], refusals[GCK_OVERFLOW_FLAGS];

typedef struct {
    uint32_t *word;                /* NULL: not requested */
    int       slot;
} listener;

/* Called by one thread of each block, after the others have read their values.  part: what one of
 * them says above the answer (gck_overflow_part()). */
GCK_LANE_FN void report(const listener &to, bool refused, uint32_t part = 0)
{
    constexpr uint32_t answers = (1u << GCK_OVERFLOW_BITS) - 1u;
    const uint32_t said = (uint32_t)refused | part << GCK_OVERFLOW_BITS;

    if (to.word == NULL) {
        return;
    }
    if (said != 0) {
        atomicOr(&refusals[to.slot], said);
    }
    __threadfence();                               /* a refusal before its block is counted */
    if (atomicInc(&finished[to.slot], gridDim.x - 1) == gridDim.x - 1) {
        const uint32_t any = atomicExch(&refusals[to.slot], 0u);
        const uint32_t answer = (any & answers) != 0 ? GCK_OVERFLOW_FOUND : GCK_OVERFLOW_NONE;
        __threadfence_system();
        *(volatile uint32_t *)to.word = answer | (any & ~answers);
    }
}

/* Of tensor i. */
static inline int listen(const gck_how *how, int i, listener *to)
{
    to->word = how != NULL ? how[i].overflow : NULL;
    to->slot = to->word != NULL ? gck_overflow_slot(to->word) : 0;
    return to->word == NULL || to->slot >= 0 ? GCK_OK : GCK_E_DEVICE;       /* a word of the host */
}

#endif
