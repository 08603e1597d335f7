/* What memories make of a residual and a gradient. See kernel.c for what holds of all. */

#include "kernel.h"

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
