/* One pass over what all workers share of the parameters and what one of them has: see kernel.py, take_in. */

#include "kernel.h"

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

/* base -= update and parameter -= update; but at the indices, ascending, parameter = base - rest, where rest is what
   base - parameter was, less what was sent. 0, or -1 without doing anything if the indices do not ascend in [0, n). */
EXPORT int kernel_take_in(float *base, float *parameter, const float *update, int64_t n, const int32_t *indices,
                          const float *sent, int64_t count)
{
    float rest[STRETCH];
    int64_t j = 0;

    if (count > 0 && (indices[0] < 0 || indices[count - 1] >= n || !ascend(indices, count)))
        return -1;
    for (int64_t start = 0; start < n; start += STRETCH) {
        int64_t stop = n - start < STRETCH ? n : start + STRETCH, first = j;
        for (; j < count && indices[j] < stop; j++)
            rest[j - first] = base[indices[j]] - parameter[indices[j]] - sent[j];
        move(base + start, parameter + start, update + start, stop - start);
        for (int64_t k = first; k < j; k++)
            parameter[indices[k]] = base[indices[k]] - rest[k - first];
    }
    return 0;
}
