/* SPDX-License-Identifier: Apache-2.0 */
/* int8 and int4 for any machine, from one body that the compiler vectorises for each level: see linear.py. */

#include "kernel_quantise.h"

static const float WHOLE = 0x3p22f; /* a float of this size has no fraction, so that adding it rounds: half to even */

INLINE void encode_block_body(const float *values, int width, int size, uint8_t *restrict out, double *squares)
{
    const float levels = (float)((1 << (width - 1)) - 1);
    int32_t largest = 0;
    for (int i = 0; i < size; i++) { /* of floats without their sign NaN has the largest bits */
        int32_t key = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        largest = key > largest ? key : largest;
    }
    if (squares) { /* as eden adds them up */
        const float power = power_of_two(254 - (largest >> 23));
        float products[LARGEST];
        for (int i = 0; i < size; i++) {
            float value = values[i] * power;
            products[i] = value * value;
        }
        for (int half = size / 2; half; half /= 2)
            for (int i = 0; i < half; i++)
                products[i] += products[i + half];
        *squares += unscaled(products[0], power);
    }
    const float scale = integers_scale(largest, levels);
    write_scale(bfloat_of(scale), out);
    out += SCALE;
    uint8_t codes[LARGEST];
    if (!(scale > 0))
        memset(codes, 0, sizeof codes);
    else
        for (int i = 0; i < size; i++) {
            float step = values[i] / scale;
            step = step > levels ? levels : step;
            step = (step < -levels ? -levels : step) + WHOLE;
            codes[i] = (uint8_t)(bits_of(step) & ((1u << width) - 1));
        }
    if (width == 8)
        memcpy(out, codes, (size_t)size);
    else
        for (int i = 0; i < size / 2; i++)
            out[i] = (uint8_t)(codes[i] | codes[i + size / 2] << 4);
}

INLINE void decode_block_body(const uint8_t *data, int width, int size, const float *before, float factor, float *to)
{
    const float scale = float_of((uint32_t)read_scale(data) << 16);
    int16_t steps[LARGEST];
    data += SCALE;
    if (width == 8)
        for (int i = 0; i < size; i++)
            steps[i] = (int16_t)(int8_t)data[i];
    else
        for (int i = 0; i < size / 2; i++) {
            steps[i] = (int16_t)(((data[i] & 15) ^ 8) - 8);
            steps[i + size / 2] = (int16_t)((data[i] >> 4 ^ 8) - 8);
        }
    if (before)
        for (int i = 0; i < size; i++)
            to[i] = (before[i] + (float)steps[i] * scale) * factor;
    else
        for (int i = 0; i < size; i++)
            to[i] = (float)steps[i] * scale * factor;
}

/* Width and size are constants in every loop. */
#define BLOCKS(width, each)                                                                                          \
    for (int64_t block = 0; block < count; block++) {                                                                \
        if (of->size == 256)                                                                                         \
            each(width, 256);                                                                                        \
        else if (of->size == 128)                                                                                    \
            each(width, 128);                                                                                        \
        else                                                                                                         \
            each(width, 64);                                                                                         \
    }

INLINE void encode_body(const struct blocks *of, const float *values, int64_t count, uint8_t *out, double *squares)
{
#define ENCODE(width, size)                                                                                          \
    encode_block_body(values + block * size, width, size, out + block * (SCALE + width * size / 8), squares)
    if (of->codec == INT_8)
        BLOCKS(8, ENCODE)
    else
        BLOCKS(4, ENCODE)
}

INLINE void decode_body(const struct blocks *of, const uint8_t *data, int64_t count, const float *before, float scale,
                        float *to)
{
#define DECODE(width, size)                                                                                          \
    decode_block_body(data + block * (SCALE + width * size / 8), width, size, before ? before + block * size : before, \
                      scale, to + block * size)
    if (of->codec == INT_8)
        BLOCKS(8, DECODE)
    else
        BLOCKS(4, DECODE)
}

FOR_EACH_LEVEL(void, encode,
               (const struct blocks *of, const float *values, int64_t count, uint8_t *out, double *squares),
               (of, values, count, out, squares))
FOR_EACH_LEVEL(void, decode,
               (const struct blocks *of, const uint8_t *data, int64_t count, const float *before, float scale,
                float *to),
               (of, data, count, before, scale, to))

uint64_t kernel_integers_encode(const struct blocks *of, const float *values, int64_t count, uint8_t *out,
                                double *squares)
{
    encode(of, values, count, out, squares);
    return 0;
}

void kernel_integers_decode(const struct blocks *of, const uint8_t *data, int64_t count, const float *before,
                            float scale, float *to, int streamed)
{
    (void)streamed;
    decode(of, data, count, before, scale, to);
}
