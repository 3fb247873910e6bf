/* saved_row.h: what a node's backward needs of a tensor that the node saves. */
#ifndef GRADCKPT_SAVED_ROW_H
#define GRADCKPT_SAVED_ROW_H

/* Whatever has no role stays exact. */
typedef enum {
    GCK_ROLE_VALUES,           /* the values                                              */
    GCK_ROLE_FACTOR,           /* a factor; a scale per row, smaller than the product, stays exact */
    GCK_ROLE_POWER,            /* the values, for small powers                            */
    GCK_ROLE_CUT,              /* the argument of a function whose derivative is constant beyond 20 */
    GCK_ROLE_CUT_OF_ONE,       /* the same, if its parameter is 1                         */
    GCK_ROLE_ROWS,             /* rows under one mean and scale                           */
    GCK_ROLE_PLANES,           /* channels under one mean and scale                       */
    GCK_ROLE_ATTENTION,        /* the values, if the two below are made again             */
    GCK_ROLE_AGAIN,            /* a result of attention, made from its arguments          */
    GCK_ROLE_ROUNDED,          /* float32 in the family's own 16 bits                     */
    GCK_ROLE_PROBABILITIES,    /* likewise; each row has the sum 1 again when restored    */
    GCK_ROLE_POSITIVE,         /* whether a value is positive                             */
    GCK_ROLE_POSITIVE_OR_NAN,
} gck_role;

/* Operators that users give a format of their own. */
typedef enum {
    GCK_LINEAR, GCK_MATMUL, GCK_CONVOLUTION, GCK_PRODUCT, GCK_ATTENTION, GCK_NORM, GCK_RNN, GCK_ACTIVATION,
    GCK_POOLING, GCK_SOFTMAX, GCK_LOG_SOFTMAX, GCK_NFAMILIES,
    GCK_SIGN = GCK_NFAMILIES,  /* one bit per value, in every format                      */
} gck_family;

/* One tensor that a node of this type saves; "result" and "output" are the operator's own.  The argument of a
 * Function in Python is a number. */
typedef struct {
    const char *node, *argument;
    gck_role    role;
    gck_family  family;
} gck_saved_row;

/* The kind of a node: the index of its first row, or one of these.  What is said of a pole holds near the
 * values at which a product is zero. */
enum {
    GCK_NODE_OTHER = -1,       /* nothing is known of it                                   */
    GCK_NODE_VIEW = -2,
    GCK_NODE_PLAIN = -3,       /* each of its values comes from a few, by derivatives with a bound */
    GCK_NODE_PEAK = -4,        /* likewise, but these are largest there                    */
    GCK_NODE_SUM = -5,         /* each comes from all along some dimensions, likewise      */
    GCK_NODE_NORM = -6,        /* likewise, and the derivative has no bound if all of them are small */
    GCK_NODE_MIX = -7,         /* each comes from many                                     */
    GCK_NODE_POLE = -8,        /* its derivative by a value has no bound                   */
    GCK_NODE_POLE_0 = -9,      /* likewise, but only by the first argument; the second; the third */
    GCK_NODE_POLE_1 = -10,
    GCK_NODE_POLE_2 = -11,
    GCK_NODE_LEAF = -12,
};

#endif
