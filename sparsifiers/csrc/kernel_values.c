/* SPDX-License-Identifier: Apache-2.0 */
/* The codecs of a few bits a value: `Steps` and `Signs` of agmerge/exchanges/message/scaled.py, where they are specified,
   operation by operation, so that each rounds as torch's does. See kernel.c for the rules of all.

   Values are written and read by blocks that share a scale or two; intermediate results of a block stay in the
   first-level cache. All scales come first, then all codes, the first in the lowest bits of a byte. */

#include "kernel.h"
#include "kernel_codes.h"

#include <float.h>
#include <string.h>

enum { AHEAD = 2048 };             /* bytes that are fetched ahead: to compute takes as long as to wait for memory */
enum { HALF = CODES / 2 };         /* of the values of a block, which share a scale, or two */
static const float WHOLE = 0x3p22f; /* a float of this size has no fraction, so that adding it rounds: half to even */

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The value clamped to the limit in magnitude, or NaN if it is not finite. */
INLINE float saturated(float value, float limit)
{
    float least = value < -limit ? -limit : value, inside = least > limit ? limit : least;
    return inside + 0.0f * value;
}

/* -- values of the codes of a block ------------------------------------------------------------------------------ */

INLINE void read_steps_body(const uint8_t *codes, int width, const float *scales, float *restrict read)
{
    int sign = 1 << (width - 1);
    for (int i = 0; i < CODES; i++)
        read[i] = (float)((codes[i] ^ sign) - sign) * scales[0];
}

/* The bits of a magnitude, and the sign before them. */
INLINE void read_signs_body(const uint8_t *codes, int width, const float *scales, float *restrict read)
{
    uint32_t lower = bits_of(scales[0]), other = width == 2 ? lower ^ bits_of(scales[1]) : 0;
    for (int i = 0; i < CODES; i++) {
        uint32_t code = codes[i], bits = lower ^ (other & (0 - (code >> 1))) ^ code << 31;
        read[i] = float_of(bits);
    }
}

/* -- a block of values ------------------------------------------------------------------------------------------- */

/* Integers, of which the largest value of the block is `levels`. */
INLINE void steps_body(const float *values, int width, float *scales, uint8_t *restrict codes, float *restrict read)
{
    const float levels = (float)((1 << (width - 1)) - 1);
    int32_t largest = 0;
    for (int i = 0; i < CODES; i++) { /* of floats without their sign NaN has the largest bits */
        int32_t key = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        largest = key > largest ? key : largest;
    }
    const float scale = saturated(float_of((uint32_t)largest) / levels, FLT_MAX / (levels + 1));
    for (int i = 0; i < CODES; i++) {
        float step = values[i] / scale;
        step = step == step ? step : 0.0f; /* 0/0, and values that are not finite; the scale carries that */
        step = step > levels ? levels : step;
        step = (step < -levels ? -levels : step) + WHOLE;
        codes[i] = (uint8_t)(bits_of(step) & ((1u << width) - 1));
        read[i] = (step - WHOLE) * scale;
    }
    scales[0] = scale;
}

/* The sum of HALF values, which are lost. Halves are added elementwise, so the order is fixed. */
INLINE float sum_body(float *values)
{
    for (int half = HALF / 2; half >= 8; half /= 2)
        for (int i = 0; i < half; i++)
            values[i] += values[i + half];
    for (int half = 4; half; half /= 2)
        for (int i = 0; i < half; i++)
            values[i] += values[i + half];
    return values[0];
}

/* Cut off to 16 significant bits. */
INLINE float coarse(float mean) { return float_of(bits_of(mean) & 0xffffff00); }

/* The sign of each value, and the mean magnitude of the `filled` first; in two bits, whether it is above that mean, and
   the mean magnitudes of those that are not, and of those that are. */
INLINE void signs_body(const float *values, int width, float filled, float *scales, uint8_t *restrict codes, float *restrict read)
{
    float rows[CODES], sums[HALF], higher[CODES];
    for (int i = 0; i < CODES; i++) {
        float value = saturated(values[i], FLT_MAX / CODES); /* so many have a finite sum */
        rows[i] = float_of(bits_of(value) & 0x7fffffff);
        codes[i] = values[i] < 0.0f;
    }
    for (int i = 0; i < HALF; i++)
        sums[i] = rows[i] + rows[i + HALF];
    float mean = sum_body(sums) / filled;
    scales[0] = coarse(mean);
    if (width == 2) {
        int32_t count = 0;
        for (int i = 0; i < CODES; i++) {
            int32_t above = rows[i] > mean;
            codes[i] = (uint8_t)(codes[i] + 2 * above);
            higher[i] = rows[i] * (float)above; /* of values that are not finite: NaN */
            count += above;
        }
        for (int i = 0; i < HALF; i++) {
            sums[i] = (rows[i] - higher[i]) + (rows[i + HALF] - higher[i + HALF]);
            higher[i] += higher[i + HALF];
        }
        float many = (float)count, few = filled - many;
        scales[0] = coarse(sum_body(sums) / (few < 1.0f ? 1.0f : few));
        scales[1] = coarse(sum_body(higher) / (many < 1.0f ? 1.0f : many));
    }
    read_signs_body(codes, width, scales, read);
}

/* -- messages ---------------------------------------------------------------------------------------------------- */

INLINE void encode_body(const float *values, int64_t count, int64_t used, int width, uint8_t *scales, uint8_t *out,
                        float *read)
{
    float padded[CODES], short_of[CODES], pair[2];
    uint8_t codes[CODES], packed[CODES];
    const size_t each = width == 2 ? 2 * sizeof(float) : sizeof(float);
    for (int64_t start = 0; start < count; start += CODES) {
        int64_t size = count - start < CODES ? count - start : CODES, filled = used - start;
        const float *block = values + start;
        float *to = read + start;
        for (int i = 0; i < CODES; i += 16) {
            PREFETCH((const char *)(block + i) + AHEAD);
            PREFETCH_TO_WRITE((const char *)(to + i) + AHEAD);
        }
        if (size < CODES) {
            memset(padded, 0, sizeof padded);
            memcpy(padded, block, (size_t)size * sizeof(float));
            block = padded;
            to = short_of;
        }
        filled = filled < 1 ? 1 : filled > CODES ? CODES : filled;
        if (width >= 4)
            steps_body(block, width, pair, codes, to);
        else
            signs_body(block, width, (float)filled, pair, codes, to);
        pack_body(codes, width, packed);
        memcpy(scales, pair, each);
        memcpy(out + start * width / 8, packed, (size_t)(size * width + 7) / 8);
        scales += each;
        if (size < CODES)
            memcpy(read + start, short_of, (size_t)size * sizeof(float));
    }
    if (used < count)
        memset(read + (used < 0 ? 0 : used), 0, (size_t)(count - (used < 0 ? 0 : used)) * sizeof(float));
}

INLINE void decode_body(const uint8_t *scales, const uint8_t *data, int64_t count, int width, float *read)
{
    float short_of[CODES], pair[2];
    uint8_t codes[CODES], packed[CODES];
    const size_t each = width == 2 ? 2 * sizeof(float) : sizeof(float);
    for (int64_t start = 0; start < count; start += CODES, scales += each) {
        int64_t size = count - start < CODES ? count - start : CODES;
        const uint8_t *from = data + start * width / 8;
        if (size < CODES) {
            memset(packed, 0, sizeof packed);
            memcpy(packed, from, (size_t)(size * width + 7) / 8);
            from = packed;
        }
        float *to = size < CODES ? short_of : read + start;
        memcpy(pair, scales, each);
        unpack_body(from, width, codes);
        if (width >= 4)
            read_steps_body(codes, width, pair, to);
        else
            read_signs_body(codes, width, pair, to);
        if (size < CODES)
            memcpy(read + start, short_of, (size_t)size * sizeof(float));
    }
}

/* The width is a constant in every function, so that each loop is unrolled for its own. */
#define FOR_WIDTH(width)                                                                                             \
    INLINE void encode_##width##_body(const float *values, int64_t count, int64_t used, uint8_t *scales,             \
                                      uint8_t *out, float *read)                                                     \
    {                                                                                                                \
        encode_body(values, count, used, width, scales, out, read);                                                  \
    }                                                                                                                \
    FOR_EACH_LEVEL(void, encode_##width,                                                                             \
                   (const float *values, int64_t count, int64_t used, uint8_t *scales, uint8_t *out, float *read),   \
                   (values, count, used, scales, out, read))                                                         \
    INLINE void decode_##width##_body(const uint8_t *scales, const uint8_t *data, int64_t count, float *read)        \
    {                                                                                                                \
        decode_body(scales, data, count, width, read);                                                               \
    }                                                                                                                \
    FOR_EACH_LEVEL(void, decode_##width, (const uint8_t *scales, const uint8_t *data, int64_t count, float *read),   \
                   (scales, data, count, read))
FOR_WIDTH(8)
FOR_WIDTH(4)
FOR_WIDTH(2)
FOR_WIDTH(1)

/* Write `count` values by the codec of that many bits, 8, 4, 2 or 1; the first `used` are in use, and the others 0. read:
   the values as receivers will read them, 0 behind those in use. */
EXPORT void kernel_values_encode(const float *values, int64_t count, int64_t used, int width, uint8_t *scales,
                                 uint8_t *out, float *read)
{
    (width == 8 ? encode_8 : width == 4 ? encode_4 : width == 2 ? encode_2 : encode_1)(values, count, used, scales,
                                                                                       out, read);
}

/* Read the first `count` values that `kernel_values_encode` has written. */
EXPORT void kernel_values_decode(const uint8_t *scales, const uint8_t *data, int64_t count, int width, float *read)
{
    (width == 8 ? decode_8 : width == 4 ? decode_4 : width == 2 ? decode_2 : decode_1)(scales, data, count, read);
}
