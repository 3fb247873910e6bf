/* stats.c: the counters behind gradckpt.stats(). */
#include "engine/payload/stats.h"

#include "gradckpt.h"
#include "torch/calls.h"
#include "engine/payload/packed.h"
#include "engine/payload/payload_overflow.h"

int gck_count_random(gck_state *state, PyObject *random, int64_t *nbytes)
{
    int64_t own = 0;

    if (random == NULL || random == state->random_state) {
        return 0;
    }
    own = random == state->py.rng.latest ? state->random_size : 0;
    if (own == 0 && gck_count_bytes(&state->py, random, &own) < 0) {
        return -1;
    }
    if (random == state->py.rng.latest) {        /* all of the CPU's are as large */
        state->random_size = own;
    }
    state->random_state = random;
    *nbytes += own;
    gck_count_replay(state, own);
    return 0;
}

void gck_uncount_random(gck_state *state, int64_t nbytes)
{
    if (nbytes != 0) {
        state->random_state = NULL;              /* whose reference went with these bytes, perhaps */
        gck_count_replay(state, -nbytes);
    }
}

PyObject *gck_stats_py(PyObject *module, PyObject *Py_UNUSED(unused))
{
    gck_state *state = gck_state_of(module);
    const gck_stats *s = &state->stats;
    PyObject *dict = PyDict_New(), *uncompressed = PyDict_New(), *codecs = PyDict_New();
    PyObject *functions = state->unknown_functions != NULL ? PyDict_Copy(state->unknown_functions) : PyDict_New();

    gck_payload_overflow_poll(state);
#define COUNTER(name) gck_set_item(&dict, #name, PyLong_FromLongLong(s->name));
    GCK_COUNTERS(COUNTER)
#undef COUNTER
    for (int r = 1; r < GCK_NREASONS; r++) {
        if (s->uncompressed[r] != 0) {
            gck_set_item(&uncompressed, gck_reason_text[r], PyLong_FromLongLong(s->uncompressed[r]));
        }
    }
    for (int i = 0; gck_codec_at(i) != NULL; i++) {
        if (s->codecs[i] != 0) {
            gck_set_item(&codecs, gck_codec_at(i)->name, PyLong_FromLongLong(s->codecs[i]));
        }
    }
    gck_set_item(&dict, "uncompressed", uncompressed);
    gck_set_item(&dict, "codecs", codecs);
    gck_set_item(&dict, "exact_functions", functions);
    return dict;
}

PyObject *gck_reset_stats_py(PyObject *module, PyObject *Py_UNUSED(unused))
{
    gck_state *state = gck_state_of(module);

    const gck_stats *s = &state->stats;

    state->stats = (gck_stats){.live_bytes = s->live_bytes, .peak_live_bytes = s->live_bytes,
                               .replay_bytes = s->replay_bytes, .peak_bytes = s->live_bytes + s->replay_bytes};
    state->last_step = state->watched_task = -1;
    state->epoch++;
    Py_CLEAR(state->unknown_functions);
    Py_RETURN_NONE;
}

PyObject *gck_restart_peak_py(PyObject *module, PyObject *Py_UNUSED(unused))
{
    gck_stats *s = &gck_state_of(module)->stats;
    PyObject *peaks = Py_BuildValue("LL", (long long)s->peak_live_bytes, (long long)s->peak_bytes);

    if (peaks != NULL) {
        s->peak_live_bytes = s->live_bytes;
        s->peak_bytes = s->live_bytes + s->replay_bytes;
    }
    return peaks;
}
