/* place_figures.h: bytes and calls of a place. */
#ifndef GRADCKPT_PLACE_FIGURES_H
#define GRADCKPT_PLACE_FIGURES_H

#include "engine/place_parts.h"

/* _C.Place.figures(restart=False): a dict. */
PyObject *gck_place_figures(PyObject *place, PyObject *args);

#endif
