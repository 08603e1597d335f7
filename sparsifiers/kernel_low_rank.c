/* Products of thin factors, left (r, n) and right (r, m), and of these with matrices (n, m), all float32 row by row:
   see kernel_low_rank.py. A matrix is read from memory once, and written once.

   A product of factors is made in the order that is written here, each product of floats rounded by itself: it has the
   same bits at every level. All else may differ, for registers are of different widths, and some multiply and add at
   once. */

#include "kernel.h"

#include <string.h>

#if X86
#include <immintrin.h>
#endif

enum { MOST = 128 };       /* rows of a factor */
enum { REGISTERS = 8 };    /* that hold elements of the matrix */
enum { GROUP = 4 };        /* rows of the matrix that are projected on the left together */
enum { AHEAD = 512 };      /* elements that a row is fetched ahead: the hardware stops at the end of a page */
enum { SHORT = 768 };      /* elements of a row up to which the first-level cache holds a group of them, and the next */
enum { WHOLE = 8192 };     /* elements of the right factor up to which the first-level cache holds all of it */
enum { PANEL = 4096 };     /* and how many are used at a time, for ROWS rows of the matrix, if there are more */
enum { ROWS = 8 };
enum { STREAMED = 65536 }; /* elements of a matrix from which on it is written past the caches */

/* What is added to a residual: nothing, or a gradient of float, bfloat16 or float16, by the numbers of kernel.py. */
enum { ALONE = -1, FLOAT32, BFLOAT16, FLOAT16 };

/* The matrix is residual + gradient. */
struct sum {
    const float *residual;
    const void *gradient;
};

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* The exponent is moved by a multiplication, which is exact; what is not finite stays so. */
static float of_half(uint16_t half)
{
    float magnitude = as_float((uint32_t)(half & 0x7fff) << 13) * 0x1p112f;
    uint32_t bits;
    memcpy(&bits, &magnitude, sizeof bits);
    return as_float(bits | (uint32_t)(half & 0x8000) << 16 | ((half & 0x7c00) == 0x7c00 ? 0x7f800000 : 0));
}

static float other_one(const void *gradient, int64_t i, int kind)
{
    return kind == FLOAT32    ? ((const float *)gradient)[i]
           : kind == BFLOAT16 ? as_float((uint32_t)((const uint16_t *)gradient)[i] << 16)
                              : of_half(((const uint16_t *)gradient)[i]);
}

static float added_one(const struct sum *of, int64_t i, int kind)
{
    return kind == ALONE ? of->residual[i] : of->residual[i] + other_one(of->gradient, i, kind);
}

/* Of a gradient of 16 bits, half the lines are fetched twice. */
INLINE void fetch(const struct sum *of, int64_t i, int kind)
{
    PREFETCH(of->residual + i);
    if (kind == FLOAT32)
        PREFETCH((const float *)of->gradient + i);
    else if (kind != ALONE)
        PREFETCH((const uint16_t *)of->gradient + i);
}

/* -- the loops, for any machine ---------------------------------------------------------------------------- */

#if defined(__GNUC__)
typedef float vec_any __attribute__((vector_size(16)));
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

static vec_any other_any(const void *gradient, int64_t i, int kind)
{
    float values[WIDTH];
    if (kind == FLOAT32)
        return LOAD((const float *)gradient + i);
    for (int lane = 0; lane < WIDTH; lane++)
        values[lane] = other_one(gradient, i + lane, kind);
    return LOAD(values);
}

static float total_any(vec_any values)
{
    float lanes[WIDTH], total = 0;
    STORE(lanes, values);
    for (int lane = 0; lane < WIDTH; lane++)
        total += lanes[lane];
    return total;
}

#define TARGET
#define TOTAL total_any
#define AT(name) name##_any
#define vec vec_any
#define MULTIPLY_ADD(a, b, c) ((a) * (b) + (c))
#define OTHER other_any
#include "kernel_low_rank_loops.h"
#undef TARGET
#undef TOTAL
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

TARGET static inline float total_avx2(__m256 values)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

TARGET static inline __m256 other_avx2(const void *gradient, int64_t i, int kind)
{
    if (kind == FLOAT32)
        return _mm256_loadu_ps((const float *)gradient + i);
    __m128i narrow = _mm_loadu_si128((const __m128i *)((const uint16_t *)gradient + i));
    if (kind == FLOAT16)
        return _mm256_cvtph_ps(narrow);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
}

#include "kernel_low_rank_loops.h"
#undef TARGET
#undef TOTAL
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

TARGET static inline __m512 other_avx512(const void *gradient, int64_t i, int kind)
{
    if (kind == FLOAT32)
        return _mm512_loadu_ps((const float *)gradient + i);
    __m256i narrow = _mm256_loadu_si256((const __m256i *)((const uint16_t *)gradient + i));
    if (kind == FLOAT16)
        return _mm512_cvtph_ps(narrow);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

#include "kernel_low_rank_loops.h"
#endif

/* -- the choice between them ------------------------------------------------------------------------------- */

DISPATCH(void, product,
         (const float *scales, const float *right, int64_t m, int64_t r, float scale, float *out, int streamed,
          int64_t n),
         (scales, right, m, r, scale, out, streamed, n))
DISPATCH(int, dots,
         (const struct sum *of, int64_t i, int64_t n, int kind, int64_t next, const float *right, int64_t m, int64_t r,
          float *out, int streamed, float *sums),
         (of, i, n, kind, next, right, m, r, out, streamed, sums))
DISPATCH(void, rows,
         (const struct sum *of, int64_t i, int64_t n, int kind, int64_t next, const float *scales, const float *right,
          int64_t m, int64_t r, float *out, int streamed),
         (of, i, n, kind, next, scales, right, m, r, out, streamed))
DISPATCH(void, copied, (float *to, const float *from, int64_t n), (to, from, n))
DISPATCH(int, columns,
         (const struct sum *of, int64_t i, int kind, int64_t m, int64_t count, const float *scales, int64_t r,
          float *right, float *out, int streamed),
         (of, i, kind, m, count, scales, r, right, out, streamed))

static void fence(void)
{
#if X86
    _mm_sfence();
#endif
}

/* How many columns of a right factor are used at a time. */
static int64_t width(int64_t m, int64_t r)
{
    return r * m <= WHOLE ? m : PANEL / r < 512 ? 512 : PANEL / r / 128 * 128;
}

/* -- what is exported; r <= MOST --------------------------------------------------------------------------- */

/* out = scale * left^T right: ((left[0, i] * right[0, j] + left[1, i] * right[1, j]) + ...) * scale. */
EXPORT void kernel_product(const float *left, int64_t n, const float *right, int64_t m, int64_t r, float scale,
                           float *out)
{
    float scales[MOST];
    int64_t step = width(m, r);
    for (int64_t j = 0; j < m; j += step)
        for (int64_t i = 0; i < n; i++) {
            for (int64_t k = 0; k < r; k++)
                scales[k] = left[k * n + i];
            product(scales, right + j, m, r, scale, out + i * m + j, n * m >= STREAMED, least(step, m - j));
        }
    fence();
}

/* left[:, i] = right . row i of residual + gradient, which is written to `matrix`; if `off`, without left^T right. For
   the kind ALONE the residual is the matrix and nothing is written. A gradient of floats is copied to `copy` too, unless
   that is NULL. 1 if the sum is not finite somewhere, else 0. */
EXPORT int kernel_project_on_right(float *matrix, const float *residual, const void *gradient, int kind, int64_t n,
                                   int64_t m, const float *right, int64_t r, float *left, int off, float *copy)
{
    float sums[ROWS][MOST];
    struct sum of = {residual, gradient};
    int endless = 0, streamed = n * m >= STREAMED;
    int64_t step = width(m, r), block = step < m ? ROWS : 1, next = step < m ? m : AHEAD;
    for (int64_t first = 0; first < n; first += block) {
        int64_t count = least(block, n - first);
        for (int64_t i = 0; i < count; i++)
            memset(sums[i], 0, (size_t)r * sizeof(float));
        for (int64_t j = 0; j < m; j += step)
            for (int64_t i = 0; i < count; i++)
                endless |= dots(&of, (first + i) * m + j, least(step, m - j), kind, next, right + j, m, r,
                                off ? NULL : matrix, streamed, sums[i]);
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < r; k++) {
                left[k * n + first + i] = sums[i][k];
                sums[i][k] = -sums[i][k];
            }
        for (int64_t j = 0; off && j < m; j += step)
            for (int64_t i = 0; i < count; i++)
                rows(&of, (first + i) * m + j, least(step, m - j), kind, next, sums[i], right + j, m, r, matrix,
                     streamed);
        if (copy)
            copied(copy + first * m, (const float *)gradient + first * m, count * m);
    }
    fence();
    return endless;
}

/* right = left . (residual + gradient), which is written to `matrix`. For the kind ALONE the residual is the matrix and
   nothing is written. A gradient of floats is copied to `copy` too, unless that is NULL. 1 if the matrix is not finite
   somewhere, else 0. */
EXPORT int kernel_project_on_left(float *matrix, const float *residual, const void *gradient, int kind, int64_t n,
                                  int64_t m, const float *left, int64_t r, float *right, float *copy)
{
    float scales[MOST * GROUP];
    struct sum of = {residual, gradient};
    int endless = 0;
    memset(right, 0, (size_t)(r * m) * sizeof(float));
    for (int64_t i = 0; i < n; i += GROUP) {
        int64_t count = least(GROUP, n - i);
        for (int64_t k = 0; k < r; k++)
            for (int64_t row = 0; row < count; row++)
                scales[k * GROUP + row] = left[k * n + i + row];
        endless |= columns(&of, i * m, kind, m, count, scales, r, right, matrix, n * m >= STREAMED);
        if (copy)
            copied(copy + i * m, (const float *)gradient + i * m, count * m);
    }
    fence();
    return endless;
}

/* matrix -= left^T right. */
EXPORT void kernel_take_off(float *matrix, int64_t n, int64_t m, const float *left, const float *right, int64_t r)
{
    float scales[ROWS][MOST];
    struct sum of = {matrix, NULL};
    int64_t step = width(m, r), block = step < m ? ROWS : 1, next = step < m ? m : AHEAD;
    for (int64_t first = 0; first < n; first += block) {
        int64_t count = least(block, n - first);
        for (int64_t i = 0; i < count; i++)
            for (int64_t k = 0; k < r; k++)
                scales[i][k] = -left[k * n + first + i];
        for (int64_t j = 0; j < m; j += step)
            for (int64_t i = 0; i < count; i++)
                rows(&of, (first + i) * m + j, least(step, m - j), ALONE, next, scales[i], right + j, m, r, matrix, 0);
    }
}
