/* SPDX-License-Identifier: Apache-2.0 */
/* Gram-Schmidt in double precision, twice, on rows of float32: see thin_factors.py.

   Every sum is made in the order that is written here, each product rounded by itself, so that all levels, and numpy in
   agmerge, give the same bits: LANES partial sums, which are added in halves. Squares of floats neither over- nor
   underflow as doubles. */

#include "kernel.h"

#include <float.h>
#include <math.h>

enum { LANES = 16 };

/* A row is dependent on those before it if so much of its length is left, or less: roundings in float32. */
static const double DEPENDENT = 8 * FLT_EPSILON;

static double halves(double *lanes)
{
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++)
            lanes[lane] += lanes[lane + half];
    return lanes[0];
}

INLINE double dot_body(const float *row, const double *vector, int64_t n)
{
    double lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += (double)row[i + lane] * vector[i + lane];
    for (int64_t rest = i; rest < n; rest++)
        lanes[rest - i] += (double)row[rest] * vector[rest];
    return halves(lanes);
}
FOR_EACH_LEVEL(double, dot, (const float *row, const double *vector, int64_t n), (row, vector, n))

INLINE double square_body(const double *vector, int64_t n)
{
    double lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += vector[i + lane] * vector[i + lane];
    for (int64_t rest = i; rest < n; rest++)
        lanes[rest - i] += vector[rest] * vector[rest];
    return halves(lanes);
}
FOR_EACH_LEVEL(double, square, (const double *vector, int64_t n), (vector, n))

INLINE int subtract_body(double *restrict vector, double scale, const float *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        vector[i] -= scale * (double)row[i];
    return 0;
}
FOR_EACH_LEVEL(int, subtract, (double *vector, double scale, const float *row, int64_t n), (vector, scale, row, n))

INLINE int widen_body(double *restrict vector, const float *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        vector[i] = row[i];
    return 0;
}
FOR_EACH_LEVEL(int, widen, (double *vector, const float *row, int64_t n), (vector, row, n))

INLINE int narrow_body(float *restrict row, const double *vector, double scale, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        row[i] = (float)(vector[i] * scale);
    return 0;
}
FOR_EACH_LEVEL(int, narrow, (float *row, const double *vector, double scale, int64_t n), (row, vector, scale, n))

INLINE int cover_body(double *restrict vector, const float *row, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        vector[i] += (double)row[i] * (double)row[i];
    return 0;
}
FOR_EACH_LEVEL(int, cover, (double *vector, const float *row, int64_t n), (vector, row, n))

/* Subtract the vector's projection on `count` rows, twice; the square of the remainder. scales: a slot for each row. */
static double project_out(double *vector, const float *rows, int64_t count, int64_t n, double *scales)
{
    for (int twice = 0; twice < 2; twice++) {
        for (int64_t j = 0; j < count; j++)
            scales[j] = dot(rows + j * n, vector, n);
        for (int64_t j = 0; j < count; j++)
            subtract(vector, scales[j], rows + j * n, n);
    }
    return square(vector, n);
}

/* Make the vector that unit vector of which the rows have least, the first of equals. */
static void choose_unit(double *vector, const float *rows, int64_t count, int64_t n)
{
    int64_t place = 0;
    for (int64_t i = 0; i < n; i++)
        vector[i] = 0;
    for (int64_t j = 0; j < count; j++)
        cover(vector, rows + j * n, n);
    for (int64_t i = 1; i < n; i++)
        if (vector[i] < vector[place])
            place = i;
    for (int64_t i = 0; i < n; i++)
        vector[i] = i == place;
}

/* Make the rows of each of `count` factors orthonormal. sizes: how many rows it has, and how long they are, which is no
   less. scratch: as many doubles as the largest sum of both. A row that is zero, not finite, or dependent on those
   before it becomes a unit vector, less its projection on these. */
EXPORT void kernel_orthonormalize(float *const *factors, const int64_t (*sizes)[2], int64_t count, double *scratch)
{
    for (int64_t f = 0; f < count; f++) {
        int64_t rows = sizes[f][0], n = sizes[f][1];
        double *vector = scratch + rows;
        for (int64_t j = 0; j < rows; j++) {
            float *row = factors[f] + j * n;
            widen(vector, row, n);
            double before = square(vector, n), left = project_out(vector, factors[f], j, n, scratch);
            if (!(left <= DBL_MAX && left > DEPENDENT * DEPENDENT * before)) {
                choose_unit(vector, factors[f], j, n);
                left = project_out(vector, factors[f], j, n, scratch);
            }
            narrow(row, vector, 1 / sqrt(left), n);
        }
    }
}
