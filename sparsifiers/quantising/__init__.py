# SPDX-License-Identifier: Apache-2.0
"""Quantisers: every coordinate of a tensor in few bits, block by block.

`base`: the contract. `blocks`: how tensors are cut. `draws`: random words that every rank can draw by itself.
`rotation` and `eden`: signs, or a few levels, of rotated blocks. `scales` and `integers`: records of the others.
`linear`: int8 and int4. `float8`: fp8. `stochastic`: qsgd and terngrad. `onebit`: signs with error feedback.
"""
