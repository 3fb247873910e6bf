/* place_parts.h: what a place is made of. */
#ifndef GRADCKPT_PLACE_PARTS_H
#define GRADCKPT_PLACE_PARTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <sys/types.h>

#include "offload/offloader_figures.h"
#include "offload/store_figures.h"

/* What a device has at a place, and what each graph has that is captured there. */
typedef struct gck_place_device {
    int            device;
    gck_offloader *offloader;
    PyObject      *memory;                       /* list of tensors: its ring */
    struct gck_place_device *next;
} gck_place_device;

typedef struct gck_place_object {
    PyObject_HEAD
    PyObject       *weakrefs, *directory;        /* bytes; NULL: no file */
    long long       host_budget, ring, held, min_bytes;
    int             prefetch, payloads;          /* payloads: for how many a ring of no given size has room */
    pid_t           process;
    gck_byte_store *store;
    gck_place_device *devices;
    gck_offloader_figures ended;                 /* counted by those that have ended      */
    struct gck_place_object *next_with_graphs;   /* owned; see place_devices.c           */
    int             graphs;                      /* it is in that list                   */
    long long       kept, small;                 /* payloads that stayed on their device: for a reason; of few bytes */
    int             in_host;                     /* it was said that some are in host memory already     */
} gck_place_object;

#endif
