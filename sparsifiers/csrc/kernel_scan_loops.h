/* SPDX-License-Identifier: Apache-2.0 */
/* The loop of kernel_scan.c, which includes this for each level without a way of its own to write many hits at once. There
   TARGET is the instruction set, AT(name) a name of that level, AT(set_of) the hits among 64 elements as bits, and
   AT(write_many) writes those of many. */

TARGET static int64_t AT(find_hits) HITS_PARAMETERS
{
    int32_t keys[SET], high[SET];
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += SET) {
        const int32_t *some = bits + i, *their = floors + each * i;
        for (int j = 0; j < SET; j += 16)
            PREFETCH((const char *)(some + j) + AHEAD);
        if (n - i < SET) { /* no key of those behind exceeds its floor */
            memset(keys, 0, sizeof keys);
            memset(high, 0x7f, sizeof high);
            some = memcpy(keys, some, (size_t)(n - i) * sizeof(int32_t));
            their = memcpy(high, their, (size_t)(n - i) * sizeof(int32_t));
        }
        uint64_t set = AT(set_of)(some, mask, their);
        int64_t end = count + bits_set(set);
        if (end - count > FEW)
            AT(write_many)(set, (int32_t)i, hits + count);
        else
            do /* slots beyond are written again; a branch for no hit would often be mispredicted */
                for (int j = 0; j < 4; j++, set &= set - 1)
                    hits[count++] = (int32_t)i + lowest_set(set | UINT64_C(1) << 63);
            while (count < end);
        count = end;
    }
    return count;
}
