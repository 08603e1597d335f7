/* SPDX-License-Identifier: Apache-2.0 */
/* Loops over float32 vectors that numpy and torch make of several passes. Called through ctypes by kernel.py.

   A key is the bits of a float without its sign (see largest.py). Nothing here allocates, keeps state
   between calls besides the level, or knows Python. Each loop exists for any machine, for AVX2 and for
   AVX-512; all give the same bits, but for some of kernel_low_rank.c. Additions are single and never contracted, so
   they round as torch's do. */

#include "kernel.h"

#include <string.h>

#if X86
#include <immintrin.h>
#endif

#define INTERFACE 14 /* kernel.py expects this number: raise both when a function changes */
#define BINS 2048

EXPORT int kernel_level = 0;
static int supported = 0;

#if X86
uint64_t kernel_compaction[256];

static void set_up(void)
{
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma"))
        supported = 1; /* every such processor converts float16 and counts bits too */
    if (supported && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vbmi2"))
        supported = 2;
    for (int set = 0; set < 256; set++) {
        uint64_t packed = 0;
        for (int lane = 0, slot = 0; lane < 8; lane++)
            if (set >> lane & 1)
                packed |= (uint64_t)lane << 8 * slot++;
        kernel_compaction[set] = packed;
    }
}
#else
static void set_up(void) { supported = NEON; }
#endif

/* To be called once, before anything else. */
EXPORT int kernel_init(void)
{
    set_up();
    kernel_level = supported;
    return INTERFACE;
}

/* Use a lower level, for tests; the level in use from now on, at most what the machine has. */
EXPORT int kernel_set_level(int level)
{
    kernel_level = level < 0 ? 0 : level < supported ? level : supported;
    return kernel_level;
}

/* -- selection in a list of keys -------------------------------------------------------------------------- */

INLINE void range_body(const int32_t *keys, int64_t n, int32_t *low, int32_t *high)
{
    int32_t a = keys[0], b = keys[0];
    for (int64_t i = 1; i < n; i++) {
        a = keys[i] < a ? keys[i] : a;
        b = keys[i] > b ? keys[i] : b;
    }
    *low = a;
    *high = b;
}
FOR_EACH_LEVEL(void, range, (const int32_t *keys, int64_t n, int32_t *low, int32_t *high), (keys, n, low, high))

/* Copy the keys in [low, low + width] to `out`, which may be `keys`; returns how many. */
INLINE int64_t within_body(const int32_t *keys, int64_t n, int32_t low, uint32_t width, int32_t *out)
{
    int64_t h = 0, i = 0;
    for (; i + 16 <= n; i += 16) {
        int hits = 0;
        for (int j = 0; j < 16; j++)
            hits += (uint32_t)(keys[i + j] - low) <= width;
        if (hits)
            for (int j = 0; j < 16; j++) { /* h <= i + j: no slot beyond n is written */
                int32_t key = keys[i + j];
                out[h] = key;
                h += (uint32_t)(key - low) <= width;
            }
    }
    for (; i < n; i++) {
        int32_t key = keys[i];
        out[h] = key;
        h += (uint32_t)(key - low) <= width;
    }
    return h;
}
FOR_EACH_LEVEL(int64_t, within, (const int32_t *keys, int64_t n, int32_t low, uint32_t width, int32_t *out),
               (keys, n, low, width, out))

/* The k-th largest of n keys (1 <= k <= n, keys >= 0). larger, equal: how many keys are. scratch: n slots. Each
   round counts the keys in bins between the smallest and the largest and keeps the bin that holds the k-th. */
int32_t kernel_kth(const int32_t *keys, int64_t n, int64_t k, int32_t *scratch, int64_t *larger, int64_t *equal)
{
    uint32_t counts[4][BINS]; /* four of each, or an addition would wait for the one before */
    int64_t above = 0;
    for (;;) {
        int32_t low, high;
        range(keys, n, &low, &high);
        uint32_t spread = (uint32_t)(high - low), bins = 32;
        if (spread == 0) {
            *larger = above;
            *equal = n;
            return low;
        }
        while (bins < BINS && bins < (uint64_t)n)
            bins *= 2;
        int shift = 0;
        while (spread >> shift >= bins)
            shift++;
        for (int j = 0; j < 4; j++)
            memset(counts[j], 0, bins * sizeof(uint32_t));
        int64_t i = 0;
        for (; i + 4 <= n; i += 4)
            for (int j = 0; j < 4; j++)
                counts[j][(uint32_t)(keys[i + j] - low) >> shift]++;
        for (; i < n; i++)
            counts[0][(uint32_t)(keys[i] - low) >> shift]++;
        uint32_t bin = spread >> shift;
        int64_t count;
        for (;; bin--) {
            count = (int64_t)counts[0][bin] + counts[1][bin] + counts[2][bin] + counts[3][bin];
            if (above + count >= k)
                break;
            above += count;
        }
        low += (int32_t)(bin << shift);
        if (shift == 0) {
            *larger = above;
            *equal = count;
            return low;
        }
        n = within(keys, n, low, (1u << shift) - 1, scratch);
        keys = scratch;
    }
}

/* Move those of the elements [i, n) of a list with a key above the floor to its slots from h on; h <= i. Returns
   the slot after the last. */
INLINE int64_t keep_body(int32_t *positions, int32_t *keys, int64_t i, int64_t n, int32_t floor, int64_t h)
{
    for (; i < n; i++) {
        int32_t position = positions[i], key = keys[i];
        positions[h] = position;
        keys[h] = key;
        h += key > floor;
    }
    return h;
}

#define KEEP_PARAMETERS (int32_t * positions, int32_t *keys, int64_t i, int64_t n, int32_t floor, int64_t h)
#define KEEP_ARGUMENTS (positions, keys, i, n, floor, h)

static int64_t keep_any KEEP_PARAMETERS { return keep_body KEEP_ARGUMENTS; }

#if X86
/* Whole registers are stored, but none reaches beyond the elements read, because h <= i. */
AVX2 static int64_t keep_avx2 KEEP_PARAMETERS
{
    const __m256i floors = _mm256_set1_epi32(floor);
    for (; i + 8 <= n; i += 8) {
        __m256i position = _mm256_loadu_si256((const __m256i *)(positions + i));
        __m256i key = _mm256_loadu_si256((const __m256i *)(keys + i));
        unsigned set = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(key, floors)));
        __m256i order = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)kernel_compaction[set]));
        _mm256_storeu_si256((__m256i *)(positions + h), _mm256_permutevar8x32_epi32(position, order));
        _mm256_storeu_si256((__m256i *)(keys + h), _mm256_permutevar8x32_epi32(key, order));
        h += _mm_popcnt_u32(set);
    }
    return keep_body KEEP_ARGUMENTS;
}

AVX512 static int64_t keep_avx512 KEEP_PARAMETERS
{
    const __m512i floors = _mm512_set1_epi32(floor);
    for (; i + 16 <= n; i += 16) {
        __m512i position = _mm512_loadu_si512(positions + i), key = _mm512_loadu_si512(keys + i);
        __mmask16 set = _mm512_cmpgt_epi32_mask(key, floors);
        /* Compressing right into memory takes many times as long on some machines. */
        _mm512_storeu_si512(positions + h, _mm512_maskz_compress_epi32(set, position));
        _mm512_storeu_si512(keys + h, _mm512_maskz_compress_epi32(set, key));
        h += _mm_popcnt_u32(set);
    }
    return keep_body KEEP_ARGUMENTS;
}
#endif

DISPATCH(int64_t, keep, KEEP_PARAMETERS, KEEP_ARGUMENTS)

/* Keep the k largest of `held` keys with their positions, order kept, of equals the first; 1 <= k <= held.
   scratch: held slots. Returns the smallest key kept. */
EXPORT int32_t kernel_cut(int32_t *positions, int32_t *keys, int64_t held, int64_t k, int32_t *scratch)
{
    int64_t larger, equal, end = held; /* up to `end` equals are taken, after it they are not */
    int32_t smallest = kernel_kth(keys, held, k, scratch, &larger, &equal);
    if (larger + equal > k) {
        end = 0;
        for (int64_t ties = k - larger; ties > 0; end++)
            ties -= keys[end] == smallest;
    }
    int64_t count = keep(positions, keys, 0, end, smallest - 1, 0);
    keep(positions, keys, end, held, smallest, count);
    return smallest;
}

/* The k-th largest of n keys; scratch: n slots. */
EXPORT int32_t kernel_nth(const int32_t *keys, int64_t n, int64_t k, int32_t *scratch)
{
    int64_t larger, equal;
    return kernel_kth(keys, n, k, scratch, &larger, &equal);
}

/* -- elements at positions ---------------------------------------------------------------------------------- */

/* One key of each of m equal stretches: this repeats `places` of largest.py. */
EXPORT void kernel_sample(const int32_t *bits, int64_t n, int64_t m, int32_t mask, int32_t *keys)
{
    enum { BATCH = 64 };
    uint64_t stretch = (uint64_t)(n / m);
    for (int64_t first = 0; first < m; first += BATCH) {
        int64_t count = m - first < BATCH ? m - first : BATCH, places[BATCH];
        for (int64_t j = 0; j < count; j++) {
            uint32_t h = (uint32_t)(first + j) * 0x9e3779b1u;
            h = (h ^ h >> 16) * 0x85ebca6bu;
            h = (h ^ h >> 13) * 0xc2b2ae35u;
            h ^= h >> 16;
            places[j] = (first + j) * n / m + (int64_t)(h * stretch >> 32);
            PREFETCH(bits + places[j]);
        }
        for (int64_t j = 0; j < count; j++)
            keys[first + j] = bits[places[j]] & mask;
    }
}
