/* SPDX-License-Identifier: Apache-2.0 */
/* Products of thin factors, left (r, n) and right (r, m), and of these with matrices (n, m), all float32 row by row:
   see thin_factors.py. A matrix is read from memory once, and written once.

   A product of factors is made in the order that is written here, each product of floats rounded by itself: it has the
   same bits at every level. All else may differ, for registers are of different widths, and some multiply and add at
   once. */

#include "kernel.h"
#include "kernel_gradients.h"

#include <string.h>

enum { MOST = 128 };       /* rows of a factor */
enum { REGISTERS = 8 };    /* that hold elements of the matrix */
enum { GROUP = 4 };        /* rows of the matrix that are projected on the left together */
enum { AHEAD = 512 };      /* elements that a row is fetched ahead: the hardware stops at the end of a page */
enum { SHORT = 768 };      /* elements of a row up to which the first-level cache holds a group of them, and the next */
enum { WHOLE = 8192 };     /* elements of the right factor up to which the first-level cache holds all of it */
enum { PANEL = 4096 };     /* and how many are used at a time, for ROWS rows of the matrix, if there are more */
enum { ROWS = 8 };
enum { STREAMED = 65536 }; /* elements of a matrix from which on it is written past the caches */

/* The matrix is residual + gradient. */
struct sum {
    const float *residual;
    const void *gradient;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static float added_one(const struct sum *of, int64_t i, int kind)
{
    return kind == ALONE ? of->residual[i] : of->residual[i] + other_one(of->gradient, i, kind);
}

/* Of a gradient of 16 bits, half the lines are fetched twice. */
INLINE void fetch(const struct sum *of, int64_t i, int kind)
{
    PREFETCH(of->residual + i);
    if (kind == FLOAT32)
        PREFETCH((const float *)of->gradient + i);
    else if (kind != ALONE)
        PREFETCH((const uint16_t *)of->gradient + i);
}

#define LOOPS "kernel_low_rank_loops.h"
#include "kernel_levels.h"

/* -- the choice between them ------------------------------------------------------------------------------- */

DISPATCH(void, product,
         (const float *scales, const float *right, int64_t m, int64_t r, float scale, float *out, int streamed,
          int64_t n),
         (scales, right, m, r, scale, out, streamed, n))
DISPATCH(int, dots,
         (const struct sum *of, int64_t i, int64_t n, int kind, int64_t next, const float *right, int64_t m, int64_t r,
          float *out, int streamed, float *sums),
         (of, i, n, kind, next, right, m, r, out, streamed, sums))
DISPATCH(void, rows,
         (const struct sum *of, int64_t i, int64_t n, int kind, int64_t next, const float *scales, const float *right,
          int64_t m, int64_t r, float *out, int streamed),
         (of, i, n, kind, next, scales, right, m, r, out, streamed))
DISPATCH(void, copied, (float *to, const float *from, int64_t n), (to, from, n))
DISPATCH(int, columns,
         (const struct sum *of, int64_t i, int kind, int64_t m, int64_t count, const float *scales, int64_t r,
          float *right, float *out, int streamed),
         (of, i, kind, m, count, scales, r, right, out, streamed))

/* How many columns of a right factor are used at a time. */
static int64_t width(int64_t m, int64_t r)
{
    return r * m <= WHOLE ? m : PANEL / r < 512 ? 512 : PANEL / r / 128 * 128;
}

/* -- exported functions; r <= MOST -------------------------------------------------------------------------- */

/* out = scale * left^T right: ((left[0, i] * right[0, j] + left[1, i] * right[1, j]) + ...) * scale. */
EXPORT void kernel_product(const float *left, int64_t n, const float *right, int64_t m, int64_t r, float scale,
                           float *out)
{
    float scales[MOST];
    int64_t step = width(m, r);
    for (int64_t j = 0; j < m; j += step)
        for (int64_t i = 0; i < n; i++) {
            for (int64_t k = 0; k < r; k++)
                scales[k] = left[k * n + i];
            product(scales, right + j, m, r, scale, out + i * m + j, n * m >= STREAMED, least(step, m - j));
        }
    fence();
}

/* left[:, i] = right . row i of residual + gradient, which is written to `matrix`; if `off`, without left^T right. For
   the kind ALONE the residual is the matrix and nothing is written. A gradient of floats is copied to `copy` too, unless
   that is NULL. 1 if the sum is not finite somewhere, else 0. */
EXPORT int kernel_project_on_right(float *matrix, const float *residual, const void *gradient, int kind, int64_t n,
                                   int64_t m, const float *right, int64_t r, float *left, int off, float *copy)
{
    float sums[ROWS][MOST];
    struct sum of = {residual, gradient};
    int endless = 0, streamed = n * m >= STREAMED;
    int64_t step = width(m, r), block = step < m ? ROWS : 1, next = step < m ? m : AHEAD;
    for (int64_t first = 0; first < n; first += block) {
        int64_t count = least(block, n - first);
        for (int64_t i = 0; i < count; i++)
            memset(sums[i], 0, (size_t)r * sizeof(float));
        for (int64_t j = 0; j < m; j += step)
            for (int64_t i = 0; i < count; i++)
                endless |= dots(&of, (first + i) * m + j, least(step, m - j), kind, next, right + j, m, r,
                                off ? NULL : matrix, streamed, sums[i]);
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < r; k++) {
                left[k * n + first + i] = sums[i][k];
                sums[i][k] = -sums[i][k];
            }
        for (int64_t j = 0; off && j < m; j += step)
            for (int64_t i = 0; i < count; i++)
                rows(&of, (first + i) * m + j, least(step, m - j), kind, next, sums[i], right + j, m, r, matrix,
                     streamed);
        if (copy)
            copied(copy + first * m, (const float *)gradient + first * m, count * m);
    }
    fence();
    return endless;
}

/* right = left . (residual + gradient), which is written to `matrix`. For the kind ALONE the residual is the matrix and
   nothing is written. A gradient of floats is copied to `copy` too, unless that is NULL. 1 if the matrix is not finite
   somewhere, else 0. */
EXPORT int kernel_project_on_left(float *matrix, const float *residual, const void *gradient, int kind, int64_t n,
                                  int64_t m, const float *left, int64_t r, float *right, float *copy)
{
    float scales[MOST * GROUP];
    struct sum of = {residual, gradient};
    int endless = 0;
    memset(right, 0, (size_t)(r * m) * sizeof(float));
    for (int64_t i = 0; i < n; i += GROUP) {
        int64_t count = least(GROUP, n - i);
        for (int64_t k = 0; k < r; k++)
            for (int64_t row = 0; row < count; row++)
                scales[k * GROUP + row] = left[k * n + i + row];
        endless |= columns(&of, i * m, kind, m, count, scales, r, right, matrix, n * m >= STREAMED);
        if (copy)
            copied(copy + i * m, (const float *)gradient + i * m, count * m);
    }
    fence();
    return endless;
}

/* matrix -= left^T right. */
EXPORT void kernel_take_off(float *matrix, int64_t n, int64_t m, const float *left, const float *right, int64_t r)
{
    float scales[ROWS][MOST];
    struct sum of = {matrix, NULL};
    int64_t step = width(m, r), block = step < m ? ROWS : 1, next = step < m ? m : AHEAD;
    for (int64_t first = 0; first < n; first += block) {
        int64_t count = least(block, n - first);
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < r; k++)
                scales[i][k] = -left[k * n + first + i];
        for (int64_t j = 0; j < m; j += step)
            for (int64_t i = 0; i < count; i++)
                rows(&of, (first + i) * m + j, least(step, m - j), ALONE, next, scales[i], right + j, m, r, matrix, 0);
    }
}
