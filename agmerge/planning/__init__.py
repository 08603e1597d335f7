# SPDX-License-Identifier: Apache-2.0
"""Measured costs of messages, and plans made or changed between steps.

* ``replanner``: what happens after which step, from the first measurement to later checks.
* ``measuring``: what planners are given, its bounds, and drift. ``cost_probe``: probes, within a budget.
* ``quantiser_choice``: bits of gradients, by what they cost here.
* ``sparse_search``: codec and exchange of selections, or dense, and the plans to try.
* ``codec_choice``: the best plan and codec by the measurements; ``codec_costs``: measured codecs.
* ``candidates``: plans to be tried. ``plan_trial``: steps under several plans, by turns.

May import step/, options/, metrics/ and below, and the package ``merging``.
"""
