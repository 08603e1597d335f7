/* SPDX-License-Identifier: Apache-2.0 */
/* Loops over float32 at indices: sent values are subtracted, values that arrive are added. See kernel.c for the rules
   of all. */

#include "kernel.h"

/* The largest of the indices as unsigned numbers, so that a negative one is too large. */
INLINE uint32_t largest_index_body(const int32_t *indices, int64_t count)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = (uint32_t)indices[i] > largest ? (uint32_t)indices[i] : largest;
    return largest;
}
FOR_EACH_LEVEL(uint32_t, largest_index, (const int32_t *indices, int64_t count), (indices, count))

enum { LOOK_AHEAD = 48 }; /* indices of elements that are fetched ahead */

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

/* values = work[indices], and work[indices] -= values, one by one; where a value is not 0, momentum[indices] *= 0, unless it
   is NULL. 0, or -1 without doing anything if an index is outside [0, n). */
EXPORT int kernel_take(float *work, float *momentum, int64_t n, const int32_t *indices, float *values, int64_t count)
{
    if (count > 0 && largest_index(indices, count) >= (uint64_t)n)
        return -1;
    for (int64_t i = 0; i < count; i++) {
        if (i + LOOK_AHEAD < count) {
            PREFETCH_TO_WRITE(work + indices[i + LOOK_AHEAD]);
            if (momentum)
                PREFETCH_TO_WRITE(momentum + indices[i + LOOK_AHEAD]);
        }
        float value = work[indices[i]];
        values[i] = value;
        work[indices[i]] = value - value;
        if (momentum)
            momentum[indices[i]] *= value == 0;
    }
    return 0;
}

/* momentum[indices] *= 0 where sent values are not 0; 0, or -1, with nothing done, if an index is outside [0, n). */
EXPORT int kernel_mask(float *momentum, int64_t n, const int32_t *indices, const float *sent, int64_t count)
{
    if (count > 0 && largest_index(indices, count) >= (uint64_t)n)
        return -1;
    for (int64_t i = 0; i < count; i++) {
        if (i + LOOK_AHEAD < count)
            PREFETCH_TO_WRITE(momentum + indices[i + LOOK_AHEAD]);
        momentum[indices[i]] *= sent[i] == 0;
    }
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
