"""Measure what messages cost, and make or change the plan between steps.

``replanner``: when to look again, and what follows. ``measurer``: what plans are made from, a part after each step: of
``cost_probe``, ``message_timing`` and ``measuring``, with what ``seen_messages`` adds; ``probe_budget``: what that may
cost. ``drift``: whether times have changed. ``earlier_run`` and ``known_plans``: plans of earlier runs, in files.
``plan_choice``: the best plan, and what is predicted of it.
``wire_choice`` and ``codec_costs``: the rule for value codecs, and what it goes by. ``candidates``: what to try;
``plan_trial``: steps under several plans, side by side. ``first_choices``: budgets by importance and the cutoff of
``dense="partial"``, once. ``advice``: what ``python -m agmerge advise`` prints.

May import step/, options/, metrics/ and below, and the package ``merging``.
"""
