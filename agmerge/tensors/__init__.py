# SPDX-License-Identifier: Apache-2.0
"""Layout and flat storage of gradients: where each one lies.

``parameters``: the table of an optimizer's parameters, by name. ``dtensors``: the local shard of a DTensor. ``layout``:
slots, tensor classes (tensor classes) and segments, as pure functions. ``arena``: the flat buffers of a tensor class.
``handed_out``: which updates the script still refers to.
``difference``: a pseudo-gradient that is not written out. ``nonfinite``: which gradients are infinite or NaN.
``squares`` and ``fingerprint``: sums and checksums of tensors, with the same bits everywhere.

May import sparsifiers (its memories and kernels), and nothing else of the house.
"""
