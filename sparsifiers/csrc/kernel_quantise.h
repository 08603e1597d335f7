/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that the loops of quantisers share: see kernel_quantise.c. The quantisers are specified, operation by
   operation, in sparsifiers/quantising/eden.py and linear.py, so that each operation rounds as torch's does. */

#ifndef SPARSIFIERS_KERNEL_QUANTISE_H
#define SPARSIFIERS_KERNEL_QUANTISE_H

#include "kernel.h"

#include <math.h>
#include <string.h>

/* Quantisers, by the numbers of native.py. */
enum { EDEN_1 = 1, EDEN_2, EDEN_3, EDEN_4, INT_4, INT_8 };
enum { LARGEST = 256 }; /* coordinates of a block */
enum { SCALE = 2 };     /* bytes of a scale, a bfloat16 */
enum { WORDS = 4 };     /* random words of a block in one stream */

#define GOLDEN UINT64_C(0x9E3779B97F4A7C15)
#define STREAM_KEY UINT64_C(0xD1342543DE82EF95) /* between the keys of two streams */

/* Consecutive blocks of one tensor: the quantiser, the coordinates of each, and the key of the random words. */
struct blocks {
    int codec, size;
    uint64_t key;  /* of the words */
    int64_t first; /* number of the first of them in the tensor */
};

enum { MIXED = 1 }; /* the last bit of a scale: of a block of zeros and others, see eden.py */
enum { HALF_STREAM = 2 }; /* of the random words that choose a half */

/* How records are written and read; a level has one of its own.

   encode: float32[count * size] as count records, none of them mixed, at most 64; the squares of all are added to
   `squares` unless it is NULL. Returns a bit for each block of eden that has a zero.
   decode: the values of count records, plus `before` unless it is NULL, all of it times `scale`: float32[count * size].
   `to` may be `before`. streamed: write past the caches, `to` is on a 64-byte boundary. */
typedef uint64_t encode_loop(const struct blocks *of, const float *values, int64_t count, uint8_t *out,
                             double *squares);
typedef void decode_loop(const struct blocks *of, const uint8_t *data, int64_t count, const float *before, float scale,
                         float *to, int streamed);
encode_loop kernel_eden_encode, kernel_integers_encode;
decode_loop kernel_eden_decode, kernel_integers_decode;
#if X86
encode_loop kernel_eden_encode_avx2, kernel_eden_encode_avx512, kernel_integers_encode_avx2,
    kernel_integers_encode_avx512;
decode_loop kernel_eden_decode_avx2, kernel_eden_decode_avx512, kernel_integers_decode_avx2,
    kernel_integers_decode_avx512;
#endif

/* One half of a block with one bit, which counts twice: rotated by itself, by its own part of the block's words. */
void kernel_eden_encode_half(const struct blocks *of, int64_t block, int second, const float *values, uint8_t *out);
void kernel_eden_decode_half(const struct blocks *of, int64_t block, int second, const uint8_t *data, float *read);

/* As encode, with the loop for the level in use, and zeros that stay zeros. length: elements, without what fills up the
   last block. held: a bit for each coordinate, 0 where it is zero and must be read as such; NULL: find them. */
void kernel_write_blocks(const struct blocks *of, const float *values, int64_t count, int64_t length,
                         const uint8_t *held, uint8_t *out, double *squares);
/* As decode, of such records. */
void kernel_read_blocks(const struct blocks *of, const uint8_t *data, int64_t count, const float *before, float scale,
                        float *to, int streamed);
/* Set the bits of those coordinates that records of eden hold a value of. */
void kernel_note_held(const struct blocks *of, const uint8_t *data, int64_t count, uint8_t *held);

INLINE int64_t record_bytes(int codec, int size)
{
    return SCALE + (codec == INT_8 ? 8 : codec == INT_4 ? 4 : codec) * size / 8;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* To the nearest bfloat16, half to even; NaN is one. */
INLINE uint16_t bfloat_of(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* 2**(exponent - 127), exponents outside of 1 to 254 as the nearest of these. */
INLINE float power_of_two(int exponent)
{
    return float_of((uint32_t)(exponent < 1 ? 1 : exponent > 254 ? 254 : exponent) << 23);
}

/* The sum of squares of a block, from that of the block times `power`, a power of two. */
INLINE double unscaled(float energy, float power)
{
    double unit = 1.0 / (double)power;
    return (double)energy * unit * unit;
}

/* Call an always inlined function with the bits and the size of `of` as constants. A checker of memory would take
   minutes to compile all of that. */
#if defined(__SANITIZE_ADDRESS__)
#define EACH for
#define FOR_SIZE(call, bits) call(bits, of->size)
#define FOR_BITS(call) FOR_SIZE(call, of->codec);
#else
#define EACH _Pragma("GCC unroll 16") for
#define FOR_SIZE(call, bits)                                                                                         \
    do {                                                                                                             \
        if (of->size == 256)                                                                                         \
            call(bits, 256);                                                                                         \
        else if (of->size == 128)                                                                                    \
            call(bits, 128);                                                                                         \
        else                                                                                                         \
            call(bits, 64);                                                                                          \
    } while (0)
#define FOR_BITS(call)                                                                                               \
    switch (of->codec) {                                                                                             \
    case EDEN_1: FOR_SIZE(call, 1); break;                                                                           \
    case EDEN_2: FOR_SIZE(call, 2); break;                                                                           \
    case EDEN_3: FOR_SIZE(call, 3); break;                                                                           \
    default: FOR_SIZE(call, 4);                                                                                      \
    }
#endif

/* -- random words: see draws.py ------------------------------------------------------------------------------------ */

INLINE uint64_t first_counter(const struct blocks *of, int64_t block, int stream)
{
    return of->key + (uint64_t)stream * STREAM_KEY + WORDS * (uint64_t)(of->first + block) * GOLDEN;
}

/* The words of a block from its first counter on, as many as `size` coordinates have. */
INLINE void draw(uint64_t counter, int size, uint64_t *words)
{
    for (int j = 0; j < size / 64; j++, counter += GOLDEN) {
        uint64_t word = (counter ^ counter >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
        word = (word ^ word >> 27) * UINT64_C(0x94D049BB133111EB);
        words[j] = word ^ word >> 31;
    }
}

/* -- eden: the front of a record ----------------------------------------------------------------------------------- */

#define LEAST_SCALE 0x1p-118f
#define MOST_SCALE 0x1p104f

/* Levels, and the thresholds between them in units of a block's root mean square. */
#define LEVELS_1 {30}
#define LEVELS_2 {30, 100}
#define LEVELS_3 {12, 36, 64, 103}
#define LEVELS_4 {6, 18, 30, 43, 58, 74, 95, 126}
#define MIDDLE(low, high) ((float)(((low) + (high)) / 2))
#define THRESHOLDS_2 {MIDDLE(0.4528, 1.5104)}
#define THRESHOLDS_3 {MIDDLE(0.2451, 0.7560), MIDDLE(0.7560, 1.3439), MIDDLE(1.3439, 2.1520)}
#define THRESHOLDS_4                                                                                                 \
    {MIDDLE(0.1284, 0.3881), MIDDLE(0.3881, 0.6568), MIDDLE(0.6568, 0.9424), MIDDLE(0.9424, 1.2562),                 \
     MIDDLE(1.2562, 1.6181), MIDDLE(1.6181, 2.0690), MIDDLE(2.0690, 2.7326)}

/* Whether a block with the largest square `highest` is to be rotated twice: one coordinate stands out, or none does. */
INLINE int is_uneven(int bits, int size, float highest, float energy)
{
    return (highest > (bits == 1 ? 1.0f / 16 : 1.0f / 8) * energy && highest < energy) ||
           highest * (float)size < 4 * energy;
}

/* The scale of a block in 16 bits, of which the last one is 0. inner: the sum of products of coordinates and levels; exponent: of its largest. */
INLINE uint16_t eden_scale(float energy, float inner, int exponent, int again)
{
    float scale = energy / inner * power_of_two(exponent);
    scale = scale >= LEAST_SCALE ? (scale > MOST_SCALE ? MOST_SCALE : scale) : 0.0f;
    uint32_t bits = bits_of(scale);
    bits = (bits + 0xffff + (bits >> 17 & 1)) >> 17 << 1;
    return (uint16_t)((exponent == 255 ? 0x7fc0 : bits) | (uint32_t)again << 15);
}

/* -- integers: their scale ----------------------------------------------------------------------------------------- */

#define LEAST_OF_INTEGERS 0x1p-109f
#define MOST_OF_INTEGERS 0x1p119f

/* The scale of a block with a largest magnitude of these bits: a bfloat16, as a float. */
INLINE float integers_scale(int32_t largest, float levels)
{
    if (largest >= 0x7f800000)
        return float_of(0x7fc00000);
    float most = float_of((uint32_t)largest);
    float wanted = (most > MOST_OF_INTEGERS ? MOST_OF_INTEGERS : most) / levels;
    return wanted < LEAST_OF_INTEGERS ? 0.0f : float_of((uint32_t)bfloat_of(wanted) << 16);
}

INLINE void write_scale(uint16_t scale, uint8_t *out)
{
    out[0] = (uint8_t)scale; /* little-endian */
    out[1] = (uint8_t)(scale >> 8);
}

INLINE uint16_t read_scale(const uint8_t *data) { return (uint16_t)(data[0] | data[1] << 8); }

#endif
