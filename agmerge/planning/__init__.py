"""Measured costs of messages, and plans made or changed between steps.

``replanner``: when to measure again, and what follows. ``measurer``: the measurements for plans, a part after each
step. It uses ``cost_probe``, ``message_timing`` and ``measuring``, and the bounds of ``seen_messages``;
``probe_budget``: their limit. ``drift``: whether times have changed. ``earlier_run`` and ``known_plans``: plans of
earlier runs, in files. ``plan_choice``: the best plan, and its prediction. ``wire_choice`` and ``codec_costs``: the
rule for value codecs, and its measurements. ``quantiser_choice`` and ``quantiser_costs``: likewise for quantisers.
``candidates``: plans to try; ``plan_trial``: steps under several plans, in turn. ``first_choices``: budgets by
importance and the cutoff of ``dense="partial"``, once. ``advice``: the text of ``python -m agmerge advise``.

May import step/, options/, metrics/ and below, and the package ``merging``.
"""
