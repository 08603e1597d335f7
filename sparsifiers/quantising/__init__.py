# SPDX-License-Identifier: Apache-2.0
"""Quantisers: every coordinate of a tensor in few bits, block by block.

* `base`: the contract, how tensors are cut, the choice among several, and compiled loops. `draws`: scales, levels and
  random words. `moving`: tensors that move by what arrives of them.
* `eden`: signs, or a few levels, of rotated blocks.
* `linear`: int8, int4 and fp8. `stochastic`: qsgd and terngrad. `onebit`: signs with error feedback.
"""
