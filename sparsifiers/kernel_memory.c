/* Loops over float32 at indices, commit and scatter, and what memories make of a residual and a gradient. See kernel.c for what holds of all. */

#include "kernel.h"

/* -- commit ----------------------------------------------------------------------------------------------- */

/* The largest of the indices as unsigned numbers, so that a negative one is too large. */
INLINE uint32_t largest_index_body(const int32_t *indices, int64_t count)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = (uint32_t)indices[i] > largest ? (uint32_t)indices[i] : largest;
    return largest;
}
FOR_EACH_LEVEL(uint32_t, largest_index, (const int32_t *indices, int64_t count), (indices, count))

enum { LOOK_AHEAD = 48 }; /* indices whose elements are fetched ahead */

/* work[indices] -= sent, one by one; 0, or -1 without doing anything if an index is outside [0, n). */
EXPORT int kernel_commit(float *work, int64_t n, const int32_t *indices, const float *sent, int64_t count)
{
    if (count > 0 && largest_index(indices, count) >= (uint64_t)n)
        return -1;
    int64_t i = 0;
    for (; i + LOOK_AHEAD < count; i++) {
        PREFETCH_TO_WRITE(work + indices[i + LOOK_AHEAD]);
        work[indices[i]] -= sent[i];
    }
    for (; i < count; i++)
        work[indices[i]] -= sent[i];
    return 0;
}

/* total[indices] += values * scale, one by one, each rounded twice; 0, or -1 without doing anything if an index is
   outside [0, n). */
EXPORT int kernel_scatter(float *total, int64_t n, const int32_t *indices, const float *values, int64_t count,
                          float scale)
{
    if (count > 0 && largest_index(indices, count) >= (uint64_t)n)
        return -1;
    for (int64_t i = 0; i < count; i++) {
        if (i + LOOK_AHEAD < count)
            PREFETCH_TO_WRITE(total + indices[i + LOOK_AHEAD]);
        float part = values[i] * scale;
        total[indices[i]] += part;
    }
    return 0;
}

/* -- compensate ------------------------------------------------------------------------------------------- */

#define LOOPS "kernel_memory_loops.h"
#include "kernel_levels.h"

DISPATCH(int, add,
         (float *work, float *home, const float *residual, const void *gradient, int64_t n, float factor, int kind),
         (work, home, residual, gradient, n, factor, kind))
DISPATCH(int, momentum,
         (float *work, float *home, const float *residual, const void *gradient, const float *before, float *after,
          int64_t n, float factor, int nesterov, int kind),
         (work, home, residual, gradient, before, after, n, factor, nesterov, kind))

/* work = factor * residual + gradient, each rounded; home = gradient, a float one, unless it is NULL. 1 if anything in
   work is then not finite, else 0. */
EXPORT int kernel_add(float *work, float *home, const float *residual, const void *gradient, int64_t n, float factor,
                      int kind)
{
    int endless = add(work, home, residual, gradient, n, factor, kind);
    fence();
    return endless;
}

/* after = factor * before + gradient, and work = residual + after; in Nesterov's form after = factor * (before + gradient),
   and work = (gradient + after) + residual. home = gradient, a float one, unless it is NULL. 1 if anything in work is then
   not finite, else 0. */
EXPORT int kernel_momentum(float *work, float *home, const float *residual, const void *gradient, const float *before,
                           float *after, int64_t n, float factor, int nesterov, int kind)
{
    int endless = momentum(work, home, residual, gradient, before, after, n, factor, nesterov, kind);
    fence();
    return endless;
}
