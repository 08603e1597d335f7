/* SPDX-License-Identifier: Apache-2.0 */
/* One pass over an update that is the sum of lists of indices and values: see native.py. */

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

/* The same, for others: 1 or 0. */
EXPORT int kernel_fit(const int32_t *indices, int64_t count, int64_t first, int64_t n)
{
    return fit(indices, count, first, n);
}

#define LOOPS "kernel_updates_loops.h"
#include "kernel_levels.h"
DISPATCH(void, pass, (float *total, const float *update, int64_t n), (total, update, n))

/* Whether all of the lists fit; at = 0 for each. */
static int all_fit(const int32_t *const *indices, const int64_t *counts, int64_t *at, int64_t lists, int64_t first,
                   int64_t n)
{
    for (int64_t list = 0; list < lists; list++) {
        if (!fit(indices[list], counts[list], first, n))
            return 0;
        at[list] = 0;
    }
    return 1;
}

/* update = the sum of scale * values of all lists, list by list, each product rounded by itself, for the elements from
   start until stop; entries before are behind `at` in their lists already. */
static void add_up(float *update, int64_t start, int64_t stop, const int32_t *const *indices,
                   const float *const *values, const int64_t *counts, int64_t *at, int64_t lists, float scale)
{
    memset(update, 0, (size_t)(stop - start) * sizeof *update);
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
}

/* total = the sum of scale * values of all lists, see add_up. All indices count from 0. 0, or -1 without doing anything
   if some do not fit. at: scratch, as long as there are lists. */
EXPORT int kernel_write_sum(float *total, int64_t n, const int32_t *const *indices, const float *const *values,
                            const int64_t *counts, int64_t *at, int64_t lists, float scale)
{
    float update[STRETCH];

    if (!all_fit(indices, counts, at, lists, 0, n))
        return -1;
    for (int64_t start = 0; start < n; start += STRETCH) {
        int64_t stop = n - start < STRETCH ? n : start + STRETCH;
        add_up(update, start, stop, indices, values, counts, at, lists, scale);
        pass(total + start, update, stop - start);
    }
    fence();
    return 0;
}

/* base -= update and parameter -= update, where update is the sum of scale * values of all lists, list by list, each
   product rounded by itself. But at the places of `own`, parameter = base - rest, where rest is the old
   base - parameter less the sent values. All indices count from `first`. 0, or -1 without doing anything if some do
   not fit. at: scratch, as long as there are lists. */
EXPORT int kernel_take_in(float *base, float *parameter, int64_t n, int64_t first, const int32_t *const *indices,
                          const float *const *values, const int64_t *counts, int64_t *at, int64_t lists, float scale,
                          const int32_t *own, const float *sent, int64_t count)
{
    float update[STRETCH], rest[STRETCH];
    int64_t j = 0;

    if (!all_fit(indices, counts, at, lists, first, n) || !fit(own, count, first, n))
        return -1;
    base -= first;
    parameter -= first;
    for (int64_t start = first; start < first + n; start += STRETCH) {
        int64_t stop = first + n - start < STRETCH ? first + n : start + STRETCH, from = j;
        add_up(update, start, stop, indices, values, counts, at, lists, scale);
        for (; j < count && own[j] < stop; j++)
            rest[j - from] = base[own[j]] - parameter[own[j]] - sent[j];
        move(base + start, parameter + start, update, stop - start);
        for (int64_t k = from; k < j; k++)
            parameter[own[k]] = base[own[k]] - rest[k - from];
    }
    return 0;
}
