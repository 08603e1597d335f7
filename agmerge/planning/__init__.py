# SPDX-License-Identifier: Apache-2.0
"""Measured costs of messages, and plans made or changed between steps.

* ``replanner``: what happens after which step, from the first measurement to later checks.
* ``measuring``: what planners are given, its bounds, and drift. ``cost_probe``: probes, within a budget.
* ``choice``: what gradients are sent as, by one rule, and the plans to try. ``coding``: costs of codecs and quantisers.
* ``plan_trial``: plans that may be used, and steps under several of them, by turns.

May import step/, options/, metrics/ and below, and the package ``merging``.
"""
