/* stats.c: the counters behind gradckpt.stats(). */
#include "engine/payload/stats.h"

#include "gradckpt.h"
#include "engine/payload/packed.h"
#include "engine/payload/payload_overflow.h"

/* Every counter once: the field is also the key in the dict. */
#define COUNTERS(COUNTER)                                                                                       \
    COUNTER(differing_saves) COUNTER(held_bytes) COUNTER(steps) COUNTER(regions) COUNTER(regions_eligible)      \
    COUNTER(regions_compressed) COUNTER(regions_met) COUNTER(regions_dropped) COUNTER(recomputes)               \
    COUNTER(eligible) COUNTER(compressed) COUNTER(encoded) COUNTER(shared) COUNTER(bytes_in) COUNTER(bytes_out) \
    COUNTER(live_bytes) COUNTER(peak_live_bytes) COUNTER(replay_bytes) COUNTER(peak_bytes)                      \
    COUNTER(originals_alive) COUNTER(originals_alive_bytes)                                                     \
    COUNTER(discrete_outputs) COUNTER(discrete_bytes) COUNTER(uncompressed_bytes) COUNTER(policy_outputs)       \
    COUNTER(policy_bytes)

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

static int set_counter(PyObject *dict, const char *key, int64_t value)
{
    PyObject *number = PyLong_FromLongLong(value);
    const int status = number == NULL ? -1 : PyDict_SetItemString(dict, key, number);

    Py_XDECREF(number);
    return status;
}

PyObject *gck_stats_py(PyObject *module, PyObject *unused)
{
    gck_state *state = gck_state_of(module);
    const gck_stats *s = &state->stats;
    PyObject *dict = PyDict_New(), *uncompressed = PyDict_New(), *codecs = PyDict_New();
    PyObject *functions = state->unknown_functions != NULL ? PyDict_Copy(state->unknown_functions) : PyDict_New();
    int status = dict == NULL || uncompressed == NULL || codecs == NULL || functions == NULL ? -1 : 0;

    (void)unused;
    gck_payload_overflow_poll(state);
#define COUNTER(name) if (status == 0) { status = set_counter(dict, #name, s->name); }
    COUNTERS(COUNTER)
#undef COUNTER
    for (int r = 1; r < GCK_NREASONS && status == 0; r++) {
        status = s->uncompressed[r] ? set_counter(uncompressed, gck_reason_text[r], s->uncompressed[r]) : 0;
    }
    for (int i = 0; gck_codec_at(i) != NULL && status == 0; i++) {
        status = s->codecs[i] ? set_counter(codecs, gck_codec_at(i)->name, s->codecs[i]) : 0;
    }
    if (status < 0 || PyDict_SetItemString(dict, "uncompressed", uncompressed) < 0
        || PyDict_SetItemString(dict, "codecs", codecs) < 0
        || PyDict_SetItemString(dict, "exact_functions", functions) < 0) {
        Py_CLEAR(dict);
    }
    Py_XDECREF(functions);
    Py_XDECREF(uncompressed);
    Py_XDECREF(codecs);
    return dict;
}

PyObject *gck_reset_stats_py(PyObject *module, PyObject *unused)
{
    gck_state *state = gck_state_of(module);

    (void)unused;
    const gck_stats *s = &state->stats;

    state->stats = (gck_stats){.live_bytes = s->live_bytes, .peak_live_bytes = s->live_bytes,
                               .replay_bytes = s->replay_bytes, .peak_bytes = s->live_bytes + s->replay_bytes};
    state->last_step = state->watched_task = -1;
    state->epoch++;
    Py_CLEAR(state->unknown_functions);
    Py_RETURN_NONE;
}

PyObject *gck_restart_peak_py(PyObject *module, PyObject *unused)
{
    gck_stats *s = &gck_state_of(module)->stats;
    PyObject *peaks = Py_BuildValue("LL", (long long)s->peak_live_bytes, (long long)s->peak_bytes);

    (void)unused;
    if (peaks != NULL) {
        s->peak_live_bytes = s->live_bytes;
        s->peak_bytes = s->live_bytes + s->replay_bytes;
    }
    return peaks;
}
