/* SPDX-License-Identifier: Apache-2.0 */
/* Eden is read with AVX2: 256 coordinates at a time, a half of them in eight registers of 16 bits. H has sums of
   integers, which are exact in any order. See eden.py. */

#include "kernel_quantise_codes.h"

#if X86
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c,bmi,bmi2,popcnt")))
#define LOOP TARGET INLINE
enum { LANES = 8 };

/* The bits of a plane of as many records as have 256 coordinates. */
LOOP __m256i plane_of(const uint8_t *data, int bits, int size, int plane)
{
    uint8_t bytes[LARGEST / 8];
    return _mm256_loadu_si256((const __m256i *)plane_bytes(data, bits, size, plane, bytes));
}

LOOP __m256i chosen(int mask, __m256i where, __m256i elsewhere) /* bit by bit */
{
    const __m256i bits = _mm256_set1_epi8((char)mask);
    return _mm256_or_si256(_mm256_and_si256(bits, where), _mm256_andnot_si256(bits, elsewhere));
}

LOOP __m256i looked_up(__m256i nibbles, __m128i table)
{
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
}

/* Bytes 8 i + r of 256 coordinates, of 1 or 2 bits each, in units of `unit`, after the butterflies of distance 1, 2
   and 4. */
LOOP void read_pairs(const uint8_t *data, int bits, int size, __m256i *w)
{
    const __m128i sums = _mm_loadu_si128((const __m128i *)PAIR_SUMS[bits]),
                  differences = _mm_loadu_si128((const __m128i *)PAIR_DIFFERENCES[bits]);
    const __m256i signs = plane_of(data, bits, size, 0);
    const __m256i numbers = bits == 1 ? _mm256_setzero_si256() : plane_of(data, bits, size, 1);
    const __m256i even = chosen(0x55, signs, _mm256_slli_epi16(numbers, 1));
    const __m256i odd = chosen(0x55, _mm256_srli_epi16(signs, 1), numbers);
    EACH(int r = 0; r < 8; r++)
    {
        __m256i pairs = r & 1 ? odd : even;
        w[r] = looked_up(r & 4 ? _mm256_srli_epi16(pairs, 4) : pairs, r & 2 ? differences : sums);
    }
    OVER(w, 1, _mm256_add_epi8, _mm256_sub_epi8);
    OVER(w, 4, _mm256_add_epi8, _mm256_sub_epi8);
}

/* Those of 3 or 4 bits each, before these butterflies. */
LOOP void read_levels(const uint8_t *data, int bits, int size, __m256i *w)
{
    const __m128i table = _mm_loadu_si128((const __m128i *)SIGNED_LEVELS[bits]);
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
        w[r] = looked_up(r & 4 ? _mm256_srli_epi16(codes[r & 3], 4) : codes[r & 3], table);
}

#define LOW_HALVES(a, b) _mm256_permute2x128_si256(a, b, 0x20)
#define HIGH_HALVES(a, b) _mm256_permute2x128_si256(a, b, 0x31)
#define PLACE(r) (((r) & 1) << 2 | ((r) >> 2 & 1) << 1 | ((r) >> 1 & 1))

/* All butterflies but that of distance 128, of a half of the coordinates. Bits of a coordinate's place, see OVER:
   registers have 2, 1, 0, then 5, 4, 3, then 6 for 3. */
LOOP void rotate_half(const __m256i *w, int bits, int size, int half, int16_t *rows)
{
    __m256i v[8];
    EACH(int r = 0; r < 8; r++)
        v[r] = _mm256_cvtepi8_epi16(half ? _mm256_extracti128_si256(w[r], 1) : _mm256_castsi256_si128(w[r]));
    if (bits > 2) {
        OVER(v, 1, _mm256_add_epi16, _mm256_sub_epi16);
        OVER(v, 2, _mm256_add_epi16, _mm256_sub_epi16);
        OVER(v, 4, _mm256_add_epi16, _mm256_sub_epi16);
    }
    OVER(v, 4, _mm256_unpacklo_epi16, _mm256_unpackhi_epi16);
    OVER(v, 4, _mm256_add_epi16, _mm256_sub_epi16);
    OVER(v, 2, _mm256_unpacklo_epi16, _mm256_unpackhi_epi16);
    OVER(v, 2, _mm256_add_epi16, _mm256_sub_epi16);
    OVER(v, 1, _mm256_unpacklo_epi16, _mm256_unpackhi_epi16);
    OVER(v, 1, _mm256_add_epi16, _mm256_sub_epi16);
    OVER(v, 1, LOW_HALVES, HIGH_HALVES);
    if (size > 64)
        OVER(v, 1, _mm256_add_epi16, _mm256_sub_epi16);
    const __m256i unit = _mm256_set1_epi16(bits == 1 ? 30 : 10);
    EACH(int r = 0; r < 8; r++)
    {
        v[r] = bits <= 2 ? _mm256_mullo_epi16(v[r], unit) : v[r];
        _mm256_storeu_si256((__m256i *)(rows + 16 * PLACE(r)), v[r]);
    }
}

LOOP __m256 as_floats(__m128i v) { return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(v)); }

/* Write 8 coordinates. */
LOOP void give(__m256 read, __m256 scale, __m256i bits, int part, const float *before, __m256 factor, float *to,
               int streamed)
{
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                  places = _mm256_sub_epi32(_mm256_set1_epi32(31 - 8 * part), lanes);
    const __m256 minus = _mm256_castsi256_ps(_mm256_sllv_epi32(bits, places)), sign = _mm256_set1_ps(-0.0f);
    __m256 value = _mm256_mul_ps(read, _mm256_or_ps(scale, _mm256_and_ps(minus, sign)));
    value = _mm256_mul_ps(before ? _mm256_add_ps(_mm256_loadu_ps(before), value) : value, factor);
    if (streamed)
        _mm256_stream_ps(to, value);
    else
        _mm256_storeu_ps(to, value);
}

/* Read 256 coordinates: some blocks, from number `block` on. */
LOOP void decode_some(const struct blocks *of, int bits, int size, const uint8_t *data, int64_t block,
                      const float *before, __m256 factor, float *to, int streamed)
{
    const int many = LARGEST / size, half = LARGEST / 2;
    const int64_t record = record_bytes(bits, size);
    int16_t rows[LARGEST];
    uint64_t words[WORDS];
    uint16_t scales[LARGEST / 64], twice = 0;
    float read[LARGEST];
    EACH(int i = 0; i < many; i++)
    {
        draw(first_counter(of, block + i, 0), size, words + i * size / 64);
        scales[i] = read_scale(data + i * record);
        twice |= scales[i];
    }
    __m256i w[8];
    if (bits <= 2)
        read_pairs(data, bits, size, w);
    else
        read_levels(data, bits, size, w);
    rotate_half(w, bits, size, 0, rows);
    rotate_half(w, bits, size, 1, rows + half);
    if (size > 128)
        for (int i = 0; i < half; i += 16) {
            __m256i left = _mm256_loadu_si256((const __m256i *)(rows + i)),
                    right = _mm256_loadu_si256((const __m256i *)(rows + half + i));
            _mm256_storeu_si256((__m256i *)(rows + i), _mm256_add_epi16(left, right));
            _mm256_storeu_si256((__m256i *)(rows + half + i), _mm256_sub_epi16(left, right));
        }
    if (__builtin_expect(twice >> 15, 0)) { /* 16 bits are exact as floats, and so are their sums */
        for (int i = 0; i < LARGEST; i += LANES)
            _mm256_storeu_ps(read + i, as_floats(_mm_loadu_si128((const __m128i *)(rows + i))));
        for (int i = 0; i < many; i++)
            if (scales[i] >> 15)
                kernel_rotate_again_avx2(read + i * size, size, first_counter(of, block + i, 1));
    }
    for (int i = 0; i < many; i++) {
        __m256 scale = _mm256_castsi256_ps(_mm256_set1_epi32((scales[i] & 0x7fff) << 16));
        for (int j = i * size; j < i * size + size; j += 4 * LANES) {
            int32_t word;
            memcpy(&word, (const char *)words + j / 8, sizeof word);
            const __m256i signs = _mm256_set1_epi32(word);
            EACH(int part = 0; part < 4; part++)
            {
                int at = j + part * LANES;
                __m256 value = twice >> 15 ? _mm256_loadu_ps(read + at)
                                           : as_floats(_mm_loadu_si128((const __m128i *)(rows + at)));
                give(value, scale, signs, part, before ? before + at : before, factor, to + at, streamed);
            }
        }
    }
}

/* There is one call in it, or all of that would be compiled twice. */
LOOP void decode_all(const struct blocks *of, int bits, int size, const uint8_t *data, int64_t count,
                     const float *before, float factor, float *to, int streamed)
{
    const int many = LARGEST / size;
    const int64_t record = record_bytes(bits, size);
    const __m256 all = _mm256_set1_ps(factor);
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

TARGET void kernel_eden_decode_avx2(const struct blocks *of, const uint8_t *data, int64_t count, const float *before,
                                    float scale, float *to, int streamed)
{
#define DECODE(bits, size) decode_all(of, bits, size, data, count, before, scale, to, streamed)
    FOR_BITS(DECODE)
}
#endif
