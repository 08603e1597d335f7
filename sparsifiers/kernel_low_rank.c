/* Products of thin factors, left (r, n) and right (r, m), and of these with matrices (n, m), all float32 row by row: see
   kernel_low_rank.py. A matrix is read and written once, in pieces of rows that the first-level cache holds.

   Every sum is made in the order that is written here, each product rounded by itself, so all levels give the same
   bits. Most loops are left to the compiler, which vectorises them for each level. */

#include "kernel.h"

#include <string.h>

#if X86
#include <immintrin.h>
#endif

enum { TILE = 1024 };      /* elements of a row that are gone over together */
enum { GROUP = 4 };        /* rows of a factor, or of a matrix, likewise */
enum { LANES = 16 };       /* partial sums of a dot product */
enum { PANEL = 8192 };     /* elements of the right factor for which a product is made: the first-level cache holds them */
enum { STREAMED = 65536 }; /* elements from which on a product is written past the caches */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* -- what all are made of --------------------------------------------------------------------------------- */

/* What becomes of the sum of up to GROUP rows: it is written, or added to what is there; and then multiplied. */
enum { FRESH, ADDED, ADDED_LAST };

INLINE void combine_rows(float *restrict out, int mode, int k, const float *scales, const float *rows, int64_t apart,
                         float factor, int64_t n)
{
    const float a = scales[0], b = k > 1 ? scales[1] : 0, c = k > 2 ? scales[2] : 0, d = k > 3 ? scales[3] : 0;
    const float *second = rows + apart, *third = second + apart, *fourth = third + apart;
    for (int64_t i = 0; i < n; i++) {
        float sum = a * rows[i];
        if (mode != FRESH)
            sum = out[i] + sum;
        if (k > 1)
            sum += b * second[i];
        if (k > 2)
            sum += c * third[i];
        if (k > 3)
            sum += d * fourth[i];
        out[i] = mode == ADDED ? sum : sum * factor;
    }
}

/* out = sum * factor, or out + sum, or (out + sum) * factor, where sum is that of scales[j] * row j for j < k <= GROUP,
   added up in this order; the rows are `apart`. */
INLINE int combine_body(float *out, int mode, int k, const float *scales, const float *rows, int64_t apart,
                        float factor, int64_t n)
{
#define COMBINE(mode, k) combine_rows(out, mode, k, scales, rows, apart, factor, n)
#define COMBINE_FEW(mode) (k == 1 ? COMBINE(mode, 1) : k == 2 ? COMBINE(mode, 2) : k == 3 ? COMBINE(mode, 3) : COMBINE(mode, 4))
    if (mode == FRESH)
        COMBINE_FEW(FRESH);
    else if (mode == ADDED)
        COMBINE_FEW(ADDED);
    else
        COMBINE_FEW(ADDED_LAST);
    return 0;
}
#define COMBINE_PARAMETERS                                                                                           \
    (float *out, int mode, int k, const float *scales, const float *rows, int64_t apart, float factor, int64_t n)
FOR_EACH_LEVEL(int, combine, COMBINE_PARAMETERS, (out, mode, k, scales, rows, apart, factor, n))

/* sums[j] += row j . vector, for j < k <= GROUP: the lanes' sums are added in halves. */
INLINE void dots_end(float (*lanes)[LANES], int k, const float *vector, const float *rows, int64_t apart, int64_t i,
                     int64_t n, float *sums)
{
    for (int j = 0; j < k; j++) {
        for (int64_t rest = i; rest < n; rest++)
            lanes[j][rest - i] += vector[rest] * rows[j * apart + rest];
        for (int half = LANES / 2; half; half /= 2)
            for (int lane = 0; lane < half; lane++)
                lanes[j][lane] += lanes[j][lane + half];
        sums[j] += lanes[j][0];
    }
}

INLINE void dots_rows(int k, const float *vector, const float *rows, int64_t apart, int64_t n, float *sums)
{
    float lanes[GROUP][LANES] = {{0}};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < k; j++)
            for (int lane = 0; lane < LANES; lane++)
                lanes[j][lane] += vector[i + lane] * rows[j * apart + i + lane];
    dots_end(lanes, k, vector, rows, apart, i, n, sums);
}

#define DOTS_PARAMETERS (int k, const float *vector, const float *rows, int64_t apart, int64_t n, float *sums)
#define DOTS_ARGUMENTS (k, vector, rows, apart, n, sums)

INLINE int dots_body DOTS_PARAMETERS
{
#define DOTS(k) dots_rows(k, vector, rows, apart, n, sums)
    k == 1 ? DOTS(1) : k == 2 ? DOTS(2) : k == 3 ? DOTS(3) : DOTS(4);
    return 0;
}

static int dots_any DOTS_PARAMETERS { return dots_body DOTS_ARGUMENTS; }

#if X86
AVX2 static int dots_avx2 DOTS_PARAMETERS { return dots_body DOTS_ARGUMENTS; }

/* The compiler makes it slower than with AVX2 by itself. */
AVX512 static inline void dots_rows_avx512(int k, const float *vector, const float *rows, int64_t apart, int64_t n,
                                           float *sums)
{
    float lanes[GROUP][LANES];
    __m512 parts[GROUP];
    int64_t i = 0;
    for (int j = 0; j < GROUP; j++)
        parts[j] = _mm512_setzero_ps();
    for (; i + LANES <= n; i += LANES) {
        __m512 sixteen = _mm512_loadu_ps(vector + i);
        for (int j = 0; j < k; j++)
            parts[j] = _mm512_add_ps(parts[j], _mm512_mul_ps(sixteen, _mm512_loadu_ps(rows + j * apart + i)));
    }
    for (int j = 0; j < k; j++)
        _mm512_storeu_ps(lanes[j], parts[j]);
    dots_end(lanes, k, vector, rows, apart, i, n, sums);
}

AVX512 static int dots_avx512 DOTS_PARAMETERS
{
#define DOTS_AVX512(k) dots_rows_avx512(k, vector, rows, apart, n, sums)
    k == 1 ? DOTS_AVX512(1) : k == 2 ? DOTS_AVX512(2) : k == 3 ? DOTS_AVX512(3) : DOTS_AVX512(4);
    return 0;
}
#endif

DISPATCH(int, dots, DOTS_PARAMETERS, DOTS_ARGUMENTS)

/* Copy n floats past the caches, where this machine can; a fence has to follow. */
static void stream(float *out, const float *from, int64_t n)
{
#if X86
    int64_t i = 0, head = least((int64_t)(-(uintptr_t)out % 16 / sizeof(float)), n);
    for (; i < head; i++)
        out[i] = from[i];
    for (; i + 4 <= n; i += 4)
        _mm_stream_ps(out + i, _mm_loadu_ps(from + i));
    for (; i < n; i++)
        out[i] = from[i];
#else
    memcpy(out, from, (size_t)n * sizeof(float));
#endif
}

static void fence(void)
{
#if X86
    _mm_sfence();
#endif
}

/* Scale each row of a factor by an element of column i of another one, and add them to out: `sign` times. */
static void add_rows(float *out, const float *column, int64_t apart, float sign, const float *rows, int64_t m,
                     int64_t r, int64_t n)
{
    for (int64_t k = 0; k < r; k += GROUP) {
        float scales[GROUP] = {0};
        int few = (int)least(GROUP, r - k);
        for (int j = 0; j < few; j++)
            scales[j] = sign * column[(k + j) * apart];
        combine(out, ADDED, few, scales, rows + k * m, m, 1, n);
    }
}

/* -- factors and matrices --------------------------------------------------------------------------------- */

/* out = scale * left^T right: ((left[0, i] * right[0, j] + left[1, i] * right[1, j]) + ...) * scale. */
EXPORT void kernel_product(const float *left, int64_t n, const float *right, int64_t m, int64_t r, float scale,
                           float *out)
{
    float tile[TILE];
    int streamed = n * m >= STREAMED;
    int64_t width = PANEL / r < 256 ? 256 : least(TILE, PANEL / r);
    for (int64_t start = 0; start < m; start += width) {
        int64_t count = least(width, m - start);
        for (int64_t i = 0; i < n; i++) {
            float *target = streamed ? tile : out + i * m + start;
            for (int64_t k = 0; k < r; k += GROUP) {
                float scales[GROUP] = {0};
                int few = (int)least(GROUP, r - k), last = k + few == r;
                for (int j = 0; j < few; j++)
                    scales[j] = left[(k + j) * n + i];
                combine(target, k == 0 ? FRESH : last ? ADDED_LAST : ADDED, few, scales, right + k * m + start, m,
                        last ? scale : 1, count);
            }
            if (streamed)
                stream(out + i * m + start, tile, count);
        }
    }
    fence();
}

/* left[:, i] = right . row i of the matrix. */
EXPORT void kernel_project_on_right(const float *matrix, int64_t n, int64_t m, const float *right, int64_t r,
                                    float *left)
{
    memset(left, 0, (size_t)(r * n) * sizeof(float));
    for (int64_t i = 0; i < n; i++)
        for (int64_t start = 0; start < m; start += TILE) {
            int64_t count = least(TILE, m - start);
            for (int64_t k = 0; k < r; k += GROUP) {
                float sums[GROUP] = {0};
                int few = (int)least(GROUP, r - k);
                dots(few, matrix + i * m + start, right + k * m + start, m, count, sums);
                for (int j = 0; j < few; j++)
                    left[(k + j) * n + i] += sums[j];
            }
        }
}

/* right = left . matrix. */
EXPORT void kernel_project_on_left(const float *matrix, int64_t n, int64_t m, const float *left, int64_t r,
                                   float *right)
{
    memset(right, 0, (size_t)(r * m) * sizeof(float));
    for (int64_t i = 0; i < n; i += GROUP)
        for (int64_t start = 0; start < m; start += TILE)
            for (int64_t k = 0; k < r; k++)
                combine(right + k * m + start, ADDED, (int)least(GROUP, n - i), left + k * n + i,
                        matrix + i * m + start, m, 1, least(TILE, m - start));
}

/* matrix -= left^T right. */
EXPORT void kernel_take_off(float *matrix, int64_t n, int64_t m, const float *left, const float *right, int64_t r)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t start = 0; start < m; start += TILE)
            add_rows(matrix + i * m + start, left + i, n, -1, right + start, m, r, least(TILE, m - start));
}
