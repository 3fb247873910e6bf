/* place_parts.h: what a place is made of. */
#ifndef GRADCKPT_PLACE_PARTS_H
#define GRADCKPT_PLACE_PARTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/types.h>

#include "offload/offloader_figures.h"
#include "offload/store_figures.h"

enum { GCK_PLACE_DEVICES = 16 };

typedef struct {
    int            device;
    gck_offloader *offloader;
    PyObject      *memory;                       /* list of tensors: its ring */
} gck_place_device;

typedef struct {
    PyObject_HEAD
    PyObject       *weakrefs, *directory;        /* bytes; NULL: no file */
    long long       host_budget, ring, held, min_bytes;
    int             prefetch, payloads;          /* payloads: for how many a ring of no given size has room */
    pid_t           process;
    gck_byte_store *store;
    gck_place_device devices[GCK_PLACE_DEVICES];
    int             n;
    long long       kept;                        /* payloads that stayed on their device */
} gck_place_object;

#endif
