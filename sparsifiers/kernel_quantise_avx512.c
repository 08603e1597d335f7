/* Eden and integers with AVX-512: a block of 256 lies in 16 registers. See eden.py, linear.py and rotation.py for what each
   operation is; the order of additions is theirs. */

#include "kernel_quantise.h"

#if X86
#include <immintrin.h>

#define EACH _Pragma("GCC unroll 16") for
#define LOOP AVX512 INLINE
enum { LANES = 16, MOST_REGISTERS = LARGEST / LANES };

/* -- rotation ------------------------------------------------------------------------------------------------------ */

/* 1 where the place in a register has a 0 at that bit, -1 where it has a 1. */
LOOP __m512 plus_minus(int right)
{
    return _mm512_mask_blend_ps((__mmask16)right, _mm512_set1_ps(1), _mm512_set1_ps(-1));
}

/* Inside a register, left + right and left - right are the one that is there times 1 or -1 plus the other one: a product
   that is exact, and one rounding. */
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

/* In each lane the bits of the largest magnitude. */
LOOP __m512i largest_of(const float *values, int n)
{
    const __m512i magnitude = _mm512_set1_epi32(MAGNITUDE);
    __m512i most[4];
    EACH(int r = 0; r < n; r++)
    {
        __m512i key = _mm512_and_si512(_mm512_loadu_si512(values + r * LANES), magnitude);
        most[r % 4] = r < 4 ? key : _mm512_max_epi32(most[r % 4], key);
    }
    most[0] = _mm512_max_epi32(_mm512_max_epi32(most[0], most[1]), _mm512_max_epi32(most[2], most[3]));
    most[0] = _mm512_max_epi32(most[0], _mm512_shuffle_i64x2(most[0], most[0], 0x4e));
    most[0] = _mm512_max_epi32(most[0], _mm512_shuffle_i64x2(most[0], most[0], 0xb1));
    most[0] = _mm512_max_epi32(most[0], _mm512_shuffle_epi32(most[0], 0x4e));
    return _mm512_max_epi32(most[0], _mm512_shuffle_epi32(most[0], 0xb1));
}

/* -- eden: writing ------------------------------------------------------------------------------------------------- */

static const float LEVELS[5][16] = {{0}, LEVELS_1, LEVELS_2, LEVELS_3, LEVELS_4};
static const float THRESHOLDS[5][16] = {{0}, {0}, THRESHOLDS_2, THRESHOLDS_3, THRESHOLDS_4};

LOOP void put(uint8_t *plane, int r, __mmask16 bits)
{
    uint16_t word = bits;
    memcpy(plane + 2 * r, &word, sizeof word);
}

LOOP __m512 lane(__m512 table, int number) { return _mm512_permutexvar_ps(_mm512_set1_epi32(number), table); }

/* Write the codes of n registers, and return what is folded for the scale. */
LOOP __m512 levels_of(__m512 *v, int n, int bits, __m512 root, uint8_t *planes)
{
    const __m512 levels = _mm512_loadu_ps(LEVELS[bits]), bounds = _mm512_mul_ps(root, _mm512_loadu_ps(THRESHOLDS[bits]));
    const __m512i low = _mm512_set1_epi32(1), high = _mm512_set1_epi32(2), top = _mm512_set1_epi32(4);
    uint8_t *numbers = planes + n * LANES / 8;
    EACH(int r = 0; r < n; r++)
    {
        put(planes, r, _mm512_cmp_ps_mask(v[r], _mm512_setzero_ps(), _CMP_LT_OQ));
        __m512 magnitude = _mm512_abs_ps(v[r]), level = lane(levels, 0);
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
        v[r] = _mm512_mul_ps(magnitude, level);
    }
    return folded(v, n);
}

LOOP void encode_block(const struct blocks *of, int bits, int size, const float *values, int64_t block, uint8_t *out,
                       double *squares)
{
    const int n = size / LANES;
    __m512 v[MOST_REGISTERS], products[MOST_REGISTERS];
    uint64_t words[WORDS];
    draw(first_counter(of, block, 0), size, words);
    const __m512i largest = largest_of(values, n);
    const __m512i exponents = _mm512_sub_epi32(_mm512_set1_epi32(254), _mm512_srli_epi32(largest, 23));
    const __m512 power = _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_max_epi32(exponents, _mm512_set1_epi32(1)), 23));
    EACH(int r = 0; r < n; r++)
    {
        v[r] = _mm512_mul_ps(_mm512_loadu_ps(values + r * LANES), power);
        products[r] = _mm512_mul_ps(v[r], v[r]);
    }
    __m512 energies = folded(products, n);
    const float energy = _mm512_cvtss_f32(energies);
    const float most = _mm512_cvtss_f32(_mm512_mul_ps(_mm512_castsi512_ps(largest), power));
    if (squares)
        *squares += unscaled(energy, _mm512_cvtss_f32(power));
    flip(v, n, words);
    rotate(v, n);
    const int again = is_spiked(bits, most * most, energy);
    if (__builtin_expect(again, 0)) {
        draw(first_counter(of, block, 1), size, words);
        flip(v, n, words);
        rotate(v, n);
        energies = _mm512_set1_ps(energy * (float)size);
    }
    const __m512 root = _mm512_broadcastss_ps(_mm_sqrt_ps(_mm512_castps512_ps128(energies)));
    const float inner = _mm512_cvtss_f32(levels_of(v, n, bits, root, out + SCALE));
    const int exponent = _mm_cvtsi128_si32(_mm512_castsi512_si128(largest)) >> 23;
    write_scale(eden_scale(energy, inner, exponent, again), out);
}

LOOP void encode_all(const struct blocks *of, int bits, int size, const float *values, int64_t count, uint8_t *out,
                     double *squares)
{
    for (int64_t block = 0; block < count; block++)
        encode_block(of, bits, size, values + block * size, block, out + block * record_bytes(bits, size), squares);
}

/* -- eden: reading ------------------------------------------------------------------------------------------------- */

/* The bits of a plane of as many records as have 256 coordinates. */
LOOP __m256i plane_of(const uint8_t *data, int bits, int size, int plane)
{
    const int64_t record = record_bytes(bits, size);
    data += SCALE + plane * size / 8;
    if (size == 256)
        return _mm256_loadu_si256((const __m256i *)data);
    uint8_t bytes[LARGEST / 8];
    EACH(int64_t i = 0; i < LARGEST / size; i++)
        memcpy(bytes + i * size / 8, data + i * record, (size_t)size / 8);
    return _mm256_loadu_si256((const __m256i *)bytes);
}

LOOP __m256i chosen(int mask, __m256i where, __m256i elsewhere) /* bit by bit */
{
    return _mm256_ternarylogic_epi32(_mm256_set1_epi8((char)mask), where, elsewhere, 0xca);
}

LOOP __m256i looked_up(__m256i nibbles, __m256i table)
{
    return _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
}

#define BOTH(a, b, add, sub)                                                                                         \
    do {                                                                                                             \
        __typeof__(a) left = a, right = b;                                                                           \
        a = add(left, right);                                                                                        \
        b = sub(left, right);                                                                                        \
    } while (0)
/* Butterflies of 8 registers over one bit of their numbers. */
#define OVER(v, bit, add, sub)                                                                                       \
    EACH(int r = 0; r < 8; r++)                                                                                      \
    if (!(r & (bit)))                                                                                                \
    BOTH(v[r], v[r + (bit)], add, sub)
/* Exchange one bit of the numbers of 8 registers with places inside of them. */
#define EXCHANGE(v, bit, low, high)                                                                                  \
    EACH(int r = 0; r < 8; r++)                                                                                      \
    if (!(r & (bit)))                                                                                                \
    BOTH(v[r], v[r + (bit)], low, high)
#define EVEN_LANES(a, b) _mm512_shuffle_i64x2(a, b, 0x88)
#define ODD_LANES(a, b) _mm512_shuffle_i64x2(a, b, 0xdd)

/* Bit i of registers' numbers and places is that of a coordinate's place: first registers have bits 2, 1 and 0, and each
   byte of a plane becomes a place. Registers then have bits 5, 4, 3, one after the other, then 6 and 7; at last register
   (6: C, 7: A, 5: B) has what belongs there. What is exact may be added in any order. */

/* The levels of 256 coordinates with their signs, 1 or 2 bits each, in units of `unit`: v[r] has coordinates 8 i + r, after
   the butterflies of distance 1, 2 and 4. No sum of 8 exceeds 80. */
LOOP void read_pairs(const uint8_t *data, int bits, int size, __m512i *v)
{
    /* By sign, number, sign, number of two coordinates: their sum and their difference. */
    const __m256i sums = _mm256_broadcastsi128_si256(
        bits == 1 ? _mm_setr_epi8(2, 0, 0, 0, 0, -2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
                  : _mm_setr_epi8(6, 0, 13, -7, 0, -6, 7, -13, 13, 7, 20, 0, -7, -13, 0, -20));
    const __m256i differences = _mm256_broadcastsi128_si256(
        bits == 1 ? _mm_setr_epi8(0, -2, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
                  : _mm_setr_epi8(0, -6, 7, -13, 6, 0, 13, -7, -7, -13, 0, -20, 13, 7, 20, 0));
    const __m256i signs = plane_of(data, bits, size, 0), no = _mm256_setzero_si256();
    const __m256i numbers = bits == 1 ? no : plane_of(data, bits, size, 1);
    const __m256i even = chosen(0x55, signs, _mm256_slli_epi16(numbers, 1));
    const __m256i odd = chosen(0x55, _mm256_srli_epi16(signs, 1), numbers);
    __m256i w[8];
    EACH(int r = 0; r < 8; r++)
    {
        __m256i pairs = r & 1 ? odd : even;
        w[r] = looked_up(r & 4 ? _mm256_srli_epi16(pairs, 4) : pairs, r & 2 ? differences : sums);
    }
    OVER(w, 1, _mm256_add_epi8, _mm256_sub_epi8);
    OVER(w, 4, _mm256_add_epi8, _mm256_sub_epi8);
    EACH(int r = 0; r < 8; r++)
        v[r] = _mm512_cvtepi8_epi16(w[r]);
}

/* The same for 3 or 4 bits each. */
LOOP void read_levels(const uint8_t *data, int bits, int size, __m512i *v)
{
    const __m256i table = _mm256_broadcastsi128_si256(
        bits == 3 ? _mm_setr_epi8(12, -12, 36, -36, 64, -64, 103, -103, 0, 0, 0, 0, 0, 0, 0, 0)
                  : _mm_setr_epi8(6, -6, 18, -18, 30, -30, 43, -43, 58, -58, 74, -74, 95, -95, 126, -126));
    const __m256i signs = plane_of(data, bits, size, 0), one = plane_of(data, bits, size, 1),
                  two = plane_of(data, bits, size, 2),
                  four = bits == 3 ? _mm256_setzero_si256() : plane_of(data, bits, size, 3);
    const __m256i even = chosen(0x55, signs, _mm256_slli_epi16(one, 1)),
                  odd = chosen(0x55, _mm256_srli_epi16(signs, 1), one),
                  upper_even = chosen(0x55, two, _mm256_slli_epi16(four, 1)),
                  upper_odd = chosen(0x55, _mm256_srli_epi16(two, 1), four);
    const __m256i codes[4] = {
        chosen(0x33, even, _mm256_slli_epi16(upper_even, 2)), chosen(0x33, odd, _mm256_slli_epi16(upper_odd, 2)),
        chosen(0x33, _mm256_srli_epi16(even, 2), upper_even), chosen(0x33, _mm256_srli_epi16(odd, 2), upper_odd)};
    EACH(int r = 0; r < 8; r++)
    {
        __m256i code = codes[r & 3];
        v[r] = _mm512_cvtepi8_epi16(looked_up(r & 4 ? _mm256_srli_epi16(code, 4) : code, table));
    }
    OVER(v, 1, _mm512_add_epi16, _mm512_sub_epi16);
    OVER(v, 2, _mm512_add_epi16, _mm512_sub_epi16);
    OVER(v, 4, _mm512_add_epi16, _mm512_sub_epi16);
}

/* H times 256 coordinates of some blocks as they are read, int16: v[r] has 32 of them, number `PLACE(r)`. */
#define PLACE(r) (((r) >> 2 & 1) | ((r) & 1) << 1 | ((r) & 2) << 1)
LOOP void read_rotated(const uint8_t *data, int bits, int size, __m512i *v)
{
    if (bits <= 2)
        read_pairs(data, bits, size, v);
    else
        read_levels(data, bits, size, v);
    EXCHANGE(v, 4, _mm512_unpacklo_epi16, _mm512_unpackhi_epi16);
    OVER(v, 4, _mm512_add_epi16, _mm512_sub_epi16);
    EXCHANGE(v, 2, _mm512_unpacklo_epi16, _mm512_unpackhi_epi16);
    OVER(v, 2, _mm512_add_epi16, _mm512_sub_epi16);
    EXCHANGE(v, 1, _mm512_unpacklo_epi16, _mm512_unpackhi_epi16);
    OVER(v, 1, _mm512_add_epi16, _mm512_sub_epi16);
    EXCHANGE(v, 1, EVEN_LANES, ODD_LANES);
    if (size > 64)
        OVER(v, 1, _mm512_add_epi16, _mm512_sub_epi16);
    EXCHANGE(v, 2, EVEN_LANES, ODD_LANES);
    if (size > 128)
        OVER(v, 2, _mm512_add_epi16, _mm512_sub_epi16);
    const __m512i unit = _mm512_set1_epi16(bits == 1 ? 30 : 10);
    EACH(int r = 0; bits <= 2 && r < 8; r++)
        v[r] = _mm512_mullo_epi16(v[r], unit);
}

/* Rotate a block once more: its 16 bits are exact as floats, and so are the sums. */
LOOP void read_twice(const struct blocks *of, int size, int64_t block, float *read)
{
    const int n = size / LANES;
    __m512 v[MOST_REGISTERS];
    uint64_t words[WORDS];
    draw(first_counter(of, block, 1), size, words);
    EACH(int r = 0; r < n; r++)
        v[r] = _mm512_loadu_ps(read + r * LANES);
    flip(v, n, words);
    rotate(v, n);
    EACH(int r = 0; r < n; r++)
        _mm512_storeu_ps(read + r * LANES, v[r]);
}

/* Write 16 coordinates. */
LOOP void give(__m512 read, uint16_t minus, __m512 plus_scale, __m512 minus_scale, const float *before, __m512 factor,
               float *to, int streamed)
{
    __m512 value = _mm512_mul_ps(read, _mm512_mask_blend_ps(minus, plus_scale, minus_scale));
    value = _mm512_mul_ps(before ? _mm512_add_ps(_mm512_loadu_ps(before), value) : value, factor);
    if (streamed)
        _mm512_stream_ps(to, value);
    else
        _mm512_storeu_ps(to, value);
}

/* Read 256 coordinates: some blocks, from number `block` on. */
LOOP void decode_some(const struct blocks *of, int bits, int size, const uint8_t *data, int64_t block,
                      const float *before, __m512 factor, float *to, int streamed)
{
    const int many = LARGEST / size, n = size / LANES;
    const int64_t record = record_bytes(bits, size);
    __m512i v[8];
    uint64_t words[WORDS];
    uint16_t scales[LARGEST / 64], twice = 0;
    EACH(int i = 0; i < many; i++)
    {
        draw(first_counter(of, block + i, 0), size, words + i * size / 64);
        scales[i] = read_scale(data + i * record);
        twice |= scales[i];
    }
    read_rotated(data, bits, size, v);
    __m512 read[MOST_REGISTERS];
    EACH(int r = 0; r < 8; r++)
    {
        read[2 * PLACE(r)] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_castsi512_si256(v[r])));
        read[2 * PLACE(r) + 1] = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(v[r], 1)));
    }
    if (__builtin_expect(twice >> 15, 0)) {
        float rows[LARGEST];
        EACH(int r = 0; r < MOST_REGISTERS; r++)
            _mm512_storeu_ps(rows + r * LANES, read[r]);
        for (int i = 0; i < many; i++)
            if (scales[i] >> 15)
                read_twice(of, size, block + i, rows + i * size);
        EACH(int r = 0; r < MOST_REGISTERS; r++)
            read[r] = _mm512_loadu_ps(rows + r * LANES);
    }
    EACH(int i = 0; i < many; i++)
    {
        uint32_t bits_of_scale = (uint32_t)(scales[i] & 0x7fff) << 16;
        __m512 plus = _mm512_castsi512_ps(_mm512_set1_epi32((int)bits_of_scale));
        __m512 minus = _mm512_castsi512_ps(_mm512_set1_epi32((int)(bits_of_scale | 0x80000000)));
        EACH(int r = i * n; r < i * n + n; r++)
        {
            uint16_t signs;
            memcpy(&signs, (const char *)words + 2 * r, sizeof signs);
            give(read[r], signs, plus, minus, before ? before + r * LANES : before, factor, to + r * LANES, streamed);
        }
    }
}

LOOP void decode_all(const struct blocks *of, int bits, int size, const uint8_t *data, int64_t count,
                     const float *before, float factor, float *to, int streamed)
{
    const int many = LARGEST / size;
    const int64_t record = record_bytes(bits, size);
    const __m512 all = _mm512_set1_ps(factor);
    int64_t block = 0;
    for (; block + many <= count; block += many)
        decode_some(of, bits, size, data + block * record, block, before ? before + block * size : before, all,
                    to + block * size, streamed);
    if (block < count) { /* fewer than fill a register of bits */
        uint8_t rest[4 * (SCALE + 4 * LARGEST / 8)] = {0};
        float rows[LARGEST];
        memcpy(rest, data + block * record, (size_t)((count - block) * record));
        memset(rows, 0, sizeof rows);
        if (before)
            memcpy(rows, before + block * size, (size_t)((count - block) * size) * sizeof(float));
        decode_some(of, bits, size, rest, block, before ? rows : before, all, rows, 0);
        memcpy(to + block * size, rows, (size_t)((count - block) * size) * sizeof(float));
    }
    if (streamed)
        _mm_sfence();
}

/* -- sizes and bits are constants in every loop -------------------------------------------------------------------- */

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

AVX512 void kernel_eden_encode_avx512(const struct blocks *of, const float *values, int64_t count, uint8_t *out,
                                      double *squares)
{
#define ENCODE(bits, size) encode_all(of, bits, size, values, count, out, squares)
    FOR_BITS(ENCODE)
}

AVX512 void kernel_eden_decode_avx512(const struct blocks *of, const uint8_t *data, int64_t count, const float *before,
                                      float scale, float *to, int streamed)
{
#define DECODE(bits, size)                                                                                           \
    do {                                                                                                             \
        if (before)                                                                                                  \
            decode_all(of, bits, size, data, count, before, scale, to, streamed);                                    \
        else                                                                                                         \
            decode_all(of, bits, size, data, count, 0, scale, to, streamed);                                         \
    } while (0)
    FOR_BITS(DECODE)
}
#endif
