/* draws.c: the generator that an operator moves.
 *
 * Running the operator again and dropping its result would not do: how many numbers it draws may
 * depend on values (poisson), and those of a recompute are approximate. */
#include "torch/draws.h"

#include "torch/calls.h"
#include "torch/error.h"
#include "torch/rng.h"
#include "torch/tensor.h"

/* 1 when the operator is one of torch's own; 0, also for a higher order operator; -1. */
static int is_of_torch(PyObject *op)
{
    PyObject *space = PyObject_GetAttrString(op, "namespace");
    const int of_torch = space != NULL && PyUnicode_Check(space)
                      && PyUnicode_CompareWithASCIIString(space, "aten") == 0;

    Py_XDECREF(space);
    return space == NULL ? gck_clear_attribute_error() : of_torch;
}

int gck_op_draws(const gck_py *py, PyObject *op)
{
    const int of_torch = is_of_torch(op);
    PyObject *tags = of_torch > 0 ? PyObject_GetAttrString(op, "tags") : NULL;
    const int draws = of_torch == 0 ? 1 : tags != NULL ? PySequence_Contains(tags, py->draws) : -1;

    Py_XDECREF(tags);
    return draws;
}

/* *generator: new reference; NULL: the CPU's default one; None: nothing is drawn.  0 or -1. */
static int generator_of(const gck_py *py, PyObject *args, PyObject *kwargs, PyObject **generator)
{
    PyObject *x = kwargs == NULL && PyTuple_Size(args) > 0 ? PyTuple_GetItem(args, 0) : NULL;
    int on_cpu = x != NULL ? gck_is_tensor(py, x) : 0;

    for (Py_ssize_t i = 1; on_cpu > 0 && i < PyTuple_Size(args); i++) {
        on_cpu = Py_TYPE(PyTuple_GetItem(args, i)) != Py_TYPE(py->rng.generator);
    }
    on_cpu = on_cpu > 0 ? gck_attr_is_true(x, py->names.is_cpu) : on_cpu;
    *generator = on_cpu != 0 ? NULL : PyObject_CallFunction(py->call.generator_of, "OO", args,
                                                          kwargs != NULL ? kwargs : Py_None);
    if (*generator == py->rng.generator) {         /* faster: its bytes can be compared */
        Py_CLEAR(*generator);
        return 0;
    }
    return on_cpu > 0 || *generator != NULL ? 0 : -1;
}

static PyObject *state_of(gck_py *py, PyObject *generator)
{
    return generator == NULL ? gck_rng_stash(&py->rng) : PyObject_CallMethodObjArgs(generator, py->rng.get_state, NULL);
}

int gck_draw_begin(gck_py *py, PyObject *args, PyObject *kwargs, gck_draw *draw)
{
    draw->before = NULL;
    if (generator_of(py, args, kwargs, &draw->generator) < 0) {
        return -1;
    }
    if (draw->generator != Py_None && (draw->before = state_of(py, draw->generator)) == NULL) {
        Py_CLEAR(draw->generator);
        return -1;
    }
    return 0;
}

void gck_draw_clear(gck_draw *draw)
{
    Py_CLEAR(draw->generator);
    Py_CLEAR(draw->before);
}

PyObject *gck_draw_end(gck_py *py, gck_draw *draw)
{
    PyObject *after = draw->before != NULL ? state_of(py, draw->generator) : Py_NewRef(Py_None), *drawn = NULL;

    if (after == draw->before || after == Py_None) {       /* the CPU's: nothing was drawn */
        drawn = Py_NewRef(Py_None);
    } else if (after != NULL) {
        drawn = PyTuple_Pack(2, draw->before, after);
    }
    Py_XDECREF(after);
    gck_draw_clear(draw);
    return drawn;
}

int gck_draw_repeat(gck_py *py, PyObject *args, PyObject *kwargs, PyObject *drawn)
{
    gck_draw now;
    PyObject *before = PyTuple_GetItem(drawn, 0), *after = PyTuple_GetItem(drawn, 1);
    int status = gck_draw_begin(py, args, kwargs, &now);

    if (status == 0 && now.before != NULL) {
        status = now.before == before ? 1 : gck_is_true(PyObject_CallMethod(now.before, "equal", "O", before));
        if (status > 0) {
            status = now.generator == NULL ? gck_rng_put(&py->rng, after)
                : gck_done(PyObject_CallMethodObjArgs(now.generator, py->rng.set_state, after, NULL));
        }
    }
    gck_draw_clear(&now);
    return status < 0 ? -1 : 0;
}
