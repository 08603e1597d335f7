/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors are moved by what arrives of them: see moving.py. Records are read and applied stretch by stretch, so that
   values that were read need not leave the first-level cache, and each tensor is gone over once. */

#include "kernel_quantise.h"

enum { STRETCH = 2048 }; /* coordinates: two buffers of them fill half of the cache */
/* Numbers of a run of blocks, in the order of `FIELDS` of tables.py; and addresses of the tensors that it moves. */
enum { BEFORE, NUMBER, FIRST, COUNT, SIZE, LENGTH, SOURCE, TARGET, FIELDS };
enum { BASE, OWN, MOMENTUM, SQUARES, ADDRESSES };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* The key of a tensor under that of its message: see `key_within` of draws.py. */
static uint64_t key_within(uint64_t key, int64_t number)
{
    uint64_t word = key ^ (uint64_t)number;
    word = (word ^ word >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ word >> 27) * UINT64_C(0x94D049BB133111EB);
    return word ^ word >> 31;
}

INLINE int sum_body(const float *before, const float *read, int64_t n, float *total)
{
    for (int64_t i = 0; i < n; i++)
        total[i] = before[i] + read[i];
    return 0;
}
FOR_EACH_LEVEL(int, sum, (const float *before, const float *read, int64_t n, float *total), (before, read, n, total))

/* base -= total * scale, and own += sent * factor - total * scale; `sent` becomes the latter difference. */
INLINE int move_body(float *base, float *own, const float *total, float scale, float *sent, float factor, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const float moved = total[i] * scale;
        base[i] -= moved;
        sent[i] = sent[i] * factor - moved;
        own[i] += sent[i];
    }
    return 0;
}
FOR_EACH_LEVEL(int, move, (float *base, float *own, const float *total, float scale, float *sent, float factor,
                           int64_t n),
               (base, own, total, scale, sent, factor, n))

/* momentum -= moved * (sqrt(squares) + eps) * factor; without squares, moved * factor. */
INLINE int follow_body(float *momentum, const float *squares, const float *moved, float factor, float eps, int64_t n)
{
    if (squares)
        for (int64_t i = 0; i < n; i++)
            momentum[i] -= moved[i] * (sqrtf(squares[i]) + eps) * factor;
    else
        for (int64_t i = 0; i < n; i++)
            momentum[i] -= moved[i] * factor;
    return 0;
}
FOR_EACH_LEVEL(int, follow, (float *momentum, const float *squares, const float *moved, float factor, float eps,
                             int64_t n),
               (momentum, squares, moved, factor, eps, n))

/* Move the tensors of `count` runs of blocks, each by the sum of `senders` messages times `scale`; own parameters by as
   much less `factor` times what this rank has sent.

   runs, sent: int64[count][FIELDS], where their records lie in each of the rows, and in `message`, this rank's own.
   row_bytes: from one row to the next. own: the row that has the bytes of `message`; -1: none has.
   addresses: [count][ADDRESSES], of elements 0 of tensors; without a base nothing is moved, and without a momentum that
   is not. factors: [count][2], of the momentum, and what is added to its root. */
EXPORT void kernel_move(int codec, const int64_t *runs, const int64_t *sent, int64_t count, const uint8_t *rows,
                        int64_t row_bytes, const uint64_t *keys, int64_t senders, float scale, const uint8_t *message,
                        uint64_t key, float factor, int64_t own, const uint64_t *addresses, const float *factors)
{
    float total[STRETCH], read[STRETCH];

    for (; count; count--, runs += FIELDS, sent += FIELDS, addresses += ADDRESSES, factors += 2) {
        const int64_t length = runs[LENGTH], size = runs[SIZE], start = runs[FIRST] * size;
        const int64_t bytes = record_bytes(codec, (int)size);
        const uint64_t before = (uint64_t)start * sizeof(float);
        float *const base = (float *)(uintptr_t)(addresses[BASE] + before);
        float *const parameter = (float *)(uintptr_t)(addresses[OWN] + before);
        float *const momentum = (float *)(uintptr_t)(addresses[MOMENTUM] + before);
        const float *const squares = (const float *)(uintptr_t)(addresses[SQUARES] + before);
        if (!addresses[BASE])
            continue;
        for (int64_t at = 0; at < length; at += STRETCH) {
            const int64_t n = least(STRETCH, length - at), block = at / size, blocks = (n + size - 1) / size;
            struct blocks of = {codec, (int)size, key_within(key, sent[NUMBER]), sent[FIRST] + block};
            const float *so_far = 0;
            kernel_read_blocks(&of, message + sent[SOURCE] + block * bytes, blocks, 0, 1.0f, read, 0);
            for (int64_t sender = 0; sender < senders; sender++) {
                if (sender == own) {
                    so_far = so_far ? (sum(so_far, read, blocks * size, total), total) : read;
                    continue;
                }
                of.key = key_within(keys[sender], runs[NUMBER]);
                of.first = runs[FIRST] + block;
                kernel_read_blocks(&of, rows + sender * row_bytes + runs[SOURCE] + block * bytes, blocks, so_far, 1.0f,
                                   total, 0);
                so_far = total;
            }
            move(base + at, parameter + at, so_far, scale, read, factor, n);
            if (addresses[MOMENTUM])
                follow(momentum + at, addresses[SQUARES] ? squares + at : 0, read, factors[0], factors[1], n);
        }
    }
}
