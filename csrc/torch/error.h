/* error.h: the pending exception: set aside, restored, read.
 *
 * No exception is ever lost.  Where two meet, the first is raised and the other goes to
 * sys.unraisablehook; each function below names what it clears. */
#ifndef GRADCKPT_ERROR_H
#define GRADCKPT_ERROR_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct { PyObject *type, *value, *traceback; } gck_error;

/* Set the pending exception aside, if there is one. */
gck_error gck_error_take(void);

/* An exception that came since is set aside when none was before, else reported. */
void gck_error_keep(gck_error *error);

/* Let go of the exception that was set aside: another one tells it all. */
void gck_error_drop(gck_error *error);

/* Restore the exception.  0, or -1: an exception is pending, this one or one that came since. */
int gck_error_return(gck_error *error);

/* New reference: the exception with its traceback; it is no longer pending. */
PyObject *gck_error_object(void);

/* After a failed question.  0 with the exception cleared: AttributeError, or the plain
 * RuntimeError, NotImplementedError, TypeError by which torch and tensor subclasses reject a
 * question. -1: any other (KeyboardInterrupt, MemoryError), which stays. */
int gck_clear_refusal(void);

/* The same for AttributeError alone. */
int gck_clear_attribute_error(void);

/* For code that cannot raise: an exception of the kinds above is cleared, any other goes to
 * sys.unraisablehook. */
void gck_error_report(void);

#endif
