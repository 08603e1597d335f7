/* SPDX-License-Identifier: Apache-2.0 */
/* The loops of kernel_memory.c, in the words of kernel_levels.h. Output goes past the caches: it is read again
   only when its whole merge buffer is. Each product and each sum is rounded by itself. A `check` adds up 0 times the
   output: NaN, if an element is not finite. Keys above a floor are noted, GROUP elements at a time. */

/* Write a register at element i, and return the register written to work. */
TARGET INLINE vec AT(add_some)(float *work, float *home, const float *residual, const void *gradient, int64_t i,
                               float factor, int kind, int streamed, vec *check)
{
    vec other = OTHER(gradient, i, kind), sum = SPLAT(factor) * LOAD(residual + i) + other;
    *check = MULTIPLY_ADD(sum, SPLAT(0), *check);
    if (home)
        WRITE(home + i, other, streamed);
    STREAM(work + i, sum);
    return sum;
}

/* work = factor * residual + gradient, and home = gradient if there is a home, n elements. */
TARGET INLINE int AT(add_of)(float *work, float *home, const float *residual, const void *gradient, int64_t n,
                             float factor, int kind, struct notes *notes)
{
    const int32_t floor = notes ? notes->floor : 0;
    vec check = SPLAT(0);
    float zero = 0;
    int64_t i = 0;
    while (i < n) {
        if (n - i < GROUP || !ALIGNED(work + i)) {
            float other = other_one(gradient, i, kind);
            if (home)
                home[i] = other;
            work[i] = factor * residual[i] + other;
            zero += 0 * work[i];
            if (notes)
                note_one(notes, i, work[i]);
            i++;
            continue;
        }
        int streamed = home && ALIGNED(home + i);
        for (; i + GROUP <= n; i += GROUP) {
            vec sums[GROUP / WIDTH]; /* written out where there are hits */
            uint64_t hits = 0;
            for (int j = 0; j < GROUP; j += WIDTH) {
                vec sum = AT(add_some)(work, home, residual, gradient, i + j, factor, kind, streamed, &check);
                sums[j / WIDTH] = sum;
                hits |= notes ? (uint64_t)HITS(sum, floor) << j : 0;
            }
            if (hits)
                note(notes, i, sums, hits);
        }
    }
    return zero + TOTAL(check) != 0;
}

TARGET INLINE int AT(add_kind)(float *work, float *home, const float *residual, const void *gradient, int64_t n,
                               float factor, int kind, struct notes *notes)
{
    if (home)
        return AT(add_of)(work, home, residual, gradient, n, factor, FLOAT32, notes);
    return kind == FLOAT32    ? AT(add_of)(work, 0, residual, gradient, n, factor, FLOAT32, notes)
           : kind == BFLOAT16 ? AT(add_of)(work, 0, residual, gradient, n, factor, BFLOAT16, notes)
           : kind == FLOAT16  ? AT(add_of)(work, 0, residual, gradient, n, factor, FLOAT16, notes)
                              : AT(add_of)(work, 0, residual, gradient, n, factor, TAKEN_OFF, notes);
}

/* A loop that notes nothing does not look, either. */
TARGET static int AT(add)(float *work, float *home, const float *residual, const void *gradient, int64_t n,
                          float factor, int kind, struct notes *notes)
{
    return notes ? AT(add_kind)(work, home, residual, gradient, n, factor, kind, notes)
                 : AT(add_kind)(work, home, residual, gradient, n, factor, kind, 0);
}

TARGET INLINE vec AT(momentum_some)(float *work, float *home, const float *residual, const void *gradient,
                                    const float *before, float *after, int64_t i, float factor, int nesterov, int kind,
                                    int streamed, int home_streamed, vec *check)
{
    vec other = OTHER(gradient, i, kind), old = LOAD(before + i), rest = LOAD(residual + i), sum, new;
    new = nesterov ? SPLAT(factor) * (old + other) : SPLAT(factor) * old + other;
    sum = nesterov ? (other + new) + rest : rest + new;
    *check = MULTIPLY_ADD(sum, SPLAT(0), *check);
    if (home)
        WRITE(home + i, other, home_streamed);
    WRITE(after + i, new, streamed);
    STREAM(work + i, sum);
    return sum;
}

/* after = factor * before + gradient, and work = residual + after; in Nesterov's form after = factor * (before + gradient),
   and work = (gradient + after) + residual. home = gradient if there is a home. */
TARGET INLINE int AT(momentum_of)(float *work, float *home, const float *residual, const void *gradient,
                                  const float *before, float *after, int64_t n, float factor, int nesterov, int kind,
                                  struct notes *notes)
{
    const int32_t floor = notes ? notes->floor : 0;
    vec check = SPLAT(0);
    float zero = 0;
    int64_t i = 0;
    while (i < n) {
        if (n - i < GROUP || !ALIGNED(work + i)) {
            float other = other_one(gradient, i, kind);
            if (home)
                home[i] = other;
            after[i] = nesterov ? factor * (before[i] + other) : factor * before[i] + other;
            work[i] = nesterov ? (other + after[i]) + residual[i] : residual[i] + after[i];
            zero += 0 * work[i];
            if (notes)
                note_one(notes, i, work[i]);
            i++;
            continue;
        }
        int streamed = ALIGNED(after + i), home_streamed = home && ALIGNED(home + i);
        for (; i + GROUP <= n; i += GROUP) {
            vec sums[GROUP / WIDTH]; /* written out where there are hits */
            uint64_t hits = 0;
            for (int j = 0; j < GROUP; j += WIDTH) {
                vec sum = AT(momentum_some)(work, home, residual, gradient, before, after, i + j, factor, nesterov,
                                            kind, streamed, home_streamed, &check);
                sums[j / WIDTH] = sum;
                hits |= notes ? (uint64_t)HITS(sum, floor) << j : 0;
            }
            if (hits)
                note(notes, i, sums, hits);
        }
    }
    return zero + TOTAL(check) != 0;
}

TARGET INLINE int AT(momentum_kind)(float *work, float *home, const float *residual, const void *gradient,
                                    const float *before, float *after, int64_t n, float factor, int nesterov, int kind,
                                    struct notes *notes)
{
    if (home)
        return AT(momentum_of)(work, home, residual, gradient, before, after, n, factor, nesterov, FLOAT32, notes);
    if (nesterov && kind == FLOAT32)
        return AT(momentum_of)(work, 0, residual, gradient, before, after, n, factor, 1, FLOAT32, notes);
    if (kind == FLOAT32)
        return AT(momentum_of)(work, 0, residual, gradient, before, after, n, factor, 0, FLOAT32, notes);
    return AT(momentum_of)(work, 0, residual, gradient, before, after, n, factor, nesterov, kind, notes);
}

TARGET static int AT(momentum)(float *work, float *home, const float *residual, const void *gradient,
                               const float *before, float *after, int64_t n, float factor, int nesterov, int kind,
                               struct notes *notes)
{
    return notes ? AT(momentum_kind)(work, home, residual, gradient, before, after, n, factor, nesterov, kind, notes)
                 : AT(momentum_kind)(work, home, residual, gradient, before, after, n, factor, nesterov, kind, 0);
}
