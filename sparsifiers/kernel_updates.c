/* One pass over what all workers share of the parameters and what one of them has: see kernel.py, take_in. */

#include "kernel.h"

#include <string.h>

enum { STRETCH = 2048 }; /* elements that are gone over together: the first-level cache holds them */

INLINE int ascend_body(const int32_t *indices, int64_t count)
{
    int falls = 0;
    for (int64_t i = 1; i < count; i++)
        falls |= indices[i] <= indices[i - 1];
    return !falls;
}
FOR_EACH_LEVEL(int, ascend, (const int32_t *indices, int64_t count), (indices, count))

INLINE int move_body(float *base, float *parameter, const float *update, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        base[i] -= update[i];
        parameter[i] -= update[i];
    }
    return 0;
}
FOR_EACH_LEVEL(int, move, (float *base, float *parameter, const float *update, int64_t n),
               (base, parameter, update, n))

/* Whether the indices ascend from `first` on, within n. */
static int fit(const int32_t *indices, int64_t count, int64_t first, int64_t n)
{
    return count == 0 || (indices[0] >= first && indices[count - 1] < first + n && ascend(indices, count));
}

/* base -= update and parameter -= update, where update is the sum of scale * values of all lists, list by list, each
   product rounded by itself. But at the places of `own`, parameter = base - rest, where rest is what base - parameter
   was, less what was sent. All indices count from `first`. 0, or -1 without doing anything if some do not fit. at:
   scratch, as long as there are lists. */
EXPORT int kernel_take_in(float *base, float *parameter, int64_t n, int64_t first, const int32_t *const *indices,
                          const float *const *values, const int64_t *counts, int64_t *at, int64_t lists, float scale,
                          const int32_t *own, const float *sent, int64_t count)
{
    float update[STRETCH], rest[STRETCH];
    int64_t j = 0;

    for (int64_t list = 0; list < lists; list++) {
        if (!fit(indices[list], counts[list], first, n))
            return -1;
        at[list] = 0;
    }
    if (!fit(own, count, first, n))
        return -1;
    base -= first;
    parameter -= first;
    for (int64_t start = first; start < first + n; start += STRETCH) {
        int64_t stop = first + n - start < STRETCH ? first + n : start + STRETCH, from = j;
        memset(update, 0, sizeof update);
        for (int64_t list = 0; list < lists; list++) {
            const int32_t *places = indices[list];
            const float *parts = values[list];
            int64_t i = at[list];
            for (; i < counts[list] && places[i] < stop; i++) {
                float part = parts[i] * scale;
                update[places[i] - start] += part;
            }
            at[list] = i;
        }
        for (; j < count && own[j] < stop; j++)
            rest[j - from] = base[own[j]] - parameter[own[j]] - sent[j];
        move(base + start, parameter + start, update, stop - start);
        for (int64_t k = from; k < j; k++)
            parameter[own[k]] = base[own[k]] - rest[k - from];
    }
    return 0;
}
