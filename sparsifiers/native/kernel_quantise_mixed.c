/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of eden in which zeros stand beside other values: their records are mixed, see eden.py. A mixed record is the
   record in one bit less with a mask behind its scale, so the loops of that quantiser write and read it. */

#include "kernel_quantise_codes.h"

static encode_loop *encoder(int codec)
{
#if X86
    if (kernel_level && codec < INT_4)
        return kernel_level == 2 ? kernel_eden_encode_avx512 : kernel_eden_encode_avx2;
#endif
    return codec >= INT_4 ? kernel_integers_encode : kernel_eden_encode;
}

static decode_loop *decoder(int codec)
{
#if X86
    if (kernel_level && codec < INT_4)
        return kernel_level == 2 ? kernel_eden_decode_avx512 : kernel_eden_decode_avx2;
#endif
    return codec >= INT_4 ? kernel_integers_decode : kernel_eden_decode;
}

/* Whether a mixed record of one bit has the second half of a block. */
static int has_second_half(const struct blocks *of, int64_t block)
{
    uint64_t word;
    draw(first_counter(of, block, HALF_STREAM), 64, &word);
    return word & 1;
}

static int bit_of(const uint8_t *mask, int i) { return mask[i / 8] >> i % 8 & 1; }

/* -- written ------------------------------------------------------------------------------------------------------- */

/* The first block from `block` on with a zero in it; else `count`. */
INLINE int64_t next_zero_body(const float *values, int64_t block, int64_t count, int size)
{
    for (; block < count; block++) {
        int32_t zero = 0;
        for (int i = 0; i < size; i++)
            zero |= values[block * size + i] == 0;
        if (zero)
            break;
    }
    return block;
}
FOR_EACH_LEVEL(int64_t, next_zero, (const float *values, int64_t block, int64_t count, int size),
               (values, block, count, size))

/* The first block from `block` on of which not all coordinates are held; else `count`. */
static int64_t next_gap(const uint8_t *held, int64_t block, int64_t count, int size)
{
    for (const int bytes = size / 8; block < count; block++)
        for (int i = 0; i < bytes; i++)
            if (held[block * bytes + i] != 0xff)
                return block;
    return count;
}

/* Write which coordinates a mixed record has, and return whether the block has one. Behind the first `length` there is
   nothing to keep. */
static int mask_of(const float *values, int size, int64_t length, const uint8_t *held, uint8_t *mask)
{
    int32_t largest = 0, gaps = 0;
    for (int i = 0; i < size; i += 8) {
        int bits = 0;
        for (int j = 0; j < 8; j++) {
            const int32_t key = (int32_t)(bits_of(values[i + j]) & 0x7fffffff);
            largest = key > largest ? key : largest;
            bits |= (values[i + j] != 0 || i + j >= length) << j;
        }
        mask[i / 8] = held ? held[i / 8] : (uint8_t)bits;
        gaps |= mask[i / 8] ^ 0xff;
    }
    return gaps && largest && largest < 0x7f800000;
}

static void write_mixed(const struct blocks *of, int64_t block, const float *values, const uint8_t *mask, uint8_t *out,
                        double *squares)
{
    uint8_t record[SCALE + 3 * LARGEST / 8];
    int masked = of->size / 8, planes = (of->codec - 1) * masked;
    if (of->codec > EDEN_1) {
        const struct blocks narrower = {of->codec - 1, of->size, of->key, of->first + block};
        encoder(narrower.codec)(&narrower, values, 1, record, squares);
    } else {
        const int second = has_second_half(of, block);
        masked = planes = of->size / 16;
        mask += second * masked;
        kernel_eden_encode_half(of, block, second, values, record, squares);
    }
    memcpy(out, record, SCALE);
    out[0] |= MIXED;
    memcpy(out + SCALE, mask, (size_t)masked);
    memcpy(out + SCALE + masked, record + SCALE, (size_t)planes);
}

void kernel_write_blocks(const struct blocks *of, const float *values, int64_t count, int64_t length,
                         const uint8_t *held, uint8_t *out, double *squares)
{
    encode_loop *encode = encoder(of->codec);
    const int64_t size = of->size, bytes = record_bytes(of->codec, of->size);
    struct blocks rest = *of;
    int64_t start = 0;
    for (int64_t block = of->codec < INT_4 ? 0 : count; block < count; block++) {
        block = held ? next_gap(held, block, count, of->size) : next_zero(values, block, count, of->size);
        uint8_t mask[LARGEST / 8];
        if (block == count ||
            !mask_of(values + block * size, of->size, length - block * size, held ? held + block * size / 8 : 0, mask))
            continue;
        rest.first = of->first + start;
        if (block > start)
            encode(&rest, values + start * size, block - start, out + start * bytes, squares);
        write_mixed(of, block, values + block * size, mask, out + block * bytes, squares);
        start = block + 1;
    }
    rest.first = of->first + start;
    if (count > start)
        encode(&rest, values + start * size, count - start, out + start * bytes, squares);
}

/* -- read ---------------------------------------------------------------------------------------------------------- */

static void read_mixed(const struct blocks *of, int64_t block, const uint8_t *data, float *read)
{
    uint8_t record[SCALE + 3 * LARGEST / 8];
    const uint8_t *mask = data + SCALE;
    int size = of->size, masked = size / 8, planes = (of->codec - 1) * masked;
    if (of->codec == EDEN_1) {
        size /= 2;
        masked = planes = size / 8;
        memset(read, 0, (size_t)of->size * sizeof(float));
    }
    memcpy(record, data, SCALE);
    record[0] &= (uint8_t)~MIXED;
    memcpy(record + SCALE, mask + masked, (size_t)planes);
    if (of->codec > EDEN_1) {
        const struct blocks narrower = {of->codec - 1, size, of->key, of->first + block};
        decoder(narrower.codec)(&narrower, record, 1, 0, 1.0f, read, 0);
    } else {
        const int second = has_second_half(of, block);
        read += second * size;
        kernel_eden_decode_half(of, block, second, record, read);
    }
    for (int i = 0; i < size; i++)
        read[i] = bit_of(mask, i) ? read[i] : 0.0f;
}

void kernel_read_blocks(const struct blocks *of, const uint8_t *data, int64_t count, const float *before, float scale,
                        float *to, int streamed)
{
    decode_loop *decode = decoder(of->codec);
    const int64_t size = of->size, bytes = record_bytes(of->codec, of->size);
    struct blocks rest = *of;
    int64_t start = 0;
    for (int64_t block = of->codec < INT_4 ? 0 : count; block <= count; block++) {
        if (block < count && !(data[block * bytes] & MIXED))
            continue;
        rest.first = of->first + start;
        if (block > start)
            decode(&rest, data + start * bytes, block - start, before ? before + start * size : 0, scale,
                   to + start * size, streamed);
        start = block + 1;
        if (block == count)
            break;
        float read[LARGEST];
        read_mixed(of, block, data + block * bytes, read);
        for (int64_t i = 0; i < size; i++)
            to[block * size + i] = (before ? before[block * size + i] + read[i] : read[i]) * scale;
    }
}

void kernel_note_held(const struct blocks *of, const uint8_t *data, int64_t count, uint8_t *held)
{
    const int masked = of->size / (of->codec > EDEN_1 ? 8 : 16);
    const int64_t bytes = record_bytes(of->codec, of->size);
    for (int64_t block = 0; block < count; block++, data += bytes, held += of->size / 8) {
        const uint16_t scale = read_scale(data);
        if (!(scale & 0x7ffe))
            continue;
        if (!(scale & MIXED)) {
            memset(held, 0xff, (size_t)of->size / 8);
            continue;
        }
        uint8_t *part = held + (of->codec == EDEN_1 && has_second_half(of, block) ? masked : 0);
        for (int i = 0; i < masked; i++)
            part[i] |= data[SCALE + i];
    }
}
