/* SPDX-License-Identifier: Apache-2.0 */
/* Integers of 8, 4, 2 or 1 bits side by side, the first in the lowest bits of a byte. The width is to be a constant. */

#ifndef SPARSIFIERS_KERNEL_CODES_H
#define SPARSIFIERS_KERNEL_CODES_H

#include "kernel.h"

#include <string.h>

enum { CODES = 256 }; /* that are packed together */

/* CODES codes in CODES * width / 8 bytes; each has `width` bits. */
INLINE void pack_body(const uint8_t *codes, int width, uint8_t *out)
{
    if (width == 8)
        memcpy(out, codes, CODES);
    for (int i = 0; width == 4 && i < CODES / 2; i++)
        out[i] = (uint8_t)(codes[2 * i] | codes[2 * i + 1] << 4);
    for (int i = 0; width == 2 && i < CODES / 4; i++) {
        uint32_t four;
        memcpy(&four, codes + 4 * i, sizeof four);
        out[i] = (uint8_t)(four | four >> 6 | four >> 12 | four >> 18);
    }
    for (int i = 0; width == 1 && i < CODES / 8; i++) {
        uint64_t eight;
        memcpy(&eight, codes + 8 * i, sizeof eight);
        eight |= eight >> 7;
        eight |= eight >> 14;
        out[i] = (uint8_t)(eight | eight >> 28);
    }
}

/* CODES codes from the bytes of `pack_body`. */
INLINE void unpack_body(const uint8_t *data, int width, uint8_t *codes)
{
    if (width == 8)
        memcpy(codes, data, CODES);
    for (int i = 0; width == 4 && i < CODES / 2; i++) {
        codes[2 * i] = data[i] & 15;
        codes[2 * i + 1] = data[i] >> 4;
    }
    for (int i = 0; width == 2 && i < CODES / 4; i++) {
        uint32_t four = data[i];
        four = (four | four << 6 | four << 12 | four << 18) & 0x03030303;
        memcpy(codes + 4 * i, &four, sizeof four);
    }
    for (int i = 0; width == 1 && i < CODES / 8; i++) {
        uint64_t eight = data[i];
        eight |= eight << 28;
        eight |= eight << 14;
        eight = (eight | eight << 7) & UINT64_C(0x0101010101010101);
        memcpy(codes + 8 * i, &eight, sizeof eight);
    }
}

#endif
