/* SPDX-License-Identifier: Apache-2.0 */
/* The loop of kernel_updates.c, in the words of kernel_levels.h. */

/* total = update, n elements, past the caches. */
TARGET static void AT(pass)(float *total, const float *update, int64_t n)
{
    int64_t i = 0;
    while (i < n) {
        if (n - i < WIDTH || !ALIGNED(total + i)) {
            total[i] = update[i];
            i++;
            continue;
        }
        for (; i + WIDTH <= n; i += WIDTH)
            STREAM(total + i, LOAD(update + i));
    }
}
