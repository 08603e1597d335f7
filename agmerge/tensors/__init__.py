# SPDX-License-Identifier: Apache-2.0
"""Layout and flat storage of gradients: where each one lies.

* ``parameters``: an optimizer's parameters by name, local shards of DTensors, fingerprints.
* ``layout``: slots, tensor classes and segments, as pure functions.
* ``arena``: the flat buffers of a tensor class, the only writer of residuals.
* ``nonfinite``: which gradients are infinite or NaN.

May import sparsifiers (its memories and kernels), and nothing else of the house.
"""
