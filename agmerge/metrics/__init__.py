# SPDX-License-Identifier: Apache-2.0
"""Times and counts, without knowledge of tensors.

* ``step_times``: the marks of one step, clocks, and whole steps.
* ``running_times``: medians over steps.
* ``totals``: bytes, messages and steps so far.
* ``chrome_trace``: steps as a picture.
* ``paired``: mean differences of paired trainings, with intervals.

May import merging.storage, and nothing else of the house.
"""
