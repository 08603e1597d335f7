/* SPDX-License-Identifier: Apache-2.0 */
/* The largest of each column of a C-order matrix of float32, exactly. See kernel.c for the rules of all.

   As in kernel_rows.c the matrix is read twice, but always in the order of memory: the first time the largest
   key in each of several groups of rows is noted for every column, which gives every column a floor; the second
   time the keys above their column's floor are collected, and these are cut column by column. */

#include "kernel.h"

#include <string.h>

#define GROUPS 4  /* for each element of the quota */
#define LANES 16  /* columns with floors that are found together */
#define CARRIED 3 /* candidates for each element of the quotas for which there is room */

/* maxima[c] = the largest key in column c of some rows. */
INLINE void tallest_body(const int32_t *restrict matrix, int64_t rows, int64_t columns, int64_t pitch, int32_t mask,
                         int32_t *restrict maxima)
{
    for (int64_t c = 0; c < columns; c++)
        maxima[c] = matrix[c] & mask;
    for (int64_t r = 1; r < rows; r++)
        for (int64_t c = 0; c < columns; c++) {
            int32_t key = matrix[r * pitch + c] & mask;
            maxima[c] = key > maxima[c] ? key : maxima[c];
        }
}
FOR_EACH_LEVEL(void, tallest,
               (const int32_t *matrix, int64_t rows, int64_t columns, int64_t pitch, int32_t mask, int32_t *maxima),
               (matrix, rows, columns, pitch, mask, maxima))

/* A floor for each of LANES columns from its maxima [groups, LANES]: bisection between `low`, which at least q of
   them exceed, and `high`, which fewer do. It closes on a key that little more than q exceed; where there is none,
   because many equal `high`, that is the floor, although too few may exceed it. */
INLINE void bisect_body(const int32_t *maxima, int64_t groups, const int32_t *q, int32_t *high)
{
    int32_t low[LANES], middle[LANES], count[LANES];
    for (int c = 0; c < LANES; c++)
        low[c] = high[c] = maxima[c];
    for (int64_t g = 1; g < groups; g++)
        for (int c = 0; c < LANES; c++) {
            int32_t key = maxima[g * LANES + c];
            low[c] = key < low[c] ? key : low[c];
            high[c] = key > high[c] ? key : high[c];
        }
    for (int c = 0; c < LANES; c++)
        low[c] -= 1;
    for (int open = 1; open;) {
        open = 0;
        for (int c = 0; c < LANES; c++) {
            middle[c] = (low[c] & high[c]) + ((low[c] ^ high[c]) >> 1); /* their sum might overflow */
            count[c] = 0;
        }
        for (int64_t g = 0; g < groups; g++)
            for (int c = 0; c < LANES; c++)
                count[c] += maxima[g * LANES + c] > middle[c];
        for (int c = 0; c < LANES; c++) {
            int few = count[c] < q[c], fits = !few && count[c] <= q[c] + q[c] / 4 + 1;
            if (middle[c] == low[c])
                continue; /* closed */
            if (!few)
                low[c] = middle[c];
            if (few || fits)
                high[c] = middle[c];
            open |= high[c] > low[c] + 1;
        }
    }
}
FOR_EACH_LEVEL(void, bisect, (const int32_t *maxima, int64_t groups, const int32_t *q, int32_t *high),
               (maxima, groups, q, high))

/* The q-th largest of n > q keys, and how many are larger. The keys are lost. Short lists lose their smallest one by
   one, which is quicker. */
static int32_t qth(int32_t *keys, int64_t n, int64_t q, int64_t *larger)
{
    int64_t equal;
    int32_t lowest;
    if ((n - q) * n > 128)
        return kernel_kth(keys, n, q, keys, larger, &equal);
    for (;; n--) {
        int64_t least = 0;
        lowest = keys[0];
        for (int64_t i = 1; i < n; i++) {
            least = keys[i] < lowest ? i : least;
            lowest = keys[i] < lowest ? keys[i] : lowest;
        }
        if (n == q)
            break;
        keys[least] = keys[n - 1];
    }
    *larger = 0;
    for (int64_t i = 0; i < n; i++)
        *larger += keys[i] > lowest;
    return lowest;
}

/* rows of a group; groups; runs of LANES columns; elements that are searched in one go, whole rows if they are short
   and adjacent; room for candidates */
typedef struct {
    int64_t step, groups, runs, tile, capacity;
} Sizes;

static Sizes sizes(int64_t length, int64_t columns, int64_t pitch, int64_t total, int64_t most)
{
    Sizes s;
    s.step = length / (GROUPS * (most > 0 ? most : 1));
    s.step = s.step > 1 ? s.step : 1;
    s.groups = (length + s.step - 1) / s.step;
    s.runs = (columns + LANES - 1) / LANES;
    s.tile = columns == pitch && columns < BLOCK ? BLOCK / columns * columns : columns;
    s.capacity = CARRIED * total + BLOCK;
    return s;
}

/* Slots of scratch for kernel_columns; total: the sum of the quotas, most: the largest. */
EXPORT int64_t kernel_columns_scratch(int64_t length, int64_t columns, int64_t pitch, int64_t total, int64_t most)
{
    Sizes s = sizes(length, columns, pitch, total, most);
    return s.runs * LANES * (s.groups + 8) + 2 * s.tile + 4 * s.capacity + total;
}

/* Positions, ascending, of the quotas[c] largest keys of each of `columns` adjacent columns of a matrix with
   `length` rows, with starts `pitch` apart; of equals in a column the first. 0, or -1 if there was not the room
   for the candidates. */
EXPORT int kernel_columns(const int32_t *bits, int64_t length, int64_t columns, int64_t pitch, int32_t mask,
                          const int64_t *quotas, int64_t total, int64_t most, int32_t *scratch, int32_t *out)
{
    const Sizes s = sizes(length, columns, pitch, total, most);
    const int64_t lanes = s.runs * LANES, tall = s.tile / columns;
    int32_t *maxima = scratch, *row = maxima + lanes * s.groups, *wanted = row + lanes, *floors = wanted + lanes;
    int32_t *starts = floors + lanes, *counts = starts + lanes, *limits = counts + lanes, *ties = limits + lanes;
    int32_t *short_of = ties + lanes, *tiled = short_of + lanes, *column_of = tiled + s.tile, *positions = column_of + s.tile;
    int32_t *keys = positions + s.capacity, *owners = keys + s.capacity, *sorted = owners + s.capacity;
    int32_t *extra = sorted + s.capacity, hits[BLOCK + 64];

    memset(row, 0, (size_t)(8 * lanes) * sizeof(int32_t));
    for (int64_t g = 0; g < s.groups; g++) {
        int64_t first = g * s.step, rows = length - first < s.step ? length - first : s.step;
        tallest(bits + first * pitch, rows, columns, pitch, mask, row);
        for (int64_t run = 0; run < s.runs; run++)
            memcpy(maxima + (run * s.groups + g) * LANES, row + run * LANES, LANES * sizeof(int32_t));
    }
    for (int64_t c = 0; c < columns; c++)
        wanted[c] = (int32_t)quotas[c];
    for (int64_t run = 0; run < s.runs; run++)
        bisect(maxima + run * s.groups * LANES, s.groups, wanted + run * LANES, floors + run * LANES);

    for (int64_t i = 0; i < s.tile; i++) {
        column_of[i] = (int32_t)(i % columns);
        tiled[i] = wanted[column_of[i]] ? floors[column_of[i]] : INT32_MAX;
    }
    int64_t held = 0;
    for (int64_t r = 0; r < length; r += tall) {
        int64_t base = r * pitch, end = length - r < tall ? (length - r) * columns : s.tile;
        for (int64_t i = 0; i < end; i += BLOCK) {
            int64_t size = end - i < BLOCK ? end - i : BLOCK;
            if (held + size > s.capacity)
                return -1;
            int64_t count = kernel_hits(bits + base + i, size, mask, tiled + i, hits);
            for (int64_t j = 0; j < count; j++) {
                int64_t place = i + hits[j];
                positions[held + j] = (int32_t)(base + place);
                keys[held + j] = bits[base + place] & mask;
                owners[held + j] = column_of[place];
                counts[column_of[place]]++;
            }
            held += count;
        }
    }

    for (int64_t c = 1; c < columns; c++)
        starts[c] = starts[c - 1] + counts[c - 1];
    for (int64_t i = 0; i < held; i++)
        sorted[starts[owners[i]]++] = keys[i];
    int64_t lacking = 0;
    for (int64_t c = 0; c < columns; c++) { /* starts[c] is now where column c ends */
        limits[c] = -1;
        if (counts[c] > wanted[c]) {
            int64_t larger;
            limits[c] = qth(sorted + starts[c] - counts[c], counts[c], wanted[c], &larger);
            ties[c] = (int32_t)(wanted[c] - larger);
        } else if (counts[c] < wanted[c]) {
            wanted[c] -= counts[c];
            short_of[lacking++] = (int32_t)c;
        }
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < held; i++) {
        int32_t owner = owners[i], key = keys[i], tie = key == limits[owner] && ties[owner] > 0;
        ties[owner] -= tie;
        positions[kept] = positions[i];
        kept += key > limits[owner] || tie;
    }
    /* Columns of which too few exceed the floor also send the first that equal it. */
    int64_t extras = 0, a = 0, b = 0;
    for (const int32_t *here = bits; lacking > 0; here += pitch) {
        int64_t still = 0;
        for (int64_t j = 0; j < lacking; j++) {
            int32_t c = short_of[j];
            if ((here[c] & mask) == floors[c]) {
                extra[extras++] = (int32_t)(here - bits) + c;
                wanted[c]--;
            }
            short_of[still] = c;
            still += wanted[c] > 0;
        }
        lacking = still;
    }
    for (int64_t i = 0; i < total; i++)
        out[i] = b == extras || (a < kept && positions[a] < extra[b]) ? positions[a++] : extra[b++];
    return 0;
}
