/* SPDX-License-Identifier: Apache-2.0 */
/* Eden is written with AVX-512: a block of 256 lies in 16 registers. See eden.py for each operation
   and the order of additions. */

#include "kernel_quantise_codes.h"

#if X86
#include <immintrin.h>

#define LOOP AVX512 INLINE
enum { LANES = 16, MOST_REGISTERS = LARGEST / LANES };

/* -- rotation ------------------------------------------------------------------------------------------------------ */

/* 1 where the place in a register has a 0 at that bit, -1 where it has a 1. */
LOOP __m512 plus_minus(int right)
{
    return _mm512_mask_blend_ps((__mmask16)right, _mm512_set1_ps(1), _mm512_set1_ps(-1));
}

/* Inside a register, left + right and left - right are the one that is there times 1 or -1 plus the other one: a
   product that is exact, and one rounding. */
LOOP void rotate(__m512 *v, int n)
{
    const __m512 by_1 = plus_minus(0xaaaa), by_2 = plus_minus(0xcccc), by_4 = plus_minus(0xf0f0),
                 by_8 = plus_minus(0xff00);
    EACH(int r = 0; r < n; r++)
    {
        v[r] = _mm512_fmadd_ps(v[r], by_1, _mm512_permute_ps(v[r], 0xb1));
        v[r] = _mm512_fmadd_ps(v[r], by_2, _mm512_permute_ps(v[r], 0x4e));
        v[r] = _mm512_fmadd_ps(v[r], by_4, _mm512_shuffle_f32x4(v[r], v[r], 0xb1));
        v[r] = _mm512_fmadd_ps(v[r], by_8, _mm512_shuffle_f32x4(v[r], v[r], 0x4e));
    }
    EACH(int distance = 1; distance < n; distance *= 2)
        EACH(int r = 0; r < n; r++)
            if (!(r & distance)) {
                __m512 left = v[r], right = v[r + distance];
                v[r] = _mm512_add_ps(left, right);
                v[r + distance] = _mm512_sub_ps(left, right);
            }
}

/* Change the sign where a word has its bit. */
LOOP void flip(__m512 *v, int n, const uint64_t *words)
{
    const __m512 sign = _mm512_set1_ps(-0.0f);
    EACH(int r = 0; r < n; r++)
    {
        uint16_t minus;
        memcpy(&minus, (const char *)words + 2 * r, sizeof minus);
        v[r] = _mm512_mask_xor_ps(v[r], minus, v[r], sign);
    }
}

/* In each lane the sum of all of n registers: halves are added. */
LOOP __m512 folded(__m512 *v, int n)
{
    EACH(int half = n / 2; half; half /= 2)
        EACH(int r = 0; r < half; r++)
            v[r] = _mm512_add_ps(v[r], v[r + half]);
    __m512 sum = v[0];
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4e));
    sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xb1));
    sum = _mm512_add_ps(sum, _mm512_permute_ps(sum, 0x4e));
    return _mm512_add_ps(sum, _mm512_permute_ps(sum, 0xb1));
}

/* In each lane the bits of the largest magnitude. zero: set to whether there is one. */
LOOP __m512i largest_of(const float *values, int n, int *zero)
{
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE);
    __m512i most[4], few[4];
    EACH(int r = 0; r < n; r++)
    {
        __m512i key = _mm512_and_si512(_mm512_loadu_si512(values + r * LANES), magnitude);
        most[r % 4] = r < 4 ? key : _mm512_max_epi32(most[r % 4], key);
        few[r % 4] = r < 4 ? key : _mm512_min_epi32(few[r % 4], key);
    }
    few[0] = _mm512_min_epi32(_mm512_min_epi32(few[0], few[1]), _mm512_min_epi32(few[2], few[3]));
    *zero = _mm512_testn_epi32_mask(few[0], few[0]) != 0;
    most[0] = _mm512_max_epi32(_mm512_max_epi32(most[0], most[1]), _mm512_max_epi32(most[2], most[3]));
    most[0] = _mm512_max_epi32(most[0], _mm512_shuffle_i64x2(most[0], most[0], 0x4e));
    most[0] = _mm512_max_epi32(most[0], _mm512_shuffle_i64x2(most[0], most[0], 0xb1));
    most[0] = _mm512_max_epi32(most[0], _mm512_shuffle_epi32(most[0], 0x4e));
    return _mm512_max_epi32(most[0], _mm512_shuffle_epi32(most[0], 0xb1));
}

/* -- levels -------------------------------------------------------------------------------------------------------- */

static const float LEVELS[5][16] = {{0}, LEVELS_1, LEVELS_2, LEVELS_3, LEVELS_4};
static const float THRESHOLDS[5][16] = {{0}, {0}, THRESHOLDS_2, THRESHOLDS_3, THRESHOLDS_4};

struct loose_word {
    uint16_t word;
} __attribute__((packed));

/* Volatile, or a compiler gathers words in a register before they are written. */
LOOP void put(uint8_t *plane, int r, __mmask16 bits) { ((volatile struct loose_word *)(plane + 2 * r))->word = bits; }

LOOP __m512 lane(__m512 table, int number) { return _mm512_permutexvar_ps(_mm512_set1_epi32(number), table); }

/* Write the codes of register r of n, and return its magnitudes times their levels. */
LOOP __m512 levels_of(__m512 v, int r, int n, int bits, __m512 bounds, __m512 levels, uint8_t *planes)
{
    const __m512i low = _mm512_set1_epi32(1), high = _mm512_set1_epi32(2), top = _mm512_set1_epi32(4);
    uint8_t *numbers = planes + n * LANES / 8;
    put(planes, r, _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_LT_OQ));
    __m512 magnitude = _mm512_abs_ps(v), level = lane(levels, 0);
    if (bits == 2) {
        __mmask16 above = _mm512_cmp_ps_mask(magnitude, lane(bounds, 0), _CMP_GT_OQ);
        put(numbers, r, above);
        level = _mm512_mask_mov_ps(level, above, lane(levels, 1));
    } else if (bits > 2) { /* bit by bit, from the highest */
        __mmask16 above = _mm512_cmp_ps_mask(magnitude, lane(bounds, bits == 4 ? 3 : 1), _CMP_GT_OQ);
        put(numbers + (bits - 2) * n * LANES / 8, r, above);
        __m512i number = _mm512_maskz_mov_epi32(above, bits == 4 ? top : high);
        if (bits == 4) {
            __m512 bound = _mm512_mask_mov_ps(lane(bounds, 1), above, lane(bounds, 5));
            above = _mm512_cmp_ps_mask(magnitude, bound, _CMP_GT_OQ);
            put(numbers + n * LANES / 8, r, above);
            number = _mm512_mask_or_epi32(number, above, number, high);
        }
        above = _mm512_cmp_ps_mask(magnitude, _mm512_permutexvar_ps(number, bounds), _CMP_GT_OQ);
        put(numbers, r, above);
        level = _mm512_permutexvar_ps(_mm512_mask_or_epi32(number, above, number, low), levels);
    }
    return _mm512_mul_ps(magnitude, level);
}

/* Rotate a block once more, by the words from a counter on. */
AVX512 void kernel_rotate_again_avx512(float *rows, int size, uint64_t counter)
{
    __m512 v[MOST_REGISTERS];
    uint64_t words[WORDS];
    draw(counter, size, words);
#define AGAIN(n)                                                                                                     \
    do {                                                                                                             \
        EACH(int r = 0; r < n; r++)                                                                                  \
            v[r] = _mm512_loadu_ps(rows + r * LANES);                                                                \
        flip(v, n, words);                                                                                           \
        rotate(v, n);                                                                                                \
        EACH(int r = 0; r < n; r++)                                                                                  \
            _mm512_storeu_ps(rows + r * LANES, v[r]);                                                                \
    } while (0)
    if (size == 256)
        AGAIN(16);
    else if (size == 128)
        AGAIN(8);
    else
        AGAIN(4);
}

/* largest: as `largest_of` the block. Returns that of the block at `next`, which is looked for meanwhile, and sets
   `zero` to whether that block has one. */
LOOP __m512i encode_block(const struct blocks *of, int bits, int size, const float *values, const float *next,
                          __m512i largest, int64_t block, uint8_t *out, double *squares, int *zero)
{
    const int n = size / LANES, half = n / 2;
    __m512 v[MOST_REGISTERS], sums[MOST_REGISTERS / 2];
    uint64_t words[WORDS];
    draw(first_counter(of, block, 0), size, words);
    const __m512i exponents = _mm512_sub_epi32(_mm512_set1_epi32(254), _mm512_srli_epi32(largest, 23));
    const __m512 power = _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_max_epi32(exponents, _mm512_set1_epi32(1)), 23));
    EACH(int r = 0; r < half; r++)
    {
        v[r] = _mm512_mul_ps(_mm512_loadu_ps(values + r * LANES), power);
        v[r + half] = _mm512_mul_ps(_mm512_loadu_ps(values + (r + half) * LANES), power);
        sums[r] = _mm512_add_ps(_mm512_mul_ps(v[r], v[r]), _mm512_mul_ps(v[r + half], v[r + half]));
    }
    __m512 energies = folded(sums, half);
    const float energy = _mm512_cvtss_f32(energies);
    const float most = _mm512_cvtss_f32(_mm512_mul_ps(_mm512_castsi512_ps(largest), power));
    if (squares)
        *squares += unscaled(energy, _mm512_cvtss_f32(power));
    const __m512i later = largest_of(next, n, zero);
    flip(v, n, words);
    rotate(v, n);
    const int again = is_uneven(bits, size, most * most, energy);
    if (__builtin_expect(again, 0)) {
        float rows[LARGEST];
        EACH(int r = 0; r < n; r++)
            _mm512_storeu_ps(rows + r * LANES, v[r]);
        kernel_rotate_again_avx512(rows, size, first_counter(of, block, 1));
        EACH(int r = 0; r < n; r++)
            v[r] = _mm512_loadu_ps(rows + r * LANES);
        energies = _mm512_set1_ps(energy * (float)size);
    }
    const __m512 root = _mm512_broadcastss_ps(_mm_sqrt_ps(_mm512_castps512_ps128(energies)));
    const __m512 levels = _mm512_loadu_ps(LEVELS[bits]),
                 bounds = _mm512_mul_ps(root, _mm512_loadu_ps(THRESHOLDS[bits]));
    EACH(int r = 0; r < half; r++)
        sums[r] = _mm512_add_ps(levels_of(v[r], r, n, bits, bounds, levels, out + SCALE),
                                levels_of(v[r + half], r + half, n, bits, bounds, levels, out + SCALE));
    const float inner = _mm512_cvtss_f32(folded(sums, half));
    const int exponent = _mm_cvtsi128_si32(_mm512_castsi512_si128(largest)) >> 23;
    write_scale(eden_scale(energy, inner, exponent, again), out);
    return later;
}

LOOP uint64_t encode_all(const struct blocks *of, int bits, int size, const float *values, int64_t count, uint8_t *out,
                         double *squares)
{
    uint64_t zeros = 0;
    int zero;
    __m512i largest = largest_of(values, size / LANES, &zero);
    for (int64_t block = 0; block < count; block++, values += size, out += record_bytes(bits, size)) {
        zeros |= (uint64_t)zero << block;
        largest = encode_block(of, bits, size, values, block + 1 < count ? values + size : values, largest, block, out,
                               squares, &zero);
    }
    return zeros;
}

/* -- exported functions -------------------------------------------------------------------------------------------- */

AVX512 uint64_t kernel_eden_encode_avx512(const struct blocks *of, const float *values, int64_t count, uint8_t *out,
                                          double *squares)
{
#define ENCODE(bits, size) return encode_all(of, bits, size, values, count, out, squares)
    FOR_BITS(ENCODE)
}
#endif
