"""One communication round: from gradients that are ready to updates that are equal on all ranks.

``gradient_exchange``: the interface for users of this room: named tensors in, combined tensors out. ``agreed_state``:
its group, and the state carried from one agreement to the next. ``agreement``: members, order and plan, the same on
every rank. ``merge_buffers``: the state between two agreements, with its ``messages``; ``update_home``: where updates
lie. ``round``: one attempt at a step; ``two_level_round``: with a stage inside each node. ``nonfinite_verdict``: the
common reaction of all ranks to an infinity. ``counted_links``: the bytes that leave a rank; ``gradient_norm``: with and
without a quantiser's noise. ``budgets``: how many elements a step sends; ``importance``: the measure behind
density="importance".

``config``: the options of a step, in the four ``records``; ``treatments``: of each
parameter, by them. ``density_policy``, ``dense_cutoff``, ``groups``, ``momentum`` and ``updates``: some of their
fields. A user of this room makes a ``Config``, or has ``options/`` make it.

May import exchanges/, runtime/, metrics/, tensors/, backends/ and below.
"""
