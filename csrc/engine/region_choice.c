/* region_choice.c: tables from Python for the planner, and its plans as a dict. */
#include "engine/region_choice.h"

#include "engine/int64_table.h"
#include "planner/planner.h"
#include "torch/calls.h"

#include <stdlib.h>

enum { KEPT, NEED, TIME, ERROR, TABLES };
enum { SHOWN = 1024 };                       /* points of a front that Python gets */

/* One call: what was asked, and what the planner found. */
typedef struct {
    gck_chain  chain;
    int64_t   *tables[TABLES];               /* malloc; NULL: none */
    int        has_budget;
    int64_t    budget, error_budget, buckets;
    gck_front *front;
    gck_solution plan;                        /* within the budgets; its choices: malloc */
    int64_t    bound;
} choice;

/* 0 or -1 with an exception. */
static int parse(choice *c, PyObject *args, PyObject *keywords)
{
    static const char *const names[] = {"regions",   "options", "kept",         "need",    "time", "error",
                                        "last_need", "budget",  "error_budget", "buckets", NULL};
    long long regions, options, last_need, error_budget = 0, buckets = 4096;
    PyObject *objects[TABLES], *budget;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "LLOOOOLO|LL:choose_options", (char **)names, &regions, &options,
                                     &objects[KEPT], &objects[NEED], &objects[TIME], &objects[ERROR], &last_need,
                                     &budget, &error_budget, &buckets)) {
        return -1;
    }
    if (regions < 0 || regions > GCK_MAX_REGIONS || options < 1 || options > GCK_MAX_OPTIONS) {
        return gck_done(PyErr_Format(
            PyExc_ValueError, "gradckpt: %lld regions with %lld options; pass 0 to %d regions, "
            "1 to %d options", regions, options, GCK_MAX_REGIONS, GCK_MAX_OPTIONS));
    }
    if (buckets < GCK_LEAST_BUCKETS || buckets > GCK_MOST_BUCKETS) {
        return gck_done(PyErr_Format(
            PyExc_ValueError, "gradckpt: buckets=%lld; pass %d to %d", buckets, GCK_LEAST_BUCKETS,
            GCK_MOST_BUCKETS));
    }
    c->has_budget = budget != Py_None;
    if (c->has_budget) {
        int beyond;                          /* -1 or 1: more than 64 bits decide as the least or the largest number */
        c->budget = PyLong_AsLongLongAndOverflow(budget, &beyond);
        if (c->budget == -1 && PyErr_Occurred()) {
            return -1;
        }
        c->budget = beyond > 0 ? INT64_MAX : beyond < 0 ? INT64_MIN : c->budget;
    }
    const int64_t count = regions * options;
    for (int i = 0; i < TABLES && (i != ERROR || objects[i] != Py_None); i++) {
        const char *name = names[2 + i];
        int64_t n;
        if ((c->tables[i] = gck_int64_rows(objects[i], name, sizeof(int64_t), "region and option", &n)) == NULL) {
            return -1;
        }
        if (n != count) {
            return gck_done(PyErr_Format(
                PyExc_ValueError, "gradckpt: %s has %lld bytes; pass regions * options * 8 = %lld", name,
                (long long)n * 8, (long long)count * 8));
        }
    }
    c->error_budget = error_budget;
    c->buckets = buckets;
    c->chain = (gck_chain){regions, options, c->tables[KEPT], c->tables[NEED], c->tables[TIME], c->tables[ERROR],
                           last_need};
    return 0;
}

/* All that needs no Python; a status. */
static int solve(choice *c)
{
    const int status = gck_front_new(&c->chain, c->buckets, &c->front);

    if (status != GCK_OK || !c->has_budget) {
        return status;
    }
    if ((c->plan.choices = malloc((size_t)(c->chain.regions + 1) * sizeof *c->plan.choices)) == NULL) {
        return GCK_E_MEMORY;
    }
    return gck_front_plan(c->front, c->budget, c->error_budget, &c->plan, &c->bound);
}

static PyObject *choices_of(const choice *c)
{
    PyObject *choices = PyList_New(0);

    for (int64_t l = 0; choices != NULL && l < c->chain.regions; l++) {
        gck_add_item(&choices, PyLong_FromUnsignedLong(c->plan.choices[l]));
    }
    return gck_as_tuple(choices);
}

/* Plans of the front as (budget, time, error): all, or SHOWN of them at equal distances. */
static PyObject *front_of(const choice *c)
{
    const gck_labels *plans = &c->front->plans;
    const int64_t n = plans->n < SHOWN ? plans->n : SHOWN;
    PyObject *points = PyList_New(0);

    for (int64_t i = 0; points != NULL && i < n; i++) {
        const gck_label *plan = &plans->at[n > 1 ? i * (plans->n - 1) / (n - 1) : 0];
        gck_add_item(&points, Py_BuildValue("LLL", (long long)plan->bytes, (long long)plan->time,
                                            (long long)plan->error));
    }
    return points;
}

static PyObject *dict_of(const choice *c)
{
    const int64_t least = gck_front_least(c->front, c->error_budget);
    const int exact = c->front->exact_from == 0;
    PyObject *smallest = least != GCK_UNAVAILABLE ? PyLong_FromLongLong(least) : Py_NewRef(Py_None);

    if (!c->plan.found) {
        return Py_BuildValue("{sO sO sO sO sO sN sN sO}", "choices", Py_None, "time", Py_None, "peak", Py_None,
                             "error", Py_None, "lower_bound", Py_None, "smallest_budget", smallest, "front",
                             front_of(c), "exact", exact ? Py_True : Py_False);
    }
    const gck_solution *plan = &c->plan;
    return Py_BuildValue("{sN sL sL sL sL sN sN sO}", "choices", choices_of(c), "time", (long long)plan->time, "peak",
                         (long long)plan->bytes, "error", (long long)plan->error, "lower_bound", (long long)c->bound,
                         "smallest_budget", smallest, "front", front_of(c), "exact", exact ? Py_True : Py_False);
}

static void clear(choice *c)
{
    gck_front_free(c->front);
    free(c->plan.choices);
    for (int i = 0; i < TABLES; i++) {
        free(c->tables[i]);
    }
}

PyObject *gck_choose_options_py(PyObject *Py_UNUSED(module), PyObject *args, PyObject *keywords)
{
    GCK_CLEARED_BY(clear) choice c = {.front = NULL};
    int status;

    if (parse(&c, args, keywords) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = solve(&c);
    Py_END_ALLOW_THREADS
    return status == GCK_OK ? dict_of(&c) : status == GCK_E_MEMORY ? PyErr_NoMemory()
         : PyErr_Format(PyExc_ValueError, "gradckpt: a time or an error is negative, or a sum reaches 2**60; pass "
                                          "smaller numbers");
}
