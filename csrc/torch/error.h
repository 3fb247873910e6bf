/* error.h: the pending exception: set aside, put back, read.
 *
 * None is ever lost.  Where two meet, the first is raised and the other goes to
 * sys.unraisablehook; what is cleared is named here. */
#ifndef GRADCKPT_ERROR_H
#define GRADCKPT_ERROR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct { PyObject *type, *value, *traceback; } gck_error;

/* Set the pending exception aside, if there is one. */
gck_error gck_error_take(void);

/* One that came since: it is set aside when nothing was, else reported. */
void gck_error_keep(gck_error *error);

/* Put it back.  0, or -1: an exception is pending, this one or one that came since. */
int gck_error_return(gck_error *error);

/* New reference: the pending exception with its traceback; it is pending no more. */
PyObject *gck_error_object(void);

/* A question failed.  0, and the exception is cleared: AttributeError, or the plain
 * RuntimeError, NotImplementedError, TypeError by which torch and subclasses of tensors refuse
 * an answer.  -1: it is any other (KeyboardInterrupt, MemoryError), and stays. */
int gck_clear_refusal(void);

/* The same for AttributeError alone. */
int gck_clear_attribute_error(void);

/* Where no caller can be told: a refusal is cleared, anything else goes to sys.unraisablehook. */
void gck_error_report(void);

#endif
