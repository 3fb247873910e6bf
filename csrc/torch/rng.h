/* rng.h: the state of the CPU's default generator: save it, restore it. */
#ifndef GRADCKPT_RNG_H
#define GRADCKPT_RNG_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* A Mersenne twister with its position (20 bytes), 624 words, and two cached normals. */
enum { GCK_RNG_BEFORE = 20, GCK_RNG_WORDS = 624, GCK_RNG_AFTER = 28,
       GCK_RNG_WINDOW = GCK_RNG_BEFORE + 4 * GCK_RNG_WORDS + GCK_RNG_AFTER };

typedef struct {
    PyObject            *generator;              /* torch.default_generator                   */
    PyObject            *get_state, *set_state;  /* names                                     */
    PyObject            *latest;                 /* the state read or set last, as torch returned it; or NULL */
    const unsigned char *window;                 /* where the generator keeps its state; NULL: not known */
    unsigned char        seen[GCK_RNG_WINDOW];   /* the window when `latest` was valid        */
} gck_rng;

/* 0, or -1 with an exception. */
int gck_rng_load(gck_rng *rng);
int gck_rng_traverse(gck_rng *rng, visitproc visit, void *arg);
void gck_rng_clear(gck_rng *rng);

/* New reference: the present state, a uint8 tensor.  Until something is drawn it is always the same
 * object, which must not be changed. */
PyObject *gck_rng_stash(gck_rng *rng);

/* Set the generator to `state`, unless it is there already.  0 or -1. */
int gck_rng_put(gck_rng *rng, PyObject *state);

/* The same, and give back the reference in *state: a state without another one is freed. */
int gck_rng_put_back(gck_rng *rng, PyObject **state);

#endif
