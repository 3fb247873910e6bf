/* simulated.c: whether this thread runs a simulated step. */
#include "torch/simulated.h"

static _Thread_local uintptr_t simulated, simulated_end;
static _Thread_local int simulated_is_device;
static _Thread_local int64_t placed, most_placed;

int gck_is_simulated(void) { return simulated_end != 0; }

int gck_has_values(const void *memory) { return (uintptr_t)memory < simulated || (uintptr_t)memory >= simulated_end; }

int gck_counts_as_device(int device) { return device >= 0 || simulated_is_device; }

void *gck_simulated_memory(void) { return (void *)simulated; }

void gck_count_simulated_placed(int64_t nbytes)
{
    placed += nbytes;
    most_placed = nbytes > most_placed ? nbytes : most_placed;
}

PyObject *gck_simulated_placed_py(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    const int64_t most = most_placed;

    most_placed = 0;
    return Py_BuildValue("LL", (long long)placed, (long long)most);
}

PyObject *gck_set_simulated_py(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long first, end;
    int is_device;

    if (!PyArg_ParseTuple(args, "KKp:set_simulated", &first, &end, &is_device)) {
        return NULL;
    }
    simulated = (uintptr_t)first;
    simulated_end = (uintptr_t)end;
    simulated_is_device = is_device;
    Py_RETURN_NONE;
}

PyObject *gck_is_simulated_py(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(gck_is_simulated());
}
