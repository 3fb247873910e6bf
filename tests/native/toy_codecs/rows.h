    CODEC(ARG, planes, 60)
    GROUP(ARG, int4_plain, 61, GCK_INT4_PLAIN, PORTABLE, NO_CUDA, 4, 1, 0,
          "a toy: int4, 16-bit scale per 128 values, no rotation",
          1.0 / 10 * (1 + 0x1p-6),
          .is_fp8 = 0, .is_rotated = 0, .has_levels = 0,
          .factor = 0x1p28 / 7, .factor_noisy = 0x1p28 / 7, .factor_escaped = 0x1p28 / 5,
          .ordinary_dropped_bits = 16, .unit = 0x1p-28, .unit_escaped = 0x1p-28,
          .table_half = 1, .table_kinds = 3, .table_size = 2, .table_factor = 0x1p24,
          .table_unit = 0x1p-12)
