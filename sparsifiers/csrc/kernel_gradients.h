/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients as they are given: of float, bfloat16 or float16, each element as a float, exactly. */

#ifndef SPARSIFIERS_KERNEL_GRADIENTS_H
#define SPARSIFIERS_KERNEL_GRADIENTS_H

#include <stdint.h>
#include <string.h>

/* Their kinds, by the numbers of kernel.py: none, and a float that is subtracted instead of added are two more. */
enum { ALONE = -1, FLOAT32, BFLOAT16, FLOAT16, TAKEN_OFF };

static inline float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The exponent is moved by a multiplication, which is exact; values that are not finite stay so. */
static inline float of_half(uint16_t half)
{
    float magnitude = as_float((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    return as_float(bits | (uint32_t)(half & 0x8000) << 16 | ((half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0));
}

static inline float other_one(const void *gradient, int64_t i, int kind)
{
    return kind == FLOAT32     ? ((const float *)gradient)[i]
           : kind == TAKEN_OFF ? -((const float *)gradient)[i]
           : kind == BFLOAT16  ? as_float((uint32_t)((const uint16_t *)gradient)[i] << 16)
                               : of_half(((const uint16_t *)gradient)[i]);
}

#endif
