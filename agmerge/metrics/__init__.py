"""Keep time and count, without knowing a tensor.

``step_times``: clocks, and the marks of one step. ``running_times``: their medians over steps.
``chrome_trace``: steps as a picture. ``totals``: bytes, messages and steps; ``link_bytes``: what leaves a rank of each
collective.

May import merging.storage, and nothing else of the house.
"""
