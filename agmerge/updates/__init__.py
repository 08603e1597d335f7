# SPDX-License-Identifier: Apache-2.0
"""State of a worker with ``sync="updates"``: the parameters that all share, its own, and its optimizer's moments.

* ``local_replica``: a worker that steps by itself, and the table of its deltas.
* ``shared_parameters``: the parameters that all workers share, and where unsent updates stay.
* ``outer_steps``: outer optimizers, which step the shared parameters.
* ``mean_moments``: moments of the optimizers of a worker, brought to those of the mean gradient. It uses ``moments``:
  moments by optimizer, and how they follow; and ``moment_scales``: the measurement that travels with each message.

When something is exchanged is decided in ``engine/update_reducer.py``. May import script/, step/, exchanges/, tensors/,
backends/ and below.
"""
