/* rng.h: the state of the CPU's default generator: save it, restore it. */
#ifndef GRADCKPT_RNG_H
#define GRADCKPT_RNG_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/types.h>

/* A Mersenne twister with its position (20 bytes), 624 words, and two cached normals. */
enum { GCK_RNG_BEFORE = 20, GCK_RNG_WORDS = 624, GCK_RNG_AFTER = 28,
       GCK_RNG_WINDOW = GCK_RNG_BEFORE + 4 * GCK_RNG_WORDS + GCK_RNG_AFTER };

typedef struct {
    PyObject            *generator;              /* torch.default_generator                   */
    PyObject            *latest;                 /* the state read or set last, as torch returned it; or NULL */
    const unsigned char *window;                 /* where the generator keeps its state; NULL: not known */
    unsigned char        seen[GCK_RNG_WINDOW];   /* the window when `latest` was valid        */
    PyObject            *around;                 /* the state before any swap; NULL: no thread is inside one */
    int                  threads;                /* that are inside a swap                    */
    pid_t                process;                /* of these                                  */
    unsigned long long   swaps;                  /* so far                                    */
} gck_rng;

/* 0, or -1 with an exception. */
int gck_rng_load(gck_rng *rng);
int gck_rng_traverse(gck_rng *rng, visitproc visit, void *arg);
void gck_rng_clear(gck_rng *rng);

/* New reference: the present state, a uint8 tensor.  Until something is drawn it is always the same
 * object, which must not be changed. */
PyObject *gck_rng_stash(gck_rng *rng);

/* Set the generator to `state`, unless it is there already.  0 or -1. */
int gck_rng_set(gck_rng *rng, PyObject *state);

/* Set the generator to `state` for the calls of this thread up to gck_rng_swap_back().  Swaps of a thread may be
 * nested.  Threads that are inside one at the same time set each other's generator, so what they draw is of no use;
 * but the last one leaves it as it was before the first.  0 or -1; swap back also then, unless *around is NULL. */
int gck_rng_swap(gck_rng *rng, PyObject *state, PyObject **around);

/* Gives back the reference in *around: a state without another one is freed.  0 or -1. */
int gck_rng_swap_back(gck_rng *rng, PyObject **around);

#endif
