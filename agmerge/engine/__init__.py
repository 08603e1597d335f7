"""Decide when gradients are exchanged: hooks, accumulation, loss scales, join, guards.

``reducer``: counts backward passes and drives rounds. ``grad_hooks``: on parameters. ``grad_scaler``: AMP. ``join``:
uneven inputs. ``optimizer_wrapper``: what stays the inner optimizer's. ``replicas``: compared, and made equal.
``dear``, ``dear_modules`` and ``dear_times``: ``merging="dear"``, whose updates come in the next forward.

May import planning/ and below.
"""
