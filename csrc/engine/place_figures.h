/* place_figures.h: bytes and calls of a place. */
#ifndef GRADCKPT_PLACE_FIGURES_H
#define GRADCKPT_PLACE_FIGURES_H

#include "engine/place_parts.h"

/* _C.Place.figures(restart=False): a dict. */
PyObject *gck_place_figures(PyObject *place, PyObject *args);

/* A place ends: what it has counted stays. */
void gck_place_figures_stay(gck_place_object *place);

/* _C.figures_of_ended_places(restart=False): the same dict of them. */
PyObject *gck_figures_of_ended_places(PyObject *module, PyObject *args);

#endif
