/* SPDX-License-Identifier: Apache-2.0 */
/* Rules of memories: sums of a residual and a gradient. See kernel.c for the rules of all. */

#include "kernel.h"

#include <string.h>

/* Notes of those of some elements with a key above `floor`: the position, `first` being that of the first of them, with
   the sign of the element as its own, and the key. A `held` above `room`: there was no room for all. The lists have
   SPARE slots more. */
struct notes {
    int32_t floor, first;
    int32_t *positions, *keys;
    int64_t elements, held, room;
};

enum { GROUP = 64, SPARE = GROUP + 1 }; /* GROUP: elements with hits in the bits of one word */

/* Note of the GROUP floats that begin at element i those that are bits of `hits`, one at least. */
INLINE void note(struct notes *notes, int64_t i, const void *group, uint64_t hits)
{
    int64_t held = notes->held, end = held + bits_set(hits);
    int32_t first = notes->first + (int32_t)i, *positions = notes->positions, *keys = notes->keys;
    notes->held = end;
    if (held > notes->room)
        return;
    do /* one slot beyond may be written; a branch for each hit would be mispredicted more often */
        for (int j = 0; j < 2; j++, held++, hits &= hits - 1) {
            int place = lowest_set(hits | UINT64_C(1) << (GROUP - 1));
            int32_t bits;
            memcpy(&bits, (const float *)group + place, sizeof bits);
            positions[held] = (first + place) | (bits & ~MAGNITUDE);
            keys[held] = bits & MAGNITUDE;
        }
    while (held < end);
}

INLINE void note_one(struct notes *notes, int64_t i, float value)
{
    int32_t key;
    memcpy(&key, &value, sizeof key);
    if ((key & MAGNITUDE) > notes->floor) {
        float group[GROUP] = {value};
        note(notes, i, group, 1);
    }
}

#define LOOPS "kernel_memory_loops.h"
#include "kernel_levels.h"

DISPATCH(int, add,
         (float *work, float *home, const float *residual, const void *gradient, int64_t n, float factor, int kind,
          struct notes *notes),
         (work, home, residual, gradient, n, factor, kind, notes))
DISPATCH(int, momentum,
         (float *work, float *home, const float *residual, const void *gradient, const float *before, float *after,
          int64_t n, float factor, int nesterov, int kind, struct notes *notes),
         (work, home, residual, gradient, before, after, n, factor, nesterov, kind, notes))

static int64_t width(int kind) { return kind == BFLOAT16 || kind == FLOAT16 ? 2 : 4; }

/* work = factor * residual + gradient, each rounded; home = gradient, a float one, unless it is NULL. 1 if anything in
   work is then not finite, else 0. notes: of so many parts that follow each other, n elements in all; none: 0 parts. */
EXPORT int kernel_add(float *work, float *home, const float *residual, const void *gradient, int64_t n, float factor,
                      int kind, struct notes *notes, int64_t parts)
{
    int endless = parts ? 0 : add(work, home, residual, gradient, n, factor, kind, NULL);
    for (int64_t p = 0, i = 0; p < parts; i += notes[p++].elements)
        endless |= add(work + i, home ? home + i : NULL, residual + i, (const char *)gradient + i * width(kind),
                       notes[p].elements, factor, kind, notes + p);
    fence();
    return endless;
}

/* after = factor * before + gradient, and work = residual + after; in Nesterov's form after = factor * (before + gradient),
   and work = (gradient + after) + residual. home, notes and the result: see kernel_add. */
EXPORT int kernel_momentum(float *work, float *home, const float *residual, const void *gradient, const float *before,
                           float *after, int64_t n, float factor, int nesterov, int kind, struct notes *notes,
                           int64_t parts)
{
    int endless = parts ? 0 : momentum(work, home, residual, gradient, before, after, n, factor, nesterov, kind, NULL);
    for (int64_t p = 0, i = 0; p < parts; i += notes[p++].elements)
        endless |= momentum(work + i, home ? home + i : NULL, residual + i, (const char *)gradient + i * width(kind),
                            before + i, after + i, notes[p].elements, factor, nesterov, kind, notes + p);
    fence();
    return endless;
}
