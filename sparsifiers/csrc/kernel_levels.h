/* SPDX-License-Identifier: Apache-2.0 */
/* Includes LOOPS, a file of loops over registers of floats, once for each level. There TARGET is the instruction set,
   AT(name) a name of that level, vec a register of WIDTH floats, and LOAD, STORE, STREAM, SPLAT, MULTIPLY_ADD, TOTAL, HITS
   (the lanes with a key above a floor, as bits) and OTHER (of a gradient) its operations. MULTIPLY_ADD may
   round once or twice: its bits differ among levels. STREAM writes past the caches, to an address that is aligned to a
   register; fence() comes after the last. */

#include "kernel.h"
#include "kernel_gradients.h"

#if X86
#include <immintrin.h>
#endif

static inline void fence(void)
{
#if X86
    _mm_sfence();
#endif
}

#define ALIGNED(address) ((uintptr_t)(address) % (WIDTH * sizeof(float)) == 0)
#define WRITE(out, values, streamed)                                                                                 \
    do {                                                                                                             \
        if (streamed)                                                                                                \
            STREAM(out, values);                                                                                     \
        else                                                                                                         \
            STORE(out, values);                                                                                      \
    } while (0)

/* -- for any machine --------------------------------------------------------------------------------------- */

#if defined(__GNUC__)
typedef float vec_any __attribute__((vector_size(16)));
typedef uint32_t bits_any __attribute__((vector_size(16)));
typedef float loose_any __attribute__((vector_size(16), aligned(4), may_alias));
#define WIDTH 4
#define LOAD(from) (*(const loose_any *)(from))
#define STORE(to, values) (*(loose_any *)(to) = (values))
#define SPLAT(value) ((vec_any){(value), (value), (value), (value)})
#else
typedef float vec_any;
#define WIDTH 1
#define LOAD(from) (*(from))
#define STORE(to, values) (*(to) = (values))
#define SPLAT(value) ((float)(value))
#endif
#if X86
#define STREAM(to, values) _mm_stream_ps(to, values)
#else
#define STREAM STORE
#endif

static inline vec_any other_any(const void *gradient, int64_t i, int kind)
{
    if (kind == FLOAT32)
        return LOAD((const float *)gradient + i);
    if (kind == TAKEN_OFF)
        return -LOAD((const float *)gradient + i);
#if defined(__GNUC__)
    uint16_t narrow __attribute__((vector_size(8)));
    memcpy(&narrow, (const uint16_t *)gradient + i, sizeof narrow);
    bits_any bits = __builtin_convertvector(narrow, bits_any);
    if (kind == BFLOAT16)
        return (vec_any)(bits << 16);
    vec_any magnitude = (vec_any)((bits & 0x7fff) << 13) * SPLAT(0x1p112f); /* see of_half */
    bits_any endless = (bits_any)((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return (vec_any)((bits_any)magnitude | (bits & 0x8000) << 16 | endless);
#else
    return other_one(gradient, i, kind);
#endif
}

static inline float total_any(vec_any values)
{
    float lanes[WIDTH], total = 0;
    STORE(lanes, values);
    for (int lane = 0; lane < WIDTH; lane++)
        total += lanes[lane];
    return total;
}

/* Nearly always there are none. */
static inline unsigned hits_any(vec_any values, int32_t floor)
{
#if X86
    __m128i key = _mm_and_si128(_mm_castps_si128(values), _mm_set1_epi32(MAGNITUDE));
    return (unsigned)_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(key, _mm_set1_epi32(floor))));
#else
    int32_t keys[WIDTH];
    uint32_t exceeds = 0;
    unsigned set = 0;
    memcpy(keys, &values, sizeof keys);
    for (int lane = 0; lane < WIDTH; lane++)
        exceeds |= (uint32_t)(floor - (keys[lane] & MAGNITUDE)); /* both >= 0: no overflow */
    for (int lane = 0; exceeds >> 31 && lane < WIDTH; lane++)
        set |= (unsigned)((keys[lane] & MAGNITUDE) > floor) << lane;
    return set;
#endif
}

#define TARGET
#define TOTAL total_any
#define HITS hits_any
#define AT(name) name##_any
#define vec vec_any
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#define OTHER other_any
#include LOOPS
#undef TARGET
#undef TOTAL
#undef HITS
#undef AT
#undef vec
#undef WIDTH
#undef LOAD
#undef STORE
#undef STREAM
#undef SPLAT
#undef MULTIPLY_ADD
#undef OTHER

#if X86
/* -- for AVX2 ---------------------------------------------------------------------------------------------- */

#define TARGET __attribute__((target("avx2,fma,f16c")))
#define AT(name) name##_avx2
#define vec __m256
#define WIDTH 8
#define LOAD(from) _mm256_loadu_ps(from)
#define STORE(to, values) _mm256_storeu_ps(to, values)
#define STREAM(to, values) _mm256_stream_ps(to, values)
#define SPLAT(value) _mm256_set1_ps(value)
#define MULTIPLY_ADD(a, b, c) _mm256_fmadd_ps(a, b, c)
#define OTHER other_avx2
#define TOTAL total_avx2
#define HITS hits_avx2

TARGET static inline float total_avx2(__m256 values)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

TARGET static inline unsigned hits_avx2(__m256 values, int32_t floor)
{
    __m256i key = _mm256_and_si256(_mm256_castps_si256(values), _mm256_set1_epi32(MAGNITUDE));
    return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(key, _mm256_set1_epi32(floor))));
}

TARGET static inline __m256 other_avx2(const void *gradient, int64_t i, int kind)
{
    if (kind == FLOAT32)
        return _mm256_loadu_ps((const float *)gradient + i);
    if (kind == TAKEN_OFF)
        return -_mm256_loadu_ps((const float *)gradient + i);
    __m128i narrow = _mm_loadu_si128((const __m128i *)((const uint16_t *)gradient + i));
    if (kind == FLOAT16)
        return _mm256_cvtph_ps(narrow);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

#include LOOPS
#undef TARGET
#undef TOTAL
#undef HITS
#undef AT
#undef vec
#undef WIDTH
#undef LOAD
#undef STORE
#undef STREAM
#undef SPLAT
#undef MULTIPLY_ADD
#undef OTHER

/* -- for AVX-512 ------------------------------------------------------------------------------------------- */

#define TARGET AVX512
#define AT(name) name##_avx512
#define vec __m512
#define WIDTH 16
#define LOAD(from) _mm512_loadu_ps(from)
#define STORE(to, values) _mm512_storeu_ps(to, values)
#define STREAM(to, values) _mm512_stream_ps(to, values)
#define SPLAT(value) _mm512_set1_ps(value)
#define MULTIPLY_ADD(a, b, c) _mm512_fmadd_ps(a, b, c)
#define OTHER other_avx512
#define TOTAL _mm512_reduce_add_ps
#define HITS hits_avx512

TARGET static inline unsigned hits_avx512(__m512 values, int32_t floor)
{
    __m512i key = _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(MAGNITUDE));
    return _mm512_cmpgt_epi32_mask(key, _mm512_set1_epi32(floor));
}

TARGET static inline __m512 other_avx512(const void *gradient, int64_t i, int kind)
{
    if (kind == FLOAT32)
        return _mm512_loadu_ps((const float *)gradient + i);
    if (kind == TAKEN_OFF)
        return -_mm512_loadu_ps((const float *)gradient + i);
    __m256i narrow = _mm256_loadu_si256((const __m256i *)((const uint16_t *)gradient + i));
    if (kind == FLOAT16)
        return _mm512_cvtph_ps(narrow);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

#include LOOPS
#endif
