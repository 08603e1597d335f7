# SPDX-License-Identifier: Apache-2.0
"""Mutants of the loops in C, sparsifiers/csrc/."""

from __future__ import annotations

from mutants.mutant import Mutant

QLOOPS = "tests/sparsifiers/test_quantiser_kernel.py"
MESSAGE_LOOPS = "tests/sparsifiers/test_kernel_message.py"
CODECS = "tests/agmerge/exchanges/test_codecs.py"
COMPILED = "tests/agmerge/exchanges/test_codecs_compiled.py"
KERNEL = "tests/sparsifiers/test_kernel.py"
SQUARES = "tests/agmerge/tensors/test_squares.py"
MOVING = "tests/sparsifiers/test_moving.py"
UPDATE_LOOPS = "tests/sparsifiers/test_kernel_updates.py"
MEMORY_LOOPS = "tests/sparsifiers/test_kernel_memories.py"
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a worker's own moves as the shared parameters do, whatever it has sent",
        "sparsifiers/csrc/kernel_quantise_move.c",
        "sent[i] = sent[i] * factor - moved;",
        "sent[i] = -moved;",
        (f"{MOVING}::test_one_pass_gives_torchs_bits",),
    ),
    Mutant(
        "a momentum is not multiplied by its root",
        "sparsifiers/csrc/kernel_quantise_move.c",
        "momentum[i] -= moved[i] * (sqrtf(squares[i]) + eps) * factor;",
        "momentum[i] -= moved[i] * factor;",
        (f"{MOVING}::test_one_pass_gives_torchs_bits",),
    ),
    Mutant(
        "the row that is this sender's own is not added",
        "sparsifiers/csrc/kernel_quantise_move.c",
        "so_far = so_far ? (sum(so_far, read, blocks * size, total), total) : read;",
        "so_far = so_far ? so_far : read;",
        (f"{MOVING}::test_any_row_may_be_this_senders",),
    ),
    Mutant(
        "what is subtracted is not read in the second tile",
        "sparsifiers/csrc/kernel_quantise.c",
        "subtract((const float *)values + start, less + start, here, tile);",
        "subtract((const float *)values + start, less, here, tile);",
        (f"{QLOOPS}::test_a_difference_is_written_as_its_values_are",),
    ),
    Mutant(
        "a scale has no upper bound",
        "sparsifiers/csrc/kernel_quantise.h",
        "(scale > MOST_SCALE ? MOST_SCALE : scale)",
        "scale",
        (f"{QLOOPS}::test_bytes_and_what_is_read_are_torchs",),
    ),
    Mutant(
        "a scale has no lower bound",
        "sparsifiers/csrc/kernel_quantise.h",
        "scale >= LEAST_SCALE ?",
        "scale >= 0 ?",
        (f"{QLOOPS}::test_bytes_and_what_is_read_are_torchs",),
    ),
    Mutant(
        "a checksum leaves out the tail",
        "sparsifiers/csrc/kernel_message.c",
        "            memcpy(words, data, (size_t)n);",
        "            memcpy(words, data, (size_t)(n - 1));",
        (f"{MESSAGE_LOOPS}::test_a_checksum_is_numpys",),
    ),
    Mutant(
        "a checksum does not tell words apart",
        "sparsifiers/csrc/kernel_message.c",
        "(2 * i + 1) * sums[i]",
        "sums[i]",
        (f"{MESSAGE_LOOPS}::test_a_checksum_is_numpys",),
    ),
    Mutant(
        "an index in no block is written",
        "sparsifiers/csrc/kernel_message.c",
        "    if (outside >> 31)\n        return -1;\n",
        "",
        (f"{CODECS}::test_an_index_in_no_block_is_not_written_outside_the_message",),
    ),
    Mutant(
        "a block behind the last one is read",
        "sparsifiers/csrc/kernel_message.c",
        "return found == count && block <= last;",
        "return found == count;",
        (f"{CODECS}::test_a_block_behind_the_last_one_is_refused_though_its_index_wraps_round",),
    ),
    Mutant(
        "old bits stay behind the indices",
        "sparsifiers/csrc/kernel_message.c",
        "    memset(out, 0, (size_t)size);\n",
        "",
        (f"{CODECS}::test_the_bytes_depend_on_nothing_behind_the_count",),
    ),
    Mutant(
        "a value that is not finite saturates",
        "sparsifiers/csrc/kernel_values.c",
        "    return inside + 0.0f * value;",
        "    return inside;",
        (f"{COMPILED}::test_messages_are_those_of_torch",),
    ),
    Mutant(
        "a step beyond the largest wraps round",
        "sparsifiers/csrc/kernel_values.c",
        "        step = step > levels ? levels : step;\n",
        "",
        (f"{COMPILED}::test_messages_are_those_of_torch",),
    ),
    Mutant(
        "values behind those in use are read",
        "sparsifiers/csrc/kernel_values.c",
        "    if (used < count)\n        memset(read",
        "    if (0)\n        memset(read",
        (f"{COMPILED}::test_messages_are_those_of_torch",),
    ),
    Mutant(
        "a mean counts what is not in use",
        "sparsifiers/csrc/kernel_values.c",
        "filled = filled < 1 ? 1 : filled > CODES ? CODES : filled;",
        "filled = CODES;",
        (f"{COMPILED}::test_messages_are_those_of_torch",),
    ),
    Mutant(
        "a sum of large values is infinite",
        "sparsifiers/csrc/kernel_values.c",
        "saturated(values[i], FLT_MAX / CODES)",
        "saturated(values[i], FLT_MAX)",
        (f"{COMPILED}::test_messages_are_those_of_torch",),
    ),
    Mutant(
        "a scan leaves out the last element",
        "sparsifiers/csrc/kernel_scan_loops.h",
        "            some = memcpy(keys, some, (size_t)(n - i) * sizeof(int32_t));",
        "            some = memcpy(keys, some, (size_t)(n - i - 1) * sizeof(int32_t));",
        (f"{KERNEL}::test_scan_appends_what_exceeds_the_floor",),
    ),
    Mutant(
        "a scan writes beyond its lists",
        "sparsifiers/csrc/kernel_scan.c",
        "        if (h + size > capacity)",
        "        if (h > capacity)",
        (f"{KERNEL}::test_scan_stops_where_a_block_might_not_fit_and_goes_on",),
    ),
    Mutant(
        "a threshold is inclusive",
        "sparsifiers/csrc/kernel.c",
        "        h += key > floor;",
        "        h += key >= floor;",
        (f"{KERNEL}::test_cut_keeps_the_largest_and_the_first_of_equals",),
    ),
    Mutant(
        "the k-th is the one before",
        "sparsifiers/csrc/kernel.c",
        "if (above + count >= k)",
        "if (above + count > k)",
        (f"{KERNEL}::test_cut_keeps_the_largest_and_the_first_of_equals",),
    ),
    Mutant(
        "of equals the last are kept",
        "sparsifiers/csrc/kernel.c",
        "            ties -= keys[end] == smallest;",
        "            ties -= keys[end] >= smallest;",
        (f"{KERNEL}::test_cut_keeps_the_largest_and_the_first_of_equals",),
    ),
    Mutant(
        "squares of the last elements are left out",
        "sparsifiers/csrc/kernel_squares.c",
        "        lanes[i % LANES] += value * value;",
        "        lanes[i % LANES] += 0 * value;",
        (f"{SQUARES}::test_all_ways_give_the_same_bits",),
    ),
    Mutant(
        "zeros do not fill up the last block",
        "sparsifiers/csrc/kernel_quantise.c",
        "            memset(tile + here, 0, (size_t)(count * size - here) * sizeof(float));\n",
        "",
        (f"{QLOOPS}::test_any_length_and_any_place",),
    ),
    Mutant(
        "a sum is scaled once a sender",
        "sparsifiers/csrc/kernel_quantise.c",
        "last ? scale : 1.0f,",
        "scale,",
        (f"{QLOOPS}::test_sums_are_added_in_the_order_of_senders",),
    ),
    Mutant(
        "a coordinate that is zero by chance is held",
        "sparsifiers/csrc/kernel_quantise.c",
        "        if (codec < INT_4) /* a sum",
        "        if (0) /* a sum",
        (f"{QLOOPS}::test_a_sum_is_written_again",),
    ),
    Mutant(
        "squares of the last block are all",
        "sparsifiers/csrc/kernel_quantise_integers.c",
        "*squares += unscaled(products[0], power);",
        "*squares = unscaled(products[0], power);",
        (f"{QLOOPS}::test_bytes_and_what_is_read_are_torchs",),
    ),
    Mutant(
        "a largest value that is not finite has a scale",
        "sparsifiers/csrc/kernel_quantise.h",
        "    if (largest >= 0x7f800000)\n        return float_of(0x7fc00000);\n",
        "",
        (f"{QLOOPS}::test_bytes_and_what_is_read_are_torchs",),
    ),
    Mutant(
        "a commit writes outside of its tensor",
        "sparsifiers/csrc/kernel_sparse.c",
        "    if (count > 0 && largest_index(indices, count) >= (uint64_t)n)\n        return -1;\n    int64_t i = 0;",
        "    int64_t i = 0;",
        (f"{KERNEL}::test_an_index_out_of_range_changes_nothing",),
    ),
    Mutant(
        "momentum is cleared where zeros were sent",
        "sparsifiers/csrc/kernel_sparse.c",
        "momentum[indices[i]] *= sent[i] == 0;",
        "momentum[indices[i]] *= 0;",
        (f"{MESSAGE_LOOPS}::test_mask_is_dgcs",),
    ),
    Mutant(
        "an infinity that was sent leaves nothing",
        "sparsifiers/csrc/kernel_sparse.c",
        "work[indices[i]] = value - value;",
        "work[indices[i]] = 0;",
        (f"{MESSAGE_LOOPS}::test_take_gathers_commits_and_masks",),
    ),
    Mutant(
        "what was sent stays in the rest",
        "sparsifiers/csrc/kernel_updates.c",
        "parameter[own[j]] - sent[j];",
        "parameter[own[j]];",
        (f"{UPDATE_LOOPS}::test_take_in_is_what_torch_makes_of_it_in_several_passes",),
    ),
    Mutant(
        "an index behind the end fits",
        "sparsifiers/csrc/kernel_updates.c",
        "indices[count - 1] < first + n",
        "indices[count - 1] <= first + n",
        (f"{UPDATE_LOOPS}::test_indices_that_do_not_fit_change_nothing",),
    ),
    Mutant(
        "a residual does not decay",
        "sparsifiers/csrc/kernel_memory_loops.h",
        "work[i] = factor * residual[i] + other;",
        "work[i] = residual[i] + other;",
        (MEMORY_LOOPS,),
    ),
    Mutant(
        "Nesterov's momentum is the plain one",
        "sparsifiers/csrc/kernel_memory_loops.h",
        "after[i] = nesterov ? factor * (before[i] + other) :",
        "after[i] = nesterov ? factor * before[i] + other :",
        (MEMORY_LOOPS,),
    ),
)
