/* SPDX-License-Identifier: Apache-2.0 */
/* Common to reading eden's records at all levels, or at AVX2 and AVX-512: butterflies over registers,
   tables of levels, planes. */

#ifndef SPARSIFIERS_KERNEL_QUANTISE_CODES_H
#define SPARSIFIERS_KERNEL_QUANTISE_CODES_H

#include "kernel_quantise.h"

/* Of 8 registers, those with numbers that differ in one bit become first(left, right) and second(left, right): sums and
   differences, a butterfly over that bit; or an exchange of the bit with places inside of registers.

   Bit i of registers' numbers and of places in them is one of a coordinate's place. At first registers have bits 2,
   1 and 0, and a byte of a plane is a place. Exchanges bring bits 5, 4 and 3 to registers one after the other,
   then 6 and 7, and move the others down, until a register has neighbours. */
#define OVER(v, bit, first, second)                                                                                  \
    do {                                                                                                             \
        EACH(int r = 0; r < 8; r++)                                                                                  \
            if (!(r & (bit))) {                                                                                      \
                __typeof__(v[0]) left = v[r], right = v[r + (bit)];                                                  \
                v[r] = first(left, right);                                                                           \
                v[r + (bit)] = second(left, right);                                                                  \
            }                                                                                                        \
    } while (0)

/* By bits, and by sign, number, sign and number of two coordinates: their sum and their difference, in units of 30 with
   one bit, of 10 with two. A sum of 8 levels is 80 at most. */
static const int8_t PAIR_SUMS[3][16] = {
    {0}, {2, 0, 0, 0, 0, -2}, {6, 0, 13, -7, 0, -6, 7, -13, 13, 7, 20, 0, -7, -13, 0, -20}};
static const int8_t PAIR_DIFFERENCES[3][16] = {
    {0}, {0, -2, 0, 0, 2, 0}, {0, -6, 7, -13, 6, 0, 13, -7, -7, -13, 0, -20, 13, 7, 20, 0}};
/* By bits, sign and number of one coordinate. */
static const int8_t SIGNED_LEVELS[5][16] = {
    {0}, {30, -30}, {30, -30, 100, -100}, {12, -12, 36, -36, 64, -64, 103, -103},
    {6, -6, 18, -18, 30, -30, 43, -43, 58, -58, 74, -74, 95, -95, 126, -126}};

/* Where the bits of a plane lie of as many records as have 256 coordinates: in `bytes`, unless it is one. */
INLINE const uint8_t *plane_bytes(const uint8_t *data, int bits, int size, int plane, uint8_t *bytes)
{
    data += SCALE + plane * size / 8;
    if (size == LARGEST)
        return data;
    for (int i = 0; i < LARGEST / size; i++, data += record_bytes(bits, size))
        memcpy(bytes + i * size / 8, data, (size_t)size / 8);
    return bytes;
}

enum { MOST_BYTES = 4 * (SCALE + 4 * LARGEST / 8) };

/* Copy fewer records than have 256 coordinates, and the values before them, and fill up with zeros. */
INLINE void take_rest(const uint8_t *data, int64_t bytes, const float *before, int64_t coordinates, uint8_t *rest,
                      float *rows)
{
    memset(rest, 0, MOST_BYTES);
    memcpy(rest, data, (size_t)bytes);
    memset(rows, 0, LARGEST * sizeof(float));
    if (before)
        memcpy(rows, before, (size_t)coordinates * sizeof(float));
}

void kernel_rotate_again_avx2(float *rows, int size, uint64_t counter);
void kernel_rotate_again_avx512(float *rows, int size, uint64_t counter);

#endif
