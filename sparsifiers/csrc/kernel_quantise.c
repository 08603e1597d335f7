/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised vectors: of values records, of the records of several senders their sum, and of that records again. See
   kernel.c for the rules of all, and native.py for the contract.

   A TILE of blocks is worked on at once: intermediate results stay in the first-level cache. */

#include "kernel_quantise.h"
#include "kernel_gradients.h"

enum { TILE = 4096 };      /* coordinates: 16 KB, half of the cache */
enum { STREAMED = 65536 }; /* elements of a vector from which on it is written past the caches */

#if defined(__GNUC__)
#define ON_A_LINE __attribute__((aligned(64)))
#else
#define ON_A_LINE
#endif

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* -- vectors of 16 bits an element --------------------------------------------------------------------------------- */

/* Of a half that is subnormal no float is made that is: some machines make that zero. */
INLINE float widened(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    if (magnitude >= 0x7c00u << 13)
        return float_of(sign | magnitude | 0x7f800000);
    float value = magnitude < 1u << 23 ? float_of(magnitude + (113u << 23)) - 0x1p-14f
                                       : float_of(magnitude + (112u << 23));
    return float_of(sign | bits_of(value));
}

/* To the nearest half, half to even. */
INLINE uint16_t half_of(float value)
{
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x47800000) /* 2**16 */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* 2**-14: adding 0.5 leaves multiples of 2**-24 in the lowest bits */
        float shifted = float_of(magnitude) + 0.5f;
        return (uint16_t)(sign | (bits_of(shifted) - 0x3f000000));
    }
    return (uint16_t)(sign | (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

INLINE void widen_body(const void *values, int64_t from, int64_t n, int kind, float *to)
{
    if (kind == FLOAT32)
        memcpy(to, (const float *)values + from, (size_t)n * sizeof(float));
    else if (kind == BFLOAT16)
        for (int64_t i = 0; i < n; i++)
            to[i] = float_of((uint32_t)((const uint16_t *)values)[from + i] << 16);
    else
        for (int64_t i = 0; i < n; i++)
            to[i] = widened(((const uint16_t *)values)[from + i]);
}
FOR_EACH_LEVEL(void, widen, (const void *values, int64_t from, int64_t n, int kind, float *to),
               (values, from, n, kind, to))

INLINE void narrow_body(const float *values, int64_t n, int kind, void *to, int64_t from)
{
    if (kind == FLOAT32)
        memcpy((float *)to + from, values, (size_t)n * sizeof(float));
    else if (kind == BFLOAT16)
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)to)[from + i] = bfloat_of(values[i]);
    else
        for (int64_t i = 0; i < n; i++)
            ((uint16_t *)to)[from + i] = half_of(values[i]);
}
FOR_EACH_LEVEL(void, narrow, (const float *values, int64_t n, int kind, void *to, int64_t from),
               (values, n, kind, to, from))

/* -- a tile -------------------------------------------------------------------------------------------------------- */

struct senders {
    const uint8_t *const *messages;
    const uint64_t *keys; /* of their words */
    const int64_t *firsts;
    int64_t count;
    int codec, size;
};

/* `scale` times the sum of all senders' values of `count` blocks from `block` on: in `to`, by way of `total`. */
static void add_up(const struct senders *all, int64_t block, int64_t count, float scale, float *total, float *to,
                   int streamed)
{
    const int64_t bytes = record_bytes(all->codec, all->size);
    for (int64_t sender = 0; sender < all->count; sender++) {
        struct blocks of = {all->codec, all->size, all->keys[sender], all->firsts[sender] + block};
        const int last = sender == all->count - 1;
        kernel_read_blocks(&of, all->messages[sender] + block * bytes, count, sender ? total : 0, last ? scale : 1.0f,
                           last ? to : total, last && streamed);
    }
}

/* Which coordinates of a tile some sender has a value of, a bit for each. */
static void note_all(const struct senders *all, int64_t block, int64_t count, uint8_t *held)
{
    const int64_t bytes = record_bytes(all->codec, all->size);
    memset(held, 0, TILE / 8);
    for (int64_t sender = 0; sender < all->count; sender++) {
        struct blocks of = {all->codec, all->size, all->keys[sender], all->firsts[sender] + block};
        kernel_note_held(&of, all->messages[sender] + block * bytes, count, held);
    }
}

/* -- exported functions -------------------------------------------------------------------------------------------- */

INLINE int subtract_body(const float *values, const float *less, int64_t n, float *to)
{
    for (int64_t i = 0; i < n; i++)
        to[i] = values[i] - less[i];
    return 0;
}
FOR_EACH_LEVEL(int, subtract, (const float *values, const float *less, int64_t n, float *to), (values, less, n, to))

/* Write n values, of a kind of kernel_gradients.h, as records; zeros fill up the last block. The squares
   of all are added to `squares` unless it is NULL. less: is subtracted from values that are floats; NULL: nothing is. */
EXPORT void kernel_quantise(const void *values, const float *less, int64_t n, int kind, int codec, int64_t size,
                            uint64_t key, int64_t first, uint8_t *out, double *squares)
{
    ON_A_LINE float tile[TILE];
    struct blocks of = {codec, (int)size, key, first};
    for (int64_t start = 0; start < n; start += TILE) {
        int64_t here = least(TILE, n - start), count = (here + size - 1) / size;
        const float *from = tile;
        if (kind == FLOAT32 && here == count * size && !less)
            from = (const float *)values + start;
        else {
            if (less)
                subtract((const float *)values + start, less + start, here, tile);
            else
                widen(values, start, here, kind, tile);
            memset(tile + here, 0, (size_t)(count * size - here) * sizeof(float));
        }
        kernel_write_blocks(&of, from, count, here, 0, out, squares);
        of.first += count;
        out += count * record_bytes(codec, (int)size);
    }
}

/* Write `scale` times the sum of the values of `senders` messages, added in their order: n elements of that kind. */
EXPORT void kernel_add_quantised(const uint8_t *const *messages, const uint64_t *keys, const int64_t *firsts,
                                 int64_t senders, int codec, int64_t size, float scale, void *out, int64_t n, int kind)
{
    ON_A_LINE float tile[TILE];
    const struct senders all = {messages, keys, firsts, senders, codec, (int)size};
    const int streamed = n >= STREAMED && (uintptr_t)out % 64 == 0;
    for (int64_t start = 0; start < n; start += TILE) {
        int64_t here = least(TILE, n - start), count = (here + size - 1) / size;
        int direct = kind == FLOAT32 && here == count * size;
        add_up(&all, start / size, count, scale, tile, direct ? (float *)out + start : tile, direct && streamed);
        if (!direct)
            narrow(tile, here, kind, out, start);
    }
}

/* Write that sum, of `count` blocks, as records of the quantiser `second`. */
EXPORT void kernel_quantise_sum(const uint8_t *const *messages, const uint64_t *keys, const int64_t *firsts,
                                int64_t senders, int codec, int64_t size, float scale, int second, uint64_t key,
                                int64_t first, uint8_t *out, int64_t count)
{
    ON_A_LINE float tile[TILE];
    uint8_t held[TILE / 8];
    const struct senders all = {messages, keys, firsts, senders, codec, (int)size};
    struct blocks of = {second, (int)size, key, first};
    for (int64_t block = 0; block < count; block += TILE / size) {
        int64_t here = least(TILE / size, count - block);
        add_up(&all, block, here, scale, tile, tile, 0);
        if (codec < INT_4) /* a sum may be 0 by chance */
            note_all(&all, block, here, held);
        kernel_write_blocks(&of, tile, here, here * size, codec < INT_4 ? held : 0, out, 0);
        of.first += here;
        out += here * record_bytes(second, (int)size);
    }
}
