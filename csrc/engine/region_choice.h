/* region_choice.h: the planner, for Python. */
#ifndef GRADCKPT_REGION_CHOICE_H
#define GRADCKPT_REGION_CHOICE_H

#include "engine/state.h"

/* _C.choose_options(): a dict, which gradckpt/_C.pyi describes.  The tables are copied, and the GIL
 * is released while the planner works. */
PyObject *gck_choose_options_py(PyObject *module, PyObject *args, PyObject *keywords);

#endif
