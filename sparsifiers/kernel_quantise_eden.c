/* Eden for any machine, in plain C: see eden.py. The sums of H are of integers when it is read, exact in any order; when
   it is written they have the order of rotation.py. */

#include "kernel_quantise.h"

static const float LEVELS[5][8] = {{0}, LEVELS_1, LEVELS_2, LEVELS_3, LEVELS_4};
static const float THRESHOLDS[5][7] = {{0}, {0}, THRESHOLDS_2, THRESHOLDS_3, THRESHOLDS_4};

/* Butterflies of distance 1, 2, 4, ..., on rows of `type`. */
#define BUTTERFLIES(type, rows, size)                                                                                \
    for (int distance = 1; distance < (size); distance *= 2)                                                         \
        for (int start = 0; start < (size); start += 2 * distance)                                                   \
            for (int i = start; i < start + distance; i++) {                                                         \
                type left = rows[i], right = rows[i + distance];                                                     \
                rows[i] = (type)(left + right);                                                                      \
                rows[i + distance] = (type)(left - right);                                                           \
            }

/* Change the sign where a word has its bit. */
static void flip(float *rows, int size, uint64_t counter)
{
    uint64_t words[WORDS];
    draw(counter, size, words);
    for (int i = 0; i < size; i++)
        rows[i] = float_of(bits_of(rows[i]) ^ (uint32_t)(words[i / 64] >> i % 64 & 1) << 31);
}

/* The sum of `size` values, which are lost: halves are added. */
static float folded(float *rows, int size)
{
    for (int half = size / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            rows[i] += rows[i + half];
    return rows[0];
}

/* Bit i % 8 of byte i / 8 is bit 0 of values[i] >> shift. */
static void pack(const uint8_t *values, int size, int shift, uint8_t *out)
{
    for (int i = 0; i < size / 8; i++) {
        unsigned byte = 0;
        for (int j = 0; j < 8; j++)
            byte |= (unsigned)(values[8 * i + j] >> shift & 1) << j;
        out[i] = (uint8_t)byte;
    }
}

static void encode_block(const struct blocks *of, const float *values, int64_t block, uint8_t *out, double *squares)
{
    const int bits = of->codec, size = of->size;
    float rows[LARGEST], products[LARGEST];
    uint8_t codes[LARGEST];
    int32_t largest = 0;
    for (int i = 0; i < size; i++) { /* of floats without their sign NaN has the largest bits */
        int32_t key = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        largest = key > largest ? key : largest;
    }
    const int exponent = largest >> 23;
    const float power = power_of_two(254 - exponent);
    for (int i = 0; i < size; i++) {
        rows[i] = values[i] * power;
        products[i] = rows[i] * rows[i];
    }
    const float energy = folded(products, size), most = float_of((uint32_t)largest) * power;
    if (squares)
        *squares += unscaled(energy, power);
    const int again = is_spiked(bits, most * most, energy);
    flip(rows, size, first_counter(of, block, 0));
    BUTTERFLIES(float, rows, size)
    if (again) {
        flip(rows, size, first_counter(of, block, 1));
        BUTTERFLIES(float, rows, size)
    }
    const float root = sqrtf(again ? energy * (float)size : energy);
    for (int i = 0; i < size; i++) {
        float magnitude = float_of(bits_of(rows[i]) & 0x7fffffff);
        int number = 0;
        for (int j = 0; j + 1 < 1 << (bits - 1); j++)
            number += magnitude > root * THRESHOLDS[bits][j];
        codes[i] = (uint8_t)((rows[i] < 0) | number << 1);
        products[i] = magnitude * LEVELS[bits][number];
    }
    write_scale(eden_scale(energy, folded(products, size), exponent, again), out);
    for (int plane = 0; plane < bits; plane++)
        pack(codes, size, plane, out + SCALE + plane * size / 8);
}

void kernel_eden_encode(const struct blocks *of, const float *values, int64_t count, uint8_t *out, double *squares)
{
    for (int64_t block = 0; block < count; block++, values += of->size, out += record_bytes(of->codec, of->size))
        encode_block(of, values, block, out, squares);
}

static void decode_block(const struct blocks *of, const uint8_t *data, int64_t block, float *read)
{
    const int bits = of->codec, size = of->size;
    int16_t rows[LARGEST];
    for (int i = 0; i < size; i++) {
        int code = 0;
        for (int plane = 0; plane < bits; plane++)
            code |= (data[SCALE + plane * size / 8 + i / 8] >> i % 8 & 1) << plane;
        int level = (int)LEVELS[bits][code >> 1];
        rows[i] = (int16_t)(code & 1 ? -level : level);
    }
    BUTTERFLIES(int16_t, rows, size)
    for (int i = 0; i < size; i++)
        read[i] = (float)rows[i];
    const uint32_t scale = (uint32_t)read_scale(data) << 16;
    if (scale >> 31) { /* sums of at most 2**8 * 2**15: exact as floats, too */
        flip(read, size, first_counter(of, block, 1));
        BUTTERFLIES(float, read, size)
    }
    flip(read, size, first_counter(of, block, 0));
    for (int i = 0; i < size; i++)
        read[i] *= float_of(scale & 0x7fffffff);
}

void kernel_eden_decode(const struct blocks *of, const uint8_t *data, int64_t count, const float *before, float scale,
                        float *to, int streamed)
{
    float read[LARGEST];
    (void)streamed;
    for (int64_t block = 0; block < count; block++, data += record_bytes(of->codec, of->size), to += of->size) {
        decode_block(of, data, block, read);
        for (int i = 0; i < of->size; i++)
            to[i] = (before ? before[i] + read[i] : read[i]) * scale;
        before = before ? before + of->size : before;
    }
}
