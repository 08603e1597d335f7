/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that the files of the kernel share: the instruction set in use, and selection in a list of keys. */

#ifndef SPARSIFIERS_KERNEL_H
#define SPARSIFIERS_KERNEL_H

#include <stdint.h>

#if defined(__GNUC__) && defined(__x86_64__)
#define X86 1
#define AVX2 __attribute__((target("avx2,f16c,bmi,bmi2,popcnt")))
#if defined(__clang__) /* which knows no wish for a width here */
#define WIDE ""
#else
#define WIDE ",prefer-vector-width=512"
#endif
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi2,avx2,f16c,bmi,bmi2,popcnt" WIDE)))
#else
#define X86 0
#endif

#if defined(__GNUC__) && defined(__aarch64__)
#define NEON 1
#else
#define NEON 0
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch(address)
#define PREFETCH_TO_WRITE(address) __builtin_prefetch(address, 1)
#else
#define INLINE static inline
#define PREFETCH(address) ((void)(address))
#define PREFETCH_TO_WRITE(address) ((void)(address))
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#elif defined(__GNUC__)
#define EXPORT __attribute__((visibility("default")))
#else
#define EXPORT
#endif

/* One function for each instruction set, from one body that the compiler vectorises for each. The arguments
   are in parentheses: FOR_EACH_LEVEL(name, (int64_t n), (n)) makes name_any, name_avx2, name_avx512, and name,
   which calls the one for the level in use. */
#if X86
#define FOR_EACH_LEVEL(result, name, parameters, arguments)                                                          \
    static result name##_any parameters { return name##_body arguments; }                                            \
    AVX2 static result name##_avx2 parameters { return name##_body arguments; }                                      \
    AVX512 static result name##_avx512 parameters { return name##_body arguments; }                                  \
    DISPATCH(result, name, parameters, arguments)
#define DISPATCH(result, name, parameters, arguments)                                                                \
    static result name parameters                                                                                    \
    {                                                                                                                \
        return kernel_level >= 2   ? name##_avx512 arguments                                                         \
               : kernel_level == 1 ? name##_avx2 arguments                                                           \
                                   : name##_any arguments;                                                           \
    }
#else /* compilers for arm64 make NEON of these bodies without being asked: every such processor has it */
#define FOR_EACH_LEVEL(result, name, parameters, arguments)                                                          \
    static result name##_any parameters { return name##_body arguments; }                                            \
    DISPATCH(result, name, parameters, arguments)
#define DISPATCH(result, name, parameters, arguments)                                                                \
    static result name parameters { return name##_any arguments; }
#endif

extern int kernel_level; /* 0: any machine, 1: AVX2, 2: AVX-512 with VBMI2; on arm64 1: NEON */
#if X86
extern uint64_t kernel_compaction[256]; /* for each set of 8 lanes, their numbers packed to the front, a byte each */
#endif

#define MAGNITUDE 0x7fffffff /* the bits of a float that are its key */
#define BLOCK 1024 /* elements of a scan that are searched together: the first-level cache holds them */

/* The place of the lowest bit of a word that is not 0. */
INLINE int lowest_set(uint64_t word)
{
#if defined(__GNUC__)
    return __builtin_ctzll(word);
#else
    int place = 0;
    for (; !(word & 1); word >>= 1)
        place++;
    return place;
#endif
}

INLINE int bits_set(uint64_t word)
{
#if defined(__GNUC__)
    return __builtin_popcountll(word);
#else
    int count = 0;
    for (; word; word &= word - 1)
        count++;
    return count;
#endif
}

/* See kernel.c and kernel_scan.c. */
int64_t kernel_hits(const int32_t *bits, int64_t n, int32_t mask, const int32_t *floors, int32_t *hits);
int64_t kernel_scan(const int32_t *bits, int64_t start, int64_t n, int32_t mask, int32_t floor, int32_t *positions,
                    int32_t *keys, int64_t capacity, int64_t *held);
int32_t kernel_kth(const int32_t *keys, int64_t n, int64_t k, int32_t *scratch, int64_t *larger, int64_t *equal);
int32_t kernel_cut(int32_t *positions, int32_t *keys, int64_t held, int64_t k, int32_t *scratch);

#endif
