/* What a message is made of: the codec `Blocks` of agmerge/exchanges/message/indices.py. See kernel.c for what holds of all. */

#include "kernel.h"

#include <string.h>

static const int WIDTHS[] = {16, 8, 4, 2};

static int64_t bytes_of(int64_t count, int width) { return (count * width + 7) / 8; }

/* -- integers side by side ---------------------------------------------------------------------------------- */

/* The low `width` bits of indices >> shift, the first in the lowest bits of a byte; the rest of `out` is 0. */
INLINE void pack_body(const int32_t *indices, int64_t count, int shift, int width, uint8_t *out, int64_t size)
{
    int64_t i = 0, whole = 0;
    if (width == 16) {
        for (; i < count; i++) {
            uint16_t part = (uint16_t)(indices[i] >> shift);
            memcpy(out + 2 * i, &part, 2);
        }
        whole = 2 * count;
    } else {
        int each = 8 / width, mask = (1 << width) - 1;
        for (; i + each <= count; i += each, whole++) {
            int byte = 0;
            for (int j = 0; j < each; j++)
                byte |= (indices[i + j] >> shift & mask) << j * width;
            out[whole] = (uint8_t)byte;
        }
        if (i < count) {
            int byte = 0;
            for (int j = 0; i + j < count; j++)
                byte |= (indices[i + j] >> shift & mask) << j * width;
            out[whole++] = (uint8_t)byte;
        }
    }
    memset(out + whole, 0, (size_t)(size - whole));
}

/* indices |= what `pack_body` has written, << shift. */
INLINE void unpack_body(const uint8_t *data, int64_t count, int shift, int width, int32_t *indices)
{
    if (width == 16) {
        for (int64_t i = 0; i < count; i++) {
            uint16_t part;
            memcpy(&part, data + 2 * i, 2);
            indices[i] |= (int32_t)((uint32_t)part << shift);
        }
        return;
    }
    int each = 8 / width;
    uint32_t mask = (1u << width) - 1;
    int64_t i = 0;
    for (; i + each <= count; i += each)
        for (int j = 0; j < each; j++)
            indices[i + j] |= (int32_t)((data[i / each] >> j * width & mask) << shift);
    for (int j = 0; i + j < count; j++)
        indices[i + j] |= (int32_t)((data[i / each] >> j * width & mask) << shift);
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

/* Write the first `count` of `capacity` indices into all of `out`; `last`: the last block of 2**low elements. 0; -1, with
   nothing but `out` changed, if an index lies in no block. */
EXPORT int kernel_blocks_encode(const int32_t *indices, int64_t count, int64_t capacity, int low, int64_t last,
                                uint8_t *out)
{
    int shift = 0;
    for (int plane = 0; plane < 4; plane++) {
        if (!(low & WIDTHS[plane]))
            continue;
        int64_t size = bytes_of(capacity, WIDTHS[plane]);
#define PACK(width) pack_body(indices, count, shift, width, out, size)
        FOR_WIDTH(WIDTHS[plane], PACK)
        out += size;
        shift += WIDTHS[plane];
    }
    memset(out, 0, (size_t)bytes_of(capacity + last, 1));
    for (int64_t i = 0; i < count; i++) {
        int64_t block = indices[i] >> low, place = block + i;
        if (block < 0 || block > last)
            return -1;
        out[place >> 3] |= (uint8_t)(1 << (place & 7));
    }
    return 0;
}

/* Read `count` <= capacity indices. Whether the bytes can be those of so many; whatever they are, only out[0, count)
   is written. */
EXPORT int kernel_blocks_decode(const uint8_t *data, int64_t count, int64_t capacity, int low, int64_t last,
                                int32_t *out)
{
    const uint8_t *planes = data;
    for (int plane = 0; plane < 4; plane++)
        data += low & WIDTHS[plane] ? bytes_of(capacity, WIDTHS[plane]) : 0;
    int64_t size = bytes_of(capacity + last, 1), found = 0, block = 0;
    for (int64_t i = 0; i < size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, data + i, (size_t)(size - i < 8 ? size - i : 8));
        for (; word; word &= word - 1, found++)
            if (found < count) {
                block = 8 * i + lowest_set(word) - found;
                out[found] = (int32_t)((uint64_t)block << low);
            }
    }
    for (int64_t i = found; i < count; i++)
        out[i] = 0;
    int shift = 0;
    for (int plane = 0; plane < 4; plane++) {
        if (!(low & WIDTHS[plane]))
            continue;
#define UNPACK(width) unpack_body(planes, count, shift, width, out)
        FOR_WIDTH(WIDTHS[plane], UNPACK)
        planes += bytes_of(capacity, WIDTHS[plane]);
        shift += WIDTHS[plane];
    }
    return found == count && block <= last;
}
