    CODEC(ARG, planes, 60)
    GROUP(ARG, int4_plain, 61, GCK_INT4_PLAIN, PORTABLE, NO_CUDA, 0, "a toy: int4, 16-bit scale per 128 values, no rotation",
          1.0 / 10 * (1 + 0x1p-6),
          4, 1, 0, 0, 0, 0x1p28 / 7, 0x1p28 / 7, 0x1p28 / 5, 16, 0x1p-28, 0x1p-28,
          1, 3, 2, 0x1p24, 0x1p-12)
