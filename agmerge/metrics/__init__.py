# SPDX-License-Identifier: Apache-2.0
"""Times and counts, without knowledge of tensors.

``step_times``: the marks of one step, and what a clock is. ``running_times``: their medians over steps.
``whole_steps``: the time of whole steps. ``chrome_trace``: steps as a picture. ``totals``: bytes, messages and steps;
``link_bytes``: bytes that leave a rank in each collective.

May import merging.storage, and nothing else of the house.
"""
