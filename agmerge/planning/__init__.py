"""Measure what messages cost, and make or change the plan between steps.

``replanner``: when to look again, and what follows. ``drift``: whether times have changed. ``cost_probe``,
``message_timing`` and ``measuring``: what plans are made from, with what ``seen_messages`` adds; ``probe_budget``: what
that may cost. ``known_plans``: those of earlier runs. ``plan_choice``: the best plan, and what is predicted of it.
``wire_choice`` and ``codec_costs``: the rule for value codecs, and what it goes by. ``candidates``: what to try;
``plan_trial``: steps under several plans, side by side. ``first_choices``: budgets by importance and the cutoff of
``dense="partial"``, once. ``advice``: what ``python -m agmerge advise`` prints.

May import step/, options/, metrics/ and below, and the package ``merging``.
"""
