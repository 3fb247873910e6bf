/* fallback.h: the boxed kernel of all operators. */
#ifndef VIRTUAL_DEVICE_FALLBACK_H
#define VIRTUAL_DEVICE_FALLBACK_H

#include "torch_parts.h"

namespace virtual_device {

/* Run the CPU's kernel of `op` on the arguments that lie on the stack. */
void run_on_cpu(const c10::OperatorHandle &op, c10::Stack *stack);

}  /* namespace virtual_device */

#endif
