/* SPDX-License-Identifier: Apache-2.0 */
/* Eden is written with AVX2: eight registers of a block at a time, the others lie in the first-level cache.
   See eden.py for each operation and the order of additions. */

#include "kernel_quantise_codes.h"

#if X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c,bmi,bmi2,popcnt")))
#define LOOP TARGET INLINE
enum { LANES = 8, GROUP = 8, TOGETHER = LANES * GROUP }; /* registers that are rotated together; their coordinates */

/* -- rotation ------------------------------------------------------------------------------------------------------ */

/* v where a bit of 32 is 0, -v where it is 1: those from 8 * part on. */
LOOP __m256 flipped(__m256 v, __m256i bits, int part)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                  places = _mm256_sub_epi32(_mm256_set1_epi32(31 - 8 * part), lanes);
    __m256i minus = _mm256_and_si256(_mm256_sllv_epi32(bits, places), _mm256_set1_epi32((int)0x80000000));
    return _mm256_xor_ps(v, _mm256_castsi256_ps(minus));
}

LOOP __m256i word_of(const uint64_t *words, int number)
{
    int32_t word;
    memcpy(&word, (const char *)words + 4 * number, sizeof word);
    return _mm256_set1_epi32(word);
}

/* Butterflies of distance 1 to 32: `rows` times `power`, with other signs, to `to`. Inside a register, left + right
   and left - right are the one that is there times 1 or -1 plus the other one: a product that is exact, and one
   rounding. */
LOOP void rotate_near(const float *rows, int size, __m256 power, const uint64_t *words, float *to)
{
    const __m256 by_1 = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1), by_2 = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1),
                 by_4 = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
    for (int i = 0; i < size; i += TOGETHER) {
        __m256 v[GROUP];
        EACH(int r = 0; r < GROUP; r++)
        {
            v[r] = _mm256_mul_ps(_mm256_loadu_ps(rows + i + r * LANES), power);
            v[r] = flipped(v[r], word_of(words, i / 32 + r / 4), r % 4);
            v[r] = _mm256_fmadd_ps(v[r], by_1, _mm256_permute_ps(v[r], 0xb1));
            v[r] = _mm256_fmadd_ps(v[r], by_2, _mm256_permute_ps(v[r], 0x4e));
            v[r] = _mm256_fmadd_ps(v[r], by_4, _mm256_permute2f128_ps(v[r], v[r], 1));
        }
        EACH(int distance = 1; distance < GROUP; distance *= 2)
            EACH(int r = 0; r < GROUP; r++)
                if (!(r & distance)) {
                    __m256 left = v[r], right = v[r + distance];
                    v[r] = _mm256_add_ps(left, right);
                    v[r + distance] = _mm256_sub_ps(left, right);
                }
        EACH(int r = 0; r < GROUP; r++)
            _mm256_storeu_ps(to + i + r * LANES, v[r]);
    }
}

/* Butterflies of distance 64 and 128 of the registers of a column, which lie that far apart: size / 64 of them. */
LOOP void rotate_far(const float *rows, int size, __m256 *v)
{
    EACH(int r = 0; r < size / TOGETHER; r++)
        v[r] = _mm256_loadu_ps(rows + r * TOGETHER);
    EACH(int distance = 1; distance < size / TOGETHER; distance *= 2)
        EACH(int r = 0; r < size / TOGETHER; r++)
            if (!(r & distance)) {
                __m256 left = v[r], right = v[r + distance];
                v[r] = _mm256_add_ps(left, right);
                v[r + distance] = _mm256_sub_ps(left, right);
            }
}

/* The sum of n registers, lane by lane: halves are added. */
LOOP __m256 added(__m256 *v, int n)
{
    EACH(int half = n / 2; half; half /= 2)
        EACH(int r = 0; r < half; r++)
            v[r] = _mm256_add_ps(v[r], v[r + half]);
    return v[0];
}

/* The sum of a block, of which `sums` has one register for each column: in the lowest lane. */
LOOP __m128 folded(__m256 *sums)
{
    __m256 all = added(sums, GROUP);
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_add_ss(sum, _mm_movehdup_ps(sum));
}

/* Butterflies of distance 64 and 128 of a block. */
LOOP void rotate_columns(float *rows, int size)
{
    for (int column = 0; column < TOGETHER; column += LANES) {
        __m256 v[LARGEST / TOGETHER];
        rotate_far(rows + column, size, v);
        EACH(int r = 0; r < size / TOGETHER; r++)
            _mm256_storeu_ps(rows + column + r * TOGETHER, v[r]);
    }
}

/* Change signs, and rotate once more, but for distance 64 and 128. Few blocks need it. */
TARGET static void start_again(float *rows, int size, uint64_t counter)
{
    uint64_t words[WORDS];
    draw(counter, size, words);
    rotate_near(rows, size, _mm256_set1_ps(1), words, rows);
}

/* Rotate a block once more, by the words from a counter on. */
TARGET void kernel_rotate_again_avx2(float *rows, int size, uint64_t counter)
{
    start_again(rows, size, counter);
    rotate_columns(rows, size);
}

/* -- levels -------------------------------------------------------------------------------------------------------- */

static const float LEVELS[5][8] = {{0}, LEVELS_1, LEVELS_2, LEVELS_3, LEVELS_4};
static const float THRESHOLDS[5][8] = {{0}, {0}, THRESHOLDS_2, THRESHOLDS_3, THRESHOLDS_4};

LOOP __m256 lane(__m256 table, int number) { return _mm256_permutevar8x32_ps(table, _mm256_set1_epi32(number)); }

LOOP __m256i taken(__m256 where, int number) /* where all bits are set */
{
    return _mm256_and_si256(_mm256_castps_si256(where), _mm256_set1_epi32(number));
}

LOOP void put(uint8_t *plane, __m256 bits) { *plane = (uint8_t)_mm256_movemask_ps(bits); }

/* Write the codes of a register, and return its magnitudes times their levels. planes: `apart` bytes from one to
   the next. */
LOOP __m256 levels_of(__m256 v, int bits, __m256 bounds, __m256 levels, uint8_t *planes, int apart)
{
    put(planes, _mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_LT_OQ));
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
    __m256 level = lane(levels, 0);
    if (bits == 2) {
        __m256 above = _mm256_cmp_ps(magnitude, lane(bounds, 0), _CMP_GT_OQ);
        put(planes + apart, above);
        level = _mm256_blendv_ps(level, lane(levels, 1), above);
    } else if (bits > 2) { /* bit by bit, from the highest */
        __m256 above = _mm256_cmp_ps(magnitude, lane(bounds, bits == 4 ? 3 : 1), _CMP_GT_OQ);
        put(planes + (bits - 1) * apart, above);
        __m256i number = taken(above, bits == 4 ? 4 : 2);
        if (bits == 4) {
            __m256 bound = _mm256_blendv_ps(lane(bounds, 1), lane(bounds, 5), above);
            above = _mm256_cmp_ps(magnitude, bound, _CMP_GT_OQ);
            put(planes + 2 * apart, above);
            number = _mm256_or_si256(number, taken(above, 2));
        }
        above = _mm256_cmp_ps(magnitude, _mm256_permutevar8x32_ps(bounds, number), _CMP_GT_OQ);
        put(planes + apart, above);
        level = _mm256_permutevar8x32_ps(levels, _mm256_or_si256(number, taken(above, 1)));
    }
    return _mm256_mul_ps(magnitude, level);
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */

/* zero: set to whether there is one. */
LOOP int32_t largest_of(const float *values, int size, int *zero)
{
    const __m256i magnitude = _mm256_set1_epi32(MAGNITUDE);
    __m256i most[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256()};
    __m256i few[4] = {magnitude, magnitude, magnitude, magnitude};
    for (int i = 0; i < size; i += 4 * LANES)
        EACH(int r = 0; r < 4; r++)
        {
            __m256i bits = _mm256_loadu_si256((const __m256i *)(values + i + r * LANES));
            bits = _mm256_and_si256(bits, magnitude);
            most[r] = _mm256_max_epi32(most[r], bits);
            few[r] = _mm256_min_epi32(few[r], bits);
        }
    few[0] = _mm256_min_epi32(_mm256_min_epi32(few[0], few[1]), _mm256_min_epi32(few[2], few[3]));
    *zero = _mm256_movemask_epi8(_mm256_cmpeq_epi32(few[0], _mm256_setzero_si256())) != 0;
    most[0] = _mm256_max_epi32(_mm256_max_epi32(most[0], most[1]), _mm256_max_epi32(most[2], most[3]));
    __m128i all = _mm_max_epi32(_mm256_castsi256_si128(most[0]), _mm256_extracti128_si256(most[0], 1));
    all = _mm_max_epi32(all, _mm_shuffle_epi32(all, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(all, _mm_shuffle_epi32(all, 0xb1)));
}

/* Returns whether there is a zero. */
LOOP int encode_block(const struct blocks *of, int bits, int size, const float *values, int64_t block, uint8_t *out,
                      double *squares)
{
    enum { FAR = LARGEST / TOGETHER };
    float rows[LARGEST];
    uint64_t words[WORDS];
    __m256 sums[GROUP];
    draw(first_counter(of, block, 0), size, words);
    int zero;
    const int32_t largest = largest_of(values, size, &zero);
    const int exponent = largest >> 23;
    const float power = power_of_two(254 - exponent);
    const __m256 powers = _mm256_set1_ps(power);
    EACH(int column = 0; column < GROUP; column++)
    {
        __m256 v[FAR];
        EACH(int r = 0; r < size / TOGETHER; r++)
        {
            v[r] = _mm256_mul_ps(_mm256_loadu_ps(values + column * LANES + r * TOGETHER), powers);
            v[r] = _mm256_mul_ps(v[r], v[r]);
        }
        sums[column] = added(v, size / TOGETHER);
    }
    const float energy = _mm_cvtss_f32(folded(sums)), most = float_of((uint32_t)largest) * power;
    if (squares)
        *squares += unscaled(energy, power);
    const int again = is_uneven(bits, size, most * most, energy);
    rotate_near(values, size, powers, words, rows);
    if (__builtin_expect(again, 0)) {
        rotate_columns(rows, size);
        start_again(rows, size, first_counter(of, block, 1));
    }
    const __m128 root = _mm_sqrt_ss(_mm_set_ss(again ? energy * (float)size : energy));
    const __m256 levels = _mm256_loadu_ps(LEVELS[bits]),
                 bounds = _mm256_mul_ps(_mm256_broadcastss_ps(root), _mm256_loadu_ps(THRESHOLDS[bits]));
    EACH(int column = 0; column < GROUP; column++)
    {
        __m256 v[FAR];
        rotate_far(rows + column * LANES, size, v);
        EACH(int r = 0; r < size / TOGETHER; r++)
            v[r] = levels_of(v[r], bits, bounds, levels, out + SCALE + column + r * GROUP, size / 8);
        sums[column] = added(v, size / TOGETHER);
    }
    write_scale(eden_scale(energy, _mm_cvtss_f32(folded(sums)), exponent, again), out);
    return zero;
}

LOOP uint64_t encode_all(const struct blocks *of, int bits, int size, const float *values, int64_t count, uint8_t *out,
                         double *squares)
{
    uint64_t zeros = 0;
    for (int64_t block = 0; block < count; block++, values += size, out += record_bytes(bits, size))
        zeros |= (uint64_t)encode_block(of, bits, size, values, block, out, squares) << block;
    return zeros;
}

TARGET uint64_t kernel_eden_encode_avx2(const struct blocks *of, const float *values, int64_t count, uint8_t *out,
                                        double *squares)
{
#define ENCODE(bits, size) return encode_all(of, bits, size, values, count, out, squares)
    FOR_BITS(ENCODE)
}
#endif
