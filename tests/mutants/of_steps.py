# SPDX-License-Identifier: Apache-2.0
"""Mutants of tensors/, step/, script/, updates/ and engine/ of agmerge."""

from __future__ import annotations

from mutants.mutant import Mutant

ARENA = "tests/agmerge/tensors/test_arena.py"
LAYOUT = "tests/agmerge/tensors/test_layout.py"
NONFINITE = "tests/agmerge/step/test_nonfinite.py"
UNDER_WAY = "tests/agmerge/step/test_under_way.py"
ROUND = "tests/agmerge/step/test_round.py"
REDISTRIBUTE = "tests/agmerge/checkpoint/test_redistribute.py"
REPEATED = "tests/agmerge/engine/test_repeated_in_place.py"
UNUSED = "tests/agmerge/optimizer/test_optimizer_unused.py"
MEMBERS = "tests/agmerge/engine/test_optimizer_members.py"
STEP = "tests/agmerge/step/test_gradient_exchange.py"
SETTLING = "tests/agmerge/step/test_settling.py"
SCRIPTS_OUTER = "tests/agmerge/updates/test_scripts_outer.py"
OUTERMOST = "tests/agmerge/engine/test_outermost_step.py"
OWN_STEP = "tests/agmerge/updates/test_own_step.py"
SCALED_DOWN = "tests/agmerge/script/test_scaled_down.py"
MOMENTS = "tests/agmerge/updates/test_moments.py"
SCALES = "tests/agmerge/updates/test_moment_scales.py"
CHANGES = "tests/agmerge/updates/test_updates_changes.py"
OF_DEVICE = "tests/agmerge/device/test_device_moments.py"
TOLERANCE = "tests/agmerge/optimizer/test_tolerance.py"
FEW_BITS = "tests/agmerge/updates/test_updates_in_few_bits.py"
MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "steps that are made while a message is under way are lost beside 16 bits",
        "agmerge/updates/shared_parameters.py",
        "                residual.sub_(moved)",
        "                pass",
        (f"{FEW_BITS}::test_a_tensor_that_is_in_one_fragment_alone_waits_for_its_turn",),
    ),
    Mutant(
        "another compressor keeps the moments of the one before",
        "agmerge/engine/update_reducer.py",
        "        self._keep_moments(self.updates)",
        "        pass",
        (f"{CHANGES}::test_another_compressor_brings_its_own_schedule_and_moments",),
    ),
    Mutant(
        "infinities that shall be kept are found",
        "agmerge/tensors/nonfinite.py",
        "if self._keeps:\n            return False",
        "if not self._keeps and False:\n            return False",
        (f"{TOLERANCE}::test_infinities_are_kept_where_that_is_asked_for",),
    ),
    Mutant(
        "replicas that may differ are an error",
        "agmerge/engine/participation.py",
        "if not warns:",
        "if True:",
        (f"{TOLERANCE}::test_replicas_that_differ_are_a_warning_where_that_is_asked_for",),
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
        "a commit is made at the beginning of the buffer",
        "agmerge/tensors/arena.py",
        "        part = slice(segment.start, segment.stop)",
        "        part = slice(0, segment.length)",
        (f"{ARENA}::test_a_commit_stays_within_its_segment",),
    ),
    Mutant(
        "what is kept of sums is taken off",
        "agmerge/tensors/arena.py",
        "indices, -values)",
        "indices, values)",
        (f"{ARENA}::test_what_is_kept_of_sums_is_added_and_ends_no_momentum",),
    ),
    Mutant(
        "a loop writes where a memory has rules of its own",
        "agmerge/tensors/arena.py",
        "if self.memory.hands_back or (self._momentum_of_gradients and not self.memory.is_formula):",
        "if False:",
        (f"{ARENA}::test_nothing_is_taken_where_something_else_is_done_with_it",),
    ),
    Mutant(
        "momentum is cleared though the memory keeps it",
        "agmerge/tensors/arena.py",
        "masks = self.momenta is not None and self.memory.formula().masks",
        "masks = self.momenta is not None",
        (f"{ARENA}::test_whoever_takes_is_told_what_the_memory_does",),
    ),
    Mutant(
        "a gradient moves onto itself",
        "agmerge/tensors/arena.py",
        " and not gradient.requires_grad and gradient.data_ptr() != update.data_ptr()",
        " and not gradient.requires_grad",
        (f"{ARENA}::test_what_no_pass_moves_has_no_place_to_move_to",),
    ),
    Mutant(
        "halves do not change places",
        "agmerge/tensors/arena.py",
        "        self.front, self.back = self.back, self.front\n",
        "",
        (f"{ARENA}::test_only_swap_makes_work_the_residual",),
    ),
    Mutant(
        "views of tensors do not change places",
        "agmerge/tensors/arena.py",
        "        self.front_of, self.back_of = self.back_of, self.front_of\n",
        "",
        (f"{ARENA}::test_only_swap_makes_work_the_residual",),
    ),
    Mutant(
        "tensors share a cache line",
        "agmerge/tensors/layout.py",
        "return self.offset + padded(self.numel)",
        "return self.offset + self.numel",
        (f"{LAYOUT}::test_slots_are_aligned_and_follow_one_another",),
    ),
    Mutant(
        "padding counts as elements",
        "agmerge/tensors/layout.py",
        "return max(self.start - slot.offset, 0), min(self.stop - slot.offset, slot.numel)",
        "return max(self.start - slot.offset, 0), self.stop - slot.offset",
        (
            f"{LAYOUT}::test_segments_of_any_plan_cover_every_class_once",
            f"{LAYOUT}::test_shapes_tell_where_each_tensor_of_a_segment_lies",
        ),
    ),
    Mutant(
        "tensors without elements take part",
        "agmerge/tensors/layout.py",
        "            if slot.numel:\n                by_class",
        "            if True:\n                by_class",
        (f"{LAYOUT}::test_tensors_without_elements_take_no_place",),
    ),
    Mutant(
        "a sum that overflows counts as infinite",
        "agmerge/tensors/nonfinite.py",
        "    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))",
        "    return False",
        (f"{NONFINITE}::test_is_finite_is_exact",),
    ),
    Mutant(
        "a checkpoint that is not finite is loaded",
        "agmerge/tensors/nonfinite.py",
        "        if not is_finite(tensor):\n            raise ValueError",
        "        if False:\n            raise ValueError",
        (f"{NONFINITE}::test_a_checkpoint_that_is_broken_is_an_error",),
    ),
    Mutant(
        "messages are queued twice after an error",
        "agmerge/step/round.py",
        "left = [one for one in messages if id(one[1]) not in self._waited]",
        "left = messages",
        (UNDER_WAY,),
    ),
    Mutant(
        "a rank with other parameters does not say so",
        "agmerge/step/round.py",
        "flags = self.flags | (Flag.REPLAN if self.dirty else 0)",
        "flags = self.flags | 0",
        (f"{ROUND}::test_where_one_rank_is_dirty_no_rank_writes_anything",),
    ),
    Mutant(
        "what is not finite is not announced",
        "agmerge/step/round.py",
        " | (Flag.NONFINITE if self.guard.found else 0)",
        " | 0",
        (f"{ROUND}::test_what_is_not_finite_is_known_to_all_and_left_out_of_residuals",),
    ),
    Mutant(
        "residuals of another number of ranks are not scaled",
        "agmerge/step/gradient_exchange.py",
        "        carried.fit(agreed.config.sync.op, comm.size)\n",
        "",
        (f"{REDISTRIBUTE}::test_survivors_go_on_with_what_they_kept",),
    ),
    Mutant(
        "updates of a round that comes to nothing are written",
        "agmerge/step/round.py",
        "writes=agreed and not self.nonfinite)",
        "writes=True)",
        (f"{REPEATED}::test_the_second_attempt_finds_the_gradients_that_the_first_one_had",),
    ),
    Mutant(
        "residuals alone are no gradient",
        "agmerge/step/round.py",
        "self._added[slot.index] = has_gradient or self.buffers.flat.has_unsent(slot)",
        "self._added[slot.index] = has_gradient",
        (
            UNUSED,
            f"{MEMBERS}::test_a_residual_that_was_kept_over_a_freeze_is_not_lost",
        ),
    ),
    Mutant(
        "the compressor's state is not restored",
        "agmerge/step/round.py",
        "        self.buffers.config.compression.compressor.load_state_dict(self._known)",
        "        pass",
        (
            f"{ROUND}::test_an_attempt_can_be_made_again_until_residuals_are_committed",
            f"{STEP}::test_a_step_that_is_discarded_leaves_nothing",
        ),
    ),
    Mutant(
        "all merge buffers are due",
        "agmerge/step/round.py",
        "count if due is None or buffer in due else 0",
        "count",
        (f"{ROUND}::test_only_what_is_due_is_asked_for_sent_and_written",),
    ),
    Mutant(
        "shards of another place are kept when a rank connects",
        "agmerge/step/gradient_exchange.py",
        "carried.tensors and self.group.shard != shard_before:",
        "carried.tensors and False:",
        (f"{STEP}::test_what_was_loaded_before_a_group_is_known_is_kept_where_it_is_of_the_same_shard",),
    ),
    Mutant(
        "a rank that is furthest is not followed",
        "agmerge/step/kept_results.py",
        "for most in (max, min))",
        "for most in (min, max))",
        (f"{SETTLING}::test_the_lowest_rank_that_is_ahead_gives_the_results",),
    ),
    Mutant(
        "a newcomer is let in in the middle of a step",
        "agmerge/step/kept_results.py",
        "if new and not all(can_give for _, can_give, _ in old):",
        "if False:",
        (f"{SETTLING}::test_a_newcomer_that_is_not_expected_is_an_error_on_all",),
    ),
    Mutant(
        "newcomers count as furthest behind",
        "agmerge/step/kept_results.py",
        "old = [one for one in told if one[0] != NEW]",
        "old = told",
        (f"{SETTLING}::test_newcomers_are_named_and_have_a_donor",),
    ),
    Mutant(
        "a script's parameters keep the shared values",
        "agmerge/updates/outer_steps.py",
        "                parameter.data, parameter.grad = data, gradient",
        "                parameter.grad = gradient",
        (f"{SCRIPTS_OUTER}::test_parameters_and_gradients_are_the_scripts_again_behind_it",),
    ),
    Mutant(
        "a step inside another one is exchanged",
        "agmerge/engine/step_hooks.py",
        "            if outer is self._frame:",
        "            if False:",
        (OUTERMOST,),
    ),
    Mutant(
        "an optimizer steps with infinities",
        "agmerge/updates/local_replica.py",
        "    if bad:\n        return OwnStep(loss",
        "    if False:\n        return OwnStep(loss",
        (OWN_STEP,),
    ),
    Mutant(
        "few elements have a common factor",
        "agmerge/script/clipping_watch.py",
        "    if int(then.count_nonzero()) < LEAST:",
        "    if False:",
        (SCALED_DOWN,),
    ),
    Mutant(
        "roundings of a loss scale are a change",
        "agmerge/script/clipping_watch.py",
        "relative = 2 * max(of_dtype.eps, EXACT) * abs(factor)",
        "relative = 0.0",
        (SCALED_DOWN,),
    ),
    Mutant(
        "a moment in the worker's own scale is scaled in every step",
        "agmerge/updates/moments.py",
        "                    self._own.discard(parameter)",
        "                    pass",
        (f"{MOMENTS}::test_a_parameter_that_comes_later_is_scaled_once",),
    ),
    Mutant(
        "more is subtracted from a second moment than the optimizer adds",
        "agmerge/updates/moments.py",
        "                of_mean = max(of_mean, 1 - kept)",
        "                pass",
        (f"{MOMENTS}::test_no_second_moment_becomes_negative_where_numbers_underflow",),
    ),
    Mutant(
        "the decay of an optimizer that maximizes is added",
        "agmerge/updates/moments.py",
        'return -decay if group.get("maximize") else decay',
        "return decay",
        (f"{MOMENTS}::test_second_moments_count_the_share_of_the_mean",),
    ),
    Mutant(
        "a momentum counted twice is followed in full",
        "agmerge/updates/moments.py",
        "return ALMOST_HALF if overlap >= period else 1.0",
        "return 1.0",
        (f"{MOMENTS}::test_workers_stray_less_when_momenta_follow",),
    ),
    Mutant(
        "steps on a device since the departure are not counted",
        "agmerge/updates/moments.py",
        "return steps + self._steps() - self._left_at",
        "return steps",
        (f"{OF_DEVICE}::test_a_momentum_that_follows",),
    ),
    Mutant(
        "workers without a gradient count as zeros",
        "agmerge/updates/moment_scales.py",
        "self._sums(samples.square()) / share.square()",
        "self._sums(samples.square())",
        (f"{SCALES}::test_ratios_are_those_of_moving_averages_by_hand",),
    ),
    Mutant(
        "an overflow counts",
        "agmerge/updates/moment_scales.py",
        "        out.copy_(torch.where(squares.sum().isfinite(), out, 0.0))",
        "        pass",
        (f"{SCALES}::test_an_overflow_does_not_count",),
    ),
)
