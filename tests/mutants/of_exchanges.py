# SPDX-License-Identifier: Apache-2.0
"""Mutants of agmerge/exchanges/."""

from __future__ import annotations

from mutants.mutant import Mutant

Q = "tests/agmerge/exchanges/test_quantised.py"
CALLS = "tests/agmerge/exchanges/test_quantised_calls.py"
NORM = "tests/agmerge/step/test_gradient_norm.py"
DEVICE_ROUNDS = "tests/agmerge/device/test_device_rounds.py"
EXCHANGES = "tests/agmerge/exchanges/test_exchanges.py"
ERRORS = "tests/agmerge/exchanges/test_exchange_errors.py"
ROUTING = "tests/agmerge/exchanges/test_routing.py"
FEW_BITS = "tests/agmerge/updates/test_updates_in_few_bits.py"
CUSTOM = "tests/agmerge/exchanges/test_custom.py"
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "tensors that a class has kept are received over",
        "agmerge/exchanges/custom.py",
        "rows = own.new_empty(size * longest)",
        'rows = self.keep(("rows", name), size * longest, torch.uint8, own.device)',
        (f"{CUSTOM}::test_a_class_gives_the_update_of_its_formula[1-keeps what arrives-layerwise]",),
    ),
    Mutant(
        "a message that another rank's is longer than is lost",
        "agmerge/exchanges/custom.py",
        "if own.data_ptr() != message.data_ptr():",
        "if False:",
        (f"{CUSTOM}::test_a_class_gives_the_update_of_its_formula[3-variable length-layerwise]",),
    ),
    Mutant(
        "tensors are added up as they are when their sizes are known",
        "agmerge/exchanges/custom.py",
        "found.append((numbers, torch.cat([parts[number].reshape(-1) for number in numbers])))",
        "found += [([number], parts[number].reshape(-1)) for number in numbers]",
        (f"{CUSTOM}::test_what_a_class_writes_to_after_compressing_is_not_sent",),
    ),
    Mutant(
        "what owners owe is forgotten",
        "agmerge/exchanges/quantised/two_phase.py",
        "            total.add_(owed)\n",
        "            pass\n",
        (f"{FEW_BITS}::test_the_mean_moves_by_the_workers_steps_alone",),
    ),
    Mutant(
        "what a worker has sent stays in its parameters, and is sent again",
        "agmerge/exchanges/quantised/exchange.py",
        "sent = layout.table, pending.message, key, self._factor, own",
        "sent = layout.table, pending.message, key, 0.0, own",
        (f"{FEW_BITS}::test_something_is_learned",),
    ),
    Mutant(
        "error feedback reads the unbiased scale",
        "agmerge/exchanges/quantised/exchange.py",
        "return 1.0 / (1.0 + quantiser.noise) if quantiser.unbiased else 1.0",
        "return 1.0",
        (f"{FEW_BITS}::test_error_feedback_forgets_least_with_the_factor_of_a_quantizer",),
    ),
    Mutant(
        "a tensor without a block in the fragment moves by its own update",
        "agmerge/exchanges/quantised/exchange.py",
        "                self._output(pending.extra, slot).zero_()",
        "                self._output(pending.extra, slot)",
        (f"{FEW_BITS}::test_a_tensor_that_is_in_one_fragment_alone_waits_for_its_turn",),
    ),
    Mutant(
        "one fragment is sent for ever",
        "agmerge/exchanges/quantised/exchange.py",
        "return self._layouts[name, step % self._fragments]",
        "return self._layouts[name, 0]",
        (f"{FEW_BITS}::test_every_fragment_has_its_turn",),
    ),
    Mutant(
        "a message that was under way is not sent again",
        "agmerge/engine/update_reducer.py",
        "self._receive_at, self._sends_again = None, is_under_way",
        "self._receive_at, self._sends_again = None, False",
        (f"{FEW_BITS}::test_resumed_between_any_two_steps_it_goes_on_to_the_bit",),
    ),
    Mutant(
        "an owner does not announce a damaged shard",
        "agmerge/exchanges/quantised/two_phase.py",
        "return control, 1 + damaged[0] if damaged else 0",
        "return control, 0",
        (f"{Q}::test_a_flipped_bit_is_the_same_error_on_all_ranks",),
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
        "what owners announce is not read",
        "agmerge/exchanges/quantised/two_phase.py",
        "faults += [fault - 1 for fault in shard.faults(row) if fault]",
        "faults += []",
        (f"{Q}::test_a_flipped_bit_is_the_same_error_on_all_ranks",),
    ),
    Mutant(
        "damage of the second phase is not seen",
        "agmerge/exchanges/quantised/two_phase.py",
        "damaged += [owner] if shard.damaged(row, lambda _: key, sealed=sealed) else []",
        "damaged += []",
        (f"{Q}::test_a_flipped_bit_is_the_same_error_on_all_ranks",),
    ),
    Mutant(
        "noise is not scaled with the mean",
        "agmerge/exchanges/quantised/two_phase.py",
        "noise * self.scale**2, noise)",
        "noise * self.scale, noise)",
        (f"{NORM}::test_nodes_have_the_norm_of_all_shards",),
    ),
    Mutant(
        "squares of a round that was given up are counted",
        "agmerge/exchanges/quantised/exchange.py",
        "            squares.zero_()\n        key =",
        "            pass\n        key =",
        (f"{NORM}::test_what_a_round_that_was_given_up_has_quantised_is_not_counted",),
    ),
    Mutant(
        "infinities that were quantised are not seen",
        "agmerge/exchanges/quantised/exchange.py",
        "return math.isfinite(squares.item())",
        "return True",
        (f"{Q}::test_what_is_not_finite_is_said_by_all",),
    ),
    Mutant(
        "records of a tensor without a gradient stay those of the last step",
        "agmerge/exchanges/quantised/exchange.py",
        "                message[where] = 0",
        "                pass",
        (f"{Q}::test_a_rank_without_a_gradient_counts_as_zero",),
    ),
    Mutant(
        "shards have the same random words",
        "agmerge/exchanges/quantised/exchange.py",
        "*([place] if place else [])",
        "*[]",
        (f"{CALLS}::test_shards_of_a_tensor_have_random_words_of_their_own",),
    ),
    Mutant(
        "keys of random signs are not compared",
        "agmerge/exchanges/quantised/layout.py",
        "enumerate(zip(announced, own, strict=True)) if pair[0] != pair[1]}",
        "enumerate(zip(announced, own, strict=True)) if pair[0] != pair[0]}",
        (f"{CALLS}::test_a_rank_with_other_random_words_is_found",),
    ),
    Mutant(
        "checksums of shards are not compared",
        "agmerge/exchanges/quantised/layout.py",
        "enumerate(sums) if written != self._checksum(rows[number])}",
        "enumerate(sums) if written != written}",
        (f"{Q}::test_a_flipped_bit_is_the_same_error_on_all_ranks",),
    ),
    Mutant(
        "a checksum leaves out the records",
        "agmerge/exchanges/quantised/layout.py",
        "native.checksum(shard[end + WORD : self.size])",
        "native.checksum(shard[end + WORD : self.announced])",
        (f"{Q}::test_a_flipped_bit_is_the_same_error_on_all_ranks",),
    ),
    Mutant(
        "whole 16-bit tensors overflow with their residual",
        "agmerge/exchanges/sparse.py",
        "saturated(load.work, torch.finfo(sent.dtype).max)",
        "load.work",
        (f"{EXCHANGES}::test_a_whole_tensor_beyond_16_bits_saturates_and_the_rest_is_kept",),
    ),
    Mutant(
        "elements are counted with padding",
        "agmerge/exchanges/sparse.py",
        "elements += min(capacity, load.segment.numel)",
        "elements += capacity",
        (f"{EXCHANGES}::test_a_message_counts_elements_of_tensors_and_no_padding",),
    ),
    Mutant(
        "what a codec has rounded is not kept",
        "agmerge/exchanges/sparse.py",
        "self.store.subtract_sent(load.segment, offer.indices, sent)",
        "self.store.subtract_sent(load.segment, offer.indices, chosen)",
        (f"{EXCHANGES}::test_a_residual_beyond_16_bits_saturates_and_the_rest_is_kept",),
    ),
    Mutant(
        "payloads are not checked",
        "agmerge/exchanges/sparse.py",
        "if not pending.on_device:\n            layout.check_payloads",
        "if pending.on_device:\n            layout.check_payloads",
        (f"{ERRORS}::test_a_value_that_changes_on_its_way_names_the_rank_that_sent_it",),
    ),
    Mutant(
        "indices out of range are not refused",
        "agmerge/exchanges/sparse.py",
        "            _refuse_disordered(pending.name, section, checks)\n        return parts",
        "            pass\n        return parts",
        (f"{ERRORS}::test_an_index_out_of_range_names_the_rank_that_sent_it",),
    ),
    Mutant(
        "parts of dense segments are not scaled",
        "agmerge/exchanges/sparse.py",
        "total.copy_(parts[0]).mul_(self.scale)",
        "total.copy_(parts[0])",
        (
            f"{EXCHANGES}::test_a_sparse_update_does_not_depend_on_its_neighbours",
            f"{EXCHANGES}::test_sparse",
        ),
    ),
    Mutant(
        "a buffer that is too short is kept",
        "agmerge/exchanges/base.py",
        "if buffer is None or buffer.numel() < length:",
        "if buffer is None:",
        (f"{ERRORS}::test_a_buffer_is_as_long_as_it_is_asked_for_and_the_same_while_it_is_long_enough",),
    ),
    Mutant(
        "a format is kept for other capacities",
        "agmerge/exchanges/base.py",
        "kept.capacities != capacities or kept.segments",
        "kept.segments",
        (f"{ERRORS}::test_buffers_are_reused_and_leak_nothing",),
    ),
    Mutant(
        "indices that a device reads behind the check go unchecked",
        "agmerge/exchanges/sparse.py",
        "            if pending.is_checked:",
        "            if False:",
        (f"{DEVICE_ROUNDS}::test_a_device_refuses_indices_that_are_not_in_order",),
    ),
    Mutant(
        "sparse tensors ahead share a segment",
        "agmerge/exchanges/routing.py",
        "[Segment(segment.tensor_class, (slot,)) for slot in segment.slots]",
        "[segment]",
        (f"{ROUTING}::test_ahead_every_sparse_tensor_is_alone_and_nothing_else_differs",),
    ),
    Mutant(
        "large dense segments ride with sparse ones",
        "agmerge/exchanges/routing.py",
        "(size - 1) * (riding - 2 * alone / size) <= RIDE",
        "True",
        (f"{ROUTING}::test_dense_segments_ride_up_to_a_bound_that_two_ranks_do_not_have",),
    ),
    Mutant(
        "large tensors are quantised with others",
        "agmerge/exchanges/routing.py",
        "max(slot.numel for slot in segment.slots) < LARGE",
        "True",
        (f"{CALLS}::test_only_large_tensors_are_summed_where_they_lie",),
    ),
)
