"""Carry out one communication round: from gradients that are ready to updates that all ranks have.

``gradient_exchange``: the seam that others build on: named tensors in, combined ones out. ``agreed_state``: its group,
and what is carried from one agreement to the next. ``agreement``: members, order and plan, the same on every rank.
``merge_buffers``: what holds between two agreements, with its ``messages``; ``update_home``: where updates lie.
``round``: one attempt at a step; ``two_level_round``: with a stage inside each node. ``nonfinite_verdict``: what all do
about an infinity. ``counted_links``: what leaves a rank; ``gradient_norm``: with and without a quantiser's noise.
``budgets``: how many elements a step sends; ``importance``: what density="importance" goes by.

May import options/, exchanges/, metrics/, tensors/, backends/ and below.
"""
