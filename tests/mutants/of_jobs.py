# SPDX-License-Identifier: Apache-2.0
"""Mutants of agmerge/planning/, agmerge/backends/, agmerge/checkpoint/ and merging/."""

from __future__ import annotations

from mutants.mutant import Mutant

REPLANNER = "tests/agmerge/planning/test_replanner.py"
TRIAL = "tests/agmerge/planning/test_plan_trial.py"
RULE = "tests/agmerge/planning/test_quantiser_rule.py"
DRIFT = "tests/agmerge/planning/test_drift.py"
SEEN = "tests/agmerge/planning/test_seen_messages.py"
PROBE = "tests/agmerge/planning/test_cost_probe.py"
MEMBERSHIP = "tests/agmerge/backends/test_membership.py"
HOSTILE = "tests/agmerge/backends/test_membership_hostile.py"
TWO_LEVEL = "tests/agmerge/step/test_two_level.py"
CHECKPOINT = "tests/agmerge/checkpoint/test_optimizer_checkpoint.py"
REDISTRIBUTE = "tests/agmerge/checkpoint/test_redistribute.py"
STREAM = "tests/agmerge/runtime/test_tensor_stream.py"
TIMELINE = "tests/merging/test_merging_timeline.py"
PARTS = "tests/merging/test_merging_parts.py"
CURVE = "tests/merging/test_merging_curve.py"
PLAN = "tests/merging/test_merging_plan.py"
EXACT = "tests/merging/test_merging_exact.py"
MUTANTS: tuple[Mutant, ...] = (
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
        "self._activity, self._steps, self._trial = Activity.SETTLED, FIRST, None",
        "self._activity, self._trial = Activity.SETTLED, None",
        (f"{REPLANNER}::test_steps_of_a_trial_do_not_count_until_times_are_checked_again",),
    ),
    Mutant(
        "the first step of a turn is counted",
        "agmerge/planning/plan_trial.py",
        "        if self._steps > 1:",
        "        if self._steps > 0:",
        (TRIAL,),
    ),
    Mutant(
        "plans have one turn too many",
        "agmerge/planning/plan_trial.py",
        "if self._turns[number] < ROUNDS]",
        "if self._turns[number] <= ROUNDS]",
        (TRIAL,),
    ),
    Mutant(
        "a plan is out for its slowest step",
        "agmerge/planning/plan_trial.py",
        "min(self._counted[number]) > most",
        "max(self._counted[number]) > most",
        (TRIAL,),
    ),
    Mutant(
        "other load decides a trial",
        "agmerge/planning/plan_trial.py",
        "sorted(seconds)[: max(1, len(seconds) // 3)]",
        "sorted(seconds)",
        (TRIAL,),
    ),
    Mutant(
        "a gain within chance is taken",
        "agmerge/planning/choice.py",
        "if took - doubts[number] <= limit]",
        "if took <= limit]",
        (RULE,),
    ),
    Mutant(
        "one clear trial is enough for a less exact candidate",
        "agmerge/planning/choice.py",
        "return chosen if twice else now",
        "return chosen if is_clear else now",
        (RULE,),
    ),
    Mutant(
        "one look is enough for a new plan",
        "agmerge/planning/measuring.py",
        "confirmed = len(recent) == CONFIRMATIONS and Finding.KEEP not in recent",
        "confirmed = True",
        (DRIFT,),
    ),
    Mutant(
        "a rank that has waited says what an exchange takes",
        "agmerge/planning/measuring.py",
        "float(travel.min(axis=0).sum() /",
        "float(travel.max(axis=0).sum() /",
        (f"{REPLANNER}::test_the_rank_that_waited_least_says_what_an_exchange_takes",),
    ),
    Mutant(
        "another load is no reason for a plan",
        "agmerge/planning/measuring.py",
        "            return Finding.PLAN\n        finding",
        "            return Finding.KEEP\n        finding",
        (DRIFT,),
    ),
    Mutant(
        "of two changes the smaller one counts",
        "agmerge/planning/measuring.py",
        "return max(recent) if confirmed",
        "return min(recent) if confirmed",
        (DRIFT,),
    ),
    Mutant(
        "a flat curve of small messages makes a dense exchange cheap",
        "agmerge/planning/measuring.py",
        "max(exchange(as_many * numel), in_a_row)",
        "exchange(as_many * numel)",
        (f"{SEEN}::test_small_messages_that_were_held_up_make_no_dense_exchange_cheap",),
    ),
    Mutant(
        "messages of training are thought to show what a dense one takes",
        "agmerge/planning/cost_probe.py",
        "exchanges[Kind.DENSE], SIZES, False",
        "exchanges[Kind.DENSE], SIZES, self._bounded",
        (f"{PROBE}::test_what_training_has_sent_needs_no_large_probe_but_a_dense_exchange_does",),
    ),
    Mutant(
        "a new lighthouse is not told who has the state",
        "agmerge/backends/membership.py",
        "str(present.number))\n        if self._has_begun:\n            self.begin()\n\n    def restore",
        "str(present.number))\n\n    def restore",
        (f"{MEMBERSHIP}::test_a_store_that_was_started_again_is_told_at_once_who_has_the_state",),
    ),
    Mutant(
        "training begins with fewer workers than the first",
        "agmerge/backends/membership.py",
        "max(self._least, self._first)",
        "self._least",
        (f"{MEMBERSHIP}::test_the_first_generation_waits_for_first_workers",),
    ),
    Mutant(
        "a worker that is suspect is asked again",
        "agmerge/backends/membership.py",
        "if silence < self._suspect and self._now() - asked",
        "if self._now() - asked",
        (f"{HOSTILE}::test_a_worker_that_is_suspect_is_asked_no_more",),
    ),
    Mutant(
        "time without looking counts as silence",
        "agmerge/backends/membership.py",
        "else since + max(now - looked - HURRY, 0.0)",
        "else since",
        (f"{MEMBERSHIP}::test_who_has_not_looked_for_long_counts_nobody_as_lost_for_that",),
    ),
    Mutant(
        "too few workers train",
        "agmerge/backends/membership.py",
        "if not lets_in or len(asking) + len(new) >= self._least:",
        "if True:",
        (f"{MEMBERSHIP}::test_too_few_workers_end_their_step_and_then_wait_for_others",),
    ),
    Mutant(
        "newcomers are never let in",
        "agmerge/backends/membership.py",
        "new = self._waiting(known) if lets_in else []",
        "new = []",
        (f"{MEMBERSHIP}::test_newcomers_are_let_in_when_members_say_so",),
    ),
    Mutant(
        "a job that has ended is begun again",
        "agmerge/backends/membership.py",
        "        if ENDS in [left[one] for one in members]:",
        "        if False:",
        (f"{MEMBERSHIP}::test_who_comes_to_a_job_that_has_ended_is_told",),
    ),
    Mutant(
        "two jobs train at one lighthouse",
        "agmerge/backends/membership.py",
        "if not is_own or self._store.decided(present.number) != numbers:",
        "if not is_own:",
        (f"{MEMBERSHIP}::test_others_may_have_begun_where_the_number_of_a_worker_is_free",),
    ),
    Mutant(
        "a job begins again though the script forbids it",
        "agmerge/backends/membership.py",
        "if steps is not None and not self._restart:",
        "if steps is not None and False:",
        (f"{HOSTILE}::test_a_script_may_have_an_error_in_place_of_a_training_that_begins_again",),
    ),
    Mutant(
        "a newcomer that was silent keeps its number",
        "agmerge/backends/membership.py",
        "if decided is not None and self.own.number < max(decided):",
        "if False:",
        (f"{MEMBERSHIP}::test_a_newcomer_that_was_silent_when_a_later_one_was_let_in_comes_in_after_it",),
    ),
    Mutant(
        "who has left is waited for",
        "agmerge/backends/membership.py",
        "        if self.has_left(number):\n            return False\n        return number == self",
        "        return number == self",
        (f"{MEMBERSHIP}::test_who_leaves_is_not_waited_for",),
    ),
    Mutant(
        "a worker with another version is let in",
        "agmerge/backends/membership.py",
        "if self.silence(one) < HURRY and self._fits(one)]",
        "if self.silence(one) < HURRY]",
        (f"{HOSTILE}::test_a_newcomer_with_a_record_that_cannot_be_read_is_refused_by_name",),
    ),
    Mutant(
        "residuals of another shard are loaded",
        "agmerge/checkpoint/rank_state.py",
        "    elif saved == place and shard == restored.shard:",
        "    elif saved == place:",
        (f"{TWO_LEVEL}::test_an_optimizer_that_has_stepped_drops_shards_of_other_nodes_too",),
    ),
    Mutant(
        "residuals of another rank are loaded",
        "agmerge/checkpoint/rank_state.py",
        "    elif saved == place and shard == restored.shard:",
        "    elif shard == restored.shard:",
        (f"{CHECKPOINT}::test_another_ranks_section_is_dropped_with_one_warning",),
    ),
    Mutant(
        "a residual of another shape is loaded",
        "agmerge/checkpoint/rank_state.py",
        "if kind not in BASES and name in shapes and tuple(tensor.shape) != shapes[name]:",
        "if False:",
        (f"{CHECKPOINT}::test_a_checkpoint_of_another_model_is_refused_by_name",),
    ),
    Mutant(
        "the plan of another planner is taken over",
        "agmerge/checkpoint/rank_state.py",
        'if section["plan"] and section["merging"] == exchange.agreed.config.plans_from:',
        'if section["plan"]:',
        (f"{CHECKPOINT}::test_another_merging_in_the_script_counts_more_than_the_plan_of_the_checkpoint",),
    ),
    Mutant(
        "ranks share what another rank has left",
        "agmerge/checkpoint/redistribute.py",
        "if r % size == rank]",
        "if r % size == 0]",
        (f"{REDISTRIBUTE}::test_what_is_still_to_come_stays_the_same",),
    ),
    Mutant(
        "two strides over one memory are one tensor",
        "agmerge/runtime/tensor_stream.py",
        "tensor.shape, tensor.stride()",
        "tensor.shape",
        (f"{STREAM}::test_a_matrix_and_its_transpose_are_two_tensors",),
    ),
    Mutant(
        "a tensor in several places is made several times",
        "agmerge/runtime/tensor_stream.py",
        "        if number not in made:\n",
        "        if True:\n",
        (f"{STREAM}::test_a_tensor_in_several_places_travels_once_and_is_one_again",),
    ),
    Mutant(
        "messages of a stream have no bound",
        "agmerge/runtime/tensor_stream.py",
        "room -= _room(piece)",
        "pass",
        (f"{STREAM}::test_messages_and_pauses_are_as_told",),
    ),
    Mutant(
        "two messages under way share a buffer",
        "agmerge/runtime/tensor_stream.py",
        "buffers[number % UNDER_WAY]",
        "buffers[0]",
        (f"{STREAM}::test_all_ranks_have_the_roots_state",),
    ),
    Mutant(
        "a stream pauses after each message",
        "agmerge/runtime/tensor_stream.py",
        "if sent // PAUSE > before // PAUSE:",
        "if sent:",
        (f"{STREAM}::test_messages_and_pauses_are_as_told",),
    ),
    Mutant(
        "a conjugate is sent as its memory",
        "agmerge/runtime/tensor_stream.py",
        "not tensor.is_conj() and not tensor.is_neg()",
        "not tensor.is_neg()",
        (f"{STREAM}::test_all_ranks_have_the_roots_state",),
    ),
    Mutant(
        "an exchange does not wait for the one before",
        "merging/timeline.py",
        "        start = max(free, leaves)\n",
        "        start = leaves\n",
        (TIMELINE,),
    ),
    Mutant(
        "parts do not wait for their selection",
        "merging/timeline.py",
        "free = max(free, later) + time",
        "free = free + time",
        (
            f"{PARTS}::test_by_hand",
            f"{PARTS}::test_agrees_with_the_twin",
            f"{TIMELINE}::test_agrees_with_the_twin",
        ),
    ),
    Mutant(
        "halves of dear take all of the time",
        "merging/timeline.py",
        '/ (2 if mode == "dear" else 1)',
        "/ 1",
        (TIMELINE,),
    ),
    Mutant(
        "dense merge buffers cost what sparse ones do",
        "merging/timeline.py",
        "return np.where(plan.dense, costs.dense(_totals(profile.numel, plan)), sparse)",
        "return sparse",
        (TIMELINE,),
    ),
    Mutant(
        "a pool has the mean without weights",
        "merging/measured.py",
        "(pool[1] / both)",
        "0.5",
        (CURVE,),
    ),
    Mutant(
        "a curve ends level",
        "merging/measured.py",
        "            slopes[-1] = (values[-1] - values[far]) / (at[-1] - at[far])\n",
        "",
        (CURVE,),
    ),
    Mutant(
        "names of a plan are not compared",
        "merging/plan.py",
        "            if planned != actual:",
        "            if False:",
        (PLAN,),
    ),
    Mutant(
        "the search ends at the first plan",
        "merging/planners/exact.py",
        "return (best or known)[0]",
        "return known[0]",
        (f"{EXACT}::test_equals_brute_force_to_the_bit",),
    ),
)
