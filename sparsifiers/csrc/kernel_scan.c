/* SPDX-License-Identifier: Apache-2.0 */
/* Which keys of a vector of float32 exceed a floor. See kernel.c for the rules of all. */

#include "kernel.h"

#include <string.h>

#if X86
#include <immintrin.h>
#elif NEON
#include <arm_neon.h>
#endif

#define AHEAD 16384 /* bytes that a scan is prefetched ahead: the hardware stops at the end of a page */
#define SET 64      /* elements with hits in the bits of one word */
#define FEW 12      /* hits among them, up to which they are written one by one */

/* Where in a block of n <= BLOCK elements the key exceeds its floor, ascending; `hits` has BLOCK + SET slots. The floors
   are one for each element (each = 1), or the same SET ones again and again (each = 0). */
#define HITS_PARAMETERS                                                                                              \
    (const int32_t *bits, int64_t n, int32_t mask, const int32_t *floors, int each, int32_t *hits)
#define HITS_ARGUMENTS (bits, n, mask, floors, each, hits)

static inline void write_many_any(uint64_t set, int32_t first, int32_t *hits)
{
    for (; set; set &= set - 1)
        *hits++ = first + lowest_set(set);
}

/* -- hits among SET elements, as bits -------------------------------------------------------------------------- */

#if X86
static inline uint64_t set_of_any(const int32_t *bits, int32_t mask, const int32_t *floors)
{
    const __m128i masks = _mm_set1_epi32(mask);
    uint64_t set = 0;
    for (int j = 0; j < SET / 4; j++) {
        __m128i key = _mm_and_si128(_mm_loadu_si128((const __m128i *)(bits + 4 * j)), masks);
        __m128i hit = _mm_cmpgt_epi32(key, _mm_loadu_si128((const __m128i *)(floors + 4 * j)));
        set |= (uint64_t)(uint32_t)_mm_movemask_ps(_mm_castsi128_ps(hit)) << 4 * j;
    }
    return set;
}

AVX2 static inline uint64_t set_of_avx2(const int32_t *bits, int32_t mask, const int32_t *floors)
{
    const __m256i masks = _mm256_set1_epi32(mask);
    uint64_t set = 0;
    for (int j = 0; j < SET / 8; j++) {
        __m256i key = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(bits + 8 * j)), masks);
        __m256i hit = _mm256_cmpgt_epi32(key, _mm256_loadu_si256((const __m256i *)(floors + 8 * j)));
        set |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(hit)) << 8 * j;
    }
    return set;
}

AVX2 static inline void write_many_avx2(uint64_t set, int32_t first, int32_t *hits)
{
    for (; set; set >>= 8, first += 8) {
        __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)kernel_compaction[set & 255]));
        _mm256_storeu_si256((__m256i *)hits, _mm256_add_epi32(lanes, _mm256_set1_epi32(first)));
        hits += _mm_popcnt_u64(set & 255);
    }
}
#else
static inline uint64_t set_of_any(const int32_t *bits, int32_t mask, const int32_t *floors)
{
    uint64_t set = 0;
    for (int j = 0; j < SET; j++)
        set |= (uint64_t)((bits[j] & mask) > floors[j]) << j;
    return set;
}
#endif

#if NEON
/* Each hit is a byte of ones; the bytes of eight elements become one, by its bits. */
static inline uint8x16_t sixteen(const int32_t *bits, int32x4_t masks, const int32_t *floors)
{
    uint16x4_t hit[4];
    for (int j = 0; j < 4; j++)
        hit[j] = vmovn_u32(vcgtq_s32(vandq_s32(vld1q_s32(bits + 4 * j), masks), vld1q_s32(floors + 4 * j)));
    return vcombine_u8(vmovn_u16(vcombine_u16(hit[0], hit[1])), vmovn_u16(vcombine_u16(hit[2], hit[3])));
}

static inline uint64_t set_of_neon(const int32_t *bits, int32_t mask, const int32_t *floors)
{
    static const uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t weight = vld1q_u8(weights);
    const int32x4_t masks = vdupq_n_s32(mask);
    uint8x16_t part[4];
    for (int j = 0; j < 4; j++)
        part[j] = vandq_u8(sixteen(bits + 16 * j, masks, floors + 16 * j), weight);
    uint8x16_t sum = vpaddq_u8(vpaddq_u8(part[0], part[1]), vpaddq_u8(part[2], part[3]));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sum, sum)), 0);
}
#endif

/* -- a block --------------------------------------------------------------------------------------------------- */

#define TARGET
#define AT(name) name##_any
#include "kernel_scan_loops.h"
#undef TARGET
#undef AT

#if NEON
#define TARGET
#define AT(name) name##_neon
#define write_many_neon write_many_any
#include "kernel_scan_loops.h"
#endif

#if X86
#define TARGET AVX2
#define AT(name) name##_avx2
#include "kernel_scan_loops.h"

static const uint8_t counting[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                     16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                     32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                     48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

AVX512 static int64_t find_hits_avx512 HITS_PARAMETERS
{
    const __m512i masks = _mm512_set1_epi32(mask), lanes = _mm512_loadu_si512(counting);
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t valid = n - i < 64 ? (UINT64_C(1) << (n - i)) - 1 : ~UINT64_C(0), set = 0;
        for (int j = 0; j < 4; j++) {
            PREFETCH((const char *)(bits + i) + AHEAD + 64 * j);
            __mmask16 here = (__mmask16)(valid >> 16 * j);
            __m512i key = _mm512_and_si512(_mm512_maskz_loadu_epi32(here, bits + i + 16 * j), masks);
            __m512i floor = _mm512_maskz_loadu_epi32(here, floors + each * i + 16 * j);
            set |= (uint64_t)_mm512_mask_cmpgt_epi32_mask(here, key, floor) << 16 * j;
        }
        __m512i found = _mm512_maskz_compress_epi8(set, lanes), base = _mm512_set1_epi32((int32_t)i);
        int64_t more = (int64_t)_mm_popcnt_u64(set);
        _mm512_storeu_si512(hits + count, _mm512_add_epi32(_mm512_cvtepu8_epi32(_mm512_castsi512_si128(found)), base));
        if (more > 16) {
            uint8_t places[64];
            _mm512_storeu_si512(places, found);
            for (int64_t j = 16; j < more; j += 16) {
                __m512i place = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(places + j)));
                _mm512_storeu_si512(hits + count + j, _mm512_add_epi32(place, base));
            }
        }
        count += more;
    }
    return count;
}
#endif

#if NEON
static int64_t find_hits HITS_PARAMETERS
{
    return kernel_level >= 1 ? find_hits_neon HITS_ARGUMENTS : find_hits_any HITS_ARGUMENTS;
}
#else
DISPATCH(int64_t, find_hits, HITS_PARAMETERS, HITS_ARGUMENTS)
#endif

/* For kernel_rows.c: a floor for each element. */
int64_t kernel_hits(const int32_t *bits, int64_t n, int32_t mask, const int32_t *floors, int32_t *hits)
{
    return find_hits(bits, n, mask, floors, 1, hits);
}

/* Positions and keys of the elements [start, n) with a key above the floor, appended to `held` others. Returns
   where it stopped: n, or earlier where the next block might not fit. */
EXPORT int64_t kernel_scan(const int32_t *bits, int64_t start, int64_t n, int32_t mask, int32_t floor,
                           int32_t *positions, int32_t *keys, int64_t capacity, int64_t *held)
{
    int32_t hits[BLOCK + SET], floors[SET];
    int64_t i = start, h = *held;
    for (int j = 0; j < SET; j++)
        floors[j] = floor;
    while (i < n) {
        int64_t size = n - i < BLOCK ? n - i : BLOCK;
        if (h + size > capacity)
            break;
        int64_t count = find_hits(bits + i, size, mask, floors, 0, hits);
        for (int64_t j = 0; j < count; j++) {
            positions[h + j] = (int32_t)i + hits[j];
            keys[h + j] = bits[i + hits[j]] & mask;
        }
        h += count;
        i += size;
    }
    *held = h;
    return i;
}

