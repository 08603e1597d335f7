/* SPDX-License-Identifier: Apache-2.0 */
/* Eden is read with AVX-512: 256 coordinates at a time, in eight registers of 16 bits. H has sums of integers,
   which are exact in any order. See eden.py. */

#include "kernel_quantise_codes.h"

#if X86
#include <immintrin.h>

#define LOOP AVX512 INLINE
enum { LANES = 16, MOST_REGISTERS = LARGEST / LANES };

/* The bits of a plane of as many records as have 256 coordinates. */
LOOP __m256i plane_of(const uint8_t *data, int bits, int size, int plane)
{
    uint8_t bytes[LARGEST / 8];
    return _mm256_loadu_si256((const __m256i *)plane_bytes(data, bits, size, plane, bytes));
}

LOOP __m256i chosen(int mask, __m256i where, __m256i elsewhere) /* bit by bit */
{
    return _mm256_ternarylogic_epi32(_mm256_set1_epi8((char)mask), where, elsewhere, 0xca);
}

LOOP __m256i table_of(const int8_t *table)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
}

LOOP __m256i looked_up(__m256i nibbles, __m256i table)
{
    return _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
}

#define EVEN_LANES(a, b) _mm512_shuffle_i64x2(a, b, 0x88)
#define ODD_LANES(a, b) _mm512_shuffle_i64x2(a, b, 0xdd)

/* The levels of 256 coordinates with their signs, 1 or 2 bits each, in units of `unit`: v[r] has coordinates 8 i +
   r, after the butterflies of distance 1, 2 and 4. No sum of 8 exceeds 80. */
LOOP void read_pairs(const uint8_t *data, int bits, int size, __m512i *v)
{
    const __m256i sums = table_of(PAIR_SUMS[bits]), differences = table_of(PAIR_DIFFERENCES[bits]);
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
    const __m256i table = table_of(SIGNED_LEVELS[bits]);
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
    OVER(v, 4, _mm512_unpacklo_epi16, _mm512_unpackhi_epi16);
    OVER(v, 4, _mm512_add_epi16, _mm512_sub_epi16);
    OVER(v, 2, _mm512_unpacklo_epi16, _mm512_unpackhi_epi16);
    OVER(v, 2, _mm512_add_epi16, _mm512_sub_epi16);
    OVER(v, 1, _mm512_unpacklo_epi16, _mm512_unpackhi_epi16);
    OVER(v, 1, _mm512_add_epi16, _mm512_sub_epi16);
    OVER(v, 1, EVEN_LANES, ODD_LANES);
    if (size > 64)
        OVER(v, 1, _mm512_add_epi16, _mm512_sub_epi16);
    OVER(v, 2, EVEN_LANES, ODD_LANES);
    if (size > 128)
        OVER(v, 2, _mm512_add_epi16, _mm512_sub_epi16);
    const __m512i unit = _mm512_set1_epi16(bits == 1 ? 30 : 10);
    EACH(int r = 0; bits <= 2 && r < 8; r++)
        v[r] = _mm512_mullo_epi16(v[r], unit);
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
                kernel_rotate_again_avx512(rows + i * size, size, first_counter(of, block + i, 1));
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

/* There is one call in it, or all of that would be compiled twice. */
LOOP void decode_all(const struct blocks *of, int bits, int size, const uint8_t *data, int64_t count,
                     const float *before, float factor, float *to, int streamed)
{
    const int many = LARGEST / size;
    const int64_t record = record_bytes(bits, size);
    const __m512 all = _mm512_set1_ps(factor);
    uint8_t rest[MOST_BYTES];
    float rows[LARGEST];
    for (int64_t block = 0; block < count; block += many, data += many * record, to += LARGEST) {
        const int64_t left = (count - block) * size;
        const int few = left < LARGEST; /* to fill a register of bits */
        if (few)
            take_rest(data, (count - block) * record, before, left, rest, rows);
        decode_some(of, bits, size, few ? rest : data, block, few && before ? rows : before, all, few ? rows : to,
                    streamed && !few);
        if (few)
            memcpy(to, rows, (size_t)left * sizeof(float));
        before = before ? before + LARGEST : before;
    }
    if (streamed)
        _mm_sfence();
}

AVX512 void kernel_eden_decode_avx512(const struct blocks *of, const uint8_t *data, int64_t count, const float *before,
                                      float scale, float *to, int streamed)
{
#define DECODE(bits, size) decode_all(of, bits, size, data, count, before, scale, to, streamed)
    FOR_BITS(DECODE)
}
#endif
