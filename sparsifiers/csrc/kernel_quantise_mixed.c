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

/* -- written ------------------------------------------------------------------------------------------------------- */

/* Write which coordinates a mixed record has, and return whether the block has one. Behind the first `length` there is
   nothing to keep. */
INLINE int mask_of_body(const float *values, int size, int64_t length, const uint8_t *held, uint8_t *mask)
{
    uint8_t kept[LARGEST];
    int32_t largest = 0, gaps = 0;
    for (int i = 0; held && i < size / 8; i++)
        gaps |= held[i] ^ 0xff;
    if (held && !gaps)
        return 0;
    for (int i = 0; i < size; i++) {
        const int32_t key = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        largest = key > largest ? key : largest;
    }
    for (int i = 0; i < size; i++)
        kept[i] = values[i] != 0;
    for (int64_t i = length; i < size; i++)
        kept[i] = 1;
    for (int i = 0; i < size / 8; i++) {
        uint64_t eight;
        memcpy(&eight, kept + 8 * i, sizeof eight);
        mask[i] = held ? held[i] : (uint8_t)(eight * UINT64_C(0x0102040810204080) >> 56);
        gaps |= mask[i] ^ 0xff;
    }
    return gaps && largest && largest < 0x7f800000;
}
FOR_EACH_LEVEL(int, mask_of, (const float *values, int size, int64_t length, const uint8_t *held, uint8_t *mask),
               (values, size, length, held, mask))

static void write_mixed(const struct blocks *of, int64_t block, const float *values, const uint8_t *mask, uint8_t *out)
{
    uint8_t record[SCALE + 3 * LARGEST / 8];
    int masked = of->size / 8, planes = (of->codec - 1) * masked;
    if (of->codec > EDEN_1) {
        const struct blocks narrower = {of->codec - 1, of->size, of->key, of->first + block};
        encoder(narrower.codec)(&narrower, values, 1, record, 0);
    } else {
        const int second = has_second_half(of, block);
        masked = planes = of->size / 16;
        mask += second * masked;
        kernel_eden_encode_half(of, block, second, values, record);
    }
    memcpy(out, record, SCALE);
    out[0] |= MIXED;
    memcpy(out + SCALE, mask, (size_t)masked);
    memcpy(out + SCALE + masked, record + SCALE, (size_t)planes);
}

void kernel_write_blocks(const struct blocks *of, const float *values, int64_t count, int64_t length,
                         const uint8_t *held, uint8_t *out, double *squares)
{
    const int64_t size = of->size, bytes = record_bytes(of->codec, of->size);
    uint64_t zeros = encoder(of->codec)(of, values, count, out, squares);
    for (int64_t block = 0; zeros; block++, zeros >>= 1) {
        uint8_t mask[LARGEST / 8];
        const uint8_t *known = held ? held + block * size / 8 : 0;
        const float *from = values + block * size;
        if (zeros & 1 && mask_of(from, of->size, length - block * size, known, mask))
            write_mixed(of, block, from, mask, out + block * bytes);
    }
}

/* -- read ---------------------------------------------------------------------------------------------------------- */

/* Set coordinates to zero of which the mask has no bit. */
INLINE void keep_body(const uint8_t *mask, int size, float *read)
{
    int8_t kept[LARGEST]; /* 0 or -1 */
    for (int i = 0; i < size / 8; i++) {
        uint64_t eight = mask[i];
        eight |= eight << 28;
        eight |= eight << 14;
        eight = ((eight | eight << 7) & UINT64_C(0x0101010101010101)) * 0xff;
        memcpy(kept + 8 * i, &eight, sizeof eight);
    }
    for (int i = 0; i < size; i++)
        read[i] = float_of(bits_of(read[i]) & (uint32_t)(int32_t)kept[i]);
}
FOR_EACH_LEVEL(void, keep, (const uint8_t *mask, int size, float *read), (mask, size, read))

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
    keep(mask, size, read);
}

INLINE void add_body(const float *before, const float *read, int64_t n, float scale, float *to)
{
    if (before)
        for (int64_t i = 0; i < n; i++)
            to[i] = (before[i] + read[i]) * scale;
    else
        for (int64_t i = 0; i < n; i++)
            to[i] = read[i] * scale;
}
FOR_EACH_LEVEL(void, add, (const float *before, const float *read, int64_t n, float scale, float *to),
               (before, read, n, scale, to))

void kernel_read_blocks(const struct blocks *of, const uint8_t *data, int64_t count, const float *before, float scale,
                        float *to, int streamed)
{
    const int64_t size = of->size, bytes = record_bytes(of->codec, of->size);
    uint8_t heads = 0;
    for (int64_t block = 0; block < count; block++)
        heads |= data[block * bytes];
    const int some = of->codec < INT_4 && heads & MIXED;
    struct blocks rest = *of;
    for (int64_t start = 0, block = some ? 0 : count; start < count; block++) {
        if (block < count && !(data[block * bytes] & MIXED))
            continue;
        rest.first = of->first + start;
        if (block > start)
            decoder(of->codec)(&rest, data + start * bytes, block - start, before ? before + start * size : 0, scale,
                               to + start * size, streamed);
        if (block < count) {
            float read[LARGEST];
            read_mixed(of, block, data + block * bytes, read);
            add(before ? before + block * size : 0, read, size, scale, to + block * size);
        }
        start = block + 1;
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
