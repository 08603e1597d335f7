/* SPDX-License-Identifier: Apache-2.0 */
/* Eden for any machine, in plain C: see eden.py. The sums of H are of integers when it is read, exact in any order;
   when it is written they have the order of `hadamard` there.

   A block is a matrix of 16 columns. Butterflies of distance 1 to 8 are between its columns, and those of more
   between its rows. For the former it is transposed, so that compilers find neighbours that are computed alike. */

#include "kernel_quantise_codes.h"

enum { COLUMNS = 16 };

static const float LEVELS[5][8] = {{0}, LEVELS_1, LEVELS_2, LEVELS_3, LEVELS_4};
static const float THRESHOLDS[5][7] = {{0}, {0}, THRESHOLDS_2, THRESHOLDS_3, THRESHOLDS_4};

/* Butterflies between the rows of a matrix, `rows` of `columns` each. */
#define BETWEEN_ROWS(type, matrix, rows, columns)                                                                    \
    for (int distance = 1; distance < (rows); distance *= 2)                                                         \
        for (int r = 0; r < (rows); r++)                                                                             \
            for (int c = 0; !(r & distance) && c < (columns); c++) {                                                 \
                type left = matrix[r * (columns) + c], right = matrix[(r + distance) * (columns) + c];               \
                matrix[r * (columns) + c] = (type)(left + right);                                                    \
                matrix[(r + distance) * (columns) + c] = (type)(left - right);                                       \
            }

#define TRANSPOSED(matrix, rows, columns, to)                                                                        \
    for (int r = 0; r < (rows); r++)                                                                                 \
        for (int c = 0; c < (columns); c++)                                                                          \
            to[c * (rows) + r] = matrix[r * (columns) + c];

INLINE void rotate(float *block, int size)
{
    float turned[LARGEST];
    const int rows = size / COLUMNS;
    TRANSPOSED(block, rows, COLUMNS, turned)
    BETWEEN_ROWS(float, turned, COLUMNS, rows)
    TRANSPOSED(turned, COLUMNS, rows, block)
    BETWEEN_ROWS(float, block, rows, COLUMNS)
}

/* Change the sign where a word has its bit: the first one is for coordinate `from`, a multiple of 32. */
INLINE void flip(float *block, int size, int from, uint64_t counter)
{
    uint64_t words[WORDS];
    draw(counter, (from + size + 32) / 64 * 64, words);
    for (int j = 0; j < size / 32; j++) {
        const int at = from / 32 + j;
        const uint32_t word = (uint32_t)(words[at / 2] >> 32 * (at % 2));
        for (int i = 0; i < 32; i++)
            block[32 * j + i] = float_of(bits_of(block[32 * j + i]) ^ (word << (31 - i) & 0x80000000));
    }
}

/* The sum of `size` values, which are lost: halves are added. */
INLINE float folded(float *values, int size)
{
    for (int half = size / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            values[i] += values[i + half];
    return values[0];
}

/* Bit i % 8 of byte i / 8 is bit `plane` of codes[i]. */
INLINE void pack_plane(const uint8_t *codes, int size, int plane, uint8_t *out)
{
    for (int i = 0; i < size / 8; i++) {
        uint64_t eight;
        memcpy(&eight, codes + 8 * i, sizeof eight);
        eight = eight >> plane & UINT64_C(0x0101010101010101);
        eight |= eight >> 7;
        eight |= eight >> 14;
        out[i] = (uint8_t)(eight | eight >> 28);
    }
}

/* Write `size` coordinates, from number `from` of their block on, and read them `factor` times, a power of two. */
/* Returns whether there is a zero. */
INLINE int encode_block(const struct blocks *of, int bits, int size, int from, float factor, const float *values,
                        int64_t block, uint8_t *out, double *squares)
{
    float rows[LARGEST], products[LARGEST], levels[LARGEST];
    int32_t numbers[LARGEST], largest = 0, zero = 0;
    uint8_t codes[LARGEST];
    for (int i = 0; i < size; i++) { /* of floats without their sign NaN has the largest bits */
        int32_t key = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        largest = key > largest ? key : largest;
        zero |= key == 0;
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
    const int again = is_uneven(bits, size, most * most, energy);
    for (int times = 0; times <= again; times++) {
        flip(rows, size, from, first_counter(of, block, times));
        rotate(rows, size);
    }
    const float root = sqrtf(again ? energy * (float)size : energy);
    for (int i = 0; i < size; i++) {
        products[i] = float_of(bits_of(rows[i]) & 0x7fffffff);
        numbers[i] = rows[i] < 0;
        levels[i] = LEVELS[bits][0];
    }
    for (int j = 0; j + 1 < 1 << (bits - 1); j++) { /* differences of levels have exact sums */
        const float bound = root * THRESHOLDS[bits][j], more = LEVELS[bits][j + 1] - LEVELS[bits][j];
        for (int i = 0; i < size; i++) {
            numbers[i] += products[i] > bound ? 2 : 0;
            levels[i] += products[i] > bound ? more : 0.0f;
        }
    }
    for (int i = 0; i < size; i++) {
        codes[i] = (uint8_t)numbers[i];
        products[i] *= levels[i];
    }
    write_scale(eden_scale(energy * factor, folded(products, size), exponent, again), out);
    for (int plane = 0; plane < bits; plane++)
        pack_plane(codes, size, plane, out + SCALE + plane * size / 8);
    return zero;
}

INLINE void decode_block(const struct blocks *of, int bits, int size, int from, const uint8_t *data, int64_t block,
                         float *read)
{
    int16_t matrix[LARGEST], turned[LARGEST];
    const int rows = size / COLUMNS;
    for (int i = 0; i < size / 8; i++) {
        uint64_t codes = 0;
        for (int plane = 0; plane < bits; plane++) {
            uint64_t eight = data[SCALE + plane * size / 8 + i];
            eight |= eight << 28;
            eight |= eight << 14;
            codes |= ((eight | eight << 7) & UINT64_C(0x0101010101010101)) << plane;
        }
        for (int j = 0; j < 8; j++)
            turned[(8 * (i % 2) + j) * rows + i / 2] = SIGNED_LEVELS[bits][codes >> 8 * j & 0xff];
    }
    BETWEEN_ROWS(int16_t, turned, COLUMNS, rows)
    TRANSPOSED(turned, COLUMNS, rows, matrix)
    BETWEEN_ROWS(int16_t, matrix, rows, COLUMNS)
    for (int i = 0; i < size; i++)
        read[i] = (float)matrix[i];
    const uint32_t scale = (uint32_t)read_scale(data) << 16;
    if (scale >> 31) { /* sums of at most 2**8 * 2**15: exact as floats, too */
        flip(read, size, from, first_counter(of, block, 1));
        rotate(read, size);
    }
    flip(read, size, from, first_counter(of, block, 0));
    for (int i = 0; i < size; i++)
        read[i] *= float_of(scale & 0x7fffffff);
}

INLINE uint64_t encode_all(const struct blocks *of, int bits, int size, const float *values, int64_t count,
                           uint8_t *out, double *squares)
{
    uint64_t zeros = 0;
    for (int64_t block = 0; block < count; block++)
        zeros |= (uint64_t)encode_block(of, bits, size, 0, 1.0f, values + block * size, block,
                                        out + block * record_bytes(bits, size), squares)
                 << block;
    return zeros;
}

INLINE void decode_all(const struct blocks *of, int bits, int size, const uint8_t *data, int64_t count,
                       const float *before, float factor, float *to)
{
    float read[LARGEST];
    for (int64_t block = 0; block < count; block++, to += size) {
        decode_block(of, bits, size, 0, data + block * record_bytes(bits, size), block, read);
        for (int i = 0; before && i < size; i++)
            read[i] = before[block * size + i] + read[i];
        for (int i = 0; i < size; i++)
            to[i] = read[i] * factor;
    }
}

uint64_t kernel_eden_encode(const struct blocks *of, const float *values, int64_t count, uint8_t *out, double *squares)
{
#define ENCODE(bits, size) return encode_all(of, bits, size, values, count, out, squares)
    FOR_SIZE(ENCODE, of->codec);
}

void kernel_eden_decode(const struct blocks *of, const uint8_t *data, int64_t count, const float *before, float scale,
                        float *to, int streamed)
{
    (void)streamed;
#define DECODE(bits, size) decode_all(of, bits, size, data, count, before, scale, to)
    FOR_SIZE(DECODE, of->codec);
}

void kernel_eden_encode_half(const struct blocks *of, int64_t block, int second, const float *values, uint8_t *out)
{
    const int half = of->size / 2, from = second * half;
    encode_block(of, EDEN_1, half, from, 2.0f, values + from, block, out, 0);
}

void kernel_eden_decode_half(const struct blocks *of, int64_t block, int second, const uint8_t *data, float *read)
{
    const int half = of->size / 2;
    decode_block(of, EDEN_1, half, second * half, data, block, read);
}
