# SPDX-License-Identifier: Apache-2.0
"""One communication round: from gradients that are ready to updates that are equal on all ranks.

``gradient_exchange``: the interface for users of this room: named tensors in, combined tensors out. It owns the
``group`` of ranks, the ``fault`` that has ended it, and ``agreed_state``: what ranks have agreed on (``agreement``),
and ``carried_state``, which waits for the next agreement. ``flat_buffers`` (``update_home``, ``gradients_in_place``):
where gradients, residuals and updates lie; ``sent_values``: what exchanges send of them. ``merge_buffers``: the
``messages`` of a plan over them. ``round``: one attempt at a step, which is ``accumulation``, with ``batches``, and
messages that are ``under_way``; ``two_level_round``: with a stage inside each node. ``queued_messages`` and
``side_streams``, ``clocks``: on devices. ``nonfinite_verdict``: the common reaction of all ranks to an infinity.
``counted_links``: the bytes that leave a rank; ``gradient_norm``: with and without a quantiser's noise. ``budgets``:
how many elements a step sends; ``importance``: the measure behind density="importance".

``config``: the options of a step, in the four ``records``; ``treatments``: of each parameter, by them.
``density_policy``, ``dense_cutoff``, ``groups``, ``momentum`` and ``updates``: some of their fields. A user of this
room makes a ``Config``, or has ``options/`` make it.

May import exchanges/, runtime/, metrics/, tensors/, backends/ and below.
"""
