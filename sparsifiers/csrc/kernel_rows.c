/* SPDX-License-Identifier: Apache-2.0 */
/* The largest of each row of a matrix of float32, exactly. See kernel.c for the rules of all.

   A row is read twice, from memory and then from the cache. The first time, its elements are dealt to groups
   and the largest key of each is noted: if q groups have a key of t or more, so has the row q elements. With
   several times as many groups as the quota, t is close to the row's q-th largest key, and the second time
   little more than the quota exceeds it. */

#include "kernel.h"

#include <string.h>

#define GROUPS 4 /* for each element of the quota: more cost more, fewer let more through */
#define STEP (1 << 20) /* of keys: an eighth of an octave */
#define LEAST 128 /* groups, where there are elements for them */
#define KEPT 64   /* of these, in registers: of AVX-512 four, of NEON sixteen */

/* The largest key of each of `groups` groups of a row; element i belongs to i % groups. groups <= n. */
INLINE void maxima_body(const int32_t *restrict row, int64_t n, int32_t mask, int32_t *restrict maxima, int64_t groups)
{
    int64_t i = groups;
    if (groups == LEAST) {
        for (int64_t first = 0; first < LEAST; first += KEPT) {
            int32_t kept[KEPT];
            for (int64_t g = 0; g < KEPT; g++)
                kept[g] = row[first + g] & mask;
            for (i = LEAST; i + LEAST <= n; i += LEAST)
                for (int64_t g = 0; g < KEPT; g++) {
                    int32_t key = row[i + first + g] & mask;
                    kept[g] = key > kept[g] ? key : kept[g];
                }
            for (int64_t g = 0; g < KEPT; g++)
                maxima[first + g] = kept[g];
        }
    } else
        for (int64_t g = 0; g < groups; g++)
            maxima[g] = row[g] & mask;
    for (; i < n; i += groups) {
        int64_t size = n - i < groups ? n - i : groups;
        for (int64_t g = 0; g < size; g++) {
            int32_t key = row[i + g] & mask;
            maxima[g] = key > maxima[g] ? key : maxima[g];
        }
    }
}
FOR_EACH_LEVEL(void, maxima, (const int32_t *row, int64_t n, int32_t mask, int32_t *maxima, int64_t groups),
               (row, n, mask, maxima, groups))

INLINE int64_t exceeding_body(const int32_t *keys, int64_t n, int32_t floor)
{
    int32_t count = 0; /* as wide as the keys: fewer instructions */
    for (int64_t i = 0; i < n; i++)
        count += keys[i] > floor;
    return count;
}
FOR_EACH_LEVEL(int64_t, exceeding, (const int32_t *keys, int64_t n, int32_t floor), (keys, n, floor))

/* A key that at least q of the maxima exceed, and little more where they differ. *tied: fewer exceed the next key. The
   search begins at a guess and goes on in growing steps till it has passed the key: rows of a matrix are alike. */
static int32_t floor_of(const int32_t *maxima, int64_t groups, int64_t q, int32_t guess, int *tied)
{
    int64_t low = -1, high = INT32_MAX; /* all exceed low, fewer than q exceed high */
    int64_t middle = guess, step = STEP;
    while (high - low > 1) {
        middle = middle <= low ? low + 1 : middle >= high ? high - 1 : middle;
        int64_t count = exceeding(maxima, groups, (int32_t)middle);
        if (count < q)
            high = middle;
        else
            low = middle;
        if (count >= q && count <= q + q / 4 + 1)
            break;
        middle = low < 0 ? high - step : high == INT32_MAX ? low + step : low + (high - low) / 2;
        step *= 2;
    }
    *tied = high - low == 1;
    return (int32_t)low;
}

/* kernel_cut for a list that may be short: then it is quicker to drop the smallest one by one. */
static void cut(int32_t *positions, int32_t *keys, int64_t held, int64_t q, int32_t *scratch)
{
    if ((held - q) * held > 128)
        kernel_cut(positions, keys, held, q, scratch);
    else
        for (; held > q; held--) {
            int64_t least = 0;
            int32_t lowest = keys[0];
            for (int64_t i = 1; i < held; i++) {
                least = keys[i] <= lowest ? i : least;
                lowest = keys[i] < lowest ? keys[i] : lowest;
            }
            size_t after = (size_t)(held - 1 - least) * sizeof(int32_t);
            memmove(keys + least, keys + least + 1, after);
            memmove(positions + least, positions + least + 1, after);
        }
}

/* Places of the q largest keys of a row, ascending, of equals the first; 0 <= q <= n. places, keys and scratch: n
   slots each. *guess: a floor of another row, and then of this one. */
static void top(const int32_t *row, int64_t n, int32_t mask, int64_t q, int32_t *places, int32_t *keys,
                int32_t *scratch, int32_t *guess)
{
    int64_t groups = (GROUPS * q + 15) / 16 * 16, held = 0;
    int32_t floor = -1;
    if (q == 0)
        return;
    if (groups < LEAST && 2 * LEAST <= n)
        groups = LEAST;
    if (2 * groups <= n) {
        int tied;
        maxima(row, n, mask, scratch, groups);
        *guess = floor = floor_of(scratch, groups, q, *guess, &tied);
        if (tied) {
            /* Many may equal floor + 1; if fewer than q exceed that, it is the q-th largest. */
            kernel_scan(row, 0, n, mask, floor + 1, places, keys, n, &held);
            if (held < q) {
                int64_t end = 0, vacant = q - held;
                for (; vacant > 0; end++)
                    vacant -= (row[end] & mask) == floor + 1;
                held = 0;
                kernel_scan(row, 0, end, mask, floor, places, keys, n, &held);
                kernel_scan(row, end, n, mask, floor + 1, places, keys, INT64_MAX, &held);
                return;
            }
        }
    }
    if (held == 0)
        kernel_scan(row, 0, n, mask, floor, places, keys, n, &held);
    cut(places, keys, held, q, scratch);
}

/* Positions, ascending, of the quotas[r] largest keys of each row r of [rows, length]; of equals in a row the
   first. scratch: 3 * length slots. */
EXPORT void kernel_rows(const int32_t *bits, int64_t rows, int64_t length, int32_t mask, const int64_t *quotas,
                        int32_t *scratch, int32_t *out)
{
    int32_t *places = scratch, *keys = places + length, *rest = keys + length, guess = INT32_MAX / 2;
    for (int64_t r = 0; r < rows; r++) {
        top(bits + r * length, length, mask, quotas[r], places, keys, rest, &guess);
        for (int64_t j = 0; j < quotas[r]; j++)
            *out++ = (int32_t)(r * length) + places[j];
    }
}
