/* SPDX-License-Identifier: Apache-2.0 */
/* The sum of the squares of a gradient, in one order whatever the instruction set: the same bits on every processor. */

#include "kernel.h"
#include "kernel_gradients.h"

enum { LANES = 16, RUN = 256 };

/* In double: the square of a float is exact there, so that it makes no difference whether it is added with one rounding
   or with two. Element i of a run is added to lane i % LANES; then halves of the lanes are added, and runs in their
   order. */
INLINE double run_body(const void *values, int64_t start, int64_t n, int kind)
{
    double lanes[LANES] = {0};
    int64_t whole = n - start < RUN ? (n - start) / LANES : RUN / LANES;
    for (int64_t row = 0; row < whole; row++)
        for (int lane = 0; lane < LANES; lane++) {
            double value = other_one(values, start + row * LANES + lane, kind);
            lanes[lane] += value * value;
        }
    for (int64_t i = start + whole * LANES; i < n && i < start + RUN; i++) {
        double value = other_one(values, i, kind);
        lanes[i % LANES] += value * value;
    }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

INLINE double squares_body(const void *values, int64_t n, int kind)
{
    double total = 0;
#define ADD_UP(known)                                                                                                \
    for (int64_t start = 0; start < n; start += RUN)                                                                 \
        total += run_body(values, start, n, known)
    if (kind == FLOAT32)
        ADD_UP(FLOAT32);
    else if (kind == BFLOAT16)
        ADD_UP(BFLOAT16);
    else
        ADD_UP(FLOAT16);
    return total;
}
FOR_EACH_LEVEL(double, squares, (const void *values, int64_t n, int kind), (values, n, kind))

/* kind: FLOAT32, BFLOAT16 or FLOAT16. */
EXPORT double kernel_squares(const void *values, int64_t n, int kind)
{
    return squares(values, n, kind);
}
