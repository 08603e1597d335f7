# SPDX-License-Identifier: Apache-2.0
"""Table of mutants: by room, what breaks, where, and the tests that must fail."""

from __future__ import annotations

from mutants.mutant import Mutant

CALLS = "tests/agmerge/exchanges/test_quantised_calls.py"
QUANTISED = "tests/agmerge/exchanges/test_quantised.py"
EXCHANGES = "tests/agmerge/exchanges/test_exchanges.py"
REPLANNER = "tests/agmerge/planning/test_replanner.py"
QUANTISER_LOOPS = "tests/sparsifiers/test_quantiser_kernel.py"
ARENA = "tests/agmerge/tensors/test_arena.py"
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "an owner does not announce a damaged shard",
        "agmerge/exchanges/quantised/two_phase.py",
        "return control, 1 + damaged[0] if damaged else 0",
        "return control, 0",
        (f"{QUANTISED}::test_a_flipped_bit_is_the_same_error_on_all_ranks",),
    ),
    Mutant(
        "second phases of an attempt that came to nothing are not started",
        "agmerge/exchanges/quantised/two_phase.py",
        "            self._add_up_all()\n        pending = super()",
        "            pass\n        pending = super()",
        (f"{CALLS}::test_a_message_that_starts_again_has_its_earlier_second_phase_behind_it",),
    ),
    Mutant(
        "first phases of an attempt that failed are kept",
        "agmerge/exchanges/quantised/two_phase.py",
        "            self._first_phase.clear()  # their",
        "            pass  # their",
        (f"{CALLS}::test_an_attempt_that_has_failed_has_no_second_phases",),
    ),
    Mutant(
        "squares of a round that was given up are counted",
        "agmerge/exchanges/quantised/exchange.py",
        "            squares.zero_()\n        key =",
        "            pass\n        key =",
        ("tests/agmerge/step/test_gradient_norm.py::test_what_a_round_that_was_given_up_has_quantised_is_not_counted",),
    ),
    Mutant(
        "keys of random signs are not compared",
        "agmerge/exchanges/quantised/layout.py",
        "enumerate(zip(announced, own, strict=True)) if pair[0] != pair[1]}",
        "enumerate(zip(announced, own, strict=True)) if pair[0] != pair[0]}",
        (f"{CALLS}::test_a_rank_with_other_random_words_is_found",),
    ),
    Mutant(
        "dense 16-bit tensors overflow with their residual",
        "agmerge/exchanges/sparse.py",
        "saturated(load.work, torch.finfo(sent.dtype).max)",
        "load.work",
        (f"{EXCHANGES}::test_a_whole_tensor_beyond_16_bits_saturates_and_the_rest_is_kept",),
    ),
    Mutant(
        "elements are counted with padding",
        "agmerge/exchanges/sparse.py",
        "elements += min(offer.capacity, load.segment.numel)",
        "elements += offer.capacity",
        (f"{EXCHANGES}::test_a_message_counts_elements_of_tensors_and_no_padding",),
    ),
    Mutant(
        "momentum of values that travel in a codec is not cleared",
        "agmerge/tensors/arena.py",
        "            self.memory.mask(self.momenta.front[part], indices, sent)",
        "            pass",
        (f"{ARENA}::test_momentum_of_values_that_travel_rounded_is_cleared",),
    ),
    Mutant(
        "a gradient that lies in the last update is not cloned",
        "agmerge/tensors/arena.py",
        "return gradient.clone() if gradient.data_ptr() == update.data_ptr() else gradient",
        "return gradient",
        (f"{ARENA}::test_a_gradient_that_lies_in_the_last_update_is_copied_before_the_sum_is_written_there",),
    ),
    Mutant(
        "messages are queued twice after an error",
        "agmerge/step/under_way.py",
        "left = [one for one in messages if id(one[1]) not in self._waited]",
        "left = messages",
        ("tests/agmerge/step/test_under_way.py",),
    ),
    Mutant(
        "the fastest rank decides a trial",
        "agmerge/planning/replanner.py",
        "(every.max(axis=0).tolist() for every in columns)",
        "(every.min(axis=0).tolist() for every in columns)",
        (f"{REPLANNER}::test_the_slowest_rank_decides_a_trial",),
    ),
    Mutant(
        "steps of a trial count for rechecks",
        "agmerge/planning/replanner.py",
        "        self._state, self._steps = State.SETTLED, FIRST",
        "        self._state = State.SETTLED",
        (f"{REPLANNER}::test_steps_of_a_trial_do_not_count_until_times_are_checked_again",),
    ),
    Mutant(
        "residuals of another shard are loaded",
        "agmerge/checkpoint/rank_state.py",
        "    elif saved == place and shard == restored.shard:",
        "    elif saved == place:",
        ("tests/agmerge/step/test_two_level.py::test_an_optimizer_that_has_stepped_drops_shards_of_other_nodes_too",),
    ),
    Mutant(
        "two strides over one memory are one tensor",
        "agmerge/checkpoint/tensor_stream.py",
        "tensor.shape, tensor.stride()",
        "tensor.shape",
        ("tests/agmerge/checkpoint/test_tensor_stream.py::test_a_matrix_and_its_transpose_are_two_tensors",),
    ),
    Mutant(
        "a scale has no upper bound",
        "sparsifiers/native/kernel_quantise.h",
        "(scale > MOST_SCALE ? MOST_SCALE : scale)",
        "scale",
        (f"{QUANTISER_LOOPS}::test_bytes_and_what_is_read_are_torchs",),
    ),
    Mutant(
        "a checksum leaves out the tail",
        "sparsifiers/native/kernel_message.c",
        "            memcpy(words, data, (size_t)n);",
        "            memcpy(words, data, (size_t)(n - 1));",
        ("tests/sparsifiers/test_kernel_message.py::test_a_checksum_is_numpys",),
    ),
    Mutant(
        "a value that is not finite saturates",
        "sparsifiers/native/kernel_values.c",
        "    return inside + 0.0f * value;",
        "    return inside;",
        ("tests/agmerge/exchanges/test_codecs_compiled.py::test_messages_are_those_of_torch",),
    ),
    Mutant(
        "a scan leaves out the last element",
        "sparsifiers/native/kernel_scan_loops.h",
        "            some = memcpy(keys, some, (size_t)(n - i) * sizeof(int32_t));",
        "            some = memcpy(keys, some, (size_t)(n - i - 1) * sizeof(int32_t));",
        ("tests/sparsifiers/test_kernel.py::test_scan_appends_what_exceeds_the_floor",),
    ),
    Mutant(
        "a threshold is inclusive",
        "sparsifiers/native/kernel.c",
        "        h += key > floor;",
        "        h += key >= floor;",
        ("tests/sparsifiers/test_kernel.py::test_cut_keeps_the_largest_and_the_first_of_equals",),
    ),
)
