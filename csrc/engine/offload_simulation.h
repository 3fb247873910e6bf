/* offload_simulation.h: the simulation of an offloaded step, for Python. */
#ifndef GRADCKPT_OFFLOAD_SIMULATION_H
#define GRADCKPT_OFFLOAD_SIMULATION_H

#include "engine/state.h"

/* _C.simulate_offload(): a dict, which gradckpt/_C.pyi describes.  The regions are copied, and the GIL is
 * released while the step is simulated. */
PyObject *gck_simulate_offload_py(PyObject *module, PyObject *args, PyObject *keywords);

#endif
