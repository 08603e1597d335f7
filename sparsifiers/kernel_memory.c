/* Loops over float32 at indices, commit and scatter, and the memory's compensate. See kernel.c for what holds of all. */

#include "kernel.h"

#include <string.h>

#if X86
#include <immintrin.h>
#endif

/* -- commit ----------------------------------------------------------------------------------------------- */

/* The largest of the indices as unsigned numbers, so that a negative one is too large. */
INLINE uint32_t largest_index_body(const int32_t *indices, int64_t count)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < count; i++)
        largest = (uint32_t)indices[i] > largest ? (uint32_t)indices[i] : largest;
    return largest;
}
FOR_EACH_LEVEL(uint32_t, largest_index, (const int32_t *indices, int64_t count), (indices, count))

enum { LOOK_AHEAD = 48 }; /* indices whose elements are fetched ahead */

/* work[indices] -= sent, one by one; 0, or -1 without doing anything if an index is outside [0, n). */
EXPORT int kernel_commit(float *work, int64_t n, const int32_t *indices, const float *sent, int64_t count)
{
    if (count > 0 && largest_index(indices, count) >= (uint64_t)n)
        return -1;
    int64_t i = 0;
    for (; i + LOOK_AHEAD < count; i++) {
        PREFETCH_TO_WRITE(work + indices[i + LOOK_AHEAD]);
        work[indices[i]] -= sent[i];
    }
    for (; i < count; i++)
        work[indices[i]] -= sent[i];
    return 0;
}

/* total[indices] += values * scale, one by one, each rounded twice; 0, or -1 without doing anything if an index is
   outside [0, n). */
EXPORT int kernel_scatter(float *total, int64_t n, const int32_t *indices, const float *values, int64_t count,
                          float scale)
{
    if (count > 0 && largest_index(indices, count) >= (uint64_t)n)
        return -1;
    for (int64_t i = 0; i < count; i++) {
        if (i + LOOK_AHEAD < count)
            PREFETCH_TO_WRITE(total + indices[i + LOOK_AHEAD]);
        float part = values[i] * scale;
        total[indices[i]] += part;
    }
    return 0;
}

/* -- compensate ------------------------------------------------------------------------------------------- */

/* What is added: a gradient of float, bfloat16, or float16, which needs AVX2; or a float that is taken off. */
enum { FLOAT32, BFLOAT16, FLOAT16, TAKEN_OFF };

INLINE float bfloat16_at(const void *gradient, int64_t i)
{
    uint32_t bits = (uint32_t)((const uint16_t *)gradient)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Whether a float is infinite or NaN: all bits of its exponent are set. */
INLINE int endless(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7f800000) == 0x7f800000;
}

/* All of these return whether a sum is not finite. */
INLINE int add_body(float *work, const float *residual, const void *gradient, int64_t i, int64_t n, int kind)
{
    int found = 0;
    for (; i < n; i++) {
        work[i] = residual[i] + (kind == FLOAT32     ? ((const float *)gradient)[i]
                                 : kind == TAKEN_OFF ? -((const float *)gradient)[i]
                                                     : bfloat16_at(gradient, i));
        found |= endless(work[i]);
    }
    return found;
}

static int add_any(float *work, const float *residual, const void *gradient, int64_t n, int kind)
{
    return add_body(work, residual, gradient, 0, n, kind);
}

#if X86
/* The stores go past the caches: `work` is read again only when its whole merge buffer is. */

AVX2 static inline __m256 eight(const void *gradient, int64_t i, int kind)
{
    if (kind == FLOAT32)
        return _mm256_loadu_ps((const float *)gradient + i);
    if (kind == TAKEN_OFF)
        return _mm256_xor_ps(_mm256_loadu_ps((const float *)gradient + i), _mm256_set1_ps(-0.0f));
    __m128i narrow = _mm_loadu_si128((const __m128i *)((const uint16_t *)gradient + i));
    if (kind == FLOAT16)
        return _mm256_cvtph_ps(narrow);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

AVX512 static inline __m512 sixteen(const void *gradient, int64_t i, int kind)
{
    if (kind == FLOAT32)
        return _mm512_loadu_ps((const float *)gradient + i);
    if (kind == TAKEN_OFF)
        return _mm512_xor_ps(_mm512_loadu_ps((const float *)gradient + i), _mm512_set1_ps(-0.0f));
    __m256i narrow = _mm256_loadu_si256((const __m256i *)((const uint16_t *)gradient + i));
    if (kind == FLOAT16)
        return _mm512_cvtph_ps(narrow);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

/* Up to where `work` is aligned, and what is left at the end. */
AVX2 static int add_few(float *work, const float *residual, const void *gradient, int64_t i, int64_t n, int kind)
{
    int found = 0;
    for (; kind == FLOAT16 && i < n; i++) {
        work[i] = residual[i] + _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(((const uint16_t *)gradient)[i])));
        found |= endless(work[i]);
    }
    return found | add_body(work, residual, gradient, i, n, kind);
}

static int64_t until_aligned(const float *work, int64_t n)
{
    int64_t elements = (int64_t)(-(uintptr_t)work % 64 / sizeof(float));
    return elements < n ? elements : n;
}

AVX2 static int add_avx2(float *work, const float *residual, const void *gradient, int64_t n, int kind)
{
    int64_t i = until_aligned(work, n);
    int found = add_few(work, residual, gradient, 0, i, kind);
    __m256 unordered = _mm256_setzero_ps();
    for (; i + 8 <= n; i += 8) {
        __m256 sum = _mm256_add_ps(_mm256_loadu_ps(residual + i), eight(gradient, i, kind));
        __m256 nothing = _mm256_sub_ps(sum, sum); /* of what is not finite: NaN */
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(nothing, nothing, _CMP_UNORD_Q));
        _mm256_stream_ps(work + i, sum);
    }
    found |= _mm256_movemask_ps(unordered) | add_few(work, residual, gradient, i, n, kind);
    _mm_sfence();
    return found;
}

enum { NOT_FINITE = 0x99 }; /* fpclass: quiet NaN 0x01, inf 0x08, -inf 0x10, signalling NaN 0x80 */

AVX512 static int add_avx512(float *work, const float *residual, const void *gradient, int64_t n, int kind)
{
    int64_t i = until_aligned(work, n);
    int found = add_few(work, residual, gradient, 0, i, kind);
    for (; i + 16 <= n; i += 16) {
        __m512 sum = _mm512_add_ps(_mm512_loadu_ps(residual + i), sixteen(gradient, i, kind));
        found |= _mm512_fpclass_ps_mask(sum, NOT_FINITE);
        _mm512_stream_ps(work + i, sum);
    }
    found |= add_few(work, residual, gradient, i, n, kind);
    _mm_sfence();
    return found;
}
#endif

DISPATCH(int, add, (float *work, const float *residual, const void *gradient, int64_t n, int kind),
         (work, residual, gradient, n, kind))

/* work = residual + gradient; 1 if anything in work is then not finite, else 0; -1, with nothing done, if that kind of
   gradient cannot be read at this level. */
EXPORT int kernel_add(float *work, const float *residual, const void *gradient, int64_t n, int kind)
{
    if (kind == FLOAT16 && kernel_level == 0)
        return -1;
    return add(work, residual, gradient, n, kind) != 0;
}
