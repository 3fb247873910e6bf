/* offload_simulation.c: regions from Python for the simulation of a step, and its result as a dict. */
#include "engine/offload_simulation.h"

#include "engine/int64_table.h"
#include "offload/simulate.h"

#include <stdlib.h>

static PyObject *dict_of(const gck_offload_time *found)
{
    return Py_BuildValue("{sL sL sL sL sL sL sL sL}", "time", (long long)found->time, "exposed_forward",
                         (long long)found->exposed_forward, "exposed_backward", (long long)found->exposed_backward,
                         "stalls", (long long)found->stalls, "copies", (long long)found->copies, "moved",
                         (long long)found->moved, "stayed", (long long)found->stayed, "peak",
                         (long long)found->peak);
}

PyObject *gck_simulate_offload_py(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    static const char *const names[] = {"regions", "rate_out", "rate_in", "latency", "ring", "held", "head", NULL};
    long long rate_out, rate_in, latency, ring, held, head;
    gck_offload_step step = {.n = 0};
    gck_offload_region *regions;
    gck_offload_time found;
    PyObject *object;
    int status;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O$LLLLLL:simulate_offload", (char **)names, &object, &rate_out,
                                     &rate_in, &latency, &ring, &held, &head)
        || (regions = gck_int64_rows(object, "regions", sizeof *regions,
                                     "forward, backward, encode, decode, bytes, placed", &step.n)) == NULL) {
        return NULL;
    }
    step = (gck_offload_step){regions, step.n, rate_out, rate_in, latency, ring, held, head};
    Py_BEGIN_ALLOW_THREADS
    status = gck_simulate_offload(&step, &found);
    Py_END_ALLOW_THREADS
    free(regions);
    if (status == GCK_E_MEMORY) {
        return PyErr_NoMemory();
    }
    return status == GCK_OK ? dict_of(&found)
         : PyErr_Format(PyExc_ValueError, "gradckpt: a number of the step is negative, a rate is 0, or a sum reaches "
                          "2**60; pass numbers in range");
}
