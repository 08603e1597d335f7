/* SPDX-License-Identifier: Apache-2.0 */
/* Sections of messages: the codec `Blocks` of agmerge/exchanges/message/indices.py. See kernel.c for common rules. */

#include "kernel.h"
#include "kernel_codes.h"

#include <string.h>

#if X86
#include <immintrin.h>
#endif

static const int WIDTHS[] = {16, 8, 4, 2};

static int64_t bytes_of(int64_t count, int width) { return (count * width + 7) / 8; }

/* -- integers side by side ---------------------------------------------------------------------------------- */

/* The low `width` bits of indices >> shift, the first in the lowest bits of a byte; padding of `out` is 0. */
INLINE void write_plane_body(const int32_t *indices, int64_t count, int shift, int width, uint8_t *out, int64_t size)
{
    if (width == 16)
        for (int64_t i = 0; i < count; i++) {
            uint16_t part = (uint16_t)(indices[i] >> shift);
            memcpy(out + 2 * i, &part, 2);
        }
    else
        for (int64_t start = 0; start < count; start += CODES) {
            uint8_t codes[CODES] = {0}, packed[CODES];
            int64_t some = count - start < CODES ? count - start : CODES;
            for (int64_t i = 0; i < some; i++)
                codes[i] = (uint8_t)(indices[start + i] >> shift & ((1 << width) - 1));
            pack_body(codes, width, packed);
            memcpy(out + start * width / 8, packed, (size_t)bytes_of(some, width));
        }
    memset(out + bytes_of(count, width), 0, (size_t)(size - bytes_of(count, width)));
}

/* indices |= bits of a plane of `write_plane_body`, << shift. */
INLINE void read_plane_body(const uint8_t *data, int64_t count, int shift, int width, int32_t *indices)
{
    if (width == 16)
        for (int64_t i = 0; i < count; i++) {
            uint16_t part;
            memcpy(&part, data + 2 * i, 2);
            indices[i] |= (int32_t)((uint32_t)part << shift);
        }
    else
        for (int64_t start = 0; start < count; start += CODES) {
            uint8_t codes[CODES], packed[CODES] = {0};
            int64_t some = count - start < CODES ? count - start : CODES;
            memcpy(packed, data + start * width / 8, (size_t)bytes_of(some, width));
            unpack_body(packed, width, codes);
            for (int64_t i = 0; i < some; i++)
                indices[start + i] |= (int32_t)((uint32_t)codes[i] << shift);
        }
}

/* The width is a constant in every call, so that each loop is unrolled for its own. */
#define FOR_WIDTH(width, call)                                                                                       \
    switch (width) {                                                                                                 \
    case 16: call(16); break;                                                                                        \
    case 8: call(8); break;                                                                                          \
    case 4: call(4); break;                                                                                          \
    default: call(2);                                                                                                \
    }

/* -- indices in blocks -------------------------------------------------------------------------------------- */

INLINE int encode_body(const int32_t *indices, int64_t count, int64_t capacity, int low, int64_t last, uint8_t *out)
{
    int shift = 0;
    for (int plane = 0; plane < 4; plane++) {
        if (!(low & WIDTHS[plane]))
            continue;
        int64_t size = bytes_of(capacity, WIDTHS[plane]);
#define PACK(width) write_plane_body(indices, count, shift, width, out, size)
        FOR_WIDTH(WIDTHS[plane], PACK)
        out += size;
        shift += WIDTHS[plane];
    }
    int64_t end = (last + 1) << low;
    uint32_t most = end > INT32_MAX ? INT32_MAX : (uint32_t)(end - 1), outside = 0; /* its sign: whether one is */
    for (int64_t i = 0; i < count; i++)
        outside |= (uint32_t)indices[i] | (most - (uint32_t)indices[i]);
    if (outside >> 31)
        return -1;
    int64_t size = bytes_of(capacity + last, 1), words = size / 8, number = -1, i = 0;
    uint64_t word = 0;
    memset(out, 0, (size_t)size);
    for (; i < count; i++) { /* to store a word for each index takes less time than to foresee which is its last */
        int64_t place = (indices[i] >> low) + i, next = place >> 6;
        if (next >= words)
            break;
        word = (next == number ? word : 0) | UINT64_C(1) << (place & 63);
        memcpy(out + 8 * next, &word, sizeof word);
        number = next;
    }
    for (; i < count; i++) {
        int64_t place = (indices[i] >> low) + i;
        out[place >> 3] |= (uint8_t)(1 << (place & 7));
    }
    return 0;
}
FOR_EACH_LEVEL(int, encode,
               (const int32_t *indices, int64_t count, int64_t capacity, int low, int64_t last, uint8_t *out),
               (indices, count, capacity, low, last, out))

/* Write the first `count` of `capacity` indices, ascending, into all of `out`; `last`: the last block of 2**low elements. 0; -1, with
   nothing but `out` changed, if an index lies in no block. */
EXPORT int kernel_blocks_encode(const int32_t *indices, int64_t count, int64_t capacity, int low, int64_t last,
                                uint8_t *out)
{
    return encode(indices, count, capacity, low, last, out);
}

/* The blocks of indices [found, count), << low, from the bits that are set in data[i, size); *block: the last of them.
   Returns how many bits are set, with those that were found before. */
INLINE int64_t read_marks_body(const uint8_t *data, int64_t i, int64_t size, int64_t found, int64_t count, int low,
                               int32_t *out, int64_t *block)
{
    for (; i < size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, data + i, (size_t)(size - i < 8 ? size - i : 8));
        int64_t all = found + bits_set(word), end = all < count ? all : count;
        for (; found < end; found++, word &= word - 1) {
            *block = 8 * i + lowest_set(word) - found;
            out[found] = (int32_t)((uint64_t)*block << low);
        }
        found = all;
    }
    return found;
}

#define MARKS_PARAMETERS (const uint8_t *data, int64_t size, int64_t count, int low, int32_t *out, int64_t *block)

static int64_t read_marks_any MARKS_PARAMETERS { return read_marks_body(data, 0, size, 0, count, low, out, block); }

#if X86
/* The places of eight bits at once, without a branch; whole registers are stored as long as there is the room. */
AVX2 static int64_t read_marks_avx2 MARKS_PARAMETERS
{
    const __m256i slots = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m128i shift = _mm_cvtsi32_si128(low);
    int64_t i = 0, found = 0;
    for (; i + 8 <= size && found + 72 <= count; i += 8) {
        uint64_t word;
        memcpy(&word, data + i, sizeof word);
        for (int part = 0; part < 8; part++) {
            int64_t before = found + _mm_popcnt_u64(word & ((UINT64_C(1) << 8 * part) - 1));
            __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)kernel_compaction[word >> 8 * part & 255]));
            __m256i base = _mm256_set1_epi32((int32_t)(8 * (i + part) - before));
            __m256i blocks = _mm256_add_epi32(_mm256_sub_epi32(lanes, slots), base);
            _mm256_storeu_si256((__m256i *)(out + before), _mm256_sll_epi32(blocks, shift));
        }
        found += _mm_popcnt_u64(word);
    }
    return read_marks_body(data, i, size, found, count, low, out, block);
}

static int64_t read_marks MARKS_PARAMETERS
{
    return (kernel_level ? read_marks_avx2 : read_marks_any)(data, size, count, low, out, block);
}
#else
#define read_marks read_marks_any
#endif

INLINE void planes_body(const uint8_t *planes, int64_t count, int64_t capacity, int low, int32_t *out)
{
    int shift = 0;
    for (int plane = 0; plane < 4; plane++) {
        if (!(low & WIDTHS[plane]))
            continue;
#define UNPACK(width) read_plane_body(planes, count, shift, width, out)
        FOR_WIDTH(WIDTHS[plane], UNPACK)
        planes += bytes_of(capacity, WIDTHS[plane]);
        shift += WIDTHS[plane];
    }
}
FOR_EACH_LEVEL(void, planes, (const uint8_t *data, int64_t count, int64_t capacity, int low, int32_t *out),
               (data, count, capacity, low, out))

/* Read `count` <= capacity indices. Whether the bytes can be those of so many; whatever they are, only out[0, count)
   is written. */
EXPORT int kernel_blocks_decode(const uint8_t *data, int64_t count, int64_t capacity, int low, int64_t last,
                                int32_t *out)
{
    const uint8_t *marks = data;
    for (int plane = 0; plane < 4; plane++)
        marks += low & WIDTHS[plane] ? bytes_of(capacity, WIDTHS[plane]) : 0;
    int64_t block = 0, found = read_marks(marks, bytes_of(capacity + last, 1), count, low, out, &block);
    for (int64_t i = found; i < count; i++)
        out[i] = 0;
    planes(data, count, capacity, low, out);
    return found == count && block <= last;
}

/* -- checksums ---------------------------------------------------------------------------------------------------- */

enum { SIDE_BY_SIDE = 32 }; /* words */

/* Each lane adds up its words, and these sums: of K words, the sum of k w_k is K times the one less the other. So nothing
   is multiplied before the end. */
INLINE uint64_t checksum_body(const uint8_t *data, int64_t n)
{
    uint64_t sums[SIDE_BY_SIDE] = {0}, sums_of_sums[SIDE_BY_SIDE] = {0}, total = 0;
    const int64_t bytes = SIDE_BY_SIDE * (int64_t)sizeof(uint64_t);
    int64_t steps = 0;
    for (; n > 0; n -= bytes, data += bytes, steps++) {
        uint64_t words[SIDE_BY_SIDE] = {0};
        if (n >= bytes)
            memcpy(words, data, (size_t)bytes);
        else
            memcpy(words, data, (size_t)n);
        for (int i = 0; i < SIDE_BY_SIDE; i++) {
            sums[i] += words[i];
            sums_of_sums[i] += sums[i];
        }
    }
    for (uint64_t i = 0; i < SIDE_BY_SIDE; i++)
        total += 2 * SIDE_BY_SIDE * ((uint64_t)steps * sums[i] - sums_of_sums[i]) + (2 * i + 1) * sums[i];
    return total;
}
FOR_EACH_LEVEL(uint64_t, checksum, (const uint8_t *data, int64_t n), (data, n))

/* The sum modulo 2**64, over the words w_i of 64 bits of n bytes, of (2i+1) w_i; zeros fill up the last word. */
EXPORT uint64_t kernel_checksum(const uint8_t *data, int64_t n) { return checksum(data, n); }
