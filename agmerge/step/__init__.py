"""Carry out one communication round: from gradients that are ready to updates that all ranks have.

``agreement``: members, order and plan, the same on every rank. ``merge_buffers``: what holds between two agreements.
``round``: one attempt at a step; ``two_level_round``: with a stage inside each node. ``nonfinite_verdict``: what all
do about an infinity. ``importance``: what density="importance" goes by.

May import options/, exchanges/, metrics/, tensors/, backends/ and below.
"""
