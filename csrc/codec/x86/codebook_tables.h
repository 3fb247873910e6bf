/* codebook_tables.h: the levels of int6 and int4 as tables of 16 bytes, for byte shuffles. */
#ifndef GRADCKPT_CODEBOOK_TABLES_H
#define GRADCKPT_CODEBOOK_TABLES_H

/* Offsets for |t| = 8 h + r, entry h: the sum is 16 times its index of int4 and less than 16 more,
 * because 8 neighbours have at most one threshold of gck_index(). */
#define GCK_INT4_OFFSETS 0, 4, 0, 8, 12, 8, 15, 8, 16, 8, 15, 8, 9, 8, 0, 0xF8

/* gck_level() of the codes of int4; ~L below zero. */
#define GCK_INT4_LEVELS 5, 17, 29, 41, 55, 71, 89, 115, ~5, ~17, ~29, ~41, ~55, ~71, ~89, ~115

/* The same for the number of its levels L below m = 8 h + r: 16 times that, and less than 16
 * more. */
#define GCK_INT4_NOISY_OFFSETS 10, 8, 14, 18, 16, 22, 16, 24, 16, 24, 16, 22, 16, 8, 12, 8

/* From each level of int4 to the one before; the first is twice as far from zero. */
#define GCK_INT4_GAPS 11, 12, 12, 12, 14, 16, 18, 26, 0, 0, 0, 0, 0, 0, 0, 0

/* gck_level() of the indices of int6: 0..15 and 16..31, not uniform and uniform. */
#define GCK_LARGER(a, b) ((a) > (b) ? (a) : (b))
#define GCK_INT6_LEVEL(i) GCK_LARGER(2 * (i) + 1, GCK_LARGER(4 * (i) - 15, 8 * (i) - 125))
#define GCK_UNIFORM_LEVEL(i) (4 * (i) + 1)
#define GCK_4_OF(level, i) level(i), level(i + 1), level(i + 2), level(i + 3)
#define GCK_16_OF(level, i) GCK_4_OF(level, i), GCK_4_OF(level, i + 4), GCK_4_OF(level, i + 8), GCK_4_OF(level, i + 12)
#define GCK_INT6_LOW     GCK_16_OF(GCK_INT6_LEVEL, 0)
#define GCK_INT6_HIGH    GCK_16_OF(GCK_INT6_LEVEL, 16)
#define GCK_UNIFORM_LOW  GCK_16_OF(GCK_UNIFORM_LEVEL, 0)
#define GCK_UNIFORM_HIGH GCK_16_OF(GCK_UNIFORM_LEVEL, 16)

/* Likewise: the gaps before those. */
#define GCK_INT6_GAP(i) ((i) > 0 ? GCK_INT6_LEVEL(i) - GCK_INT6_LEVEL((i) - 1) : 3)
#define GCK_UNIFORM_GAP(i) ((i) > 0 ? 4 : 3)
#define GCK_INT6_GAPS_LOW     GCK_16_OF(GCK_INT6_GAP, 0)
#define GCK_INT6_GAPS_HIGH    GCK_16_OF(GCK_INT6_GAP, 16)
#define GCK_UNIFORM_GAPS_LOW  GCK_16_OF(GCK_UNIFORM_GAP, 0)

#define GCK_FOUR_TIMES(...) __VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__

#endif
