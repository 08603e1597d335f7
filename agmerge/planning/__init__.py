"""Measure what messages cost, and make or change the plan between steps.

``replanner``: when to look again, and what follows. ``cost_probe`` and ``message_timing``: the measurements.
``plan_trial``: steps under rival plans, side by side. ``cutoff_choice``: the cutoff of ``dense="partial"``. ``advice``:
what ``python -m agmerge advise`` prints.

May import step/, options/, metrics/ and below, and the package ``merging``.
"""
