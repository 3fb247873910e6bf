/* run.c: what one run of a region's function knows while it runs. */
#include "engine/run.h"

#include "torch/tensor.h"

uint64_t gck_mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

uint64_t gck_mix_strides(uint64_t hash, const gck_dl_tensor *x)
{
    int64_t numel = 1;

    for (int d = 0; d < x->ndim; d++) {
        numel *= x->shape[d] > 0;
    }
    for (int d = 0; numel > 0 && d < x->ndim; d++) {
        hash = x->shape[d] > 1 ? gck_mix(hash, (uint64_t)x->strides[d]) : hash;
    }
    return hash;
}

static int give(const gck_py *py, gck_run *run, PyObject *x)
{
    gck_dl_tensor dl;
    int status = 0;

    if (PyTuple_Check(x)) {                      /* no other container owns its items for as long as the call runs */
        for (Py_ssize_t i = 0; status == 0 && i < PyTuple_Size(x); i++) {
            status = give(py, run, PyTuple_GetItem(x, i));
        }
    } else if (run->n < GCK_GIVEN && PyType_IsSubtype(Py_TYPE(x), (PyTypeObject *)py->Tensor)) {
        const int shown = gck_is_plain_tensor(py, x) ? gck_read_dlpack(py, x, &dl) : 0;
        run->given[run->n++] = x;
        run->layouts = shown > 0 ? gck_mix_strides(run->layouts, &dl) : gck_mix(run->layouts, 0);
        status = shown < 0 ? -1 : 0;
    }
    return status;
}

int gck_run_of(const gck_py *py, gck_run *run, const Py_ssize_t *saved, PyObject *args, PyObject *kwargs)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    int status;

    *run = (gck_run){.saved = saved};
    status = give(py, run, args);
    while (status == 0 && kwargs != NULL && PyDict_Next(kwargs, &at, &name, &value)) {
        status = give(py, run, value);
    }
    return status;
}

PyObject *gck_given(const gck_run *run, int i, int original)
{
    PyObject *x = !original ? run->given[i] : run->originals != NULL && run->originals[i] != NULL
                ? PyWeakref_GetObject(run->originals[i]) : NULL;

    return x != Py_None ? x : NULL;
}

uint32_t gck_arguments_that_are(const gck_run *run, const PyObject *x)
{
    uint32_t found = 0;

    for (int i = 0; run != NULL && i < run->n; i++) {
        found |= (uint32_t)(run->given[i] == x || gck_given(run, i, 1) == x) << i;
    }
    return found;
}
