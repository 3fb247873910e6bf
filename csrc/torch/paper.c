/* paper.c: whether this thread runs a step on paper. */
#include "torch/paper.h"

static _Thread_local uintptr_t paper, paper_end;
static _Thread_local int paper_is_device;
static _Thread_local int64_t placed, most_placed;

int gck_on_paper(void) { return paper_end != 0; }

int gck_has_values(const void *memory) { return (uintptr_t)memory < paper || (uintptr_t)memory >= paper_end; }

int gck_counts_as_device(int device) { return device >= 0 || paper_is_device; }

void *gck_paper_memory(void) { return (void *)paper; }

void gck_paper_placed(int64_t nbytes)
{
    placed += nbytes;
    most_placed = nbytes > most_placed ? nbytes : most_placed;
}

PyObject *gck_placed_on_paper_py(PyObject *module, PyObject *unused)
{
    const int64_t most = most_placed;

    (void)module;
    (void)unused;
    most_placed = 0;
    return Py_BuildValue("LL", (long long)placed, (long long)most);
}

PyObject *gck_set_on_paper_py(PyObject *module, PyObject *args)
{
    unsigned long long first, end;
    int is_device;

    (void)module;
    if (!PyArg_ParseTuple(args, "KKp:set_on_paper", &first, &end, &is_device)) {
        return NULL;
    }
    paper = (uintptr_t)first;
    paper_end = (uintptr_t)end;
    paper_is_device = is_device;
    Py_RETURN_NONE;
}

PyObject *gck_on_paper_py(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    return PyBool_FromLong(gck_on_paper());
}
