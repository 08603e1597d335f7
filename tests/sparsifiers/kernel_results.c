/* SPDX-License-Identifier: Apache-2.0 */
/* Runs the compiled loops of sparsifiers/ on hard inputs at every level that a processor has, and prints a line for each
   level, loop, kind of input and length, with a hash of what the loop has written. It is linked with kernel*.c, for any
   architecture, and prints the same lines on each. All NaN are one: which one it is is nobody's concern. */

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int kernel_init(void);
int kernel_set_level(int level);
int64_t kernel_scan(const int32_t *bits, int64_t start, int64_t n, int32_t mask, int32_t floor, int32_t *positions,
                    int32_t *keys, int64_t capacity, int64_t *held);
int32_t kernel_cut(int32_t *positions, int32_t *keys, int64_t held, int64_t k, int32_t *scratch);
int32_t kernel_nth(const int32_t *keys, int64_t n, int64_t k, int32_t *scratch);
void kernel_sample(const int32_t *bits, int64_t n, int64_t m, int32_t mask, int32_t *keys);
void kernel_rows(const int32_t *bits, int64_t rows, int64_t length, int32_t mask, const int64_t *quotas,
                 int32_t *scratch, int32_t *out);
int64_t kernel_columns_scratch(int64_t length, int64_t columns, int64_t pitch, int64_t total, int64_t most);
int kernel_columns(const int32_t *bits, int64_t length, int64_t columns, int64_t pitch, int32_t mask,
                   const int64_t *quotas, int64_t total, int64_t most, int32_t *scratch, int32_t *out);
int kernel_commit(float *work, int64_t n, const int32_t *indices, const float *sent, int64_t count);
int kernel_take(float *work, float *momentum, int64_t n, const int32_t *indices, float *values, int64_t count);
int kernel_mask(float *momentum, int64_t n, const int32_t *indices, const float *sent, int64_t count);
uint64_t kernel_checksum(const uint8_t *data, int64_t n);
int kernel_fit(const int32_t *indices, int64_t count, int64_t first, int64_t n);
int kernel_scatter(float *total, int64_t n, const int32_t *indices, const float *values, int64_t count, float scale);
struct notes {
    int32_t floor, first, *positions, *keys;
    int64_t elements, held, room;
};
int kernel_add(float *work, float *home, const float *residual, const void *gradient, int64_t n, float factor, int kind,
               struct notes *notes, int64_t parts);
int kernel_momentum(float *work, float *home, const float *residual, const void *gradient, const float *before,
                    float *after, int64_t n, float factor, int nesterov, int kind, struct notes *notes, int64_t parts);
int kernel_blocks_encode(const int32_t *indices, int64_t count, int64_t capacity, int low, int64_t last, uint8_t *out);
int kernel_blocks_decode(const uint8_t *data, int64_t count, int64_t capacity, int low, int64_t last, int32_t *out);
void kernel_values_encode(const float *values, int64_t count, int64_t used, int width, uint8_t *scales, uint8_t *out,
                          float *read);
void kernel_values_decode(const uint8_t *scales, const uint8_t *data, int64_t count, int width, float *read);
int kernel_write_sum(float *total, int64_t n, const int32_t *const *indices, const float *const *values,
                     const int64_t *counts, int64_t *at, int64_t lists, float scale);
int kernel_take_in(float *base, float *parameter, int64_t n, int64_t first, const int32_t *const *indices,
                   const float *const *values, const int64_t *counts, int64_t *at, int64_t lists, float scale,
                   const int32_t *own, const float *sent, int64_t count);
void kernel_quantise(const void *values, const float *less, int64_t n, int kind, int codec, int64_t size, uint64_t key, int64_t first,
                     uint8_t *out, double *squares);
void kernel_add_quantised(const uint8_t *const *messages, const uint64_t *keys, const int64_t *firsts, int64_t senders,
                          int codec, int64_t size, float scale, void *out, int64_t n, int kind);
void kernel_quantise_sum(const uint8_t *const *messages, const uint64_t *keys, const int64_t *firsts, int64_t senders,
                         int codec, int64_t size, float scale, int second, uint64_t key, int64_t first, uint8_t *out,
                         int64_t count);
void kernel_move(int codec, const int64_t *runs, const int64_t *sent, int64_t count, const uint8_t *rows,
                 int64_t row_bytes, const uint64_t *keys, int64_t senders, float scale, const uint8_t *message,
                 uint64_t key, float factor, int64_t own, const uint64_t *addresses, const float *factors);
void kernel_product(const float *left, int64_t n, const float *right, int64_t m, int64_t r, float scale, float *out);
void kernel_orthonormalize(float *const *factors, const int64_t (*sizes)[2], int64_t count, double *scratch);

enum { MOST = 6000, ROOM = 1 << 17, MASK = 0x7fffffff };
enum { NORMAL, TIES, DENORMAL, SPECIAL, KINDS };
static const char *const NAMES[KINDS] = {"normal", "ties", "denormal", "special"};
static const uint32_t SPECIALS[] = {0,          0x80000000, 1,          0x80000001, 0x007fffff, 0x7f800000,
                                    0xff800000, 0x7fc00000, 0xffc00001, 0x7f7fffff, 0xff7fffff, 0x00800000};

static float inputs[4][MOST + 8], first[MOST + 8], second[MOST + 8], third[MOST + 8];
static uint16_t halves[MOST + 8];
static int32_t places[ROOM], keys[ROOM], scratch[ROOM], chosen[MOST];
static uint8_t bytes[ROOM];

static uint32_t state;
static uint32_t drawn(void)
{
    state ^= state << 13;
    state ^= state >> 17;
    return state ^= state << 5;
}

static void fill(float *values, int64_t n, int kind)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = drawn();
        values[i] = (float)((int32_t)bits >> 8) * 0x1p-21f;
        if (kind == TIES)
            values[i] = (float)((int32_t)bits >> 29);
        else if (kind == DENORMAL)
            values[i] *= 0x1p-140f;
        else if (kind == SPECIAL && bits % 3 == 0)
            memcpy(values + i, SPECIALS + bits / 3 % 12, sizeof *values);
    }
}

/* -- hashes -------------------------------------------------------------------------------------------------------- */

static uint64_t hash;
static void hash_word(uint32_t word)
{
    hash = (hash ^ word) * UINT64_C(0x100000001b3);
    hash ^= hash >> 29;
}

static void hash_words(const int32_t *words, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        hash_word((uint32_t)words[i]);
}

static void hash_floats(const float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        hash_word(values[i] != values[i] ? 0x7fc00000 : bits);
    }
}

static void hash_bytes(const uint8_t *data, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        hash_word(data[i]);
}

static void say(int level, const char *loop, int kind, int64_t n)
{
    printf("%d %s %s %" PRId64 " %016" PRIx64 "\n", level, loop, NAMES[kind], n, hash);
    hash = UINT64_C(0xcbf29ce484222325);
}

/* -- loops --------------------------------------------------------------------------------------------------------- */

static void select_all(int level, int kind, int64_t n, int shift)
{
    const int32_t floors[] = {-1, 0, 0x3f800000, 0x40200000, MASK};
    const int32_t *bits = (const int32_t *)(const void *)(inputs[0] + shift);
    for (int i = 0; i < 5; i++) {
        int64_t held = 1;
        hash_word((uint32_t)kernel_scan(bits, 0, n, MASK, floors[i], places, keys, ROOM, &held));
        hash_words(places + 1, held - 1);
        hash_words(keys + 1, held - 1);
        for (int64_t k = 1; k < held; k = 3 * k + 1) {
            int64_t many = held - 1;
            hash_word((uint32_t)kernel_nth(keys + 1, many, k, scratch));
            int32_t copies[2][MOST];
            memcpy(copies[0], places + 1, (size_t)many * sizeof(int32_t));
            memcpy(copies[1], keys + 1, (size_t)many * sizeof(int32_t));
            hash_word((uint32_t)kernel_cut(copies[0], copies[1], many, k, scratch));
            hash_words(copies[0], k);
            hash_words(copies[1], k);
        }
    }
    for (int64_t m = 1; m <= n; m = 5 * m + 2) {
        kernel_sample(bits, n, m, MASK, keys);
        hash_words(keys, m);
    }
    say(level, "selection", kind, n);
    for (int64_t rows = 1; rows <= n && rows < 600; rows = 4 * rows + 1) {
        int64_t length = n / rows, total = 0, most = 0, quotas[600];
        for (int64_t r = 0; r < rows; r++) {
            quotas[r] = (r * 7 + n) % (length / 8 + 2);
            quotas[r] = quotas[r] < length ? quotas[r] : length;
            total += quotas[r];
            most = most < quotas[r] ? quotas[r] : most;
        }
        kernel_rows(bits, rows, length, MASK, quotas, scratch, places);
        hash_words(places, total);
        if (kernel_columns_scratch(length, rows, rows, total, most) <= ROOM) {
            int full = kernel_columns(bits, length, rows, rows, MASK, quotas, total, most, scratch, places);
            hash_word((uint32_t)full);
            hash_words(places, full ? 0 : total);
        }
    }
    say(level, "rows", kind, n);
}

/* All of it, in two parts, each with lists and room of its own; a floor that many exceed, or few. */
static void prepare(struct notes notes[2], int64_t n, int32_t floor, int64_t room)
{
    for (int p = 0; p < 2; p++)
        notes[p] = (struct notes){floor, p ? 1000 : 3, places + p * MOST, keys + p * MOST, p ? n - n / 3 : n / 3, 0, room};
}

static void hash_notes(const struct notes notes[2])
{
    for (int p = 0; p < 2; p++) {
        hash_word((uint32_t)notes[p].held);
        if (notes[p].held <= notes[p].room) {
            for (int64_t j = 0; j < notes[p].held; j++) { /* all NaN are one, also those of another sign */
                int nan = notes[p].keys[j] > 0x7f800000;
                hash_word((uint32_t)(nan ? notes[p].positions[j] & MASK : notes[p].positions[j]));
                hash_word((uint32_t)(nan ? 0x7fc00000 : notes[p].keys[j]));
            }
        }
    }
}

static void sum_all(int level, int kind, int64_t n, int shift)
{
    const float *residual = inputs[0] + shift, *gradient = inputs[1] + (shift + 1) % 3, *before = inputs[2];
    for (int of = 0; of < 4; of++) { /* gradients of float, bfloat16 and float16, and a float that is taken off */
        const void *other = of == 1 || of == 2 ? (const void *)halves : (const void *)gradient;
        for (int part = 0; part < 2; part++) {
            float *home = of == 0 && part ? second + shift + part : NULL; /* a gradient of float may move */
            struct notes notes[2];
            prepare(notes, n, part ? 0x3fc00000 : 0x3c23d70a, MOST - 100); /* 1.5, 0.01 */
            hash_word((uint32_t)kernel_add(first + shift, home, residual, other, n, part ? 0.95f : 1.0f, of, notes,
                                           of == 3 && part ? 0 : 2));
            hash_notes(notes);
            hash_floats(first + shift, n);
            hash_floats(second + shift + part, home ? n : 0);
            prepare(notes, n, part ? 0x3fc00000 : 0, n / 2);
            hash_word((uint32_t)kernel_momentum(first + shift, home ? third : NULL, residual, other, before,
                                                second + part, n, 0.9f, part, of, notes, of ? 2 : 0));
            hash_notes(notes);
            hash_floats(first + shift, n);
            hash_floats(second + part, n);
            hash_floats(third, home ? n : 0);
        }
    }
    say(level, "memories", kind, n);
}

static void move_all(int level, int kind, int64_t n, int shift)
{
    int64_t count = 0;
    for (int64_t i = (int64_t)(drawn() % 3); i < n; i += 1 + (int64_t)(drawn() % 20))
        chosen[count++] = (int32_t)i;
    memcpy(first, inputs[0], sizeof first);
    hash_word((uint32_t)kernel_commit(first + shift, n, chosen, inputs[1], count));
    hash_word((uint32_t)kernel_scatter(first + shift, n, chosen, inputs[2], count, 0.3f));
    hash_floats(first, n + shift);
    hash_word((uint32_t)kernel_mask(first + shift, n, chosen, inputs[1], count));
    hash_word((uint32_t)kernel_fit(chosen, count, 0, n));
    memcpy(second, inputs[3], sizeof second);
    hash_word((uint32_t)kernel_take(first + shift, second + shift, n, chosen, third, count));
    hash_floats(first, n + shift);
    hash_floats(second, n + shift);
    hash_floats(third, count);
    memcpy(second, inputs[3], sizeof second);
    int64_t at[2], counts[2] = {count, count / 2};
    const int32_t *lists[2] = {chosen, chosen};
    const float *values[2] = {inputs[1], inputs[2]};
    hash_word((uint32_t)kernel_write_sum(second + shift, n, lists, values, counts, at, 2, 0.5f));
    hash_floats(second, n + shift);
    hash_word((uint32_t)kernel_take_in(first + shift, second, n, 0, lists, values, counts, at, 2, 0.5f, chosen,
                                       inputs[3], count / 3));
    hash_floats(first, n + shift);
    hash_floats(second, n);
    for (int low = 2; low <= 14; low += 4) {
        int64_t last = n >> low;
        memset(bytes, 0, sizeof bytes);
        hash_word((uint32_t)kernel_blocks_encode(chosen, count, count + 3, low, last, bytes));
        hash_bytes(bytes, 4 * n + 64);
        hash_word((uint32_t)kernel_blocks_decode(bytes, count, count + 3, low, last, places));
        hash_words(places, count);
    }
    say(level, "indices", kind, n);
    for (int width = 8; width; width /= 2) {
        uint8_t scales[8 * (MOST / 256 + 1)];
        memset(scales, 0, sizeof scales);
        memset(bytes, 0, sizeof bytes);
        kernel_values_encode(inputs[0] + shift, n, n - shift, width, scales, bytes, first);
        float means[2 * (MOST / 256 + 1)];
        memcpy(means, scales, sizeof means);
        hash_floats(means, 2 * (MOST / 256 + 1));
        hash_bytes(bytes, n);
        hash_floats(first, n);
        kernel_values_decode(scales, bytes, n, width, second);
        hash_floats(second, n);
    }
    say(level, "values", kind, n);
}

/* Records of exactly as many bytes as there are, so that a checker of memory sees a byte too many. */
static void quantise_all(int level, int kind, int64_t n)
{
    static const int BYTES[] = {0, 1, 2, 3, 4, 4, 8};
    static const uint64_t keys[] = {7, UINT64_C(0xfedcba9876543210), 1};
    static const int64_t firsts[] = {0, 1000000, 3};
    for (int codec = 1; codec <= 6; codec++)
        for (int64_t size = 64; size <= 256; size *= 2) {
            const int64_t blocks = (n + size - 1) / size, many = blocks * (2 + BYTES[codec] * size / 8);
            uint8_t *messages[3];
            for (int of = 0; of < 3; of++) { /* values of float, bfloat16 and float16 */
                double squares = 1.0;
                messages[of] = malloc((size_t)many);
                kernel_quantise(of ? (const void *)halves : inputs[0], of ? 0 : inputs[1], n, of, codec, size, keys[of], firsts[of],
                                messages[of], &squares);
                float rounded = (float)squares;
                hash_bytes(messages[of], many);
                hash_word((uint32_t)(kernel_checksum(messages[of], many) >> 32));
                hash_floats(&rounded, 1);
            }
            const uint8_t *const all[3] = {messages[0], messages[1], messages[2]};
            for (int64_t senders = 1; senders <= 3; senders++) {
                kernel_add_quantised(all, keys, firsts, senders, codec, size, 0.3f, first, n, 0);
                hash_floats(first, n);
            }
            for (int of = 1; kind != SPECIAL && of < 3; of++) {
                kernel_add_quantised(all, keys, firsts, 1, codec, size, 1.0f, second, n, of);
                hash_words((const int32_t *)(const void *)second, n / 2);
            }
            for (int64_t own = -1; own < 1; own++) { /* a momentum with its squares, and one without */
                const int64_t runs[8] = {0, 5, firsts[0], blocks, size, n, 0, 0};
                uint64_t addresses[4];
                const float factors[2] = {0.2f, 1e-8f};
                memcpy(second, inputs[2], sizeof second);
                memcpy(third, inputs[3], sizeof third);
                memcpy(first, inputs[1], sizeof first);
                addresses[0] = (uint64_t)(uintptr_t)first;
                addresses[1] = (uint64_t)(uintptr_t)second;
                addresses[2] = (uint64_t)(uintptr_t)third;
                addresses[3] = own ? 0 : (uint64_t)(uintptr_t)inputs[0];
                kernel_move(codec, runs, runs, 1, messages[0], 0, keys, 1, 0.5f, messages[0], keys[0], 0.9f, own,
                            addresses, factors);
                hash_floats(first, n);
                hash_floats(second, n);
                hash_floats(third, n);
            }
            const int other = 7 - codec;
            const int64_t few = blocks * (2 + BYTES[other] * size / 8);
            uint8_t *summed = malloc((size_t)few);
            kernel_quantise_sum(all, keys, firsts, 3, codec, size, 1.0f / 3, other, 5, 9, summed, blocks);
            hash_bytes(summed, few);
            free(summed);
            for (int of = 0; of < 3; of++)
                free(messages[of]);
        }
    say(level, "quantisers", kind, n);
}

static void multiply_all(int level, int kind, int64_t n)
{
    int64_t r = n % 5 + 1, rows = n / 40 + 1, columns = MOST / rows < 90 ? MOST / rows : 90;
    rows = rows * columns > MOST ? MOST / columns : rows;
    kernel_product(inputs[0], rows, inputs[1], columns, r, 0.7f, first);
    hash_floats(first, rows * columns);
    int64_t length = rows < r ? r : rows;
    memcpy(second, inputs[2], sizeof second);
    float *factors[1] = {second};
    const int64_t sizes[1][2] = {{r, length}};
    static double work[MOST];
    kernel_orthonormalize(factors, sizes, 1, work);
    hash_floats(second, r * length);
    say(level, "factors", kind, n);
}

int main(void)
{
    static const int64_t longer[] = {127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 1025, 2049, 5000};
    kernel_init();
    for (int level = 0; level < 3 && kernel_set_level(level) == level; level++) {
        state = 1;
        hash = UINT64_C(0xcbf29ce484222325);
        for (int kind = 0; kind < KINDS; kind++)
            for (int64_t at = 1; at < 71 + 12; at++) {
                int64_t n = at < 71 ? at : longer[at - 71];
                for (int i = 0; i < 4; i++)
                    fill(inputs[i], MOST + 8, kind);
                for (int i = 0; i < MOST + 8; i++)
                    halves[i] = (uint16_t)(drawn() >> 7);
                for (int shift = 0; shift < 3; shift++) {
                    select_all(level, kind, n, shift);
                    sum_all(level, kind, n, shift);
                    move_all(level, kind, n, shift);
                }
                multiply_all(level, kind, n);
                quantise_all(level, kind, n);
            }
    }
    return 0;
}
