# SPDX-License-Identifier: Apache-2.0
"""One communication round: from gradients that are ready to updates that are equal on all ranks.

* ``gradient_exchange``: the interface for users of this room, named tensors in, combined tensors out; errors, verdicts.
* ``round``: one attempt at a step; ``two_level_round``: with a stage in each node.
* ``agreed_state``: what ranks have agreed on, and what waits for the next agreement.
* ``merge_buffers``: messages of a plan, with their exchanges and the scratch of their kernels.
* ``flat_buffers``: where gradients, residuals and updates lie.
* ``group``: communicators, clocks and side streams. ``kept_results``: what survivors of a lost worker settle by.
* ``gradient_norm``: of the combined gradient. ``plan_status``: planning for reports, and its one line.
* ``config``: the options of a step, and the treatment of each parameter; ``density_policy``: how much is sent of it.

A user of this room makes a ``Config``, or has ``options/`` make it. May import exchanges/, metrics/, tensors/,
backends/ and below.
"""
