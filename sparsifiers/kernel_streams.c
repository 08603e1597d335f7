/* Loops whose stores go past the caches: what they write is read again only after much else. A store that goes through
   them first reads what it is about to overwrite. */

#include "kernel.h"

#include <string.h>

#if X86
#include <immintrin.h>
#endif

enum { LINE = 64, LINE_FLOATS = LINE / sizeof(float) };

/* How many of n floats lie before the first line of the cache that begins at or after them. */
static int64_t before_line(const float *floats, int64_t n)
{
    int64_t elements = (int64_t)(-(uintptr_t)floats % LINE / sizeof(float));
    return elements < n ? elements : n;
}

/* -- zero ------------------------------------------------------------------------------------------------- */

static void zero_any(float *total, int64_t n)
{
    memset(total, 0, (size_t)n * sizeof *total);
}

#if X86
AVX2 static void zero_avx2(float *total, int64_t n)
{
    int64_t i = before_line(total, n);
    zero_any(total, i);
    for (; i + 8 <= n; i += 8)
        _mm256_stream_ps(total + i, _mm256_setzero_ps());
    zero_any(total + i, n - i);
    _mm_sfence();
}

AVX512 static void zero_avx512(float *total, int64_t n)
{
    int64_t i = before_line(total, n);
    zero_any(total, i);
    for (; i + LINE_FLOATS <= n; i += LINE_FLOATS)
        _mm512_stream_ps(total + i, _mm512_setzero_ps());
    zero_any(total + i, n - i);
    _mm_sfence();
}
#endif

DISPATCH(void, zero, (float *total, int64_t n), (total, n))

/* total = 0. */
EXPORT void kernel_zero(float *total, int64_t n)
{
    zero(total, n);
}

/* -- add and move ----------------------------------------------------------------------------------------- */

/* Whether a float is infinite or NaN: all bits of its exponent are set. */
INLINE int endless(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (bits & 0x7f800000) == 0x7f800000;
}

INLINE int add_and_move_body(float *work, float *home, const float *residual, const float *gradient, int64_t n)
{
    int found = 0;
    for (int64_t i = 0; i < n; i++) {
        home[i] = gradient[i];
        work[i] = residual[i] + gradient[i];
        found |= endless(work[i]);
    }
    return found;
}

static int add_and_move_any(float *work, float *home, const float *residual, const float *gradient, int64_t n)
{
    return add_and_move_body(work, home, residual, gradient, n);
}

#if X86
AVX2 static int add_and_move_avx2(float *work, float *home, const float *residual, const float *gradient, int64_t n)
{
    int64_t i = before_line(work, n);
    int found = add_and_move_body(work, home, residual, gradient, i);
    __m256 unordered = _mm256_setzero_ps();
    for (; i + 8 <= n; i += 8) {
        __m256 given = _mm256_loadu_ps(gradient + i), sum = _mm256_add_ps(_mm256_loadu_ps(residual + i), given);
        __m256 nothing = _mm256_sub_ps(sum, sum); /* of what is not finite: NaN */
        unordered = _mm256_or_ps(unordered, _mm256_cmp_ps(nothing, nothing, _CMP_UNORD_Q));
        _mm256_stream_ps(home + i, given);
        _mm256_stream_ps(work + i, sum);
    }
    found |= _mm256_movemask_ps(unordered);
    found |= add_and_move_body(work + i, home + i, residual + i, gradient + i, n - i);
    _mm_sfence();
    return found;
}

enum { NOT_FINITE = 0x99 }; /* fpclass: quiet NaN 0x01, inf 0x08, -inf 0x10, signalling NaN 0x80 */

AVX512 static int add_and_move_avx512(float *work, float *home, const float *residual, const float *gradient,
                                      int64_t n)
{
    int64_t i = before_line(work, n);
    int found = add_and_move_body(work, home, residual, gradient, i);
    for (; i + LINE_FLOATS <= n; i += LINE_FLOATS) {
        __m512 given = _mm512_loadu_ps(gradient + i), sum = _mm512_add_ps(_mm512_loadu_ps(residual + i), given);
        found |= _mm512_fpclass_ps_mask(sum, NOT_FINITE);
        _mm512_stream_ps(home + i, given);
        _mm512_stream_ps(work + i, sum);
    }
    found |= add_and_move_body(work + i, home + i, residual + i, gradient + i, n - i);
    _mm_sfence();
    return found;
}
#endif

DISPATCH(int, add_and_move,
         (float *work, float *home, const float *residual, const float *gradient, int64_t n),
         (work, home, residual, gradient, n))

/* work = residual + gradient and home = gradient, which lie alike within a line; 1 if anything in work is then not
   finite, else 0; -1, with nothing done, if they do not lie alike. */
EXPORT int kernel_add_and_move(float *work, float *home, const float *residual, const float *gradient, int64_t n)
{
    if ((uintptr_t)work % LINE != (uintptr_t)home % LINE)
        return -1;
    return add_and_move(work, home, residual, gradient, n) != 0;
}
