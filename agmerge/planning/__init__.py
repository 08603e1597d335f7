# SPDX-License-Identifier: Apache-2.0
"""Measured costs of messages, and plans made or changed between steps.

``replanner``: what happens after which step, from the first measurement to later checks (its states are in
``reasons``, with the record for reports). ``measurer``: the measurements for plans, a part after each step. It uses
``cost_probe``, ``message_timing`` and ``measuring``, and the bounds of ``seen_messages``; ``probe_budget``: their
limit. ``drift``: whether times have changed.

What is chosen with a plan: ``sparse_choice`` of selections (codec, exchange, or dense; ``sparse_search``: the plans
to try; ``codec_choice`` and ``codec_costs``: the rule for codecs, and its measurements), or ``quantiser_choice``
of gradients in few bits (``quantiser_costs``). ``plan_choice``: the best plan, and its prediction. ``plan_trial``:
steps under several plans, in turn. ``first_choices``: budgets by importance and the cutoff of ``dense="partial"``,
once. ``advice``: what ``python -m agmerge advise`` makes of measured steps.

May import step/, options/, metrics/ and below, and the package ``merging``.
"""
