/* SPDX-License-Identifier: Apache-2.0 */
/* The loops of kernel_low_rank.c, in the words of kernel_levels.h. Several registers are filled with elements of the
   matrix; then all rows of a factor go over them. Elements that do not fill a register come last, one by one. */

/* Elements i, i + 1, ... of residual + gradient. */
TARGET INLINE vec AT(added)(const struct sum *of, int64_t i, int kind)
{
    if (kind == ALONE)
        return LOAD(of->residual + i);
    return LOAD(of->residual + i) + OTHER(of->gradient, i, kind);
}

/* -- scale * left^T right --------------------------------------------------------------------------------- */

TARGET INLINE void AT(product_part)(const float *scales, const float *right, int64_t m, int64_t r, float scale,
                                    float *out, int streamed, int count)
{
    vec sums[REGISTERS];
    for (int q = 0; q < count; q++)
        sums[q] = SPLAT(scales[0]) * LOAD(right + q * WIDTH);
    for (int64_t k = 1; k < r; k++)
        for (int q = 0; q < count; q++)
            sums[q] += SPLAT(scales[k]) * LOAD(right + k * m + q * WIDTH);
    for (int q = 0; q < count; q++)
        WRITE(out + q * WIDTH, sums[q] * SPLAT(scale), streamed);
}

/* A part of one row of the product, of n elements. */
TARGET static void AT(product)(const float *scales, const float *right, int64_t m, int64_t r, float scale, float *out,
                               int streamed, int64_t n)
{
    int64_t j = 0;
    streamed = streamed && ALIGNED(out);
    for (; j + REGISTERS * WIDTH <= n; j += REGISTERS * WIDTH)
        AT(product_part)(scales, right + j, m, r, scale, out + j, streamed, REGISTERS);
    for (; j + WIDTH <= n; j += WIDTH)
        AT(product_part)(scales, right + j, m, r, scale, out + j, streamed, 1);
    for (; j < n; j++) {
        float sum = scales[0] * right[j];
        for (int64_t k = 1; k < r; k++)
            sum += scales[k] * right[k * m + j];
        out[j] = sum * scale;
    }
}

/* -- right . row of the matrix ---------------------------------------------------------------------------- */

TARGET INLINE void AT(dots_part)(const struct sum *of, int64_t i, int kind, int64_t next, const float *right, int64_t m,
                                 int64_t r, vec *sums, vec *check, float *out, int streamed, int count)
{
    vec values[REGISTERS];
    for (int q = 0; q < count; q++) {
        fetch(of, i + q * WIDTH + next, kind);
        values[q] = AT(added)(of, i + q * WIDTH, kind);
        *check = MULTIPLY_ADD(values[q], SPLAT(0), *check);
        if (out)
            WRITE(out + i + q * WIDTH, values[q], streamed);
    }
    for (int64_t k = 0; k < r; k++) {
        vec sum = sums[k];
        for (int q = 0; q < count; q++)
            sum = MULTIPLY_ADD(values[q], LOAD(right + k * m + q * WIDTH), sum);
        sums[k] = sum;
    }
}

/* sums[k] += right[k] . elements [i, i + n) of the matrix, which are written to `out` unless it is NULL; whether one of
   them is not finite. Rows of right are m apart. next: how far ahead the matrix is fetched. */
TARGET INLINE int AT(dots_of)(const struct sum *of, int64_t i, int64_t n, int kind, int64_t next, const float *right,
                              int64_t m, int64_t r, float *out, int streamed, float *sums)
{
    vec parts[MOST], check = SPLAT(0);
    int64_t j = 0;
    for (int64_t k = 0; k < r; k++)
        parts[k] = SPLAT(0);
    streamed = streamed && out && ALIGNED(out + i);
    for (; j + REGISTERS * WIDTH <= n; j += REGISTERS * WIDTH)
        AT(dots_part)(of, i + j, kind, next, right + j, m, r, parts, &check, out, streamed, REGISTERS);
    for (; j + WIDTH <= n; j += WIDTH)
        AT(dots_part)(of, i + j, kind, next, right + j, m, r, parts, &check, out, streamed, 1);
    for (int64_t k = 0; k < r; k++)
        sums[k] += TOTAL(parts[k]);
    float zero = TOTAL(check);
    for (; j < n; j++) {
        float value = added_one(of, i + j, kind);
        zero += value * 0;
        for (int64_t k = 0; k < r; k++)
            sums[k] += value * right[k * m + j];
        if (out)
            out[i + j] = value;
    }
    return zero != 0;
}

TARGET static int AT(dots)(const struct sum *of, int64_t i, int64_t n, int kind, int64_t next, const float *right,
                           int64_t m, int64_t r, float *out, int streamed, float *sums)
{
    if (kind == ALONE)
        return AT(dots_of)(of, i, n, ALONE, next, right, m, r, NULL, 0, sums);
    if (kind == FLOAT32 && r == 4)
        return AT(dots_of)(of, i, n, FLOAT32, next, right, m, 4, out, streamed, sums);
    if (kind == FLOAT32)
        return AT(dots_of)(of, i, n, FLOAT32, next, right, m, r, out, streamed, sums);
    return AT(dots_of)(of, i, n, kind, next, right, m, r, out, streamed, sums);
}

/* -- row of the matrix + scales . right ------------------------------------------------------------------- */

TARGET INLINE void AT(rows_part)(const struct sum *of, int64_t i, int kind, int64_t next, const float *scales,
                                 const float *right, int64_t m, int64_t r, float *out, int streamed, int count)
{
    vec values[REGISTERS];
    for (int q = 0; q < count; q++) {
        if (kind == ALONE)
            fetch(of, i + q * WIDTH + next, ALONE); /* a sum was read before, for its dot products */
        values[q] = AT(added)(of, i + q * WIDTH, kind);
    }
    for (int64_t k = 0; k < r; k++)
        for (int q = 0; q < count; q++)
            values[q] = MULTIPLY_ADD(SPLAT(scales[k]), LOAD(right + k * m + q * WIDTH), values[q]);
    for (int q = 0; q < count; q++)
        WRITE(out + i + q * WIDTH, values[q], streamed);
}

/* Write elements [i, i + n) of the matrix, plus scales . right, to those of `out`; see dots_of. */
TARGET static void AT(rows)(const struct sum *of, int64_t i, int64_t n, int kind, int64_t next, const float *scales,
                            const float *right, int64_t m, int64_t r, float *out, int streamed)
{
    int64_t j = 0;
    streamed = streamed && ALIGNED(out + i);
    for (; j + REGISTERS * WIDTH <= n; j += REGISTERS * WIDTH)
        AT(rows_part)(of, i + j, kind, next, scales, right + j, m, r, out, streamed, REGISTERS);
    for (; j + WIDTH <= n; j += WIDTH)
        AT(rows_part)(of, i + j, kind, next, scales, right + j, m, r, out, streamed, 1);
    for (; j < n; j++) {
        float value = added_one(of, i + j, kind);
        for (int64_t k = 0; k < r; k++)
            value += scales[k] * right[k * m + j];
        out[i + j] = value;
    }
}

/* -- a copy ----------------------------------------------------------------------------------------------- */

/* Write `from` to `to` past the caches, while it is in them. */
TARGET static void AT(copied)(float *to, const float *from, int64_t n)
{
    int64_t j = 0;
    for (; j < n && !ALIGNED(to + j); j++)
        to[j] = from[j];
    for (; j + WIDTH <= n; j += WIDTH)
        STREAM(to + j, LOAD(from + j));
    for (; j < n; j++)
        to[j] = from[j];
}

/* -- left . matrix ---------------------------------------------------------------------------------------- */

TARGET INLINE void AT(columns_part)(const struct sum *of, int64_t i, int64_t j, int kind, int64_t m, int64_t rows,
                                    const float *scales, int64_t r, float *right, vec *check, float *out, int streamed,
                                    int count)
{
    vec values[GROUP][REGISTERS / GROUP];
    for (int64_t row = 0; row < rows; row++)
        for (int q = 0; q < count; q++) {
            int64_t at = i + j + row * m + q * WIDTH;
            fetch(of, GROUP * m + (m > SHORT ? at : i + j * rows + (row * count + q) * WIDTH), kind);
            values[row][q] = AT(added)(of, at, kind);
            *check = MULTIPLY_ADD(values[row][q], SPLAT(0), *check);
            if (out)
                WRITE(out + at, values[row][q], streamed);
        }
    for (int64_t k = 0; k < r; k++)
        for (int q = 0; q < count; q++) {
            vec sum = LOAD(right + k * m + q * WIDTH);
            for (int64_t row = 0; row < rows; row++)
                sum = MULTIPLY_ADD(SPLAT(scales[k * GROUP + row]), values[row][q], sum);
            STORE(right + k * m + q * WIDTH, sum);
        }
}

/* right[k] += the sum of `rows` rows of the matrix, from element i on, times scales[k * GROUP + row]. They are written
   to `out` unless it is NULL. Returns whether an element is not finite. */
TARGET INLINE int AT(columns_of)(const struct sum *of, int64_t i, int kind, int64_t m, int64_t rows,
                                 const float *scales, int64_t r, float *right, float *out, int streamed)
{
    enum { STEP = REGISTERS / GROUP };
    vec check = SPLAT(0);
    int64_t j = 0;
    streamed = streamed && out && ((uintptr_t)(out + i) | (uintptr_t)m * sizeof(float)) % (WIDTH * sizeof(float)) == 0;
    for (; j + STEP * WIDTH <= m; j += STEP * WIDTH)
        AT(columns_part)(of, i, j, kind, m, rows, scales, r, right + j, &check, out, streamed, STEP);
    for (; j + WIDTH <= m; j += WIDTH)
        AT(columns_part)(of, i, j, kind, m, rows, scales, r, right + j, &check, out, streamed, 1);
    float zero = TOTAL(check);
    for (; j < m; j++)
        for (int64_t row = 0; row < rows; row++) {
            float value = added_one(of, i + row * m + j, kind);
            zero += value * 0;
            for (int64_t k = 0; k < r; k++)
                right[k * m + j] += scales[k * GROUP + row] * value;
            if (out)
                out[i + row * m + j] = value;
        }
    return zero != 0;
}

TARGET static int AT(columns)(const struct sum *of, int64_t i, int kind, int64_t m, int64_t rows, const float *scales,
                              int64_t r, float *right, float *out, int streamed)
{
    if (rows == GROUP && kind == ALONE)
        return AT(columns_of)(of, i, ALONE, m, GROUP, scales, r, right, NULL, 0);
    if (rows == GROUP && kind == FLOAT32)
        return AT(columns_of)(of, i, FLOAT32, m, GROUP, scales, r, right, out, streamed);
    if (rows == GROUP)
        return AT(columns_of)(of, i, kind, m, GROUP, scales, r, right, out, streamed);
    int endless = 0;
    for (int64_t row = 0; row < rows; row++)
        endless |= AT(columns_of)(of, i + row * m, kind, m, 1, scales + row, r, right, out, streamed);
    return endless;
}
